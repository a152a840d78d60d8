"""What a covariance of a parameter can do: the protocol of `Gaussian`.

A Gaussian here is zero-mean: it describes the deviation δ of a parameter W from its mean, which is stored elsewhere, as
a linear image of standard normals,

    δ = R z,     z ~ N(0, I).

A kind says what R and its transpose do (`push`, `pull`); everything else follows from that, in weight space and slowly,
and a kind states in closed form what it knows better. For a matrix W (m, n), read as y = Wx of vectors x with
E[xxᵀ] = Σ + μμᵀ, Σ = diag(λ) + UUᵀ:

    row_variances   Σ_a a_tᵀ Cov(W_i·) a_t            for known vectors a at places t
    noise           Σ_a Cov(W a) + Σ_j λ_j Cov(W_·j)  for one vector x per input, a ∈ {μ, u₁, …}
    spread          Σ_j λ_j Cov(W_·j)                 what independent entries of x add, at each place alone
    rows_between    E[(δx)_i (δx′)_i]                 for two uses x, x′ of one draw; of kinds with independent rows
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.surrogate.checks import require_finite, require_floating
from favour.surrogate.moments import Moments
from favour.surrogate.noise import DenseNoise, LatentNoise, Noise

Blocks = Callable[[Tensor], Tensor]  # a weight (…, *shape) as groups of matrices (…, g, m, n)
Keep = Callable[[str, Tensor, Callable[[Tensor], Tensor]], Tensor]  # `function(tensor)`, once for each tensor
KINDS: dict[str, type[Gaussian]] = {}
_TOGETHER = 64  # columns of R at a time


class Gaussian(ABC):
    """The covariance of one parameter tensor; see the module docstring.

    Subclasses are frozen dataclasses whose fields are tensors (and plain tuples of integers), with a `shape`, and are
    saved and read by the name of their class.

    Attributes:
        independent: All entries are.
        by_rows: All rows are, the entries along the first axis.

    Example:
        A kind of one's own, two opposite entries that share one draw; every operation that reads a weight takes it:

        >>> @dataclasses.dataclass(frozen=True, eq=False, repr=False)
        ... class Balance(Gaussian):
        ...     scale: Tensor
        ...     shape, latent_shape = (2,), (1,)
        ...
        ...     def push(self, z):
        ...         return self.scale * torch.cat([z, -z], -1)
        ...
        ...     def pull(self, w):
        ...         return self.scale * (w[..., :1] - w[..., 1:])
        >>> Balance(torch.tensor(2.0)).covariance().tolist()
        [[4.0, -4.0], [-4.0, 4.0]]
    """

    independent: bool = False
    by_rows: bool = False

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]:
            """Shape of the parameter described."""

        @property
        def latent_shape(self) -> tuple[int, ...]:
            """Shape of z."""

    def __init_subclass__(cls, saved: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if saved:
            KINDS[cls.__name__] = cls

    @abstractmethod
    def push(self, z: Tensor) -> Tensor:
        """R z, (…, *latent_shape) to (…, *shape)."""

    @abstractmethod
    def pull(self, w: Tensor) -> Tensor:
        """Rᵀw, (…, *shape) to (…, *latent_shape)."""

    def held(self, keep: Keep) -> Gaussian:
        """The same R, with what it needs computed once: for kinds that store no root of their covariance."""
        return self

    # ------------------------------------------------- what follows in weight space

    def columns(self) -> Tensor:
        """R, as (numbers in z, *shape)."""
        count = math.prod(self.latent_shape)
        like = next(iter(self.tensors().values()))
        eye = torch.eye(count, dtype=like.dtype, device=like.device)
        return self.push(eye.reshape(count, *self.latent_shape))

    def variance(self) -> Tensor:
        """Marginal variances, of shape `shape`."""
        return self.columns().square().sum(0)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` zero-mean deviations, of shape (n, *shape)."""
        return self.push(standard_normal((n, *self.latent_shape), next(iter(self.tensors().values())), generator))

    def covariance(self) -> Tensor:
        """The dense (N, N) covariance of the parameter flattened row-major; for tests and small layers."""
        rows = self.columns().flatten(1)
        return rows.mT @ rows

    def transposed(self) -> Gaussian:
        """Of the matrix Wᵀ, with the same z."""
        return Image(self, _turned, _turned, self.shape[::-1])

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        """Σ_a a_tᵀ Cov(W_i·) a_t, (batch, g, m, T).

        Args:
            a: (P, batch, g, n, T).
            blocks: How the operation that multiplies them arranges its weight.
        """
        total: Tensor | None = None
        for columns in self.columns().split(_TOGETHER):
            seen = torch.einsum("kgmn,pbgnt->kpbgmt", blocks(columns), a).square().sum((0, 1))
            total = seen if total is None else total + seen
        if total is None:
            return torch.einsum("gmn,bgnt->bgmt", blocks(self.variance()), a.square().sum(0))
        return total

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        """What the draws of a matrix (m, n) add to y = Wx, for one vector x per input.

        Args:
            x: Moments of x, (batch, n).
            label: For attribution.
            mean: Whether to count the mean of x; without, only what its uncertainty adds.
        """
        points = x.points(mean)
        noises: list[Noise] = [] if not len(points) else [self._at(points, label)]
        return noises if x.diag is None else [*noises, self.spread(x.diag, label)]

    def spread(self, diag: Tensor, label: str) -> Noise:
        """What independent entries of x add: N_t = Σ_j λ_tj Cov(W_·j), independent from place to place t.

        n_t = Σ_j √λ_tj R_j z_tj with R_j a root of Cov(W_·j).

        Args:
            diag: λ, (batch, *places, n).
            label: For attribution.
        """
        covariances = self.column_covariances()
        if diag.ndim == 2:
            return DenseNoise(torch.einsum("bn,nmp->bmp", diag, covariances), None, label)
        roots, sigma = psd_root(covariances), diag.sqrt()
        return LatentNoise(
            lambda z: torch.einsum("fb...nk,nmk->fb...m", z * sigma.unsqueeze(-1), roots),
            lambda g: torch.einsum("fb...m,nmk->fb...nk", g, roots) * sigma.unsqueeze(-1),
            torch.einsum("b...n,nmm->b...m", diag, covariances),
            (*diag.shape[1:], roots.shape[-1]),
            None,
            label,
        )

    def column_covariances(self) -> Tensor:
        """Cov(W_·j) of a matrix, (n, m, m)."""
        columns = self.columns()
        return torch.einsum("kmn,kpn->nmp", columns, columns)

    def rows_between(self, x: Moments, other: Moments) -> Tensor:
        """E[(δx)_i (δx′)_i] for two uses of one draw, (batch, m); the noise's own variance where they are one.

        Between two uses only the named columns they share count: their independent parts are independent.
        """
        raise UnsupportedOperation(f"{type(self).__name__} correlates the rows of its weight.")

    def _at(self, a: Tensor, label: str) -> LatentNoise:
        """Σ_a (R z_a) a for known vectors (P, batch, n)."""
        variances = self.row_variances(a[:, :, None, :, None], lambda w: w.unsqueeze(-3)).flatten(1)
        return LatentNoise(
            lambda z: torch.einsum("fbpmn,pbn->fbm", self.push(z), a),
            lambda g: self.pull(torch.einsum("fbm,pbn->fbpmn", g, a)),
            variances,
            (a.shape[0], *self.latent_shape),
            None,
            label,
        )

    # ---------------------------------------------------------- fields and their checks

    def check_shapes(self, name: str) -> None:
        """Raise `ShapeMismatch` or `InvalidType`, naming `name`, if the fields do not fit together."""
        require_floating(name, self.tensors())

    def check_values(self, name: str) -> None:
        """Raise `InvalidValue` if they cannot be a covariance."""
        for what, tensor in self.tensors().items():
            require_finite(name, what, tensor)

    def validate(self, name: str) -> None:
        """Check shapes, and in eager mode the values: finite, variances ≥ 0, matrices symmetric and PSD.

        Args:
            name: What the error messages call this parameter.
        """
        self.check_shapes(name)
        if not torch.compiler.is_compiling():
            self.check_values(name)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {k: v for k, v in self._fields().items() if isinstance(v, Tensor)}

    def settings(self) -> dict[str, Any]:
        """The fields that are not tensors, JSON-able."""
        return {k: list(v) for k, v in self._fields().items() if not isinstance(v, Tensor)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy whose tensors are on `device` with `dtype`; None leaves either as it is."""
        moved = {k: v.to(device=device, dtype=dtype) for k, v in self.tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    def _fields(self) -> Mapping[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'×'.join(map(str, self.shape)) or 'scalar'})"


class Image(Gaussian, saved=False):
    """G δ for the δ = R z of another Gaussian: the same z, so that all who read the parameter share its draws.

    The parameter is transposed, scaled, or any function of it is taken to first order.

    Args:
        base: Of the parameter.
        apply: G, (…, *shape of the base) to (…, *shape).
        transpose: The transposed map.
        shape: Of the image.
        marginal: A Gaussian with the same covariance (its own z may be others), which knows closed forms.
    """

    def __init__(
        self,
        base: Gaussian,
        apply: Callable[[Tensor], Tensor],
        transpose: Callable[[Tensor], Tensor],
        shape: tuple[int, ...],
        marginal: Gaussian | None = None,
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


def _turned(w: Tensor) -> Tensor:
    return w.mT


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normals with the dtype and device of `like`, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)


def psd_root(matrix: Tensor) -> Tensor:
    """R with RRᵀ = matrix (…, N, N), for a singular PSD matrix too: R = V√max(λ, 0).

    Differentiable where the eigenvalues are distinct and positive.
    """
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()  # eigh has no half-precision kernels
    values, vectors = torch.linalg.eigh(wide)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(matrix.dtype)
