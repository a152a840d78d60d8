"""Weights computed from weights, W′ = f(W, …): `favour.passes.normalise.derived` finds them.

The call's own rule gives W′ ≈ m + Σ_i G_i (W_i − W̄_i) + n for a batch of one. With W_i = W̄_i + R_i z_i the posterior
of W′ is a sum of independent parts: images G_i R_i z_i, one for each parameter that went in, on whatever way, and n. A
part keeps its parameter's z, so that a layer tied to another by `w.T` meets the same draws.

Exact for linear f (transposes, reshapes, sums, factors); else as exact as the rule, in mean and variances, with
correlations to first order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument
from favour.posterior import Diagonal, Gaussian, Image
from favour.posterior.gaussians import Rooted
from favour.surrogate import DiagonalNoise, LinearMap, Noise, Surrogate
from favour.surrogate.value import Context, Value, Weight

Act = Callable[[Tensor], Tensor]


@dataclass
class _Way:
    """A parameter's draws on their way into W′, over all paths."""

    part: Weight
    acts: list[Act]
    backs: list[Act]
    maps: list[LinearMap]


def derived_weight(
    ctx: Context, function: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any], *, uses: int, mixed: bool
) -> Weight:
    """The weight that a call makes.

    Args:
        ctx: For the rule.
        function: The rule.
        args, kwargs: As the rule gets them, weights in the place of uncertain tensors.
        uses, mixed: See `Weight`.
    """
    values: dict[int, Value] = {}
    weights: dict[int, Weight] = {}

    def value(a: Argument) -> Any:
        if not isinstance(a, Weight):
            return a
        if id(a) not in values:
            values[id(a)] = made = Value(a.mean.unsqueeze(0), a.variance().unsqueeze(0))
            weights[id(made)] = a
        return values[id(a)]

    made = function(ctx, *[value(a) for a in args], **kwargs)
    if not isinstance(made, Surrogate):
        raise UnsupportedOperation(f"the weight made at {ctx.place} is one of several results, which has no rule.")
    shape = made.mean.shape[1:]
    ways: dict[str, _Way] = {}
    latents: Tensor | None = None
    for x, G in made.maps:
        weight = weights[id(x)]
        act, back = _folded(G.apply, weight.shape, shape), _folded(G.transpose, shape, weight.shape)
        for part in weight.draws:
            way = ways.setdefault(part.name, _Way(part, [], [], []))
            way.acts.append(act)
            way.backs.append(back)
            way.maps.append(G)
        if weight.latents is not None:
            columns = act(weight.latents)
            latents = columns if latents is None else latents + columns
    parts = [_image(way, shape) for way in ways.values()]
    for i, noise in enumerate(made.noises):
        parts.append(Weight(f"{ctx.step} {i}", made.mean[0], _own(noise, shape), uses=uses, mixed=mixed))
    return Weight(ctx.step, made.mean[0], latents=latents, uses=uses, mixed=mixed, parts=tuple(parts))


def _folded(act: Act, inner: torch.Size, outer: torch.Size) -> Act:
    """(…, *inner) to (…, *outer), for a map with the fold axis and a batch of one."""

    def acted(w: Tensor) -> Tensor:
        lead = w.shape[: w.ndim - len(inner)]
        return act(w.reshape(-1, 1, *inner)).expand(-1, 1, *outer).reshape(*lead, *outer)

    return acted


def _image(way: _Way, shape: torch.Size) -> Weight:
    part = way.part
    assert part.gaussian is not None
    if len(way.acts) == 1:
        (act,), (back,), (G,) = way.acts, way.backs, way.maps
        marginal: Gaussian | None = None
        if part.gaussian.independent and G.one_per_column:  # no two entries of the image share one of the parameter
            marginal = Diagonal(G.square(part.gaussian.variance().unsqueeze(0)).squeeze(0).expand(shape))
        return replace(part, gaussian=Image(part.gaussian, act, back, tuple(shape), marginal))
    return replace(part, gaussian=Image(part.gaussian, _sum(way.acts), _sum(way.backs), tuple(shape)))


def _sum(acts: list[Act]) -> Act:
    def acted(w: Tensor) -> Tensor:
        made = [act(w) for act in acts]
        return sum(made[1:], made[0])

    return acted


def _own(noise: Noise, shape: torch.Size) -> Gaussian:
    """What the call itself draws, or leaves over."""
    if isinstance(noise, DiagonalNoise):
        return Diagonal(noise.variance.expand(1, *shape)[0].clamp_min(0))
    return Rooted(noise.columns()[:, 0].flatten(1).mT, tuple(shape))
