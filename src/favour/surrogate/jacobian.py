"""Jacobians of norms and softmax: a diagonal plus low rank, along one axis.

    G = diag(D) + Σ_l P_l Q_lᵀ                                  for every group of entries along the axis

closes exactly under products of entries,

    G∘H = diag(D_G D_H + D_G Σ_m P′_m Q′_m + D_H Σ_l P_l Q_l) + Σ_lm (P_l P′_m)(Q_l Q′_m)ᵀ,

of rank L·M, or L(L + 1)/2 for G∘G, whose mixed terms come twice. None of it is larger than the groups themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from favour.surrogate.linear_map import Factor, LinearMap, Rows, Unavailable, meet


class DiagonalPlusLowRank(LinearMap):
    """G = diag(D) + Σ_l P_l Q_lᵀ along the last axis of the input seen in the shape `grouped`.

    Args:
        diag: D, which broadcasts to `grouped`.
        left: P_l, which broadcast to `grouped`.
        right: Q_l, likewise.
        grouped: A shape with the batch in front.
        axis: Along which, from the front with the batch.
    """

    def __init__(
        self, diag: Factor, left: Sequence[Factor], right: Sequence[Factor], grouped: Sequence[int], axis: int = -1
    ) -> None:
        self.diag, self.left, self.right = diag, tuple(left), tuple(right)
        self.grouped = tuple(grouped)
        self.axis = axis if axis < 0 else axis - len(self.grouped)

    @property
    def near_diagonal(self) -> bool:
        return True

    def apply(self, d: Tensor) -> Tensor:
        return self._through(d, self.left, self.right)

    def transpose(self, g: Tensor) -> Tensor:
        return self._through(g, self.right, self.left)

    def _through(self, d: Tensor, left: Sequence[Factor], right: Sequence[Factor]) -> Tensor:
        t = d.reshape(d.shape[0], d.shape[1], *self.grouped[1:])
        total = t * self.diag
        for p, q in zip(left, right, strict=True):
            total = total + p * (t if _one(q) else t * q).sum(self.axis, keepdim=True)
        return total.reshape(d.shape)

    def square(self, v: Tensor) -> Tensor:
        return super().square(v).clamp_min(0)  # sums of squares, but for rounding

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if other.__class__ is not DiagonalPlusLowRank or not self._agrees(other):
            return meet(self, other)
        assert isinstance(other, DiagonalPlusLowRank)
        mine, theirs = list(zip(self.left, self.right, strict=True)), list(zip(other.left, other.right, strict=True))
        diag = self.diag * other.diag
        for p, q in theirs:
            diag = diag + self.diag * (p * q)
        for p, q in mine:
            diag = diag + other.diag * (p * q)
        if other is self:
            terms = [
                (p * r if i == j else 2 * (p * r), q * s)
                for i, (p, q) in enumerate(mine)
                for j, (r, s) in enumerate(mine[: i + 1])
            ]
        else:
            terms = [(p * r, q * s) for p, q in mine for r, s in theirs]
        return DiagonalPlusLowRank(diag, [p for p, _ in terms], [q for _, q in terms], self.grouped, self.axis)

    def _agrees(self, other: DiagonalPlusLowRank) -> bool:
        return self.grouped[1:] == other.grouped[1:] and self.axis == other.axis

    def diagonal(self) -> Factor | Unavailable:
        total = self.diag
        for p, q in zip(self.left, self.right, strict=True):
            total = total + p * q
        if isinstance(total, Tensor):
            return Unavailable("the diagonal of a Jacobian in groups")
        return total

    def rows(self, take: Rows, like: Tensor) -> LinearMap:
        def rows(factor: Factor) -> Factor:
            full = isinstance(factor, Tensor) and factor.ndim == len(self.grouped)
            return take(factor) if full else factor  # type: ignore[arg-type]

        left, right = [rows(p) for p in self.left], [rows(q) for q in self.right]
        return DiagonalPlusLowRank(rows(self.diag), left, right, self.grouped, self.axis)


def _one(factor: Factor) -> bool:
    return isinstance(factor, int | float) and factor == 1
