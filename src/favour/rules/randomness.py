"""Draws that are no dropout: a model's own noise, as a source with known moments.

Each operation draws anew for every entry of its argument, with that entry as its mean,

    bernoulli   y ~ Bernoulli(x)          Var[y | x] = x(1 − x)    κ₃ = x(1 − x)(1 − 2x),  κ₄ = x(1 − x)(1 − 6x(1 − x))
    normal      y = x + z, z ~ N(0, 1)    Var[y | x] = 1
    uniform     y = x + u, |u| < 1/2      Var[y | x] = 1/12        κ₃ = 0,  κ₄ = −1/120

so that for uncertain x, by the law of total variance, all exact,

    m = E[x],   G = I,   N = E[Var[y | x]],   which is m(1 − m) − v for a Bernoulli draw.

What a model does with its draws, masks, scales that are themselves computed, sums, is code like any other and has its
own rules; `favour.passes.normalise.randomness` brings the ways to write a draw to these three.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.graph.traits import Argument, Draw, Traits
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, Surrogate, identity, partners
from favour.surrogate.value import Context, Value, mean_of

_LIBRARY = torch.library.Library("favour", "FRAGMENT")
UNIFORM_VARIANCE = 1 / 12


def _check_switch(strength: Argument, where: str) -> None:
    if not isinstance(strength, (int, float)) or strength not in (0, 1):
        raise InvalidValue(
            f"the draw at {where} is a noise of the model's own making, not a dropout: it has no rate. Give 0 to "
            f"leave it out, or nothing; got {strength}."
        )


def _below(x: Tensor, uniform: Tensor, strength: Argument) -> Tensor:
    return (uniform < x).to(x.dtype)


def _added(x: Tensor, draw: Tensor, strength: Argument) -> Tensor:
    return x + draw


BERNOULLI = Draw(sample=lambda random, shape, p, dtype: random.uniform(shape, dtype), apply=_below, check=_check_switch)
NORMAL = Draw(sample=lambda random, shape, p, dtype: random.normal(shape, dtype), apply=_added, check=_check_switch)
UNIFORM = Draw(
    sample=lambda random, shape, p, dtype: random.uniform(shape, dtype) - 0.5, apply=_added, check=_check_switch
)


def _bernoulli(x: Tensor, strength: float = 1.0, live: bool = True) -> Tensor:
    return _below(x, torch.rand_like(x), strength) if live else x.clone()


def _normal(x: Tensor, strength: float = 1.0, live: bool = True) -> Tensor:
    return x + torch.randn_like(x) if live else x.clone()


def _uniform(x: Tensor, strength: float = 1.0, live: bool = True) -> Tensor:
    return x + torch.rand_like(x) - 0.5 if live else x.clone()


def _fake(x: Tensor, strength: float = 1.0, live: bool = True) -> Tensor:
    return torch.empty_like(x)


for _name, _function in (("bernoulli", _bernoulli), ("normal", _normal), ("uniform", _uniform)):
    _LIBRARY.define(
        f"{_name}(Tensor x, float strength=1.0, bool live=True) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
    )
    _LIBRARY.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"favour::{_name}", _fake, lib=_LIBRARY)

bernoulli_draw = torch.ops.favour.bernoulli.default
normal_draw = torch.ops.favour.normal.default
uniform_draw = torch.ops.favour.uniform.default


def _surrogate(x: Argument, noise: DiagonalNoise, live: bool) -> Surrogate:
    return Surrogate(mean_of(x), [(x, identity())] if isinstance(x, Value) else [], [noise] if live else [])


@rule(bernoulli_draw, exactness="exact", family="draw", traits=Traits(draws=BERNOULLI, elementwise=True))
def bernoulli(ctx: Context, x: Argument, strength: float = 1.0, live: bool = True) -> Surrogate:
    p = mean_of(x)
    spread = p * (1 - p)

    def between(c: Tensor | None, q: int) -> DiagonalNoise:
        """For one uniform number below both probabilities: min(p_a, p_b) − p_a p_b."""
        other = partners(p, q)
        return DiagonalNoise((torch.minimum(p, other) - p * other).flatten(0, 1))

    noise = DiagonalNoise((spread - x.variance).clamp_min(0) if isinstance(x, Value) else spread, _label(ctx))
    if not isinstance(x, Value):
        noise.between = between
        noise.skew = lambda: 0.5 - p
        noise.cumulants = lambda: (spread * (1 - 2 * p), spread * (1 - 6 * spread))
    return _surrogate(x, noise, live)


@rule(normal_draw, exactness="exact", family="draw", traits=Traits(draws=NORMAL, elementwise=True))
def normal(ctx: Context, x: Argument, strength: float = 1.0, live: bool = True) -> Surrogate:
    return _surrogate(x, _same_for_all(ctx, mean_of(x), 1.0), live)


@rule(uniform_draw, exactness="exact", family="draw", traits=Traits(draws=UNIFORM, elementwise=True))
def uniform(ctx: Context, x: Argument, strength: float = 1.0, live: bool = True) -> Surrogate:
    mean = mean_of(x)
    noise = _same_for_all(ctx, mean, UNIFORM_VARIANCE)
    noise.cumulants = lambda: (torch.zeros_like(mean), torch.full_like(mean, -1 / 120))
    return _surrogate(x, noise, live)


def _same_for_all(ctx: Context, mean: Tensor, variance: float) -> DiagonalNoise:
    def between(c: Tensor | None, q: int) -> DiagonalNoise:
        return DiagonalNoise(torch.full_like(partners(mean, q), variance).flatten(0, 1))

    return DiagonalNoise(torch.full_like(mean, variance), _label(ctx), between=between)


def _label(ctx: Context) -> str:
    return ctx.module or "noise"
