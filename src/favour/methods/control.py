"""The linear part of a belief as a control variate of the network's own draws.

A draw z of the network realises a noise n_s(z) at every source s. With A_s the covectors of the reverse sweep at s,

    ℓ(z) = Σ_s A_s n_s(z),      E ℓ = 0,      Cov ℓ = Σ_s A_s C_s A_sᵀ,

exactly, however wrong the A_s may be, if n_s depends on the draw alone, has mean zero, and its covariance C_s is known.
So noises are taken where the forward sweep has the mean μ of an operation's arguments, not where the draw has them:

| source s                        | n_s(z)               | C_s                                                   |
|---------------------------------|----------------------|-------------------------------------------------------|
| dropout y = D(x, z)             | D(μ, z) − E D(μ, z)  | as its rule says of a certain argument: diag(μ² p/q)   |
| parameters W, y = f(x, W)       | f(μ, W(z)) − f(μ, W̄) | the same, f being linear in W: J_w Σ_w J_wᵀ            |
| an input that is a belief       | x(z) − x̄             | its covariance                                        |

One draw that is read several times has one z and so is one source: noises with a key add their covectors, as in the
reverse sweep. Where the covectors know curvatures (secants), A_s is the slope of the best line through a skewed noise.

Left out, and named in `missing`, is what cannot be written so: dropout that was joined with a maximum behind it,
and weights that code computes from parameters. ℓ then correlates less with the network; all above stays true. (Masks
are drawn at rates rounded to 2⁻¹⁶, so that C_s is known to about 10⁻⁴ of itself.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from favour.graph.interpreter import arguments
from favour.graph.node import Node, replace_nodes
from favour.methods.adjoint import Adjoint
from favour.methods.forward import Entry, Sweep, note_readings
from favour.methods.linearised import Linearised
from favour.methods.method import Bound, Method
from favour.methods.reverse import all_outputs, reverse, total
from favour.methods.sampling import Sampler
from favour.passes.normalise.derived import DerivedNode
from favour.passes.plan.steps import Step
from favour.rules.parameter import drawn as drawn_parameter
from favour.rules.parameter import for_each
from favour.surrogate import DiagonalNoise, Noise, Surrogate, inner
from favour.surrogate.noise import ImageNoise
from favour.surrogate.value import Value, Weight, mean_of

Drawn = Mapping[str, Tensor]  # by the names of the captured graph, (n, …)


@dataclass(eq=False)
class _Source:
    """One operation that draws: its realised noise, and the covectors there."""

    names: tuple[str, ...]
    realised: Callable[[Drawn], Tensor]  # (n, batch, *event)
    value: Value
    covectors: Tensor | None = None


@dataclass(eq=False)
class Control:
    """ℓ, of one output.

    Attributes:
        mean: The belief's, (batch, *event).
        covariance: Cov ℓ, (batch, n, n).
        missing: Names of draws that ℓ does not follow.
    """

    mean: Tensor
    covariance: Tensor
    missing: tuple[str, ...]
    sources: list[_Source]

    def at(self, drawn: Drawn) -> Tensor:
        """ℓ(z) for draws (count, …) by name, (count, batch, n)."""
        count = len(next(iter(drawn.values())))
        batch, n = self.covariance.shape[:2]
        result = self.covariance.new_zeros(batch, count, n)
        for source in self.sources:
            if source.covectors is not None:
                result = result + inner(source.realised(drawn), source.covectors)
        return result.transpose(0, 1)


def control_of(method: Method, bound: Bound, output: int) -> tuple[Control, dict[str, Any]]:
    """The control variate for one output of a call.

    Args:
        method: Of whose kind the sweeps are; all but the linearised network's take those of `Adjoint`.
        bound: The call, which is used up.
        output: Which of the plan's.

    Returns:
        The control variate, and the values of the graph's leaves by name, to sample with.
    """
    weights = {node: value for node, value in bound.values.items() if isinstance(value, Weight)}
    known = {node.name: node for node in bound.graph.nodes}
    steps = [step for step in bound.plan.steps if step.uncertain and step.rule is not None and _draws(step, weights)]
    origins = [step.node.origin for step in steps if step.node.draw is not None]
    bound.ctx = replace(bound.ctx, short=None, tf32=False)  # ℓ and Cov ℓ are to belong together
    bound.kept = {node.name: None for step in steps for node in step.node.inputs}
    sweep, inputs = _sweeps(method, bound).swept(bound)
    leaves = bound.leaves | {name: exact for name, exact, _ in inputs}
    value = sweep.result(bound.plan.outputs[output])
    if not isinstance(value, Value):
        zeros = torch.zeros_like(value).flatten(1) if value.ndim > 1 else torch.zeros_like(value).unsqueeze(1)
        return Control(value, zeros.diag_embed(), (), []), leaves

    tape = {entry.step: entry for entry in sweep.tape}
    noises: dict[Step, list[Noise]] = {}
    sources: list[_Source] = []
    env: dict[Node, Any] = dict(weights)
    for step in steps:
        env |= {n: bound.kept[n.name] for n in step.node.inputs if n not in weights}
        made = _at_means(step, env, bound)
        entry = tape.get(step)
        if made is None or entry is None:
            continue
        note_readings(step.node, made, env)
        single = origins.count(step.node.origin) == 1 and step.node.origin in known
        source = _dropped(step, env, made, entry) if step.node.draw is not None else _read(step, env, entry)
        if source is None or (step.node.draw is not None and not single):
            continue
        noises[step] = made.noises
        sources.append(source)
    for name, exact, seen in inputs:
        sources.append(_Source((name,), partial(_given, name, exact.mean), seen))

    basis = all_outputs(value.mean)
    lines = [Entry(e.value, _with(e.surrogate, noises.get(e.step, [])), e.step) for e in sweep.tape]
    met: dict[int, Any] = {id(source.value): None for source in sources}
    secant = bound.ctx.activation == "price"
    grams = reverse(Sweep(sweep.values, lines), value, basis, inputs, secant=secant, met=met)
    by_value = {id(line.value): line.surrogate.noises for line in lines}
    for source in sources:
        if met[id(source.value)] is not None:
            source.covectors = _bent(met[id(source.value)], by_value.get(id(source.value), []))
    followed = {name for source in sources for name in source.names}
    sampler = Sampler(bound.graph, bound.posterior.names, [name for name, _, _ in inputs])
    missing = [n for n in (*sampler.dropouts, *sampler.leaves) if n.name not in followed]
    named = dict.fromkeys(n.module or n.name if n.kind == "call" else str(n.target) for n in missing)
    return Control(value.mean, total(grams, value.mean, len(basis)), tuple(named), sources), leaves


def _sweeps(method: Method, bound: Bound) -> Adjoint | Linearised:
    if isinstance(method, Linearised):
        return Linearised()
    price = bound.ctx.activation == "price"
    if isinstance(method, Adjoint):
        return replace(method, directions=None, shift=False, pairs=0, secant=price)
    return Adjoint(secant=price)


def _draws(step: Step, weights: Mapping[Node, Weight]) -> bool:
    if isinstance(step.node, DerivedNode):
        return False
    return step.node.draw is not None or any(node in weights for node in step.node.inputs)


def _at_means(step: Step, env: Mapping[Node, Any], bound: Bound) -> Surrogate | None:
    """What the rule says where only the step's own draws vary."""
    assert step.rule is not None
    points: dict[Node, Any] = {n: v.mean if isinstance(v, Value) else v for n, v in env.items()}
    if any(isinstance(points[n], Weight) and points[n].parts for n in step.node.inputs):
        return None
    args, kwargs = arguments(step.node, points)
    made = step.rule.function(bound.ctx.at(step.node.name, step.node.module, step.node.place), *args, **kwargs)
    return made if isinstance(made, Surrogate) else None


def _given(name: str, mean: Tensor, drawn: Drawn) -> Tensor:
    return drawn[name] - mean


def _dropped(step: Step, env: Mapping[Node, Any], made: Surrogate, entry: Entry) -> _Source | None:
    draw, name = step.node.draw, step.node.origin
    x, p = mean_of(env[step.node.args[0]]), replace_nodes(step.node.rate, env.__getitem__)
    assert draw is not None

    def realised(drawn: Drawn) -> Tensor:
        return torch.func.vmap(lambda mask: draw.apply(x, mask, p))(drawn[name]) - made.mean

    return _Source((name,), realised, entry.value)


def _read(step: Step, env: Mapping[Node, Any], entry: Entry) -> _Source | None:
    """An operation on parameters that are drawn."""
    read = [n for n in dict.fromkeys(step.node.inputs) if isinstance(env[n], Weight)]
    points = {n: mean_of(env[n]) for n in step.node.inputs}
    function = for_each if step.node.target is drawn_parameter else step.node.target  # which torch.vmap knows

    def at(drawn: list[Tensor]) -> Tensor:
        args, kwargs = arguments(step.node, points | dict(zip(read, drawn, strict=True)))
        return function(*args, **kwargs)

    mean = at([points[n] for n in read])
    return _Source(
        tuple(n.name for n in read),
        lambda drawn: torch.func.vmap(at)([drawn[n.name] for n in read]) - mean,
        entry.value,
    )


def _with(surrogate: Surrogate, noises: list[Noise]) -> Surrogate:
    """The same maps with other noises. Tangents where one draw touches many entries, as `_bent` takes them."""
    for noise in noises:
        if isinstance(noise, ImageNoise):
            noise.drawn_cumulants = None
    return Surrogate(surrogate.mean, surrogate.maps, noises, surrogate.second)


def _bent(met: tuple[Tensor, Tensor | None], noises: list[Noise]) -> Tensor:
    """Covectors with their curvatures, as the Gram matrix is taken of."""
    g, c = met
    if c is not None and len(noises) == 1 and isinstance(noises[0], DiagonalNoise):
        return noises[0].bent(g, c)
    return g
