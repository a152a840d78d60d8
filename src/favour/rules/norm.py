"""Normalisation.

**BatchNorm** with running statistics is y = (x − r)·w/√(s + ε) + b, channel by channel: affine, so exact.

**LayerNorm, GroupNorm, InstanceNorm, RMSNorm** divide each group of n entries by its own spread,

    y_i = w_i c_i/√(V + ε) + b_i,    c = Cx,    V = cᵀc/n,

with C = I − 11ᵀ/n (C = I for RMSNorm). The spread of the mean alone is too small: the uncertainty of x adds to it in
every draw, E[V] = V(μ) + tr(CΣC)/n. Expanding around s² = E[V] + ε, with c and x̂ = c/s at the mean and κ = Cov[c] c,

    m_i  = w_i x̂_i γ − w_i κ_i/(n s³) + b_i,        γ = s·E[(V + ε)^−½] ≈ 1 + ⅜ Var[V]/s⁴,   Cov[c_i, V] = 2κ_i/n
    G_ij = γ w_i/s·(C_ij − x̂_i x̂_j/n)
    N_ii = w_i²·(x̂_i² q/(4s⁴) + v_i Var[V]/(4s⁶)),    q = 2‖v‖²/n²,  Var[V] = 4cᵀκ/n² + q

q is the variance of V's own second-order part, which G does not carry. The squared entries of G have a closed form,

    Σ_j G_ij² v_j = γ²w_i²/s²·[v_i(1 − 2(k + x̂_i²)/n) + (k Σv + 2k x̂_i Σx̂v + x̂_i² Σx̂²v)/n²],   k = 1 (RMSNorm: 0).

Left out is what a Gaussian does not have: dropout of attention weights is skewed, and a norm behind it loses variance
that second moments cannot show (a fifth of it in a small encoder).

Symbols: μ, v, λ, u the input's mean, marginal variance, independent part and factor columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, LinearMap, Noise, Surrogate, compose, scaling
from favour.value import Context, Value

aten = torch.ops.aten


@rule(aten.batch_norm.default, exactness="exact", family="norm")
def batch_norm(
    ctx: Context,
    x: Value,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
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
    return Surrogate(mean, [(x, scaling(scale.reshape(1, -1, *[1] * (x.mean.ndim - 2))))])


def _spread(x: Value, grouped: Sequence[int], c: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """tr(CΣC)/n, one for each group, and κ = CΣc."""
    n = grouped[-1]
    v = x.variance.reshape(grouped)
    extra = v.mean(-1, keepdim=True)
    kappa = torch.zeros_like(c)
    total = torch.zeros_like(extra)  # 1ᵀΣ1
    if x.diag is not None:
        diag = x.diag.reshape(grouped)
        kappa = diag * c
        total = diag.sum(-1, keepdim=True)
    for block in x.blocks.values():
        u = block.reshape(block.shape[0], *grouped)
        kappa = kappa + (u * (u * c).sum(-1, keepdim=True)).sum(0)
        total = total + u.sum(-1, keepdim=True).square().sum(0)
    if not centred:
        return extra, kappa
    return extra - total / n**2, kappa - kappa.mean(-1, keepdim=True)


def normalise(
    ctx: Context, x: Value, grouped: Sequence[int], eps: float, weight: Any, bias: Any, *, centred: bool = True
) -> Surrogate:
    """x in groups along the last axis of the shape `grouped`, each divided by its spread; then w∘ + b in x's shape."""
    shape, n = x.mean.shape, grouped[-1]
    k = 1.0 if centred else 0.0
    mu = x.mean.reshape(grouped)
    c = mu - mu.mean(-1, keepdim=True) if centred else mu
    v = x.variance.reshape(grouped)
    extra, kappa = _spread(x, grouped, c, centred)
    s2 = c.square().mean(-1, keepdim=True) + extra.clamp_min(0) + eps
    s = s2.sqrt()
    hat = c / s

    own = 2 * v.square().sum(-1, keepdim=True) / n**2
    spread = (4 * (c * kappa).sum(-1, keepdim=True) / n**2).clamp_min(0) + own
    gain = 1 + 0.375 * spread / s2.square()  # E[(V + ε)^−½]·s
    mean = hat * gain - kappa / (n * s2 * s)
    noise = (hat.square() * own + v * spread / s2) / (4 * s2.square())

    def forward(d: Tensor) -> Tensor:
        t = d.reshape(d.shape[0], *grouped)
        t = t - t.mean(-1, keepdim=True) if centred else t
        return ((t - hat * (hat * t).mean(-1, keepdim=True)) * (gain / s)).reshape(d.shape)

    def square(d: Tensor) -> Tensor:
        t = d.reshape(grouped)
        sums = [(t * power).sum(-1, keepdim=True) for power in (1.0, hat, hat.square())]
        rest = k * sums[0] + 2 * k * hat * sums[1] + hat.square() * sums[2]
        return ((t * (1 - 2 * (k + hat.square()) / n) + rest / n**2) * (gain.square() / s2)).reshape(shape)

    # The matrix of one group is symmetric: C and x̂x̂ᵀ are, and x̂ is centred.
    G = LinearMap(forward, forward, square)
    mean, noise = mean.reshape(shape), noise.reshape(shape)
    if weight is not None:
        mean, noise = mean * weight, noise * weight.square()
        G = compose(scaling(weight), G)
    noises: list[Noise] = [DiagonalNoise(noise, f"{ctx.module or 'model'} (norm)")]
    return Surrogate(mean if bias is None else mean + bias, [(x, G)], noises)


def _last(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, ...]:
    lead = x.shape[: x.ndim - len(normalized_shape)]
    return (*lead, math.prod(normalized_shape))


@rule(aten.layer_norm.default, exactness="linearised", family="norm")
def layer_norm(
    ctx: Context,
    x: Value,
    normalized_shape: Sequence[int],
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Surrogate:
    return normalise(ctx, x, _last(x.mean, normalized_shape), eps, weight, bias)


@rule(aten.rms_norm.default, exactness="linearised", family="norm")
def rms_norm(
    ctx: Context, x: Value, normalized_shape: Sequence[int], weight: Any = None, eps: float | None = None
) -> Surrogate:
    eps = torch.finfo(x.mean.dtype).eps if eps is None else eps
    return normalise(ctx, x, _last(x.mean, normalized_shape), eps, weight, None, centred=False)


def _per_channel(parameter: Any, x: Tensor) -> Any:
    return None if parameter is None else parameter.reshape(1, -1, *[1] * (x.ndim - 2))


@rule(aten.group_norm.default, exactness="linearised", family="norm")
def group_norm(
    ctx: Context,
    x: Value,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn: bool = True,
) -> Surrogate:
    grouped = (x.mean.shape[0], num_groups, math.prod(x.mean.shape[1:]) // num_groups)
    return normalise(ctx, x, grouped, eps, _per_channel(weight, x.mean), _per_channel(bias, x.mean))


@rule(aten.instance_norm.default, exactness="linearised", family="norm")
def instance_norm(
    ctx: Context,
    x: Value,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Surrogate:
    if not use_input_stats:
        return batch_norm(ctx, x, weight, bias, running_mean, running_var, False, momentum, eps, cudnn)
    grouped = (*x.mean.shape[:2], math.prod(x.mean.shape[2:]))
    return normalise(ctx, x, grouped, eps, _per_channel(weight, x.mean), _per_channel(bias, x.mean))
