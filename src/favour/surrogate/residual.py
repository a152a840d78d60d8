"""What an element-wise function leaves over beside its line, as a noise.

Where the cumulants of the argument are known, it is taken for a draw of two values (`favour.scalar.effective`). Secants
explain a part of the residual then, and a method that takes them counts that part with the covectors instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from favour.surrogate.noise import DiagonalNoise


@dataclass(frozen=True, eq=False)
class EffectiveDraw:
    """A draw of two values in x (`favour.scalar.effective`), before a function with the slope s and E[f″] = b.

    Attributes:
        third: κ₃ of x.
        variance: u.
        slope: s.
        curvature: b, when called.
    """

    third: Tensor
    variance: Tensor
    slope: Tensor
    curvature: Callable[[], Tensor]

    def explained(self) -> Tensor:
        """What secants explain of the residual."""
        b, some = self.curvature(), self.variance > 16 * torch.finfo(self.variance.dtype).tiny
        ratio = torch.where(some, self.third / torch.where(some, self.variance, 1.0), 0.0)
        return b * self.third * (self.slope + 0.25 * b * ratio)


@dataclass(eq=False)
class Residual(DiagonalNoise):
    """What an element-wise function leaves over beside its line.

    Attributes:
        draw: The effective draw of two values in the argument, where its cumulants are known. What secants of it
            explain is in the variance too, which may be below 0 without.
    """

    draw: EffectiveDraw | None = None

    def less(self, counted: Tensor | None = None) -> DiagonalNoise:
        """Without what secants explain of it, and without what is `counted` elsewhere."""
        explained = None if self.draw is None else self.draw.explained()
        if counted is not None:
            explained = counted if explained is None else explained + counted
        if explained is None:
            return self
        return DiagonalNoise((self.variance - explained).clamp_min(0), self.label)


class Explained(Residual):
    """Variance that secants of the draws before explain, all of it."""

    def less(self, counted: Tensor | None = None) -> DiagonalNoise:
        return DiagonalNoise(torch.zeros_like(self.variance), self.label)
