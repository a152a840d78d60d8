"""Draws of a weight that is used at many places, held in weight space.

A Gaussian weight is W = W̄ + δ with δ = R z, z ~ N(0, I) and R a root of its covariance,

| posterior       | z                  | R z                              |
|-----------------|--------------------|----------------------------------|
| mean-field      | W's shape          | σ ∘ z                            |
| rows D + Σ fᵣfᵣᵀ | W's shape, (r, m)  | √D ∘ z + Σᵣ zᵣ,ᵢ fᵣ,ᵢ            |
| Kronecker A ⊗ B | W's shape          | √B z √Aᵀ                         |
| V in bases P, Q | V's shape          | P(√V ∘ z)Qᵀ                      |
| full            | N                  | √Σ z                             |

A product with it at places t, for known vectors a of the input (its mean, its factor columns), adds

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

from favour.posterior import Diagonal, Full, Gaussian, Kronecker, Rotated, Rows
from favour.posterior.gaussians import psd_root
from favour.surrogate import DiagonalNoise, LatentNoise, Noise, partners
from favour.surrogate.value import Context, Weight

Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class WeightSpace:
    """δ = R z by what it does.

    Attributes:
        latent: Shape of z.
        push: (…, *latent) to (…, *shape of the Gaussian).
        pull: The transposed map.
    """

    latent: tuple[int, ...]
    push: Map
    pull: Map


def weight_space(ctx: Context, weight: Weight) -> WeightSpace:
    """The draws of a weight; roots are found once for each prediction."""
    gaussian = weight.gaussian
    assert gaussian is not None
    if isinstance(gaussian, Diagonal):
        sigma = gaussian.variance().sqrt()
        if weight.turned:  # z in the layout of the parameter, whoever reads it
            return WeightSpace(tuple(sigma.mT.shape), lambda z: z.mT * sigma, lambda w: (w * sigma).mT)
        return WeightSpace(tuple(sigma.shape), lambda z: z * sigma, lambda w: w * sigma)
    if isinstance(gaussian, Rows):
        return _rows(gaussian)
    if isinstance(gaussian, Rotated):
        sigma, P, Q = gaussian.diag.sqrt(), gaussian.outputs, gaussian.inputs
        return WeightSpace(tuple(sigma.shape), lambda z: P @ (z * sigma) @ Q.mT, lambda w: P.mT @ w @ Q * sigma)
    key = ("root", weight.name)
    if key not in ctx.shared:
        matrices = (gaussian.outputs, gaussian.inputs) if isinstance(gaussian, Kronecker) else (gaussian.covariance(),)
        ctx.shared[key] = tuple(psd_root(matrix) for matrix in matrices)
    if isinstance(gaussian, Kronecker):
        left, right = ctx.shared[key]
        return WeightSpace(tuple(gaussian.shape), lambda z: left @ z @ right.mT, lambda w: left.mT @ w @ right)
    (root,) = ctx.shared[key]
    shape = gaussian.shape
    return WeightSpace(
        (root.shape[-1],),
        lambda z: (z @ root.mT).reshape(*z.shape[:-1], *shape),
        lambda w: w.flatten(w.ndim - len(shape)) @ root,
    )


def _rows(gaussian: Rows) -> WeightSpace:
    sigma, factor = gaussian.diag.flatten(1).sqrt(), gaussian.factor.flatten(2)  # (m, n), (r, m, n)
    r, m, n = factor.shape
    shape = gaussian.shape

    def push(z: Tensor) -> Tensor:
        own, common = z[..., : m * n].unflatten(-1, (m, n)), z[..., m * n :].unflatten(-1, (r, m))
        rows = own * sigma + torch.einsum("...rm,rmn->...mn", common, factor)
        return rows.reshape(*z.shape[:-1], *shape)

    def pull(w: Tensor) -> Tensor:
        rows = w.reshape(*w.shape[: w.ndim - len(shape)], m, n)
        common = torch.einsum("...mn,rmn->...rm", rows, factor)
        return torch.cat([(rows * sigma).flatten(-2), common.flatten(-2)], -1)

    return WeightSpace((m * n + r * m,), push, pull)


@dataclass(frozen=True)
class Layout:
    """How an operation arranges its weight and its result.

    Attributes:
        blocks: A weight (…, *shape) as (…, g, m, n).
        whole: The inverse.
        result: (F, batch, g, m, T) as the operation's result (F, batch, *event).
        places: The inverse.
    """

    blocks: Map
    whole: Map
    result: Map
    places: Map


def shared_noise(
    space: WeightSpace, gaussian: Gaussian, a: Tensor, layout: Layout, key: Hashable | None, label: str
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

    latent = (a.shape[0], *space.latent)
    return LatentNoise(push, pull, squared(a), latent, key, label, drawn=True, between=between)


def row_variances(gaussian: Gaussian, a: Tensor, layout: Layout) -> Tensor:
    """Σ_a a_tᵀ Σ_w,ii a_t, (batch, g, m, T)."""
    if isinstance(gaussian, Kronecker):
        scale = torch.einsum("pbgit,ij,pbgjt->bgt", a, gaussian.inputs, a)
        return gaussian.outputs.diagonal().reshape(a.shape[2], -1, 1) * scale.unsqueeze(2)
    if isinstance(gaussian, Rotated):
        seen = torch.einsum("pbgit,il->pbglt", a, gaussian.inputs).square().sum(0)
        spread = (gaussian.outputs.square() @ gaussian.diag).reshape(a.shape[2], -1, gaussian.diag.shape[1])
        return torch.einsum("gml,bglt->bgmt", spread, seen)
    if isinstance(gaussian, Full):
        count = gaussian.matrix.shape[0]
        entries = layout.blocks(torch.arange(count, device=a.device).reshape(gaussian.shape))  # (g, m, n)
        blocks = gaussian.matrix[entries.unsqueeze(-1), entries.unsqueeze(-2)]  # (g, m, n, n)
        return torch.einsum("gmij,pbgit,pbgjt->bgmt", blocks, a, a)
    independent = gaussian.diag if isinstance(gaussian, Rows) else gaussian.variance()
    total = torch.einsum("gmn,bgnt->bgmt", layout.blocks(independent), a.square().sum(0))
    if isinstance(gaussian, Rows):
        seen = torch.einsum("rgmn,pbgnt->rpbgmt", layout.blocks(gaussian.factor), a)
        total = total + seen.square().sum((0, 1))
    return total
