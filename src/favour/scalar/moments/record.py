"""The record that every moment function returns, and the dtype it is computed in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
Number = float | Tensor
Kinks = Sequence[tuple[Number, Number]]


class Moments(NamedTuple):
    """E[f(x)], E[f′(x)] and Var f(x) − E[f′(x)]²σ², all of the shape of x."""

    mean: Tensor
    slope: Tensor
    residual: Tensor

    def variance(self, variance: Tensor) -> Tensor:
        """Var f(x) = slope²σ² + residual, given the variance σ² of x."""
        return self.slope.square() * variance + self.residual

    def to(self, dtype: torch.dtype) -> Moments:
        """The same moments in another dtype."""
        return self if all([part.dtype == dtype for part in self]) else Moments(*(part.to(dtype) for part in self))


def widen(mean: Tensor, variance: Tensor, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, torch.dtype]:
    """Mean and variance broadcast together, in at least float32; and the dtype to return the answer in."""
    if torch.compiler.is_compiling() or mean.shape != variance.shape:
        mean, variance = torch.broadcast_tensors(mean, variance)
    out = torch.promote_types(mean.dtype, variance.dtype)
    work = dtype or torch.promote_types(out, torch.float32)
    return mean.to(work), variance.to(work), out
