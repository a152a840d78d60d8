"""The largest of independent entries of any law, by their distribution functions.

y = max_i x_i has P(y ≤ t) = Π_i F_i(t), so with nodes t from where no entry is below to where none is above

    E[y] = t_K − ∫ P(y ≤ t) dt,       E[(t_K − y)²] = 2∫ (t_K − t) P(y ≤ t) dt,       and so on.

The best line through y in x_i has the slope Cov(y, x_i)/Var x_i. With F_−i the product of the others and
E[y | x_i = s] of derivative F_−i(s),

    Cov(y, x_i) = ∫ F_−i(s) L_i(s) ds,       L_i(s) = E[(x_i − E x_i)·1(x_i > s)] ≥ 0,

which for Gaussians is P(x_i is the largest), Stein's lemma. Slopes lie between 0 and 1, and what lines leave of the
variance is never negative.

Entries are a draw of two values beside a Gaussian, with their first four cumulants (`favour.scalar.effective`): exact
for what a single unit of dropout leaves, and a Gaussian where nothing is skewed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favour.scalar.moments.tails import PDF0, SQRT_HALF

NODES = 64
REACH = 4.5  # standard deviations of a Gaussian


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
    span = highest - lowest
    step = span / NODES
    grid = torch.arange(NODES, dtype=x.mean.dtype, device=x.mean.device) + 0.5
    nodes = lowest + grid.reshape(-1, *[1] * lowest.ndim) * step  # (K, …)
    s = torch.maximum(s, torch.where(span > 0, step, 1.0) * 1e-3)  # steps are resolved to the distance of nodes
    below, partial = _sides(x, chance, s, nodes, there)
    logs = below.clamp_min(1e-30).log()
    total = logs.sum(0)  # (K, …)
    P = total.exp()
    others = (total.unsqueeze(0) - logs).exp()
    slopes = (others * partial).sum(1) * step
    variances = x.up * x.down + x.rest
    positive = variances > 100 * torch.finfo(variances.dtype).tiny ** 0.5  # the quotient's gradient overflows below
    slopes = torch.where(positive, slopes / torch.where(positive, variances, 1.0), 0.0)
    gap = highest - nodes
    # Moments of highest − y ≥ 0, of which P(· > u) = P(y < highest − u); below the first node nothing is left.
    first = (P * step).sum(0)
    second = 2 * (P * gap * step).sum(0) - step.square() / 12  # gap·P ends with a slope of 1
    third = 3 * (P * gap.square() * step).sum(0)
    fourth = 4 * (P * gap.pow(3) * step).sum(0)
    variance = (second - first.square()).clamp_min(0)
    skew = third - 3 * first * second + 2 * first.pow(3)
    kurt = fourth - 4 * first * third + 6 * first.square() * second - 3 * first.pow(4) - 3 * variance.square()
    return Largest(highest - first, variance, -skew, kurt, slopes.clamp(0, 1))


def _sides(x: TwoValued, chance: Tensor, s: Tensor, nodes: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
    """F_i and L_i at the nodes, (n, K, …)."""
    below = partial = torch.zeros_like(nodes)
    for weight, shift in ((chance, x.up), (1 - chance, -x.down)):
        a = (nodes - (x.mean + shift).unsqueeze(1)) / s.unsqueeze(1)
        above = 0.5 * torch.special.erfc(a * SQRT_HALF)
        density = torch.exp(-0.5 * a * a) * PDF0
        w = weight.unsqueeze(1)
        below = below + w * (1 - above)
        partial = partial + w * (shift.unsqueeze(1) * above + s.unsqueeze(1) * density)
    gone = ~there.unsqueeze(1)
    return below.masked_fill(gone, 1.0), partial.masked_fill(gone, 0.0)
