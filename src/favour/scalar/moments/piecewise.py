"""Moments of piecewise linear and piecewise constant functions, in closed form.

With z = (x − μ)/σ and s = (t − μ)/σ, relu(x − t) = σ·relu(z − s), and relu(z − s) = (z − s) + relu(s − z): up
to an affine part, a kink at s < 0 mirrors one at |s|, so Q, h and e of `favour.scalar.moments.tails` are needed for
a = |s| only. Two kinks on one side, a ≤ b: E[relu(z − a) relu(z − b)] = e(b) + (b − a) h(b). On opposite
sides it is 0.

Symbols: φ, Q density and upper tail of N(0, 1); t place of a kink, c the change of slope there.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from favour.scalar.moments.integration import legendre
from favour.scalar.moments.record import Kinks, Moments, Number, widen
from favour.scalar.moments.tails import FAR, PDF0, SQRT_HALF, tails


def affine(mean: Tensor, variance: Tensor, *, scale: Number = 1.0, shift: Number = 0.0) -> Moments:
    """f(x) = scale·x + shift, exactly."""
    mean, variance, out = widen(mean, variance)
    return Moments(scale * mean + shift, scale * torch.ones_like(mean), torch.zeros_like(variance)).to(out)


def _piecewise_value(x: Tensor, offset: Number, slope: Number, kinks: Kinks) -> Tensor:
    """f(x), segment by segment: the segments are bounded, so a saturated f is exact at any x."""
    if not kinks:
        return offset + slope * x
    # Ties go to the segment on the left, in value and gradient, as in `piecewise_slope`.
    first = kinks[0][0]
    value = offset + slope * torch.where(x > first, first, x)
    for i, (t, c) in enumerate(kinks):
        slope = slope + c
        length = torch.relu(x - t)
        if i + 1 < len(kinks):
            after = kinks[i + 1][0]
            length = torch.where(x > after, after - t, length)
        value = value + slope * length
    return value


def piecewise_slope(x: Tensor, slope: Number, kinks: Kinks) -> Tensor:
    """f′(x) of the continuous piecewise linear f, the left derivative at a kink (so relu′(0) = 0)."""
    value = slope + torch.zeros_like(x)
    for t, c in kinks:
        value = value + c * (x > t).to(x.dtype)
    return value


def piecewise_curvature(mean: Tensor, variance: Tensor, *, kinks: Kinks) -> Tensor:
    """E[f″(x)] = Σ_k c_k φ((t_k − μ)/σ)/σ of the continuous piecewise linear f, for σ > 0."""
    mean, variance, out = widen(mean, variance)
    precision = variance.reciprocal()
    total = torch.zeros_like(mean)
    for t, c in kinks:
        total = total + c * torch.exp(-0.5 * precision * (t - mean).square())
    return (PDF0 * total * precision.sqrt()).to(out)


def piecewise_linear(
    mean: Tensor,
    variance: Tensor,
    *,
    offset: Number = 0.0,
    slope: Number = 0.0,
    kinks: Kinks = (),
) -> Moments:
    """f(x) = offset + slope·x + Σ_k c_k·relu(x − t_k), in closed form.

    With a_k = |t_k − μ|/σ:

        mean     = f(μ) + σ Σ c_k h(a_k)
        slope    = f′(μ) ± Σ c_k Q(a_k)                 + for a kink above μ, − for one below
        residual = σ² Σ_kl c_k c_l R(a_k, a_l)
        R(a, b)  = e(b) + (b − a)h(b) − h(a)h(b) − Q(a)Q(b)    same side, a ≤ b
                 = −h(a)h(b) + Q(a)Q(b)                        opposite sides

    Where f has the same slope on both ends (hard tanh) and σ exceeds twice the distance of the kinks, the sum
    above cancels and the integral over the bent part is taken instead (`_narrow`).

    Args:
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.
        offset: f extended linearly from x → −∞ to x = 0.
        slope: f′ for x → −∞; a float or a tensor that broadcasts.
        kinks: pairs (t_k, c_k) of place and change of slope, t_k ascending; floats or tensors that broadcast.

    Example:
        >>> m = piecewise_linear(torch.tensor([9.0]), torch.tensor([1.0]), kinks=[(0.0, 1.0), (6.0, -1.0)])
        >>> round(m.mean.item(), 4)
        5.9996
    """
    mean, variance, out = widen(mean, variance)
    value, tangent = _piecewise_value(mean, offset, slope, kinks), piecewise_slope(mean, slope, kinks)
    certain = variance <= 0
    safe = variance.masked_fill(certain, 1.0)
    sigma = torch.sqrt(safe)
    total = torch.zeros_like(mean)
    parts: list[tuple[Number, Number, Tensor, Tensor, Tensor, Tensor]] = []
    for t, c in kinks:
        s = (t - mean) / sigma
        below = s < 0
        a = torch.where(below, -s, s).clamp(max=FAR).masked_fill(certain, FAR)
        upper, first, second = tails(a)
        value = value + c * sigma * first
        tangent = tangent + c * torch.where(below, -upper, upper)
        total = total + c * c * (second - first * first - upper * upper)
        for t0, c0, below0, upper0, first0, second0 in parts:  # t0 ≤ t, so `below` implies `below0`
            gap = ((t - t0) / sigma).clamp(max=FAR)
            same = torch.where(below, second0 + gap * first0, second + gap * first)
            opposite = below0 & ~below
            both = upper0 * upper
            pair = torch.where(opposite, both, same - both) - first0 * first
            total = total + 2 * c0 * c * pair
        parts.append((t, c, below, upper, first, second))
    result = Moments(value, tangent, safe * total.clamp(min=0))
    changes = [c for _, c in kinks if not isinstance(c, Tensor)]
    if 1 < len(kinks) == len(changes) and abs(sum(changes)) < 1e-12:
        narrow = ((kinks[-1][0] - kinks[0][0]) < 0.5 * sigma) & ~certain
        wide = _narrow(mean, sigma, offset, slope, kinks)
        result = Moments(*(torch.where(narrow, a, b) for a, b in zip(wide, result, strict=True)))
    return result.to(out)


def _narrow(mean: Tensor, sigma: Tensor, offset: Number, slope: Number, kinks: Kinks) -> Moments:
    """`piecewise_linear` where all kinks lie within σ/2 and Σ c_k = 0, so that f bends only between them.

    f = offset + slope·x + ∫ C(u) 1[x > u] du with C the slope gained, F(u) = ∫_{−∞}^u C, and the residual
    covariance of two steps is Q(max(u, u′)) − Q(u)Q(u′) − φ(u)φ(u′), hence

        residual = 2∫ C F Q du − (∫ C Q du)² − (∫ C φ du)²

    unchanged when Q is the lower tail and F counts from the other end: so done where μ is above the kinks.
    """
    nodes, weights = legendre(8 if mean.dtype == torch.float64 else 5)  # segments are below σ/2
    flip = (kinks[0][0] + kinks[-1][0]) < 2 * mean
    end: Number = 0.0
    steps: list[tuple[Number, Number, Number]] = []  # position, weight C du, F
    gained: Number = 0.0
    for (t, c), (after, _) in pairwise(kinks):
        gained = gained + c
        for node, share in zip(nodes, weights, strict=True):
            part = (after - t) * (0.5 + 0.5 * node)
            steps.append((t + part, gained * (after - t) * (0.5 * share), end + gained * part))
        end = end + gained * (after - t)
    zero = torch.zeros_like(mean)
    tail_sum, pdf_sum, square_sum = zero, zero, zero
    for place, weight, height in steps:
        u = ((place - mean) / sigma).clamp(-FAR, FAR)
        tail = 0.5 * torch.special.erfc(torch.where(flip, -u, u) * SQRT_HALF)
        tail_sum = tail_sum + weight * tail
        pdf_sum = pdf_sum + weight * torch.exp(-0.5 * u * u) * PDF0
        square_sum = square_sum + weight * tail * torch.where(flip, zero + (end - height), height)
    rise = torch.where(flip, end - tail_sum, tail_sum)
    residual = (2 * square_sum - tail_sum * tail_sum - pdf_sum * pdf_sum).clamp(min=0)
    return Moments(offset + slope * mean + rise, slope + pdf_sum / sigma, residual)


def step(mean: Tensor, variance: Tensor, *, threshold: float = 0.0, low: float = 0.0, high: float = 1.0) -> Moments:
    """f(x) = low for x ≤ threshold, high above: with d = high − low and s = (threshold − μ)/σ,

        mean = low + dQ(s),  slope = dφ(s)/σ,  residual = d²(Q(s)(1 − Q(s)) − φ(s)²).

    At σ = 0 the slope is 0, also on the threshold, where it grows like 1/σ as σ → 0.
    """
    mean, variance, out = widen(mean, variance)
    certain = variance <= 0
    sigma = torch.sqrt(variance.masked_fill(certain, 1.0))
    s = (threshold - mean) / sigma
    below = s < 0
    a = torch.where(below, -s, s).clamp(max=FAR).masked_fill(certain, FAR)
    upper = 0.5 * torch.special.erfc(a * SQRT_HALF)
    pdf = torch.exp(-0.5 * a * a) * PDF0
    jump = high - low
    value = torch.where(below, high - jump * upper, low + jump * upper)
    residual = jump**2 * (upper * (1 - upper) - pdf * pdf).clamp(min=0)
    return Moments(value, jump * pdf / sigma, residual).to(out)
