"""The largest of independent entries of any law, by their distribution functions.

y = max_i x_i has P(y ≤ t) = Π_i F_i(t), so with nodes t from where no entry is below to where none is above

    E[y] = t_K − ∫ P(y ≤ t) dt,       E[(t_K − y)²] = 2∫ (t_K − t) P(y ≤ t) dt,       and so on.

The best line through y in x_i has the slope Cov(y, x_i)/Var x_i. With F_−i the product of the others and
E[y | x_i = s] of derivative F_−i(s),

    Cov(y, x_i) = ∫ F_−i(s) L_i(s) ds,       L_i(s) = E[(x_i − E x_i)·1(x_i > s)] ≥ 0,

which for Gaussians is P(x_i is the largest), Stein's lemma. Slopes lie between 0 and 1, and what lines leave of the
variance is never negative.

Entries are a draw of two values beside a Gaussian, with their first four cumulants (`favour.scalar.effective`): exact
for what a single unit of dropout leaves, and a Gaussian where nothing is skewed. A rare draw goes far, so half of the
nodes lie where the likely values of all entries have their largest, and half on the whole way; steps narrower than the
distance of nodes are widened to it, so that rounding moves nothing across a node.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favour.scalar.moments.tails import PDF0, SQRT_HALF

NODES = 64
CELLS = (16, 32, 16)  # below, where and above the likely values of all entries have their largest
REACH = 4.5  # standard deviations of a Gaussian
RESOLVED = 0.5  # of the distance of nodes, the least standard deviation of a step


@dataclass
class TwoValued:
    """x = mean + D + z: D is `up` with probability down/(up + down), else −`down`; z is Gaussian.

    Attributes:
        mean, up, down: (n, …), up and down at least 0.
        rest: The variance of z.
    """

    mean: Tensor
    up: Tensor
    down: Tensor
    rest: Tensor


@dataclass
class Largest:
    """Mean, variance and third and fourth cumulants of y, and the slopes (n, …)."""

    mean: Tensor
    variance: Tensor
    third: Tensor
    fourth: Tensor
    slopes: Tensor


def largest_independent(x: TwoValued, absent: float) -> Largest:
    """The largest along the first axis; entries of a mean of `absent` are not there."""
    there = x.mean > absent
    width = x.up + x.down
    some = width > 0
    chance = torch.where(some, x.down / torch.where(some, width, 1.0), 0.5)  # of `up`
    left = x.rest > 0
    s = torch.where(left, torch.where(left, x.rest, 1.0).sqrt(), 0.0)  # of which 0 has a gradient
    lowest = torch.where(there, x.mean - x.down - REACH * s, absent).amax(0)
    highest = torch.where(there, x.mean + x.up + REACH * s, absent).amax(0)
    likely = x.mean + torch.where(chance < 0.5, -x.down, x.up)
    centre = torch.where(there, likely, absent).amax(0)
    low, high = (torch.where(there, likely + side * s, absent).amax(0) for side in (-REACH, REACH))
    ends = (lowest, low, high, highest)
    width_of = torch.cat([((v - u) / n).expand(n, *u.shape) for u, v, n in zip(ends, ends[1:], CELLS, strict=False)])
    edges = torch.cat([_spaced(u, v, n) for u, v, n in zip(ends, ends[1:], CELLS, strict=False)])  # lower ones
    nodes = torch.cat([edges + 0.5 * width_of, low.unsqueeze(0), high.unsqueeze(0)])
    whole = highest - lowest
    least = torch.where(whole > 0, whole * 1e-6, 1.0)
    core = (high - low) / CELLS[1]
    likely_s = torch.maximum(torch.maximum(s, core * RESOLVED / 2), least).unsqueeze(1)
    rare_s = torch.maximum(likely_s, torch.cat([width_of, 0 * width_of[:2]]) * RESOLVED)
    below, partial = _sides(x, chance, likely_s, rare_s, nodes, there)
    logs = below.clamp_min(1e-30).log()
    total = logs.sum(0)  # (K, …)
    others = (total.unsqueeze(0) - logs).exp()[:, :-2]
    P, at_low, at_high = total[:-2].exp(), total[-2].exp(), total[-1].exp()
    partial = partial[:, :-2]
    variances = torch.maximum(x.up * x.down + x.rest, (partial * width_of).sum(1))
    positive = variances > 100 * torch.finfo(variances.dtype).tiny ** 0.5  # the quotient's gradient overflows below
    slopes = torch.where(positive, (others * partial * width_of).sum(1) / torch.where(positive, variances, 1.0), 0.0)
    # E[(y − c)ⁿ] = n∫ (t − c)ⁿ⁻¹ (1(t > c) − P) dt, with c so near to y that little cancels. Sums at midpoints lack
    # h²/24 times the difference of slopes at the ends of a stretch.
    off = nodes[:-2] - centre
    start, end = edges - centre, edges + width_of - centre
    above = (start >= 0).to(P.dtype)
    across = torch.where((start < 0) & (end > 0), end, 0.0)
    beside = (above - P) * width_of
    inner = (above * width_of.pow(3))[CELLS[0] : -CELLS[2]]

    def moment(n: int) -> Tensor:
        sums = (n * off.pow(n - 1) * beside + across.pow(n)).sum(0)
        if n == 1:
            return sums
        if n > 2:  # (t − c)ⁿ⁻¹ itself, above c
            sums = sums + (n * (n - 1) * (n - 2) / 24 * off[CELLS[0] : -CELLS[2]].pow(n - 3) * inner).sum(0)
        below_core, in_core, above_core = ((v - u) / k for u, v, k in zip(ends, ends[1:], CELLS, strict=False))
        lower, upper = ((t - centre).pow(n - 2) for t in (low, high))
        lacking = below_core.square() * lower * at_low + in_core.square() * (upper * at_high - lower * at_low)
        return sums - n * (n - 1) / 24 * (lacking + above_core.square() * upper * (1 - at_high))

    first, second, third, fourth = (moment(n) for n in (1, 2, 3, 4))
    variance = (second - first.square()).clamp_min(0)
    skew = third - 3 * first * second + 2 * first.pow(3)
    kurt = fourth - 4 * first * third + 6 * first.square() * second - 3 * first.pow(4) - 3 * variance.square()
    return Largest(centre + first, variance, skew, kurt, slopes.clamp(0, 1))


def _spaced(low: Tensor, high: Tensor, count: int) -> Tensor:
    """The lower edges of `count` cells."""
    share = torch.arange(count, dtype=low.dtype, device=low.device).reshape(-1, *[1] * low.ndim) / count
    return torch.lerp(low, high, share)


def _sides(
    x: TwoValued, chance: Tensor, likely: Tensor, rare: Tensor, nodes: Tensor, there: Tensor
) -> tuple[Tensor, Tensor]:
    """F_i and L_i at the nodes, (n, K, …), with standard deviations beside likely values and rare ones."""
    below = partial = torch.zeros_like(nodes)
    for weight, shift in ((chance, x.up), (1 - chance, -x.down)):
        s = torch.where(weight.unsqueeze(1) < 0.5, rare, likely)
        a = (nodes - (x.mean + shift).unsqueeze(1)) / s
        above = 0.5 * torch.special.erfc(a * SQRT_HALF)
        density = torch.exp(-0.5 * a * a) * PDF0
        w = weight.unsqueeze(1)
        below = below + w * (1 - above)
        partial = partial + w * (shift.unsqueeze(1) * above + s * density)
    gone = ~there.unsqueeze(1)
    return below.masked_fill(gone, 1.0), partial.masked_fill(gone, 0.0)
