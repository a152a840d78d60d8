"""Draws of a weight that is used at many places, held in weight space.

A Gaussian weight is W = W̄ + δ with δ = R z, z ~ N(0, I) and R a root of its covariance (`favour.surrogate.gaussian`). A
product with it at places t, for known vectors a of the input (its mean, its factor columns), adds

    n_t = Σ_a (R z_a) a_t,    Var[n_ti] = Σ_a a_tᵀ Σ_w,ii a_t

to its result: one draw z_a for all places. A convolution is such a product with the patches of its input, group by
group. Uses of one weight by several operations share z for the mean, whatever the operations are.

Symbols: P vectors a, g groups, m outputs and n inputs of a group, T places; F the fold axis.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from favour.posterior import Gaussian
from favour.surrogate import DiagonalNoise, LatentNoise, Noise, constant_between, partners
from favour.surrogate.value import Context, Weight

Map = Callable[[Tensor], Tensor]


def held(ctx: Context, weight: Weight) -> Gaussian:
    """The Gaussian of a weight, with roots that are found once for each of its tensors."""
    assert weight.gaussian is not None

    def keep(name: str, tensor: Tensor, function: Map) -> Tensor:
        return ctx.cached(f"{weight.name} {name}", tensor, function)

    return weight.gaussian.held(keep)


def reshaped(
    weight: Weight, result: Map, back: Map, like: Tensor, space: Gaussian, factor: float = 1.0, named: bool = False
) -> LatentNoise:
    """n = factor · the weight's own draw, arranged as the result: added parameters, biases, draws for each input.

    Args:
        weight: With its Gaussian.
        result: A weight (F, batch, *shape) as the result (F, batch, *event).
        back: Its transpose.
        like: The result's mean, of every input.
        space: `held` of the weight.
        factor: A number.
        named: Forward methods keep its columns by the weight's name, and do not compress them.
    """
    assert weight.gaussian is not None
    weight_variance = weight.gaussian.variance().expand(1, 1, *weight.shape)
    variances = result(factor**2 * weight_variance).squeeze(0).expand(like.shape)
    return LatentNoise(
        lambda z: result(factor * space.push(z.squeeze(2))).expand(z.shape[0], *like.shape),
        lambda g: space.pull(factor * back(g)).unsqueeze(2),
        variances,
        (1, *space.latent_shape),
        (weight.name, "mean") if weight.uses > 1 or named else None,
        weight.name,
        drawn=True,
        between=constant_between(variances),
    )


@dataclass(frozen=True)
class Layout:
    """How an operation arranges its weight and its result.

    Attributes:
        blocks: A weight (…, *shape) as (…, g, m, n).
        whole: The inverse.
        result: (F, batch, g, m, T) as the operation's result (F, batch, *event).
        places: The inverse.
        rows: The m outputs of a group are rows of the weight.
    """

    blocks: Map
    whole: Map
    result: Map
    places: Map
    rows: bool = True


def shared_noise(
    space: Gaussian, gaussian: Gaussian, a: Tensor, layout: Layout, key: Hashable | None, label: str
) -> LatentNoise:
    """n_t = Σ_a (R z_a) a_t for vectors a of shape (P, batch, g, n, T)."""

    def push(z: Tensor) -> Tensor:
        return layout.result(torch.einsum("fbpgmn,pbgnt->fbgmt", layout.blocks(space.push(z)), a))

    def pull(g: Tensor) -> Tensor:
        return space.pull(layout.whole(torch.einsum("fbgmt,pbgnt->fbpgmn", layout.places(g), a)))

    def squared(points: Tensor) -> Tensor:
        return layout.result(row_variances(gaussian, points, layout).unsqueeze(0)).squeeze(0)

    def between(c: Tensor | None, q: int) -> Noise:
        # A quadratic form Q is bilinear between two inputs: ¼(Q(a + b) − Q(a − b)).
        theirs = partners(a.transpose(0, 1), q).expand(q, a.shape[1], a.shape[0], *a.shape[2:]).movedim(2, 1)
        return DiagonalNoise(torch.cat([(squared(a + row) - squared(a - row)) / 4 for row in theirs]))

    latent = (a.shape[0], *space.latent_shape)
    return LatentNoise(push, pull, squared(a), latent, key, label, drawn=True, between=between)


def row_variances(gaussian: Gaussian, a: Tensor, layout: Layout) -> Tensor:
    """Σ_a a_tᵀ Σ_w,ii a_t, (batch, g, m, T); kinds know closed forms where outputs are rows, or entries independent."""
    known = layout.rows or gaussian.independent
    return gaussian.row_variances(a, layout.blocks) if known else Gaussian.row_variances(gaussian, a, layout.blocks)
