"""Moments of f(x) for an x with third and fourth cumulants: one effective draw of two values beside a Gaussian.

A sum of many dropped units is near to a Gaussian, one of few is not: with a single unit it takes two values. Between
the two lies x = μ + D + z, with z ~ N(0, v − u) and D of two values, α with probability π and −β otherwise, of mean 0,
variance u = αβ and third cumulant κ₃ = u(α − β). Its fourth is κ₄ = κ₃²/u − 2u², so that u is the one positive root of

    2u³ + κ₄u − κ₃² = 0,

and x has the first four cumulants asked for. It is exact for one dropped unit, and a density for any, which a series in
Hermite polynomials is not. With m₁, m₂ the means of f at μ + α and μ − β, s₁, s₂ its slopes and V₁, V₂ its variances,

    E[f]   = πm₁ + (1 − π)m₂
    Var f  = πV₁ + (1 − π)V₂ + π(1 − π)(m₁ − m₂)²
    Cov(f, x) = (v − u)(πs₁ + (1 − π)s₂) + u(m₁ − m₂)/(α + β).

The slope is s = Cov(f, x)/v − ½E[f″]κ₃/v: secants (`favour.methods.adjoint`) add, unit by unit, what the last term
takes off. The residual is Var f − s²v as ever, but may be below 0: a line overstates a skewed x before a kink. Secants
explain

    (s + ½E[f″]κ₃/u)²u − s²u = sE[f″]κ₃ + ¼E[f″]²κ₃²/u

of it, all there is for a single unit, and methods that take them take that off (`EffectiveDraw.explained`); pairs of
units (`favour.methods.pairs`) explain ½E[f″]²(v² − u²) more.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from favour.scalar.function import ScalarFunction
from favour.scalar.moments import Moments
from favour.surrogate import EffectiveDraw

_STEPS = 8  # of Newton's method, from above the root of a convex function


def effective_draw(third: Tensor, fourth: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u, α and β; all 0 where the cumulants are, or the variance is (or its square no normal number any more)."""
    positive = variance > 100 * torch.finfo(variance.dtype).tiny ** 0.5
    v = torch.where(positive, variance, 1.0)
    skew, excess = third / (v * v.sqrt()), fourth / v.square()
    square = skew.square()
    with torch.no_grad():
        # (s/2)^⅓ + √(−γ₄/2) bounds the root for s = γ₃², and so do 1, as γ₄ ≥ γ₃² − 2 for all that is random, and a
        # fourth root in the place of the third below that.
        share = ((0.5 * square).sqrt().sqrt() + (-0.5 * excess).clamp_min(0).sqrt()).clamp_max(1)
        for _ in range(_STEPS):
            share = _step(share, square, excess)
    share = _step(share, square, excess)  # once more, for the gradient
    share = torch.where(positive & (share > 1e-6), share.clamp(max=1), 0.0)
    some = share > 0
    tilt = torch.where(some, skew / torch.where(some, share, 1.0), 0.0)
    width = torch.where(some, (tilt.square() + 4 * share).clamp_min(1e-12).sqrt(), 0.0)
    sigma = torch.where(positive, v.sqrt(), 0.0)
    return share * variance, 0.5 * (width + tilt) * sigma, 0.5 * (width - tilt) * sigma


def _step(share: Tensor, square: Tensor, excess: Tensor) -> Tensor:
    """Newton's for 2s³ + γ₄s − γ₃², which is (4s³ + γ₃²)/(6s² + γ₄)."""
    s2 = share * share
    return torch.addcmul(square, s2, share, value=4) / torch.add(excess, s2, alpha=6).clamp_min(1e-12)


def effective_moments(
    f: ScalarFunction,
    mean: Tensor,
    variance: Tensor,
    third: Tensor,
    fourth: Tensor,
    curvature: Callable[[], Tensor],
) -> tuple[Moments, EffectiveDraw]:
    """Mean, slope and residual of f(x), and the draw; `curvature` gives E[f″]."""
    u, up, down = effective_draw(third, fourth, variance)
    rest = variance - u
    width = up + down
    first, second = f.moments(mean + up, rest), f.moments(mean - down, rest)
    some = width > 0
    safe = torch.where(some, width, 1.0)
    weight = torch.where(some, down / safe, 0.5)
    gap = first.mean - second.mean
    total = torch.lerp(second.variance(rest), first.variance(rest), weight) + weight * (1 - weight) * gap.square()
    along = rest * torch.lerp(second.slope, first.slope, weight) + u * gap / safe
    positive = variance > 0
    v = torch.where(positive, variance, 1.0)
    slope = torch.where(positive, (along - 0.5 * curvature() * third) / v, first.slope)
    moments = Moments(torch.lerp(second.mean, first.mean, weight), slope, total - slope.square() * variance)
    return moments, EffectiveDraw(third, u, slope, curvature)


def effective_cumulants(
    f: ScalarFunction, mean: Tensor, variance: Tensor, third: Tensor, fourth: Tensor
) -> tuple[Tensor, Tensor]:
    """κ₃ and κ₄ of f(x), with f(x) of either value of the effective draw taken for Gaussian."""
    u, up, down = effective_draw(third, fourth, variance)
    rest = variance - u
    first, second = f.moments(mean + up, rest), f.moments(mean - down, rest)
    width = up + down
    some = width > 0
    chance = torch.where(some, down / torch.where(some, width, 1.0), 0.5)
    centre = torch.lerp(second.mean, first.mean, chance)
    total: list[Tensor] = []
    for weight, moments in ((chance, first), (1 - chance, second)):
        off, v = moments.mean - centre, moments.variance(rest)
        powers = (off.square() + v, off * (off.square() + 3 * v), off.pow(4) + 6 * off.square() * v + 3 * v.square())
        terms = [weight * power for power in powers]
        total = terms if not total else [a + b for a, b in zip(total, terms, strict=True)]
    return total[1], total[2] - 3 * total[0].square()
