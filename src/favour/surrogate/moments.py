"""What the draws of a weight need to know of the vectors it multiplies."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Moments:
    """Mean and covariance of vectors x, Σ = diag(λ) + Σ_k U_k U_kᵀ, of one for each input or at several places.

    Attributes:
        mean: (batch, *places, n).
        variance: Marginal variances, or None where x is known.
        diag: λ, or None for zero.
        blocks: Factor columns by the name of their latent variables, (rank, batch, *places, n).
    """

    mean: Tensor
    variance: Tensor | None = None
    diag: Tensor | None = None
    blocks: dict[Hashable, Tensor] | None = None

    @classmethod
    def of(cls, x: Any, *, constant: bool = False) -> Moments:
        """Of a `Value` or a known tensor; with `constant`, of x with a 1 appended, which carries the bias."""
        if isinstance(x, Tensor):
            return cls(F.pad(x, (0, 1), value=1.0) if constant else x)
        if not constant:
            return cls(x.mean, x.variance, x.diag, dict(x.blocks))

        def pad(t: Tensor | None) -> Tensor | None:
            return None if t is None else F.pad(t, (0, 1))

        blocks = {name: F.pad(block, (0, 1)) for name, block in x.blocks.items()}
        return cls(F.pad(x.mean, (0, 1), value=1.0), pad(x.variance), pad(x.diag), blocks)

    @property
    def second(self) -> Tensor:
        """E[x²], element-wise."""
        return self.mean.square() if self.variance is None else self.mean.square() + self.variance

    @property
    def factor(self) -> Tensor | None:
        """All columns, (rank, *shape of the mean)."""
        return torch.cat(list(self.blocks.values())) if self.blocks else None

    def points(self, mean: bool = True) -> Tensor:
        """The mean, if it is wanted, and the factor columns: (1 + rank, *shape of the mean)."""
        parts = [self.mean.unsqueeze(0)] if mean else []
        if self.factor is not None:
            parts.append(self.factor)
        return torch.cat(parts) if parts else self.mean.new_zeros(0, *self.mean.shape)
