"""Second derivatives of operations on groups of entries: softmax, norms, variances.

Pulled back by a covector g, each is a diagonal plus low rank along the axis of the groups,

    H(g) = diag(α) + ½ Σ_l (a_l b_lᵀ + b_l a_lᵀ),

with α and a_l linear in g. No group's matrix is formed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from favour.surrogate.surrogate import Second

Term = tuple[Tensor, Tensor]


class GroupedSecond(Second):
    """H(g) in groups.

    Args:
        make: α and the pairs (a_l, b_l) for covectors in the shape (F, *grouped).
        shape: The input's.
        grouped: That seen in groups, the batch in front.
        axis: Of the entries of a group, from the end.
        reduced: The result has one entry for each group.
    """

    def __init__(
        self,
        make: Callable[[Tensor], tuple[Tensor, list[Term]]],
        shape: Sequence[int],
        grouped: Sequence[int],
        axis: int = -1,
        reduced: bool = False,
    ) -> None:
        self.make, self.shape, self.grouped = make, tuple(shape), tuple(grouped)
        self.axis, self.reduced = axis, reduced

    def _made(self, g: Tensor) -> tuple[Tensor, list[Term]]:
        groups = list(self.grouped)
        if self.reduced:
            groups[self.axis] = 1
        return self.make(g.reshape(*g.shape[:2], *groups[1:]))

    def diagonal(self, g: Tensor) -> Tensor:
        alpha, terms = self._made(g)
        total = alpha + sum([a * b for a, b in terms])
        return total.expand(*g.shape[:2], *self.grouped[1:]).reshape(*g.shape[:2], *self.shape[1:])

    def forms(self, g: Tensor, u: Tensor) -> Tensor:
        alpha, terms = self._made(g)
        u = u.reshape(*u.shape[:2], *self.grouped[1:]).movedim(self.axis, -1)
        u = u.reshape(*u.shape[:2], -1, u.shape[-1])  # (P, batch, groups, n)

        def rows(t: Tensor) -> Tensor:
            t = t.expand(*g.shape[:2], *self.grouped[1:]).movedim(self.axis, -1)
            return t.reshape(*g.shape[:2], -1, u.shape[-1])  # (F, batch, groups, n)

        total = torch.einsum("fbcn,pbcn,qbcn->bfpq", rows(alpha), u, u)
        for a, b in terms:
            along, across = (torch.einsum("fbcn,pbcn->bfpc", rows(t), u) for t in (a, b))
            half = torch.einsum("bfpc,bfqc->bfpq", along, across)
            total = total + 0.5 * (half + half.mT)
        return total
