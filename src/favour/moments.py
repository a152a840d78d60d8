"""Gaussian moments of element-wise functions: E[f(x)], E[f′(x)] and what a line cannot explain of f(x).

For x ~ N(μ, σ²), element by element, every function here returns three tensors (`Moments`):

    mean     = E[f(x)]
    slope    = E[f′(x)] = Cov(f(x), x) / σ²                (Stein)
    residual = Var f(x) − slope² σ²  ≥ 0                   (Cauchy–Schwarz)

so f(x) ≈ mean + slope·(x − μ) + noise of variance `residual`, uncorrelated with x. Adding an affine function
to f changes mean and slope and leaves the residual alone: the formulas below use that to avoid cancellation.
At σ = 0 the answer is f(μ), f′(μ), 0, with finite gradients. Half precision is widened to float32 inside.

**Piecewise linear.** With z = (x − μ)/σ and s = (t − μ)/σ, relu(x − t) = σ·relu(z − s), and
relu(z − s) = (z − s) + relu(s − z): up to an affine part, a kink at s < 0 mirrors one at |s|. For a ≥ 0

    Q(a) = P(z > a)
    h(a) = E relu(z − a)  = φ(a) − a Q(a)
    e(a) = E relu(z − a)² = (1 + a²) Q(a) − a φ(a)

lose their digits in the tail as written. All three follow, without subtraction, from the ratio r = e/φ:

    Q = φ (a + r)/(1 + a²)      h = φ (1 − a r)/(1 + a²)      r = 2/((1 + a²) c + 2a)

where c(a) = a + 3/(a + 4/(a + 5/…)), the tail of Laplace's continued fraction for Q/φ, is nearly linear in a.
Two kinks on one side, a ≤ b: E[relu(z − a) relu(z − b)] = e(b) + (b − a) h(b). On opposite sides it is 0.

**Everything else.** The trapezoidal rule, exponentially convergent for analytic f, after the change of
variable z = k + b·t√(1 + t²): nodes are dense where f bends, at x = centre, and as wide as the Gaussian
elsewhere, since activations bend within |x| ≲ 3 however large σ is. For GELU, SiLU, tanh, sigmoid, Mish and
softplus at |μ| ≤ 6, 17 nodes keep slope and variance within 1e-4 for σ ≤ 1 and within 1e-3 at σ = 5, where
Gauss–Hermite needs about 200. Where f is not smooth, Gauss–Legendre on each piece.

Small σ: f(μ + σz) − f(μ) drowns in rounding. The nodes are never set closer than a floor σ₀ and the result is
scaled back by the order of each term in the Taylor expansion: with ρ² = σ²/σ₀², E[f] − f(μ) ∝ ρ²,
E[f′] − f′(μ) ∝ ρ², residual ∝ ρ⁴, each up to a relative O(σ₀²). That needs no branch, and leaves the gradient
in σ² at 0 right: ½f″.

Symbols: φ, Q density and upper tail of N(0, 1); v = σ² variance; t place of a kink, c the change of slope
there; s = (t − μ)/σ; a = |s|.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from favour.errors import InvalidValue

Function = Callable[[Tensor], Tensor]
Number = float | Tensor
Kinks = Sequence[tuple[Number, Number]]

_FAR = 40.0  # φ(40) underflows to 0 in float64, so a kink this many σ away does not exist
_SQRT_HALF = math.sqrt(0.5)
_PDF0 = 1.0 / math.sqrt(2.0 * math.pi)

# c(a) ≈ numerator/denominator to 1.3e-8 relative on [0, 16], where φ leaves float32; highest power first.
_C_NUMERATOR = (0.002207721197, 0.02734924641, 0.1709122471, 0.6392713012, 1.430077902, 1.595769101)
_C_DENOMINATOR = (0.002207843553, 0.02734139524, 0.1645077129, 0.5537128235, 1.0)


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
        return Moments(*(part.to(dtype) for part in self))


def widen(
    mean: Tensor, variance: Tensor, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, torch.dtype]:
    """Mean and variance broadcast together, in at least float32; and the dtype to return the answer in."""
    mean, variance = torch.broadcast_tensors(mean, variance)
    out = torch.promote_types(mean.dtype, variance.dtype)
    work = dtype or torch.promote_types(out, torch.float32)
    return mean.to(work), variance.to(work), out


def _polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """Horner's rule, highest power first."""
    value = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _tails(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Q(a), h(a), e(a) of the module docstring for a ≥ 0, relatively accurate far into the tail."""
    square = a * a
    pdf = torch.exp(square * -0.5) * _PDF0
    if a.dtype == torch.float64:  # subtraction costs a factor a⁴/2: float64 has the digits to spare
        upper = 0.5 * torch.special.erfc(a * _SQRT_HALF)
        first = pdf - a * upper
        return upper, first, upper - a * first
    c = _polynomial(a, _C_NUMERATOR) / _polynomial(a, _C_DENOMINATOR)
    spread = square + 1
    r = 2 / (spread * c + 2 * a)
    scaled = pdf / spread
    return scaled * (a + r), scaled * (1 - a * r), pdf * r


@cache
def _leggauss(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return tuple(nodes.tolist()), tuple(weights.tolist())


@torch.compiler.assume_constant_result  # numpy is not traced
def _legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Gauss–Legendre nodes and weights on [−1, 1]."""
    return _leggauss(count)


def normal_tail(a: Tensor) -> Tensor:
    """Q(a) = P(z > a) for a ≥ 0, relatively accurate."""
    if torch.compiler.is_compiling() and a.dtype != torch.float64:  # fused, this costs half of an erfc
        return _tails(a.clamp(max=_FAR))[0]
    return 0.5 * torch.special.erfc(a * _SQRT_HALF)


def affine(mean: Tensor, variance: Tensor, *, scale: Number = 1.0, shift: Number = 0.0) -> Moments:
    """f(x) = scale·x + shift, exactly."""
    mean, variance, out = widen(mean, variance)
    return Moments(scale * mean + shift, scale * torch.ones_like(mean), torch.zeros_like(variance)).to(out)


def relu(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = max(x, 0): `piecewise_linear` with one kink at 0, in as few operations as possible.

    With a = |μ|/σ:  mean = max(μ, 0) + σh(a),  slope = Φ(μ/σ),  residual = σ²(e(a) − h(a)² − Q(a)²).

    Args:
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.

    Example:
        >>> m = relu(torch.zeros(1), torch.ones(1))
        >>> round(m.mean.item(), 4), round(m.slope.item(), 4), round(m.residual.item(), 4)
        (0.3989, 0.5, 0.0908)
    """
    mean, variance, out = widen(mean, variance)
    certain = variance <= 0
    safe = variance.masked_fill(certain, 1.0)
    sigma = torch.sqrt(safe)
    s = mean / sigma
    positive = mean > 0
    a = torch.where(positive, s, -s).clamp(max=_FAR).masked_fill(certain, _FAR)
    upper, first, second = _tails(a)
    return Moments(
        torch.relu(mean) + sigma * first,
        torch.where(positive, 1 - upper, upper),
        safe * (second - first * first - upper * upper).clamp(min=0),
    ).to(out)


def _piecewise_value(x: Tensor, offset: Number, slope: Number, kinks: Kinks) -> Tensor:
    """f(x), segment by segment: the segments are bounded, so a saturated f is exact at any x."""
    if not kinks:
        return offset + slope * x
    # Ties go to the segment on the left, in value and gradient, as in `piecewise_slope`.
    first = kinks[0][0]
    value = offset + slope * torch.where(x > first, first, x)
    for i, (t, c) in enumerate(kinks):
        slope = slope + c
        beyond = torch.relu(x - t)
        if i + 1 < len(kinks):
            after = kinks[i + 1][0]
            beyond = torch.where(x > after, after - t, beyond)
        value = value + slope * beyond
    return value


def piecewise_slope(x: Tensor, slope: Number, kinks: Kinks) -> Tensor:
    """f′(x) of the continuous piecewise linear f, the left derivative at a kink (so relu′(0) = 0)."""
    value = slope + torch.zeros_like(x)
    for t, c in kinks:
        value = value + c * (x > t).to(x.dtype)
    return value


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
        a = torch.where(below, -s, s).clamp(max=_FAR).masked_fill(certain, _FAR)
        upper, first, second = _tails(a)
        value = value + c * sigma * first
        tangent = tangent + c * torch.where(below, -upper, upper)
        total = total + c * c * (second - first * first - upper * upper)
        for t0, c0, below0, upper0, first0, second0 in parts:  # t0 ≤ t, so `below` implies `below0`
            gap = ((t - t0) / sigma).clamp(max=_FAR)
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
    nodes, weights = _legendre(8 if mean.dtype == torch.float64 else 5)  # segments are below σ/2
    flip = (kinks[0][0] + kinks[-1][0]) < 2 * mean
    end: Number = 0.0
    steps: list[tuple[Number, Number, Number]] = []  # position, weight C du, F
    gained: Number = 0.0
    for (t, c), (after, _) in pairwise(kinks):
        gained = gained + c
        for node, weight in zip(nodes, weights, strict=True):
            part = (after - t) * (0.5 + 0.5 * node)
            steps.append((t + part, gained * (after - t) * (0.5 * weight), end + gained * part))
        end = end + gained * (after - t)
    zero = torch.zeros_like(mean)
    tail_sum, pdf_sum, square_sum = zero, zero, zero
    for place, weight, height in steps:
        u = ((place - mean) / sigma).clamp(-_FAR, _FAR)
        tail = 0.5 * torch.special.erfc(torch.where(flip, -u, u) * _SQRT_HALF)
        tail_sum = tail_sum + weight * tail
        pdf_sum = pdf_sum + weight * torch.exp(-0.5 * u * u) * _PDF0
        square_sum = square_sum + weight * tail * torch.where(flip, zero + (end - height), height)
    rise = torch.where(flip, end - tail_sum, tail_sum)
    residual = (2 * square_sum - tail_sum * tail_sum - pdf_sum * pdf_sum).clamp(min=0)
    return Moments(offset + slope * mean + rise, slope + pdf_sum / sigma, residual)


def step(
    mean: Tensor, variance: Tensor, *, threshold: float = 0.0, low: float = 0.0, high: float = 1.0
) -> Moments:
    """f(x) = low for x ≤ threshold, high above: with d = high − low and s = (threshold − μ)/σ,

        mean = low + dQ(s),  slope = dφ(s)/σ,  residual = d²(Q(s)(1 − Q(s)) − φ(s)²).

    At σ = 0 the slope is 0, also on the threshold, where it grows like 1/σ as σ → 0.
    """
    mean, variance, out = widen(mean, variance)
    certain = variance <= 0
    sigma = torch.sqrt(variance.masked_fill(certain, 1.0))
    s = (threshold - mean) / sigma
    below = s < 0
    a = torch.where(below, -s, s).clamp(max=_FAR).masked_fill(certain, _FAR)
    upper = 0.5 * torch.special.erfc(a * _SQRT_HALF)
    pdf = torch.exp(-0.5 * a * a) * _PDF0
    jump = high - low
    value = torch.where(below, high - jump * upper, low + jump * upper)
    residual = jump**2 * (upper * (1 - upper) - pdf * pdf).clamp(min=0)
    return Moments(value, jump * pdf / sigma, residual).to(out)


_BEND, _REACH = 3.0, 4.0  # the width in x that the nodes resolve, and the largest |k|; chosen by measurement


def _nodes_around(mean: Tensor, sigma: Tensor, count: int, centre: float) -> tuple[Tensor, Tensor]:
    """Trapezoidal nodes and weights for N(0, 1), dense where μ + σz = centre: each (count, *shape).

    z = k + b·t√(1 + t²) with b = bend/σ, and t equidistant between the solutions of z = ∓L. The inverse of
    y = t√(1 + t²) is t = y√(2/(1 + √(1 + 4y²))). The weights are φ(z) dz/dt up to a factor.
    """
    limit = 2.55 * count**0.345  # balances the truncated tail against the spacing
    k = ((centre - mean) / sigma).clamp(-_REACH, _REACH)
    bend = (sigma / _BEND).clamp(max=1e6)  # so that its square stays finite
    below, above = (-limit - k) * bend, (limit - k) * bend
    low = below * torch.sqrt(2 / (1 + torch.sqrt(1 + 4 * below * below)))
    high = above * torch.sqrt(2 / (1 + torch.sqrt(1 + 4 * above * above)))
    grid = torch.arange(count, dtype=mean.dtype, device=mean.device).view(-1, *(1,) * mean.dim())
    t = low + (high - low) / (count - 1) * grid  # (count, *shape)
    square = t * t
    stretch = torch.rsqrt(1 + square)
    z = k + t * (1 + square) * stretch / bend
    return z, (1 + 2 * square) * stretch * torch.exp(-0.5 * z * z)


def _nodes_between(
    mean: Tensor, sigma: Tensor, count: int, kinks: Sequence[Number], limit: float
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gauss–Legendre nodes and weights, each (count, *shape), on every piece of [−L, L] cut at the kinks."""
    edge = torch.full_like(mean, limit)
    cuts = [-edge, *(((t - mean) / sigma).clamp(-limit, limit) for t in kinks), edge]
    shape = (-1, *(1,) * mean.dim())
    g, weight = (torch.tensor(x, dtype=mean.dtype, device=mean.device).view(shape) for x in _legendre(count))
    for low, high in pairwise(cuts):
        half = 0.5 * (high - low)
        z = low + half * (1 + g)
        yield z, half * weight * torch.exp(-0.5 * z * z)


def deviations(
    f: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    derivative: Function | None = None,
    kinks: Sequence[Number] = (),
    centre: float = 0.0,
    nodes: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """E[f] − f(μ), E[f′] − f′(μ) and the residual, by quadrature; arguments as in `quadrature`.

    The corrections on their own, so that a caller can add them to f(μ) and f′(μ) computed in a better way.
    Without `derivative` the second is E[f′] itself. Mean and variance have one shape and one dtype, float32
    or float64.
    """
    precise = mean.dtype == torch.float64 if nodes is None else nodes > 32
    eps = torch.finfo(mean.dtype).eps
    with torch.no_grad():  # the floor is a constant of the rule
        floor = (0.6 * eps**0.2 + (2**13 * eps) * mean.abs()).square()
        limit = 9.0 if precise else 7.0
        for t in kinks:  # never widen the nodes across a kink
            floor = torch.minimum(floor, ((t - mean) / limit).square())
        floor = torch.maximum(floor, (8 * eps * (1 + mean.abs())).square())
    widened = torch.maximum(variance, floor)
    sigma = torch.sqrt(widened)
    if kinks:
        pieces = list(_nodes_between(mean, sigma, nodes or (40 if precise else 24), kinks, limit))
    else:
        with torch.no_grad():  # with nodes held still the gradient is the quadrature of f′: exact and cheaper
            pieces = [_nodes_around(mean, sigma, nodes or (41 if precise else 17), centre)]
    # Sums over the nodes of f less its tangent at μ, in one pass: the tangent takes the cancellation out.
    value = f(mean)
    tilt = torch.zeros_like(mean) if derivative is None else derivative(mean) * sigma
    total, z1, z2, d1, d2, zd = (torch.zeros_like(mean) for _ in range(6))
    for z, w in pieces:
        delta = f(mean + sigma * z) - value - tilt * z  # (nodes, *shape)
        wz, wd = w * z, w * delta
        total, z1, z2 = total + w.sum(0), z1 + wz.sum(0), z2 + (wz * z).sum(0)
        d1, d2, zd = d1 + wd.sum(0), d2 + (wd * delta).sum(0), zd + (wd * z).sum(0)
    z1, z2, d1, d2, zd = z1 / total, z2 / total, d1 / total, d2 / total, zd / total
    spread = z2 - z1 * z1  # the variance of z on these nodes, so that Cauchy–Schwarz holds for them
    gain = (zd - z1 * d1) / spread
    residual = (d2 - d1 * d1 - gain * gain * spread).clamp(min=0)
    ratio = variance.clamp(min=0) / widened  # ρ²
    slope = gain / sigma
    return d1 * ratio, slope if derivative is None else slope * ratio, residual * ratio * ratio


def quadrature(
    f: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    derivative: Function | None = None,
    kinks: Sequence[Number] = (),
    centre: float = 0.0,
    nodes: int | None = None,
) -> Moments:
    """Any element-wise f, all three moments from the same nodes, so that residual ≥ 0.

    f is called at `mean` and on one stack (nodes, *shape) per piece, in the dtype given but float32 at least;
    without `derivative` in float64, since f(μ + σz) in float32 lacks the digits for the slope at small σ.

    Args:
        f: the function, element-wise on tensors; it should vary on a scale of about 1 (else rescale x).
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.
        derivative: f′, for full accuracy at small σ.
        kinks: places where f or a low derivative of it jumps, ascending; floats or tensors that broadcast.
        centre: where a smooth f bends most.
        nodes: evaluations per element, or per piece with kinks. By default 17 (24 per piece) in float32, for
            relative errors of 1e-4 where σ ≤ 1, and 41 (40) in float64, for about 1e-8.

    Example:
        >>> m = quadrature(torch.sigmoid, torch.zeros(1).double(), torch.ones(1).double())
        >>> round(m.mean.item(), 6), round(m.slope.item(), 6)
        (0.5, 0.206621)
    """
    if nodes is not None and nodes < 3:
        raise InvalidValue(
            f"quadrature was given nodes={nodes}; it needs 3 or more, or None for the default."
        )
    plain = derivative is not None or mean.device.type == "mps"  # which has no float64
    mean, variance, out = widen(mean, variance, None if plain else torch.float64)
    if nodes is None and out != torch.float64:
        nodes = 24 if kinks else 17
    shift, tilt, residual = deviations(
        f, mean, variance, derivative=derivative, kinks=kinks, centre=centre, nodes=nodes
    )
    slope = tilt if derivative is None else derivative(mean) + tilt
    return Moments(f(mean) + shift, slope, residual).to(out)


def exp(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = eˣ:  mean = slope = e^{μ + v/2},  residual = e^{2μ + 2v}(1 − (1 + v)e^{−v})."""
    mean, variance, out = widen(mean, variance)
    value = torch.exp(mean + 0.5 * variance)
    # 1 − (1 + v)e^{−v} = e^{−v}(e^v − 1 − v), whose bracket is v²/2! + v³/3! + … for small v.
    small = variance < 0.3
    near = torch.where(small, variance, 0.0)
    series = _polynomial(near, [1 / math.factorial(k) for k in range(13, 1, -1)]) * near.square()
    decay = torch.exp(-variance)
    part = torch.where(small, decay * series, 1 - (1 + variance) * decay)
    peak = torch.exp(mean + variance)
    return Moments(value, value, peak * (peak * part)).to(out)  # peak² alone may overflow


def sin(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = sin x:  mean = e^{−v/2} sin μ,  slope = e^{−v/2} cos μ,

    residual = e^{−v}(sin²μ (cosh v − 1) + cos²μ (sinh v − v)), the Hermite series summed: every term is ≥ 0.
    """
    mean, variance, out = widen(mean, variance)
    sine, cosine, damp = torch.sin(mean), torch.cos(mean), torch.exp(-0.5 * variance)
    even, odd = _hyperbolic(variance)
    return Moments(damp * sine, damp * cosine, sine.square() * even + cosine.square() * odd).to(out)


def cos(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = cos x:  mean = e^{−v/2} cos μ,  slope = −e^{−v/2} sin μ,

    residual as for `sin` with sin and cos exchanged.
    """
    mean, variance, out = widen(mean, variance)
    sine, cosine, damp = torch.sin(mean), torch.cos(mean), torch.exp(-0.5 * variance)
    even, odd = _hyperbolic(variance)
    return Moments(damp * cosine, -damp * sine, cosine.square() * even + sine.square() * odd).to(out)


def _hyperbolic(v: Tensor) -> tuple[Tensor, Tensor]:
    """e^{−v}(cosh v − 1) = (1 − e^{−v})²/2 and e^{−v}(sinh v − v), without cancellation."""
    small = v < 0.7
    near = torch.where(small, v, 0.0)
    series = _polynomial(near * near, [1 / math.factorial(k) for k in (15, 13, 11, 9, 7, 5, 3)]) * near**3
    odd = torch.where(small, torch.exp(-near) * series, -0.5 * torch.expm1(-2 * v) - v * torch.exp(-v))
    return 0.5 * torch.expm1(-v).square(), odd


def power(mean: Tensor, variance: Tensor, exponent: int) -> Moments:
    """f(x) = xⁿ for an integer n ≥ 0.

    With m_k = E[x^k] = μ m_{k−1} + (k − 1) v m_{k−2}, the j-th Hermite coefficient of f is E[f⁽ʲ⁾] σʲ/√j!, so
    slope = n m_{n−1} and residual = Σ_{j ≥ 2} (n!/(n − j)! · m_{n−j})² vʲ/j!, a sum of squares.
    """
    if exponent < 0:
        raise InvalidValue(f"power was given exponent={exponent}; a closed form needs an integer ≥ 0.")
    mean, variance, out = widen(mean, variance)
    raw = [torch.ones_like(mean), mean]
    for k in range(2, exponent + 1):
        raw.append(mean * raw[-1] + (k - 1) * variance * raw[-2])
    residual = torch.zeros_like(mean)
    for j in range(exponent, 1, -1):
        factor = math.perm(exponent, j) ** 2 / math.factorial(j)
        residual = residual + factor * raw[exponent - j].square() * variance**j
    slope = exponent * raw[exponent - 1] if exponent else torch.zeros_like(mean)
    return Moments(raw[exponent], slope, residual).to(out)


def square(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = x²:  mean = μ² + v,  slope = 2μ,  residual = 2v²."""
    return power(mean, variance, 2)


def second_order(value: Tensor, first: Tensor, second: Tensor, variance: Tensor) -> Moments:
    """The delta method, from f, f′ and f″ at μ:  mean = f + ½f″v,  slope = f′,  residual = ½f″²v².

    For functions such as log, which a Gaussian leaves the domain of, so that the moments do not exist.
    """
    bend = second * variance
    return Moments(value + 0.5 * bend, first, 0.5 * bend.square())
