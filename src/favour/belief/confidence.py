"""Confidence regions of a Gaussian, and the χ² quantiles that size them.

{y : (y − μ)ᵀ Σ⁻¹ (y − μ) ≤ q}                  holds `level` of the mass for q the χ²_n quantile
P(χ²_n ≤ q) = P(n/2, q/2)                       the regularised lower incomplete gamma function
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from favour.errors import InvalidValue

if TYPE_CHECKING:
    from favour.belief import Belief


class ConfidenceRegion:
    """{y : mahalanobis(y) ≤ radius}, radius² the χ²_n quantile of `level`.

    >>> from favour.belief import Belief
    >>> region = Belief(torch.zeros(1, 2), diag=torch.ones(1, 2)).confidence_region(0.95)
    >>> round(region.radius, 4)
    2.4477
    >>> region.contains(torch.tensor([[2.0, 2.0]]))
    tensor([False])
    """

    def __init__(self, belief: Belief, level: float):
        self.belief, self.level = belief, level
        self.radius = math.sqrt(chi_square_quantile(level, belief.event_shape.numel()))

    def contains(self, y: Tensor) -> Tensor:
        """Whether y lies inside, (B,), or (*S, B) for y of shape (*S, B, *event)."""
        return self.belief.mahalanobis(y) <= self.radius

    def __repr__(self) -> str:
        return f"ConfidenceRegion(level={self.level}, radius={self.radius:.4g}, of {self.belief!r})"


def chi_square_quantile(level: float, dof: int) -> float:
    """The x with P(χ²_dof ≤ x) = level: bisection on the regularised incomplete gamma function P(dof/2, x/2).

    >>> round(chi_square_quantile(0.95, 1), 6)
    3.841459
    """
    check_level(level)
    half = torch.tensor(0.5 * dof, dtype=torch.float64)

    def above(x: float) -> bool:
        if level > 0.5:  # compare the upper tails: 1 − level keeps its digits, P near 1 does not
            return float(torch.special.gammaincc(half, half.new_tensor(0.5 * x))) < 1 - level
        return float(torch.special.gammainc(half, half.new_tensor(0.5 * x))) > level

    low, high = 0.0, float(dof) + 1.0
    while not above(high):
        low, high = high, 2 * high
    while low < (mid := 0.5 * (low + high)) < high:  # until low and high are neighbours
        low, high = (low, mid) if above(mid) else (mid, high)
    return mid


def check_level(level: float) -> None:
    """Raises `InvalidValue` unless 0 < level < 1."""
    if not 0 < level < 1:
        raise InvalidValue(f"`level` is {level}; it must lie strictly between 0 and 1, such as 0.95.")
