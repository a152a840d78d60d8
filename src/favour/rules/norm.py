"""Normalisation.

**BatchNorm** with running statistics is y = (x − r)·w/√(s + ε) + b, channel by channel: affine, so exact.

**LayerNorm, GroupNorm, InstanceNorm, RMSNorm** divide each group of n entries by its own spread,

    y_i = w_i c_i/√(V + ε) + b_i,    c = Cx,    V = cᵀc/n,

with C = I − 11ᵀ/n (C = I for RMSNorm). The spread of the mean alone is too small: the uncertainty of x adds to it in
every draw, E[V] = V(μ) + tr(CΣC)/n. Expanding around s² = E[V] + ε, with c and x̂ = c/s at the mean and κ = Cov[c] c,

    m_i  = w_i x̂_i γ − w_i κ_i/(n s³) + b_i,        γ = s·E[(V + ε)^−½] ≈ 1 + ⅜ Var[V]/s⁴,   Cov[c_i, V] = 2κ_i/n
    G_ij = γ w_i/s·(C_ij − x̂_i x̂_j/n)
    N    = wwᵀ∘x̂x̂ᵀ·q/(4s⁴) + diag(w²∘v)·Var[V]/(4s⁶),    q = 2‖CΣC‖²/n²,  Var[V] = 4cᵀκ/n² + q

q is the variance of V's own second-order part, which G does not carry: one draw scales the whole group
(`favour.rules.group_moments`, also for what dropout takes from the entries). Since Σ_i ŷ_i² = nV/(V + ε) for ŷ before
w and b, mean and variances are kept to ‖m‖² + Σ_i Var ŷ_i ≤ n E[V]/(E[V] + ε), which counts where x is mostly noise.
The squared entries of G have a closed form, since G is a diagonal plus low rank (`favour.surrogate.jacobian`).

**The variance** of the entries, y = n/(n − d)·V with d the correction, is what the norms divide by:

    m = n/(n − d)·E[V],    G = 2cᵀ/(n − d),    N = (n/(n − d))²·q,    H = 2C/(n − d).

Left out is what a Gaussian does not have. Dropout of attention weights is strongly skewed, and a norm behind it loses
variance that second moments cannot show (a quarter of it in a small encoder; Gaussian noise of the same variance
loses none).

Symbols: μ, v, λ, u the input's mean, marginal variance, independent part and factor columns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Affine, Argument, Traits
from favour.rules.group_moments import second_order_of, skewed_of, spread_of
from favour.rules.registry import rule
from favour.scalar import intervals
from favour.surrogate import (
    DiagonalNoise,
    LatentNoise,
    LinearMap,
    Noise,
    Surrogate,
    compose,
    scaling,
    weighted_sum,
)
from favour.surrogate.curvature import GroupedSecond
from favour.surrogate.jacobian import DiagonalPlusLowRank
from favour.surrogate.linear_map import Factor
from favour.surrogate.residual import Explained
from favour.surrogate.tokens import token_columns
from favour.surrogate.value import Context, Value

aten = torch.ops.aten


def _trailing(
    shape: Sequence[Any], normalized_shape: Sequence[int], *rest: Argument, **more: Argument
) -> Collection[int]:
    return range(len(shape) - len(normalized_shape), len(shape))


def _groups(shape: Sequence[Any], num_groups: int, *rest: Argument, **more: Argument) -> Collection[int]:
    return range(2 if num_groups == shape[1] else 1, len(shape))


def _places(shape: Sequence[Any], *rest: Argument, **more: Argument) -> Collection[int]:
    return range(2, len(shape))


AFFINE = Affine("weight", "bias", channels=True)


def _rows(bias: str | None) -> Traits:
    return Traits(
        mixes=_trailing,
        norm=Affine("weight", bias, channels=False),
        row_wise=lambda normalized_shape, *rest, **more: len(normalized_shape) == 1,
    )


@rule(
    aten.batch_norm.default,
    exactness="exact",
    family="norm",
    traits=Traits(mixes=lambda shape, *rest, **more: (), norm=AFFINE),
)
def batch_norm(
    ctx: Context,
    x: Value,
    weight: Argument,
    bias: Argument,
    running_mean: Argument,
    running_var: Argument,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Surrogate:
    if training or running_mean is None or running_var is None:
        raise UnsupportedOperation(
            f"batch normalisation at {ctx.place} uses the statistics of the batch, which mixes its inputs; "
            "predictions are per input. Keep running statistics (`track_running_stats=True`) and use them."
        )
    mean = F.batch_norm(x.mean, running_mean, running_var, weight, bias, False, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    scale = scale.reshape(1, -1, *[1] * (x.mean.ndim - 2))
    return Surrogate(mean, [(x, scaling(scale))])


def _with_columns(x: Value, grouped: Sequence[int]) -> Value:
    """What is known of each token's covariance as columns, where a group is a token."""
    known = token_columns(x)
    if known is None or x.blocks or tuple(grouped) != tuple(x.shape):
        return x
    return Value(x.mean, known.rest(x.variance), dict(known.blocks), carried=x.carried)


def normalise(
    ctx: Context,
    x: Value,
    grouped: Sequence[int],
    eps: float,
    weight: Argument,
    bias: Argument,
    *,
    centred: bool = True,
) -> Surrogate:
    """x in groups along the last axis of the shape `grouped`, each divided by its spread; then w∘ + b in x's shape."""
    argument, x = x, _with_columns(x, grouped)
    shape, n = x.mean.shape, grouped[-1]
    k = 1.0 if centred else 0.0
    mu = x.mean.reshape(grouped)
    c = mu - mu.mean(-1, keepdim=True) if centred else mu
    v = x.variance.reshape(grouped)
    extra, kappa = spread_of(x, grouped, c, centred)
    scatter, cross = n * extra.clamp_min(0), (c * kappa).sum(-1, keepdim=True)  # tr(CΣC), cᵀΣc
    s2 = c.square().mean(-1, keepdim=True) + extra.clamp_min(0) + eps
    s = s2.sqrt()
    hat = c / s

    blocks = {name: block.reshape(block.shape[0], *grouped) for name, block in x.blocks.items()}
    second_order = second_order_of(Value(mu, None if x.diag is None else x.diag.reshape(grouped), blocks), centred)
    explained = torch.zeros_like(second_order)
    skewed = skewed_of(x, grouped, centred)
    if skewed is not None:
        explained = skewed.explained
        second_order = (second_order + skewed.fourth - explained).clamp_min(0)
        kappa = kappa + 0.5 * n * skewed.shared
    spread = (4 * (c * kappa).sum(-1, keepdim=True) / n**2).clamp_min(0) + second_order + explained
    # One product with 1/s² after the other: s⁴ and s⁶ underflow where ε is that of `normalize`.
    inverse = 1 / s2
    relative = spread * inverse * inverse
    gain = 1 + 0.375 * relative  # E[(V + ε)^−½]·s
    room = n * (extra.clamp_min(0) * inverse)
    shift = hat * (gain - 1) - kappa * inverse / (n * s)
    longer = (2 * hat * shift + shift.square()).sum(-1, keepdim=True)  # ‖m‖² − ‖x̂‖²
    shift = shift * _at_most(longer, room)
    room = room - (2 * hat * shift + shift.square()).sum(-1, keepdim=True)
    mean = hat + shift
    noise = 0.25 * (v * inverse) * relative
    common = 0.5 * hat * (second_order.sqrt() * inverse)  # one draw for the whole group
    # Σ_i Var y_i by the terms above, and by what Σ_i E[y_i²] = n E[V/(V + ε)] leaves beside the mean.
    power = hat.square().sum(-1, keepdim=True)
    carried = scatter - cross * inverse * (2 / n - power / n**2)
    carried = gain.square() * (carried * inverse) + noise.sum(-1, keepdim=True) + common.square().sum(-1, keepdim=True)
    carried = carried + 0.25 * power * (explained * inverse * inverse)
    shrink = _at_most(carried, room).sqrt()
    noise, common, tilt = noise * shrink.square(), common * shrink, gain * shrink

    steep = tilt / s
    left: list[Factor] = [-hat * steep / n]
    right: list[Factor] = [hat]
    if centred:
        left, right = [-steep / n, *left], [1.0, *right]
    G: LinearMap = DiagonalPlusLowRank(steep, left, right, grouped)
    mean, noise, common = mean.reshape(shape), noise.reshape(shape), common.reshape(shape)
    if weight is not None:
        mean, noise, common = mean * weight, noise * weight.square(), common * weight
        G = compose(scaling(weight), G)
    label = f"{ctx.module or 'model'} (norm)"
    noises: list[Noise] = [DiagonalNoise(noise, label), _per_group(common, grouped, label)]
    if skewed is not None:
        bent = (0.25 * (hat * shrink).square() * (explained * inverse * inverse)).reshape(shape)
        noises.append(Explained(bent if weight is None else bent * weight.square(), label))
    second = _bend(hat, tilt * inverse / n, weight, shape, grouped, k)
    return Surrogate(mean if bias is None else mean + bias, [(argument, G)], noises, second)


def _at_most(size: Tensor, limit: Tensor) -> Tensor:
    """The factor of at most 1 that keeps `size` to a limit."""
    above = size > limit
    return torch.where(above, limit.clamp_min(0) / torch.where(above, size, 1.0), 1.0)


def _bend(
    hat: Tensor, scale: Tensor, weight: Any, shape: Sequence[int], grouped: Sequence[int], k: float
) -> GroupedSecond:
    """H = −γ/(ns²)·[(Cg)x̂ᵀ + x̂(Cg)ᵀ + (gᵀx̂)C − 3(gᵀx̂)x̂x̂ᵀ/n], with w∘g in the place of g."""
    n = grouped[-1]

    def make(g: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        if weight is not None:
            g = (g.reshape(*g.shape[:2], *shape[1:]) * weight).reshape(g.shape)
        along = scale * (g * hat).sum(-1, keepdim=True)
        across = -2 * scale * (g - k * g.mean(-1, keepdim=True))
        one = torch.ones_like(hat)
        return -along, [(across, hat), (k / n * along, one), (3 / n * along * hat, hat)]

    return GroupedSecond(make, shape, grouped)


def _per_group(column: Tensor, grouped: Sequence[int], label: str) -> LatentNoise:
    """n = column ∘ z with one z for each group."""
    shape = column.shape
    inner = tuple(grouped[1:-1])
    wide = column.reshape(grouped)

    def push(z: Tensor) -> Tensor:
        return (wide * z.unsqueeze(-1)).reshape(z.shape[0], *shape)

    def pull(g: Tensor) -> Tensor:
        return (wide * g.reshape(g.shape[0], *grouped)).sum(-1)

    return LatentNoise(push, pull, column.square(), inner, None, label)


def _last(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    lead = x.shape[: x.ndim - len(normalized_shape)]
    return (*lead, math.prod(normalized_shape))


@rule(aten.layer_norm.default, exactness="linearised", family="norm", traits=_rows("bias"))
def layer_norm(
    ctx: Context,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Argument = None,
    bias: Argument = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Surrogate:
    return normalise(ctx, x, _last(x.mean, normalized_shape), eps, weight, bias)


@rule(aten.rms_norm.default, exactness="linearised", family="norm", traits=_rows(None))
def rms_norm(
    ctx: Context, x: Value, normalized_shape: Sequence[int], weight: Argument = None, eps: float | None = None
) -> Surrogate:
    eps = torch.finfo(x.mean.dtype).eps if eps is None else eps
    return normalise(ctx, x, _last(x.mean, normalized_shape), eps, weight, None, centred=False)


def _per_channel(parameter: Argument, x: Tensor) -> Any:
    return None if parameter is None else parameter.reshape(1, -1, *[1] * (x.ndim - 2))


@rule(aten.group_norm.default, exactness="linearised", family="norm", traits=Traits(mixes=_groups, norm=AFFINE))
def group_norm(
    ctx: Context,
    x: Value,
    num_groups: int,
    weight: Argument = None,
    bias: Argument = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Surrogate:
    grouped = (x.mean.shape[0], num_groups, math.prod(x.mean.shape[1:]) // num_groups)
    return normalise(ctx, x, grouped, eps, _per_channel(weight, x.mean), _per_channel(bias, x.mean))


@rule(aten.instance_norm.default, exactness="linearised", family="norm", traits=Traits(mixes=_places, norm=AFFINE))
def instance_norm(
    ctx: Context,
    x: Value,
    weight: Argument,
    bias: Argument,
    running_mean: Argument,
    running_var: Argument,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Surrogate:
    if not use_input_stats:
        return batch_norm(ctx, x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn)
    grouped = (*x.mean.shape[:2], math.prod(x.mean.shape[2:]))
    return normalise(ctx, x, grouped, eps, _per_channel(weight, x.mean), _per_channel(bias, x.mean))


def _variance(ctx: Context, x: Value, dim: Argument, correction: float, keepdim: bool) -> Surrogate:
    shape = x.mean.shape
    dims = (
        list(range(x.mean.ndim)) if dim is None else [d % x.mean.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    )
    if 0 in dims or len(dims) != 1:
        raise UnsupportedOperation(
            f"a variance over the dimensions {dims} of a tensor of shape {tuple(shape)} at {ctx.place} has no rule: "
            "one dimension, and not dimension 0, the batch. Flatten several into one."
        )
    axis = dims[0]
    last = Value(
        x.mean.movedim(axis, -1),
        None if x.diag is None else x.diag.movedim(axis, -1),
        {name: block.movedim(axis + 1, -1) for name, block in x.blocks.items()},
    )
    n = shape[axis]
    c = last.mean - last.mean.mean(-1, keepdim=True)
    extra, _ = spread_of(last, c.shape, c, True)
    if n <= correction:
        raise UnsupportedOperation(
            f"the variance at {ctx.place} of {n} entries of a tensor of shape {tuple(shape)} with the correction "
            f"{correction:g} divides by {max(n - correction, 0):g}, which torch answers with NaN. Use `correction=0` "
            "(`unbiased=False`), or a dimension of more entries."
        )
    scale = n / (n - correction)
    mean = scale * (c.square().mean(-1, keepdim=True) + extra.clamp_min(0))
    slope = (2 * scale / n * c).movedim(-1, axis)
    second_order = second_order_of(last, True)
    label = f"{ctx.module or 'model'} (variance)"
    noises: list[Noise] = []

    def shaped(t: Tensor, at: int) -> Tensor:
        return t if keepdim else t.squeeze(at)

    skewed = skewed_of(x, last.mean.shape, True, axis)
    if skewed is not None:
        second_order = (second_order + skewed.fourth - skewed.explained).clamp_min(0)
        noises.append(Explained(shaped((skewed.explained * scale**2).movedim(-1, axis), axis), label))
    noises.insert(0, DiagonalNoise(shaped((second_order * scale**2).movedim(-1, axis), axis), label))

    G = weighted_sum(slope, axis, keepdim, n)
    one = torch.ones_like(x.mean)

    def hessian(g: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        alpha = 2 * scale / n * g
        return alpha, [(-alpha / n, one)]

    second = GroupedSecond(hessian, shape, shape, axis - len(shape), reduced=True)
    return Surrogate(shaped(mean.movedim(-1, axis), axis), [(x, G)], noises, second)


SPREAD = Traits(sums=True, bounds=intervals.POSITIVE)


@rule(aten.var.dim, exactness="linearised", family="norm", traits=SPREAD)
def var(ctx: Context, x: Value, dim: Argument, unbiased: bool = True, keepdim: bool = False) -> Surrogate:
    return _variance(ctx, x, dim, float(unbiased), keepdim)


@rule(aten.var.correction, exactness="linearised", family="norm", traits=SPREAD)
def var_correction(
    ctx: Context, x: Value, dim: Argument = None, *, correction: float | None = None, keepdim: bool = False
) -> Surrogate:
    return _variance(ctx, x, dim, 1.0 if correction is None else correction, keepdim)
