"""Moments of any element-wise function, by quadrature.

Smooth f: the trapezoidal rule, exponentially convergent for analytic f, after the change of variable
z = k + b·t√(1 + t²): nodes are dense where f bends, at x = centre, and as wide as the Gaussian elsewhere,
since activations bend within |x| ≲ 3 however large σ is. For GELU, SiLU, tanh, sigmoid, Mish and softplus at
|μ| ≤ 6, 17 nodes keep slope and variance within 1e-4 for σ ≤ 1 and within 1e-3 at σ = 5, where Gauss–Hermite
needs about 200. Where f is not smooth, Gauss–Legendre on each piece, and the exact integral where the first
or last piece is a straight line.

Small σ: f(μ + σz) − f(μ) drowns in rounding. The nodes are never set closer than a floor σ₀ and the result is
scaled back by the order of each term in the Taylor expansion: with ρ² = σ²/σ₀², E[f] − f(μ) ∝ ρ²,
E[f′] − f′(μ) ∝ ρ², residual ∝ ρ⁴, each up to a relative O(σ₀²). That needs no branch, and leaves the gradient
in σ² at 0 right: ½f″.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.graph.tracing import constant
from favour.scalar.moments.record import Function, Moments, Number, widen
from favour.scalar.moments.tails import FAR, PDF0, SQRT_HALF
from favour.scalar.table import table

Line = tuple[Number, Number]


@cache
def _leggauss(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return tuple(nodes.tolist()), tuple(weights.tolist())


@constant
def legendre(count: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Gauss–Legendre nodes and weights on [−1, 1]."""
    return _leggauss(count)


_BEND, _REACH = 3.0, 4.0  # the width in x that the nodes resolve, and the largest |k|; chosen by measurement


_ONE_BY_ONE = 2**14  # elements from which a stack of nodes leaves a CPU's cache


def stacked(like: Tensor, *rows: Sequence[float]) -> Iterator[tuple[Number, ...]]:
    """Numbers of every node as one stack (count, 1, …); or one by one, if that is large and not compiled."""
    if not torch.compiler.is_compiling() and like.device.type == "cpu" and like.numel() >= _ONE_BY_ONE:
        yield from zip(*rows, strict=True)
    else:
        shape = (-1, *(1,) * like.dim())
        yield tuple(table(tuple(row), like).view(shape) for row in rows)


def _nodes_around(mean: Tensor, sigma: Tensor, count: int, centre: float) -> Iterator[tuple[Tensor, Tensor]]:
    """Trapezoidal nodes and weights for N(0, 1), dense where μ + σz = centre.

    z = k + b·t√(1 + t²) with b = bend/σ, and t equidistant between the solutions of z = ∓L. The inverse of
    y = t√(1 + t²) is t = y√(2/(1 + √(1 + 4y²))). The weights are φ(z) dz/dt up to a factor.
    """
    limit = 2.55 * count**0.345  # balances the truncated tail against the spacing
    k = ((centre - mean) / sigma).clamp(-_REACH, _REACH)
    ratio = (sigma / _BEND).clamp(max=1e6)  # so that its square stays finite
    below, above = (-limit - k) * ratio, (limit - k) * ratio
    low = below * torch.sqrt(2 / (1 + torch.sqrt(1 + 4 * below * below)))
    high = above * torch.sqrt(2 / (1 + torch.sqrt(1 + 4 * above * above)))
    spacing, width = (high - low) / (count - 1), 1 / ratio
    for (i,) in stacked(mean, range(count)):
        t = low + spacing * i
        square = t * t
        stretch = torch.rsqrt(1 + square)
        z = torch.addcmul(k, t * (1 + square), stretch * width)
        yield z, (1 + 2 * square) * stretch * torch.exp(-0.5 * z * z)


def _nodes_between(
    mean: Tensor,
    sigma: Tensor,
    count: int,
    kinks: Sequence[Number],
    limit: float,
    ends: tuple[Line | None, Line | None],
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gauss–Legendre nodes and weights on the pieces of [−L, L] cut at the kinks, less straight ends."""
    edge = torch.full_like(mean, limit)
    left, right = [-edge] if ends[0] is None else [], [edge] if ends[1] is None else []
    cuts = [*left, *(((t - mean) / sigma).clamp(-limit, limit) for t in kinks), *right]
    for low, high in pairwise(cuts):
        half = 0.5 * (high - low)
        middle = low + half
        for g, weight in stacked(mean, *legendre(count)):
            z = middle + half * g
            yield z, half * weight * torch.exp(-0.5 * z * z)


def _with_nodes(sums: list[Tensor], z: Tensor, w: Tensor, delta: Tensor) -> list[Tensor]:
    """Add w·(1, z, z², δ, δ², zδ), of one node or of a stack of nodes."""
    wz, wd = w * z, w * delta
    if z.dim() > sums[0].dim():
        terms = (w, wz, wz * z, wd, wd * delta, wd * z)
        return [s + term.sum(0) for s, term in zip(sums, terms, strict=True)]
    total, z1, z2, d1, d2, zd = sums
    pairs = (torch.addcmul(z2, wz, z), d1 + wd, torch.addcmul(d2, wd, delta), torch.addcmul(zd, wd, z))
    return [total + w, z1 + wz, *pairs]


def _with_tail(sums: list[Tensor], c: Tensor, sign: int, offset: Tensor, slope: Tensor) -> list[Tensor]:
    """Add √(2π) E[(1, z, z², δ, δ², zδ); sign·z > c] for δ = offset + slope·z, by

    √(2π) E[1; z > c] = √(2π)Q(c),  √(2π) E[z; z > c] = exp(−c²/2),  E[z²; z > c] = Q(c) + cφ(c).
    """
    c = c.clamp(-FAR, FAR)
    w = (0.5 / PDF0) * torch.special.erfc(c * SQRT_HALF)
    peak = torch.exp(-0.5 * c * c)
    wz, wzz = sign * peak, w + c * peak
    wd, wzd = offset * w + slope * wz, offset * wz + slope * wzz
    terms = (w, wz, wzz, wd, offset * wd + slope * wzd, wzd)
    return [s + term for s, term in zip(sums, terms, strict=True)]


def deviations(
    f: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    derivative: Function | None = None,
    kinks: Sequence[Number] = (),
    centre: float = 0.0,
    nodes: int | None = None,
    ends: tuple[Line | None, Line | None] = (None, None),
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
        places = _nodes_between(mean, sigma, nodes or (40 if precise else 24), kinks, limit, ends)
    else:  # with nodes held still the gradient is the quadrature of f′: exact and cheaper
        places = _nodes_around(mean.detach(), sigma.detach(), nodes or (41 if precise else 17), centre)
    # Sums over the nodes of f less its tangent at μ, in one pass: the tangent takes the cancellation out.
    # For a wide Gaussian that would bring in numbers as large as σ, so the tangent is taken no steeper than at σ = 1.
    value = f(mean)
    slope = torch.zeros_like(mean) if derivative is None else derivative(mean)
    tilt = slope * sigma.clamp(max=1)
    sums = [torch.zeros_like(mean) for _ in range(6)]
    for z, w in places:
        delta = torch.addcmul(f(torch.addcmul(mean, sigma, z)) - value, tilt, z, value=-1)
        sums = _with_nodes(sums, z, w, delta)
    for line, index, sign in ((ends[0], 0, -1), (ends[1], -1, 1)):
        if line is not None:
            offset, rise = line[0] + line[1] * mean - value, line[1] * sigma - tilt
            sums = _with_tail(sums, sign * (kinks[index] - mean) / sigma, sign, offset, rise)
    z1, z2, d1, d2, zd = (s / sums[0] for s in sums[1:])
    spread = z2 - z1 * z1  # the variance of z on these nodes, so that Cauchy–Schwarz holds for them
    gain = (zd - z1 * d1) / spread
    residual = (d2 - d1 * d1 - gain * gain * spread).clamp(min=0)
    ratio = variance.clamp(min=0) / widened  # ρ²
    more = gain / sigma - slope * (1 - 1 / sigma.clamp(min=1))
    return d1 * ratio, more if derivative is None else more * ratio, residual * ratio * ratio


def quadrature(
    f: Function,
    mean: Tensor,
    variance: Tensor,
    *,
    derivative: Function | None = None,
    kinks: Sequence[Number] = (),
    centre: float = 0.0,
    nodes: int | None = None,
    ends: tuple[Line | None, Line | None] = (None, None),
) -> Moments:
    """Any element-wise f, all three moments from the same nodes, so that residual ≥ 0.

    f is called at `mean`, and on one stack (nodes, *shape) per piece or node by node, in the dtype given but
    float32 at least; without `derivative` in float64, since f(μ + σz) in float32 lacks the digits for the
    slope at small σ.

    Args:
        f: the function, element-wise on tensors; it should vary on a scale of about 1 (else rescale x).
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.
        derivative: f′, for full accuracy at small σ.
        kinks: places where f or a low derivative of it jumps, ascending; floats or tensors that broadcast.
        centre: where a smooth f bends most.
        nodes: evaluations per element, or per piece with kinks. By default 17 (24 per piece) in float32, for
            relative errors of 1e-4 where σ ≤ 1, and 41 (40) in float64, for about 1e-8.
        ends: (p, q) where f(x) = p + q·x below the first kink, and the same above the last; exact there.

    Example:
        >>> m = quadrature(torch.sigmoid, torch.zeros(1).double(), torch.ones(1).double())
        >>> round(m.mean.item(), 6), round(m.slope.item(), 6)
        (0.5, 0.206621)
    """
    if nodes is not None and nodes < 3:
        raise InvalidValue(f"quadrature was given nodes={nodes}; it needs 3 or more, or None for the default.")
    plain = derivative is not None or mean.device.type == "mps"  # which has no float64
    mean, variance, out = widen(mean, variance, None if plain else torch.float64)
    if nodes is None and out != torch.float64:
        nodes = 24 if kinks else 17
    shift, tilt, residual = deviations(
        f, mean, variance, derivative=derivative, kinks=kinks, centre=centre, nodes=nodes, ends=ends
    )
    slope = tilt if derivative is None else derivative(mean) + tilt
    return Moments(f(mean) + shift, slope, residual).to(out)
