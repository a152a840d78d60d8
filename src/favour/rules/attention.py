"""Softmax and log-softmax; attention is made of them and of matrix products (`favour.passes.normalise.decompose`).

For p = softmax(μ) and Σ = diag(λ) + UUᵀ the covariance along the axis, the Hessian of p_i gives to second order

    E[p_i] ≈ p_i(1 + a_i − pᵀa),    a = ½v − Σp,

which softmax(μ + a) agrees with while it stays positive and sums to one; m is that, with a taken once more at the
result. The slope is Stein's, E[∂p_i/∂x_j] = E[p_i δ_ij − p_i p_j], with Cov[p] ≈ JΣJ to first order:

    G = J − JΣJ,    J = diag(m) − mmᵀ,

J for certain scores, and smaller where they are not: at standard deviations of 0.2 it takes the error of the covariance
from 7 % to 1 %. So that it stays a contraction, λ counts as λ/(1 + mλ) and UUᵀ is divided by 1 + Σ uᵀJu. With
D = m/(1 + mλ), r = m − D = mλD and w = Ju both parts are of low rank,

    G = diag(D) − Dmᵀ − m((Σr)m − r)ᵀ − Σ_k w_k w_kᵀ = diag(D) − Σ_l P_l Q_lᵀ

so neither G nor its squares (`favour.surrogate.jacobian`) need a matrix for each row of
scores. Several columns u that are large together may still take an entry
above the variance that 0 ≤ p_i ≤ 1 allows: its row of G is shortened to that.

    softmax       N_ii = ½ tr(H_i V H_i V),   H_i = m_i[(e_i − m)(e_i − m)ᵀ − diag(m) + mmᵀ],  V = diag(v/(1 + mv)),
                  the variance of the second-order term, and at most what 0 ≤ p_i ≤ 1 allows
    log_softmax   y = x − lse(x),  E[lse] ≈ lse(μ) + b,  b = ½(pᵀv − pᵀΣp),   G = I − 1mᵀ
    neg. entropy  y = Σ p log p,  g = p(log p − y),  H = diag(d) − ½(apᵀ + paᵀ),  d = g + p, a = 2g + p,
                  m = y + ½ tr(HΣ),  G = gᵀ,  N = ½ tr(HΛHΛ)
    logsumexp     that lse with G = mᵀ and N = ½ tr(HΛHΛ), H = diag(p) − ppᵀ

b and N grow as v and v² do, the truth as √v and v: since lse rises by no more than the largest rise of an entry, of n,

    E[lse] − lse(μ) ≤ E[max_i (x_i − μ_i)] ≤ √(2 max v log n),   Var[lse] ≤ E[pᵀΣp] ≤ max v   (Poincaré),

which b and mᵀΣm + N are kept to: at ten entries of one variance that takes a standard deviation above 4.

Entries at −∞ (masked) have probability 0.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Link, Traits
from favour.rules.registry import rule
from favour.scalar import intervals
from favour.surrogate import Carried, DiagonalNoise, LinearMap, Surrogate, compose, scaling, weighted_sum
from favour.surrogate.attending import Scores
from favour.surrogate.curvature import GroupedSecond
from favour.surrogate.jacobian import DiagonalPlusLowRank
from favour.surrogate.value import Context, Value

aten = torch.ops.aten

ALONG = Traits(mixes=lambda shape, dim, *rest, **more: (dim % len(shape),))


def _axis(ctx: Context, x: Value, dim: int) -> int:
    axis = dim % x.mean.ndim
    if axis == 0:
        raise UnsupportedOperation(
            f"a softmax over dimension 0 of a tensor of shape {tuple(x.mean.shape)} at {ctx.place} mixes the inputs of "
            "a batch; predictions are per input. Use another dimension."
        )
    return axis


def _safe(scores: Tensor, axis: int) -> Tensor:
    """softmax, and 0 where everything is masked.

    As `aten._safe_softmax`, which on a CPU selects entry by entry and takes four times as long.
    """
    lowest = torch.finfo(scores.dtype).min
    if not scores.shape[axis]:
        return scores.softmax(axis)
    live = (scores.amax(axis, keepdim=True) >= lowest).to(scores.dtype)
    return scores.clamp_min(lowest).softmax(axis) * live


def _times(x: Value, p: Tensor, axis: int) -> Tensor:
    """Σp along the axis."""
    total = torch.zeros_like(p) if x.diag is None else x.diag * p
    for u in x.blocks.values():
        total = total + (u * (u * p).sum(axis + 1, keepdim=True)).sum(0)
    return total


def _expected(x: Value, axis: int) -> Tensor:
    """E[softmax(x)]."""
    half = x.mean + 0.5 * x.variance
    p = _safe(x.mean, axis)
    for _ in range(2):
        p = _safe(half - _times(x, p, axis), axis)
    return p


def _largest(x: Value, axis: int) -> Tensor:
    """max v, over the entries that are not masked."""
    v = torch.where(x.mean > -math.inf, x.variance, 0.0)
    return v.amax(axis, keepdim=True) if v.shape[axis] else v.sum(axis, keepdim=True)


def _rise(x: Value, p: Tensor, axis: int) -> Tensor:
    """E[lse] − lse(μ)."""
    rise = 0.5 * (p * (x.variance - _times(x, p, axis))).sum(axis, keepdim=True)
    most = (2 * math.log(max(p.shape[axis], 1)) * _largest(x, axis)).clamp_min(torch.finfo(p.dtype).tiny).sqrt()
    return torch.minimum(rise, most)


def _second_order(p: Tensor, v: Tensor, axis: int) -> Tensor:
    """½ tr(H_i V H_i V) for every i, in O(n)."""
    S2 = (v * p.square()).sum(axis, keepdim=True)
    S3 = (v.square() * p.pow(3)).sum(axis, keepdim=True)
    around = v * (1 - 2 * p) + S2  # Σ v e²
    across = v * p - S2  # Σ v e p
    # Σ_j v_j²(p_j² − 2p_j(e_j² + p_j²)), with Σ v² p e² = Σ v² p³ + v_i² p_i(1 − 2p_i)
    squares = (v.square() * p.square()).sum(axis, keepdim=True) - 4 * S3 - 2 * v.square() * p * (1 - 2 * p)
    total = around.square() + S2.square() + 2 * across.square() + squares
    return (0.5 * p.square() * total).clamp_min(0)


def _row(x: Value, scores: Scores) -> Value:
    """Scores with the column that the draws of a row's query make."""
    if scores.common is None or x.blocks:
        return x
    column = scores.common * scores.factor
    return Value(x.mean, (x.variance - column.square()).clamp_min(0), {"query": column.unsqueeze(0)})


@rule(
    aten.softmax.int,
    aten._softmax.default,
    aten._safe_softmax.default,
    exactness="linearised",
    family="attention",
    traits=ALONG.merged(Traits(link=Link(joint=True), bounds=intervals.UNIT)),
)
def softmax(ctx: Context, x: Value, dim: int, half_to_float: Argument = None, *, dtype: Argument = None) -> Surrogate:
    axis = _axis(ctx, x, dim)
    if dtype is not None and dtype != x.mean.dtype:
        raise UnsupportedOperation(
            f"a softmax at {ctx.place} converts from {x.mean.dtype} to {dtype}; convert with `.to` before it."
        )
    argument, scores = x, x.known(Scores)
    if scores is not None and axis == x.mean.ndim - 1:
        x = _row(x, scores)
    v = x.variance
    m = _expected(x, axis)
    D = m if x.diag is None else m / (1 + m * x.diag)
    r = m - D if x.diag is None else m * x.diag * D
    left, right = [D, m], [m, r.sum(axis, keepdim=True) * m - r]
    if x.factor is not None:
        u = x.factor
        w = m * u
        w = w - m * w.sum(axis + 1, keepdim=True)
        w = w * (1 + (u * w).sum(axis + 1, keepdim=True).sum(0)).rsqrt()
        left, right = [*left, *w.unbind()], [*right, *w.unbind()]
    G: LinearMap = DiagonalPlusLowRank(D, [-p for p in left], right, x.mean.shape, axis)
    most = m * (1 - m)
    if x.factor is None:
        carried = G.square(v)
    else:
        carried = G.apply(x.factor).square().sum(0)
        carried = carried if x.diag is None else carried + G.square(x.diag)
        excess = carried > most
        share = torch.where(excess, most / torch.where(excess, carried, 1.0), 1.0)
        # √ has no gradient at 0, where an entry is certain and so is the row
        G = compose(scaling(torch.where(share > 0, torch.where(share > 0, share, 1.0).sqrt(), 0.0)), G)
    curved = _second_order(m, v / (1 + m * v), axis)
    noise = torch.minimum(curved, (most - carried).clamp_min(0))
    label = f"{ctx.module or 'model'} (softmax)"
    weight_scores: list[Carried] = [replace(scores, weights=True)] if scores is not None and axis == m.ndim - 1 else []

    def hessian(g: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        gm = g * m
        along = gm.sum(axis + 1, keepdim=True) * m
        return gm - along, [(-2 * gm, m), (2 * along, m)]

    second = GroupedSecond(hessian, m.shape, m.shape, axis - m.ndim)
    return Surrogate(m, [(argument, G)], [DiagonalNoise(noise, label)], second, weight_scores)


@rule(
    aten.log_softmax.int,
    aten._log_softmax.default,
    exactness="linearised",
    family="attention",
    traits=ALONG.merged(Traits(link=Link(joint=True, log=True), bounds=(-math.inf, 0.0))),
)
def log_softmax(
    ctx: Context, x: Value, dim: int, half_to_float: Argument = None, *, dtype: Argument = None
) -> Surrogate:
    axis = _axis(ctx, x, dim)
    if dtype is not None and dtype != x.mean.dtype:
        raise UnsupportedOperation(
            f"a log-softmax at {ctx.place} converts from {x.mean.dtype} to {dtype}; convert with `.to` before it."
        )
    p = x.mean.softmax(axis)
    mean = x.mean.log_softmax(axis) - _rise(x, p, axis)
    m = _expected(x, axis)

    G = DiagonalPlusLowRank(1.0, [-1.0], [m], m.shape, axis)
    return Surrogate(mean, [(x, G)], second=_bend_of_sum(m, -1.0, axis, reduced=False))


def _bend_of_sum(m: Tensor, sign: float, axis: int, reduced: bool) -> GroupedSecond:
    """H = g(diag(m) − mmᵀ) of logsumexp, which the entries of log-softmax subtract."""

    def hessian(g: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        alpha = sign * g.sum(axis + 1, keepdim=True) * m
        return alpha, [(-alpha, m)]

    return GroupedSecond(hessian, m.shape, m.shape, axis - m.ndim, reduced)


@rule(aten.logsumexp.default, exactness="linearised", family="attention", traits=Traits(reduces=True))
def logsumexp(ctx: Context, x: Value, dim: Argument, keepdim: bool = False) -> Surrogate:
    dims = [dim] if isinstance(dim, int) else list(dim)
    if len(dims) != 1:
        raise UnsupportedOperation(
            f"a logsumexp over the dimensions {dims} at {ctx.place} has no rule; flatten them into one before it."
        )
    axis = _axis(ctx, x, dims[0])
    p = x.mean.softmax(axis)
    v = x.variance
    mean = x.mean.logsumexp(axis, True) + _rise(x, p, axis)
    m = _expected(x, axis)
    pv = p * v
    # tr(HΛHΛ) = Σ p²v² − 2Σ p³v² + (Σ p²v)²
    variance = (pv.square() * (1 - 2 * p)).sum(axis, keepdim=True) + (p * pv).sum(axis, keepdim=True).square()
    left = _largest(x, axis) - (m * _times(x, m, axis)).sum(axis, keepdim=True)
    variance = torch.minimum(0.5 * variance, left).clamp_min(0)

    def shaped(t: Tensor, at: int) -> Tensor:
        return t if keepdim else t.squeeze(at)

    G = weighted_sum(m, axis, keepdim, m.shape[axis])
    noise = DiagonalNoise(shaped(variance, axis), f"{ctx.module or 'model'} (logsumexp)")
    return Surrogate(shaped(mean, axis), [(x, G)], [noise], _bend_of_sum(m, 1.0, axis, reduced=True))


def negative_entropy(ctx: Context, x: Value, dim: int, keepdim: bool) -> Surrogate:
    """Σ_i p_i log p_i for p = softmax(x)."""
    axis = _axis(ctx, x, dim)

    def total(t: Tensor) -> Tensor:
        return t.sum(axis, keepdim=True)

    def value(p: Tensor) -> Tensor:
        return p * p.clamp_min(torch.finfo(p.dtype).tiny).log()

    p, plain = _expected(x, axis), _safe(x.mean, axis)
    slope = value(p) - p * total(value(p))
    d, a, v = slope + p, 2 * slope + p, x.variance
    bent = total(d * v) - total(a * _times(x, p, axis))
    mean = (total(value(plain)) + 0.5 * bent).clamp(-math.log(max(p.shape[axis], 1)), 0)
    square = total(a * p * v).square() + total(a.square() * v) * total(p.square() * v)
    noise = 0.5 * (total((d * v).square()) - 2 * total(d * a * p * v.square()) + 0.5 * square).clamp_min(0)

    def shaped(t: Tensor) -> Tensor:
        return t if keepdim else t.squeeze(axis)

    second = GroupedSecond(lambda g: (g * d, [(-g * a, p)]), p.shape, p.shape, axis - p.ndim, reduced=True)
    G = weighted_sum(slope, axis, keepdim, p.shape[axis])
    label = f"{ctx.module or 'model'} (entropy)"
    return Surrogate(shaped(mean), [(x, G)], [DiagonalNoise(shaped(noise), label)], second)
