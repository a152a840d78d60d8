"""The covariance of a linear image of a parameter: transposed, scaled, or to first order any function of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from favour.surrogate.gaussian import Blocks, Gaussian, Keep
from favour.surrogate.moments import Moments
from favour.surrogate.noise import Noise

Act = Callable[[Tensor], Tensor]


class Image(Gaussian, saved=False):
    """G δ for the δ = R z of another Gaussian: the same z, so that all who read the parameter share its draws.

    Args:
        base: Of the parameter.
        apply: G, (…, *shape of the base) to (…, *shape).
        transpose: The transposed map.
        shape: Of the image.
        marginal: A Gaussian with the same covariance (its own z may be others), which knows closed forms.
    """

    def __init__(
        self, base: Gaussian, apply: Act, transpose: Act, shape: tuple[int, ...], marginal: Gaussian | None = None
    ) -> None:
        self.base, self.apply, self.transpose, self.marginal = base, apply, transpose, marginal
        self._shape = tuple(shape)
        if marginal is not None:
            self.independent, self.by_rows = marginal.independent, marginal.by_rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.base.latent_shape

    def push(self, z: Tensor) -> Tensor:
        return self.apply(self.base.push(z))

    def pull(self, w: Tensor) -> Tensor:
        return self.base.pull(self.transpose(w))

    def held(self, keep: Keep) -> Gaussian:
        return Image(self.base.held(keep), self.apply, self.transpose, self._shape, self.marginal)

    def tensors(self) -> dict[str, Tensor]:
        return self.base.tensors()

    def variance(self) -> Tensor:
        return super().variance() if self.marginal is None else self.marginal.variance()

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        known = self.marginal
        return super().row_variances(a, blocks) if known is None else known.row_variances(a, blocks)

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        known = self.marginal
        return super().noise(x, label, mean=mean) if known is None else known.noise(x, label, mean=mean)

    def spread(self, diag: Tensor, label: str) -> Noise:
        return super().spread(diag, label) if self.marginal is None else self.marginal.spread(diag, label)

    def column_covariances(self) -> Tensor:
        return super().column_covariances() if self.marginal is None else self.marginal.column_covariances()

    def rows_between(self, x: Moments, other: Moments) -> Tensor:
        known: Any = self.marginal
        return super().rows_between(x, other) if known is None else known.rows_between(x, other)
