"""Powers of a positive variable, by the Gamma law of its mean and variance.

A sum of squares is never negative, while a Gaussian with its mean M and variance V may be, and where M² is not much
larger than V the delta method of √ is far off. The Gamma law with shape k = M²/V has, for 0 < r ≤ 1,

    E[S^r]     = M^r ρ_r,                      ρ_r = Γ(k + r)/(Γ(k) k^r)
    slope      = Cov(S^r, S)/V = r E[S^r]/M
    residual   = M^2r ρ_r² (ρ_2r/ρ_r² − 1 − r²/k) ≥ 0

and log ρ_r = (r² − r)/2k − (r³ − 1.5r² + 0.5r)/6k² + (r⁴ − 2r³ + r²)/12k³ − … for large k, so nothing cancels.

**Behind dropout**, S = c·Σ_i D_i t_i with t_i ≥ 0 and D_i ∈ {0, 1/q}, a large term that is there or not leaves S far
from any such law. So the `top` largest terms are told apart: their 2^top masks are a mixture, in each of which the
other terms have a mean and a variance and S^r the moments above,

    E[∂y/∂t_i] = Σ_masks P(mask)·slope·c·E[D_i | mask].
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from favour.scalar.moments.maxima import Dropped, Law
from favour.scalar.moments.record import Moments, Number, widen

_SERIES_FROM = 12.0
_LARGEST = 1e12


def _log_ratio(k: Tensor, r: float) -> Tensor:
    """log ρ_r(k)."""
    small = k.clamp(max=_SERIES_FROM)
    exact = torch.lgamma(small + r) - torch.lgamma(small) - r * torch.log(small)
    i = 1 / k.clamp(min=_SERIES_FROM)
    # (−1)^(n+1)(B_{n+1}(r) − B_{n+1})/(n(n + 1)) kⁿ⁻¹ with the Bernoulli polynomials
    second, third = (r**3 - 1.5 * r**2 + 0.5 * r) / 6, (r**4 - 2 * r**3 + r**2) / 12
    fourth = (r**5 - 2.5 * r**4 + 5 / 3 * r**3 - r / 6) / 20
    series = i * ((r * r - r) / 2 - i * (second - i * (third - i * fourth)))
    return torch.where(k < _SERIES_FROM, exact, series)


def positive_power(mean: Tensor, variance: Tensor, exponent: float) -> Moments:
    """f(S) = S^r for S ≥ 0 with the given mean and variance, 0 < r ≤ 1.

    Example:
        >>> m = positive_power(torch.tensor([2.0]), torch.tensor([4.0]), 0.5)  # S/2 has the Exponential law
        >>> round(m.mean.item(), 4), round(m.variance(torch.tensor([4.0])).item(), 4)
        (1.2533, 0.4292)
    """
    mean, variance, out = widen(mean, variance)
    r = exponent
    nothing = mean <= 0
    safe = mean.masked_fill(nothing, 1.0)
    certain = variance <= 0
    k = (safe * safe / variance.masked_fill(certain, 1.0)).clamp(1e-6, _LARGEST).masked_fill(certain, _LARGEST)
    first, twice = _log_ratio(k, r), _log_ratio(k, 2 * r)
    value = torch.exp(r * torch.log(safe) + first)
    residual = value * value * (torch.expm1(twice - 2 * first) - r * r / k).clamp(min=0)
    parts = value, r * value / safe, residual.masked_fill(certain, 0.0)
    return Moments(*(part.masked_fill(nothing, 0.0) for part in parts)).to(out)


def dropped_power(entries: Sequence[Law], rates: Sequence[Number], exponent: float, scale: float, top: int) -> Dropped:
    """(scale·Σ_i D_i t_i)^exponent, for t_i ≥ 0 in ascending order of E[t_i]/q_i.

    Args:
        entries: The laws of the t_i.
        rates: p_i, numbers or tensors.
        exponent: 0 < r ≤ 1.
        scale: c > 0.
        top: How many terms are told apart.
    """
    entries = [Law(t.mean.clamp(min=0), t.variance, t.factor) for t in entries]  # a filled entry adds nothing
    first = max(len(entries) - top, 0)
    zero = torch.zeros_like(entries[0].mean)
    # mean, independent variance and columns of the terms told apart by nobody
    rest, rest_variance, columns = zero, zero, None
    for t, p in zip(entries[:first], rates[:first], strict=True):
        rest = rest + t.mean
        rest_variance = rest_variance + _own(t) + p / (1 - p) * (t.mean.square() + t.variance)
        columns = _plus(columns, t.factor)
    parts: list[tuple[Number, tuple[int, ...], Moments, Tensor]] = []
    for mask in product((0, 1), repeat=len(entries) - first):
        chance: Number = 1.0
        mean, variance, factor = rest, rest_variance, columns
        for alive, t, p in zip(mask, entries[first:], rates[first:], strict=True):
            chance = chance * (1 - p if alive else p)
            if alive:
                mean, variance = mean + t.mean / (1 - p), variance + _own(t) / (1 - p) ** 2
                factor = _plus(factor, None if t.factor is None else t.factor / (1 - p))
        variance = variance if factor is None else variance + factor.square().sum(0)
        variance = scale * scale * variance
        moments = positive_power(scale * mean, variance, exponent)
        parts.append((chance, mask, moments, moments.variance(variance)))
    mean = zero
    for chance, _, moments, _ in parts:
        mean = mean + chance * moments.mean
    spread = zero
    slopes = [zero] * len(entries)
    alive_mean, fallen_mean = [zero] * len(entries), [zero] * len(entries)
    for chance, mask, moments, variance in parts:
        spread = spread + chance * (variance + (moments.mean - mean).square())
        for i, p in enumerate(rates):
            alive = 1 if i < first else mask[i - first]
            gain = chance * moments.slope * scale
            if i < first:
                slopes[i] = slopes[i] + gain
                alive_mean[i] = alive_mean[i] + gain * entries[i].mean / (1 - p)
            elif alive:
                slopes[i] = slopes[i] + gain / (1 - p)
                alive_mean[i] = alive_mean[i] + chance / (1 - p) * moments.mean
            else:
                fallen_mean[i] = fallen_mean[i] + chance / p * moments.mean
    draws = [a - b for a, b in zip(alive_mean, fallen_mean, strict=True)]
    return Dropped(mean, spread, slopes, draws)


def _own(t: Law) -> Tensor:
    """The part of the variance that is not in the factor columns."""
    return t.variance if t.factor is None else t.variance - t.factor.square().sum(0)


def _plus(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b
