r"""Moments of max(x, 0), in as few operations as possible, and their gradient in closed form.

With σ² the variance, s = μ/σ, a = |s| and Q, h, e, φ as in `favour.scalar.moments.tails`:

    m = max(μ, 0) + σh(a)        Φ = E[f′] = 1 − Q(a) for μ > 0, else Q(a)        R = σ²(e(a) − h(a)² − Q(a)²)

Training differentiates these for every unit of every layer. Φ and m are their own best derivatives,

    ∂m/∂μ = Φ                          ∂m/∂σ² = φ/(2σ)
    ∂Φ/∂μ = φ/σ                        ∂Φ/∂σ² = −φs/(2σ²)
    ∂R/∂μ = 2m(1 − Φ) − 2Φσφ           ∂R/∂σ² = Φ(1 − Φ) − φ²

(the left column by E[f]′ = E[f′], the right one by the heat equation, ∂E[g]/∂σ² = ½E[g″]): one exponential instead of
what differentiating rational functions costs. At σ = 0 the derivatives by σ² are 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from favour.scalar.moments.record import Moments, widen
from favour.scalar.moments.tails import FAR, PDF0, tails


def relu(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = max(x, 0): `piecewise_linear` with one kink at 0.

    Args:
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.

    Example:
        >>> m = relu(torch.zeros(1), torch.ones(1))
        >>> round(m.mean.item(), 4), round(m.slope.item(), 4), round(m.residual.item(), 4)
        (0.3989, 0.5, 0.0908)
    """
    mean, variance, out = widen(mean, variance)
    if not torch.compiler.is_compiling() and (_transformed(mean) or _transformed(variance)):
        return Moments(*_by_selection(mean, variance)).to(out)
    followed = torch.is_grad_enabled() and (mean.requires_grad or variance.requires_grad)
    if followed and not torch.compiler.is_exporting():
        return Moments(*_Relu.apply(mean, variance)).to(out)
    return Moments(*_values(mean, variance)).to(out)


def _transformed(x: Tensor) -> bool:
    """Whether x is followed in forward mode, or by a transform of functions."""
    return torch._C._functorch.is_functorch_wrapped_tensor(x) or unpack_dual(x).tangent is not None


class _Relu(torch.autograd.Function):
    """The three moments; gradients may be differentiated again."""

    @staticmethod
    def forward(ctx: Any, mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, slope, residual = _values(mean, variance)
        ctx.save_for_backward(mean, variance, m, slope)
        return m, slope, residual

    @staticmethod
    def backward(ctx: Any, at_mean: Tensor, at_slope: Tensor, at_residual: Tensor) -> tuple[Tensor, Tensor]:
        mean, variance, m, slope = ctx.saved_tensors
        sigma = variance.masked_fill(variance <= 0, 1.0).sqrt()
        s = (mean / sigma).masked_fill(variance <= 0, FAR)
        pdf = torch.exp(-0.5 * s * s) * PDF0
        density, rest = pdf / sigma, 1 - slope
        # Far above the kink m(1 − Φ) is 0 times what may be large.
        bent = torch.where(pdf > 0, m * rest - slope * sigma * pdf, 0.0)
        by_mean = at_mean * slope + at_slope * density + 2 * at_residual * bent
        by_variance = 0.5 * (at_mean - at_slope * s / sigma) * density + at_residual * (slope * rest - pdf * pdf)
        return by_mean, by_variance


def _values(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return _by_selection(mean, variance) if torch.compiler.is_compiling() else _by_arithmetic(mean, variance)


def _by_selection(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """With comparisons, which cost a compiler nothing; differentiable."""
    certain = variance <= 0
    safe = variance.masked_fill(certain, 1.0)
    sigma = torch.sqrt(safe)
    s = mean / sigma
    positive = mean > 0
    a = torch.where(positive, s, -s).clamp(max=FAR).masked_fill(certain, FAR)
    upper, first, second = tails(a)
    residual = safe * (second - first * first - upper * upper).clamp(min=0)
    return torch.relu(mean) + sigma * first, torch.where(positive, 1 - upper, upper), residual


def _by_arithmetic(mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same without comparisons and selections, which on a CPU cost twenty times a multiplication.

    At σ = 0 the ratio |μ|/σ is infinite or not a number, and its gradient too: for plain evaluation only.
    """
    variance = torch.relu(variance)
    sigma = torch.sqrt(variance)
    a = (mean / sigma).abs().nan_to_num(nan=FAR, posinf=FAR).clamp(max=FAR)
    upper, first, second = tails(a)
    residual = torch.addcmul(torch.addcmul(second, first, first, value=-1), upper, upper, value=-1)
    value = torch.addcmul(torch.relu(mean), sigma, first)
    slope = (torch.sign(mean).clamp(min=0) - upper).abs()  # Q or 1 − Q
    return value, slope, variance * residual.clamp(min=0)
