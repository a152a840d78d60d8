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

from favour.graph.traits import Argument, Draw, Traits
from favour.rules.dropout import second_moment_noise, zero_or_larger
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, ImageNoise, Noise, Surrogate, identity, products, scaling
from favour.surrogate.channels import ChannelCovariance, Fallen, Scaled
from favour.surrogate.matrices import Contraction
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten

# −λα of SELU with the digits torch uses: the value far below zero.
SATURATION = -1.7580993408473766


def _channel_noise(points: Tensor, p: Argument, label: str) -> ImageNoise:
    """n_c = Σ_k a_kc z_kc for points a of shape (K, batch, channels, *space): the mean, then factor columns.

    z of the mean is D itself, of two values, with the cumulants (p − q)/√(pq) and (1 − 6pq)/pq; those of the columns
    are products of D with Gaussians, whose third is 0 and whose fourth is not told.
    """
    letters = "".join(chr(ord("k") + i) for i in range(points.ndim - 3))
    image = Contraction(points, "bac", "abc" + letters, "bc" + letters, (points.shape[1], len(points), points.shape[2]))

    def cumulants() -> tuple[Tensor, Tensor]:
        q = 1 - torch.as_tensor(p, dtype=points.dtype, device=points.device).reshape(-1)
        spread = torch.where(q < 1, q * (1 - q), 1.0)
        columns = torch.zeros(len(points) - 1, len(q), dtype=q.dtype, device=q.device)
        third = torch.where(q < 1, (1 - 2 * q) / spread.sqrt(), 0.0)
        fourth = torch.where(q < 1, (1 - 6 * spread) / spread, 0.0)
        return torch.cat([third.unsqueeze(0), columns]), torch.cat([fourth.unsqueeze(0), columns])

    def between(c: Tensor | None, q: int) -> Noise:
        return products(points, q)

    drawn_cumulants = cumulants if isinstance(p, Tensor) or p > 0 else None
    latent = points.new_empty(0, points.shape[1], len(points), points.shape[2])
    return ImageNoise(image, latent, label, drawn_cumulants=drawn_cumulants, between=between, drawn=True)


def _channel_surrogate(
    ctx: Context, x: Argument, p: Argument, mean: Tensor, centre: Tensor, gain: Argument, scale: Argument
) -> Surrogate:
    """m = mean, G = gain, N = scale·(c cᵀ + Σ) within each channel.

    What is known of the covariance within channels, gain²Σ_cc + N_c, goes with the value: entries of a channel fall
    together, for a maximum over neighbours too.
    """
    label = ctx.module or "dropout"
    maps = [(x, scaling(gain) if isinstance(gain, Tensor) or gain != 1 else identity())] if isinstance(x, Value) else []
    if centre.ndim < 3:
        return Surrogate(mean, maps, [second_moment_noise(x, centre, scale, label)])
    points, diag, within = centre.unsqueeze(0), None, None
    if isinstance(x, Value):
        diag, known = x.diag, x.known(ChannelCovariance)
        within = None if known is None else Scaled(known, (gain * gain + scale) ** 0.5, centre.ndim - 2)
        points = points if x.factor is None else torch.cat([points, x.factor])
    weighted = points * torch.as_tensor(scale, dtype=points.dtype, device=points.device).sqrt()
    noises: list[Noise] = [_channel_noise(weighted, p, label)]
    if diag is not None:

        def between(c: Tensor | None, q: int) -> Noise:
            assert c is not None
            return DiagonalNoise((c * scale).flatten(0, 1))

        noises.append(DiagonalNoise(diag * scale, label, between=between))
    return Surrogate(mean, maps, noises, carried=[Fallen(weighted, within)])


def alpha_scale(p: Argument) -> Any:
    """a = (q(1 + pα′²))^(−1/2)."""
    return ((1 - p) * (1 + p * SATURATION**2)) ** -0.5


CHANNELS = Draw(channels=True, falls=True, outcomes=zero_or_larger)


@rule(aten.feature_dropout.default, exactness="exact", family="dropout", traits=Traits(draws=CHANNELS))
def feature_dropout(ctx: Context, x: Argument, p: Argument, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    CHANNELS.check_shape(p, mean.shape, ctx.place)
    return _channel_surrogate(ctx, x, p, mean, mean, 1.0, p / (1 - p))


def _saturated(x: Tensor, mask: Tensor, p: Argument) -> Tensor:
    """Alpha dropout of x with a scaled mask, 0 or 1/q."""
    a = alpha_scale(p)
    return a * torch.where(mask > 0, x, SATURATION) - a * p * SATURATION


def _kept_or_saturated(p: float) -> tuple[float, float, float]:
    a = alpha_scale(p)
    return a, -a * p * SATURATION, a * (1 - p) * SATURATION


ALPHA, ALPHA_CHANNELS = (
    Draw(channels=channels, apply=_saturated, outcomes=_kept_or_saturated) for channels in (False, True)
)


@rule(
    aten.alpha_dropout.default,
    exactness="exact",
    family="dropout",
    traits=Traits(draws=ALPHA, elementwise=True, row_wise=True),
)
def alpha_dropout(ctx: Context, x: Argument, p: Argument, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    q, a = 1 - p, alpha_scale(p)
    noise = second_moment_noise(x, mean - SATURATION, a * a * p * q, ctx.module or "dropout")
    return Surrogate(a * q * mean, [(x, scaling(a * q))] if isinstance(x, Value) else [], [noise])


@rule(aten.feature_alpha_dropout.default, exactness="exact", family="dropout", traits=Traits(draws=ALPHA_CHANNELS))
def feature_alpha_dropout(ctx: Context, x: Argument, p: Argument, train: bool) -> Surrogate:
    p = p if train else 0.0
    mean = mean_of(x)
    ALPHA_CHANNELS.check_shape(p, mean.shape, ctx.place)
    q, a = 1 - p, alpha_scale(p)
    return _channel_surrogate(ctx, x, p, a * q * mean, mean - SATURATION, a * q, a * a * p * q)
