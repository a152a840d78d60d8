"""A covariance that cannot stay diagonal, as the sum of parts it is known by.

    M = Σ_i G_i Λ_i G_iᵀ + Σ_s N_s + YYᵀ + D

What Algorithm 1 and its starts need of it are products, the diagonal and Gram matrices; it is never formed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from favour.passes.plan.steps import Step
from favour.surrogate import LinearMap, Noise, diagonal_columns, flat, inner, root, weighted_gram


@dataclass
class Pending:
    """M as a sum of parts that cannot stay diagonal, and its diagonal part D."""

    spread: list[tuple[LinearMap, Tensor]]
    noises: list[Noise]
    columns: Tensor | None
    diag: Tensor | None
    like: Tensor
    _diagonal: Tensor | None = field(default=None, init=False, repr=False)

    def matmul(self, V: Tensor) -> Tensor:
        total = torch.zeros_like(V) if self.diag is None else V * self.diag
        for G, variance in self.spread:
            total = total + G.apply(G.transpose(V) * variance)
        for noise in self.noises:
            total = total + noise.matmul(V)
        if self.columns is not None:
            weights = inner(V, self.columns)  # (batch, r, k)
            total = total + torch.einsum("brk,kbn->rbn", weights, flat(self.columns)).reshape(V.shape)
        return total

    def diagonal(self) -> Tensor:
        """diag(M), exact before compression."""
        if self._diagonal is None:
            self._diagonal = self._summed()
        return self._diagonal

    def _summed(self) -> Tensor:
        total = torch.zeros_like(self.like) if self.diag is None else self.diag
        for G, variance in self.spread:
            total = total + G.square(variance)
        for noise in self.noises:
            total = total + noise.diag()
        return total if self.columns is None else total + self.columns.square().sum(0)

    def gram(self, g: Tensor) -> Tensor:
        """g M gᵀ, (batch, F, F)."""
        everywhere = g.expand(g.shape[0], *self.like.shape)
        total = torch.zeros((), dtype=g.dtype, device=g.device) if self.diag is None else weighted_gram(g, self.diag)
        for G, variance in self.spread:
            total = total + weighted_gram(G.transpose(g if G.thin else everywhere), variance)
        for noise in self.noises:
            total = total + noise.gram(everywhere)
        if self.columns is not None:
            seen = inner(g, self.columns)
            total = total + seen @ seen.mT
        return total

    def explicit(self) -> Tensor:
        """Columns of M − D, (k, batch, *event)."""
        parts = [] if self.columns is None else [self.columns]
        parts += [G.apply(diagonal_columns(root(v))) for G, v in self.spread]
        parts += [noise.columns() for noise in self.noises]
        return torch.cat(parts)


# The first V of Algorithm 1 for a step.
Start = Callable[[Step, Pending, int], Tensor]
