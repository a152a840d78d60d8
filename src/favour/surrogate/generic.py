"""Jacobians that are known by what they do, and not entry by entry."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from favour.surrogate.linear_map import LinearMap, Unavailable


class Generic(LinearMap):
    """A map known by `apply` and `transpose` alone, and by what squares of its entries do if they are given.

    Args:
        apply: δ ↦ Gδ, with the fold axis.
        transpose: g ↦ Gᵀg, with the fold axis.
        square: v ↦ (G∘G)v, of variances without the fold axis; without it variances cannot be carried.
        one_per_column: See `LinearMap`.
        alike: See `LinearMap`.
    """

    def __init__(
        self,
        apply: Callable[[Tensor], Tensor],
        transpose: Callable[[Tensor], Tensor],
        square: Callable[[Tensor], Tensor] | None = None,
        *,
        one_per_column: bool = False,
        alike: bool = False,
    ) -> None:
        self._apply, self._transpose, self._square = apply, transpose, square
        self.one_per_column, self.alike = one_per_column, alike

    def apply(self, d: Tensor) -> Tensor:
        return self._apply(d)

    def transpose(self, g: Tensor) -> Tensor:
        return self._transpose(g)

    def square(self, v: Tensor) -> Tensor:
        return super().square(v) if self._square is None else self._square(v)

    def hadamard(self, other: LinearMap) -> Unavailable:
        return Unavailable("a map that is given by what it does tells nothing of its entries")
