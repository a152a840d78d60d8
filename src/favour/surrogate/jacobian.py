"""Jacobians of norms and softmax: a diagonal plus low rank, along one axis.

    G = diag(D) + Σ_l P_l Q_lᵀ                                  for every group of entries along the axis

closes exactly under products of entries,

    G∘H = diag(D_G D_H + D_G Σ_m P′_m Q′_m + D_H Σ_l P_l Q_l) + Σ_lm (P_l P′_m)(Q_l Q′_m)ᵀ,

of rank L·M, or L(L + 1)/2 for G∘G, whose mixed terms come twice. None of it is larger than the groups themselves.

With few terms each is a sum and a product; more of them are stacked, so that two batched products serve. Where a group
has few entries beside terms, G∘G is taken from the matrices of some groups at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from favour.surrogate.linear_map import Factor, LinearMap, Rows, Unavailable, meet

# Terms up to which each is taken by itself, and numbers in the matrices of the groups that are formed together.
FEW, BLOCK = 4, 2**20


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
        self._stacks: tuple[Tensor, Tensor] | None = None

    @property
    def near_diagonal(self) -> bool:
        return True

    def apply(self, d: Tensor) -> Tensor:
        return self._through(d, self.left, self.right)

    def transpose(self, g: Tensor) -> Tensor:
        return self._through(g, self.right, self.left)

    def _through(self, d: Tensor, left: Sequence[Factor], right: Sequence[Factor]) -> Tensor:
        t = d.reshape(d.shape[0], d.shape[1], *self.grouped[1:])
        if len(left) > FEW and d.shape[1] == self.grouped[0]:
            return self._together(t, left is self.right).reshape(d.shape)
        total, level, plain = t * self.diag, None, None
        for p, q in zip(left, right, strict=True):
            if self._level(q):
                plain = t.sum(self.axis, keepdim=True) if plain is None else plain
                along = plain * q
            else:
                along = (t * q).sum(self.axis, keepdim=True)
            if self._level(p):
                level = p * along if level is None else level + p * along
            else:
                assert isinstance(p, Tensor)
                total = torch.addcmul(total, p.to(total.dtype), along)
        return (total if level is None else total + level).reshape(d.shape)

    def _level(self, factor: Factor) -> bool:
        """Whether a factor is the same for all entries of a group."""
        return not isinstance(factor, Tensor) or factor.ndim < -self.axis or factor.shape[self.axis] == 1

    def _stacked(self) -> tuple[Tensor, Tensor]:
        """P and Q, (groups, n, L)."""
        if self._stacks is None:
            like = next(p for p in (*self.left, *self.right) if isinstance(p, Tensor))
            wide = [
                torch.stack([torch.as_tensor(p, dtype=like.dtype, device=like.device).expand(self.grouped) for p in ps])
                for ps in (self.left, self.right)
            ]
            P, Q = (w.movedim(self.axis, -1).flatten(1, -2).permute(1, 2, 0) for w in wide)
            self._stacks = P, Q
        return self._stacks

    def _together(self, t: Tensor, transposed: bool) -> Tensor:
        """All terms by two products for each group."""
        P, Q = reversed(self._stacked()) if transposed else self._stacked()
        rows = t.movedim(self.axis, -1)
        x = rows.flatten(1, -2).transpose(0, 1)  # (groups, F, n)
        along = torch.bmm(torch.bmm(x, Q.to(x.dtype)), P.mT.to(x.dtype))
        total = along.transpose(0, 1).reshape(rows.shape).movedim(-1, self.axis)
        return torch.addcmul(total, t, torch.as_tensor(self.diag, dtype=t.dtype, device=t.device))

    def square(self, v: Tensor) -> Tensor:
        terms, n = len(self.left), self.grouped[self.axis]
        if terms > FEW and isinstance(n, int) and n < 4 * terms and not torch.compiler.is_compiling():
            return self._squares(v)
        return super().square(v).clamp_min(0)  # sums of squares, but for rounding

    def _squares(self, v: Tensor) -> Tensor:
        """(G∘G)v by the groups' matrices."""
        P, Q = self._stacked()
        groups, n, _ = P.shape
        diag = torch.as_tensor(self.diag, dtype=P.dtype, device=P.device).expand(self.grouped)
        diag = diag.movedim(self.axis, -1).reshape(groups, n)
        seen = v.reshape(self.grouped).movedim(self.axis, -1)
        rows = seen.reshape(groups, n, 1)
        size = max(1, BLOCK // (n * n))
        parts = []
        for p, q, d, r in zip(*(s.split(size) for s in (P, Q, diag, rows)), strict=True):
            G = torch.baddbmm(torch.diag_embed(d), p, q.mT)
            parts.append(torch.bmm(G.square().to(r.dtype), r))
        return torch.cat(parts).reshape(seen.shape).movedim(-1, self.axis).reshape(v.shape)

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
