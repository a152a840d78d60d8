"""Dropout of whole channels, and the variants that keep self-normalising networks normal.

**Channels** (`Dropout1d`, `Dropout2d`, `Dropout3d`). One D_c ∈ {0, 1/q} for all entries of a channel c, so that
entries of a channel fall together. With E[D] = 1 and Var[D] = p/q

    m = μ,   G = I,   N_c = p/q·(μ_c μ_cᵀ + Σ_cc),

one latent per channel for the mean and for each factor column of Σ, and a diagonal for its independent part.

**Alpha dropout.** A dropped entry becomes α′ = −λα of SELU instead of 0, and the result is rescaled,

    y = a(Mx + α′(1 − M)) − aα′p,   M ~ Bernoulli(q),   a = (q(1 + pα′²))^(−1/2),

which keeps mean 0 and variance 1 where x has them. In general

    m = aqμ,   G = aq,   N = a²pq·diag((μ − α′)² + v),

and per channel N_c = a²pq·((μ_c − α′)(μ_c − α′)ᵀ + Σ_cc). Plain dropout is α′ = 0, a = 1/q.

All exact. p is a number, or a tensor that broadcasts to the input (for channels, with one entry per channel).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from favour.errors import ShapeMismatch
from favour.rules.dropout import second_moment_noise
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, LatentNoise, Noise, Surrogate, identity, products, scaling
from favour.value import Context, Value, mean_of

aten = torch.ops.aten

# −λα of SELU with the digits torch uses: the value far below zero.
SATURATION = -1.7580993408473766

# `ctx.shared[(WITHIN_CHANNELS, step)]`: independent variance and factor columns that hold within each channel.
WITHIN_CHANNELS = "within channels"


def check_channel_rate(p: Any, shape: torch.Size, where: str) -> None:
    """Raise unless p has one entry per channel of a (batch, channels, *space) tensor."""
    space = len(shape) - 2
    if isinstance(p, Tensor) and p.ndim and any(size != 1 for size in p.shape[max(p.ndim - space, 0) :]):
        raise ShapeMismatch(
            f"the dropout at {where} drops whole channels of a {tuple(shape)} tensor, so its rates need the shape "
            f"{(shape[1], *[1] * space)}, not {tuple(p.shape)}: one for each channel."
        )


def _channel_noise(points: Tensor, label: str) -> LatentNoise:
    """n_c = Σ_p a_pc z_pc for points a of shape (P, batch, channels, *space)."""
    space = points.shape[3:]
    a = points.flatten(3)  # (P, batch, channels, T)

    def push(z: Tensor) -> Tensor:
        return torch.einsum("fbpc,pbct->fbct", z, a).reshape(z.shape[0], *points.shape[1:3], *space)

    def pull(g: Tensor) -> Tensor:
        return torch.einsum("fbct,pbct->fbpc", g.flatten(3), a)

    def between(c: Tensor | None, q: int) -> Noise:
        return products(points, q)

    variances, latent = points.square().sum(0), (points.shape[0], points.shape[2])
    return LatentNoise(push, pull, variances, latent, None, label, drawn=True, between=between)


def _channel_noises(ctx: Context, x: Any, centre: Tensor, gain: Any, scale: Any, label: str) -> list[Noise]:
    """scale·(c cᵀ + Σ) within each channel.

    What is known of the covariance within channels, gain²Σ_cc + N_c, is left for an operation that asks for it: a
    maximum over neighbours, which fall together (`WITHIN_CHANNELS`).
    """
    if centre.ndim < 3:
        return [second_moment_noise(x, centre, scale, label)]
    points, columns, own = centre.unsqueeze(0), [], None
    if isinstance(x, Value):
        own = x.diag
        if x.factor is not None:
            points = torch.cat([points, x.factor])
            columns.append(x.factor * gain)
    weighted = points * torch.as_tensor(scale, dtype=points.dtype, device=points.device).sqrt()
    diag = None if own is None else own * (gain * gain + scale)
    ctx.shared[(WITHIN_CHANNELS, ctx.step)] = diag, torch.cat([*columns, weighted])
    noises: list[Noise] = [_channel_noise(weighted, label)]
    if own is None:
        return noises

    def between(c: Tensor | None, q: int) -> Noise:
        assert c is not None
        return DiagonalNoise((c * scale).flatten(0, 1))

    return [*noises, DiagonalNoise(own * scale, label, between=between)]


def alpha_scale(p: Any) -> Any:
    """a = (q(1 + pα′²))^(−1/2)."""
    return ((1 - p) * (1 + p * SATURATION**2)) ** -0.5


@rule(aten.feature_dropout.default, exactness="exact", family="dropout")
def feature_dropout(ctx: Context, x: Any, p: Any, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    check_channel_rate(p, mean.shape, ctx.place)
    maps = [(x, identity())] if isinstance(x, Value) else []
    return Surrogate(mean, maps, _channel_noises(ctx, x, mean, 1.0, p / (1 - p), ctx.module or "dropout"))


@rule(aten.alpha_dropout.default, exactness="exact", family="dropout")
def alpha_dropout(ctx: Context, x: Any, p: Any, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    q, a = 1 - p, alpha_scale(p)
    noise = second_moment_noise(x, mean - SATURATION, a * a * p * q, ctx.module or "dropout")
    return Surrogate(a * q * mean, [(x, scaling(a * q))] if isinstance(x, Value) else [], [noise])


@rule(aten.feature_alpha_dropout.default, exactness="exact", family="dropout")
def feature_alpha_dropout(ctx: Context, x: Any, p: Any, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    check_channel_rate(p, mean.shape, ctx.place)
    q, a = 1 - p, alpha_scale(p)
    noises = _channel_noises(ctx, x, mean - SATURATION, a * q, a * a * p * q, ctx.module or "dropout")
    return Surrogate(a * q * mean, [(x, scaling(a * q))] if isinstance(x, Value) else [], noises)
