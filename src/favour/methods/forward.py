"""Forward sweeps: from surrogates to beliefs, one step at a time.

A *representation* decides how much of the covariance a value carries: nothing but variances (`DiagonalOnly`), every
noise as explicit columns (`favour.methods.full`), a diagonal plus a few columns compressed by Algorithm 1
(`favour.methods.dplr`), or nothing at all (`favour.methods.linearised`). The sweep itself only walks the plan and hands
each surrogate to the representation.
"""

from __future__ import annotations

import itertools
import operator
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from favour.belief.covariance import Dense
from favour.graph.interpreter import arguments, interpret
from favour.graph.node import Node, replace_nodes
from favour.methods.method import Bound, belief_of
from favour.passes.normalise.derived import DerivedNode
from favour.passes.normalise.fusion import FusedNode, fused_surrogate
from favour.passes.plan.steps import Step
from favour.rules.derived import derived_weight
from favour.surrogate import (
    Carried,
    LinearMap,
    Noise,
    Residual,
    Surrogate,
    Unavailable,
)
from favour.surrogate.carried import find
from favour.surrogate.siblings import Siblings, meeting
from favour.surrogate.tokens import shared_variance
from favour.surrogate.value import Context, Value, Weight

Blocks = dict[Hashable, Tensor]


class Representation(ABC):
    """How values hold their covariance."""

    @abstractmethod
    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        """The value an operation results in; what could not be carried is noted in the sweep."""

    def source(self, value: Value) -> Value:
        """Take in an uncertain input of the network."""
        return value


@dataclass
class Entry:
    """A line of the tape that the reverse sweep reads: a result, its surrogate, and where it came from."""

    value: Value
    surrogate: Surrogate
    step: Step

    @property
    def curved(self) -> bool:
        """Whether the result is no linear function of what is uncertain."""
        more = len(self.surrogate.maps) > 1 or bool(self.surrogate.noises)
        return more and (self.step.rule is None or self.step.rule.exactness != "exact")


@dataclass
class Sweep:
    """What a forward sweep leaves behind.

    Attributes:
        values: Of the outputs, and of what was to be kept.
        tape: Surrogates and results, in order.
        notes: What methods could not do, by the name of the step.
    """

    values: dict[Node, Any]
    tape: list[Entry] = field(default_factory=list)
    notes: dict[str, list[str]] = field(default_factory=dict)

    def result(self, output: Any) -> Any:
        """What was found for an output of the plan."""
        return self.values[output] if isinstance(output, Node) else output

    def note(self, step: Step, text: str) -> None:
        """Something that a method wanted and an operation could not tell, for `Predictor.explain` in eager code."""
        if torch.compiler.is_compiling():
            return
        known = self.notes.setdefault(step.node.name, [])
        if text not in known:
            known.append(text)


def forward(bound: Bound, representation: Representation, *, keep_tape: bool = False) -> Sweep:
    """Execute a plan.

    Args:
        bound: The call; its uncertain inputs are taken in by the representation.
        representation: How covariances are held.
        ctx: Settings for the rules.
        keep_tape: Record surrogates for a reverse sweep (and keep what they refer to alive).
    """
    for _, value in bound.sources:
        taken = representation.source(value)
        value.replace(taken.diag, taken.blocks)
    sweep = Sweep(bound.values)
    keep_tape = keep_tape or bound.watched
    bound.sweep = sweep if bound.watched else None
    steps = {step.node: step for step in bound.plan.steps}

    def handle(node: Node, values: Mapping[Node, Any]) -> Any:
        step = steps[node]
        if not step.uncertain:
            return evaluate(node, values)
        here = bound.ctx.at(node.name, node.module, node.place)
        if isinstance(node, DerivedNode):
            return weight_of(step, values, here)
        made = surrogate_of(step, values, here)
        if bound.posterior.names:
            note_readings(node, made, sweep.values)
        results = []
        for surrogate in made if isinstance(made, list) else [made]:
            value = representation.absorb(surrogate, step, sweep)
            value.name = node.name
            results.append(value)
            if keep_tape:
                sweep.tape.append(Entry(value, surrogate, step))
        return results if isinstance(made, list) else results[0]

    done, kept = bound.plan.done, bound.kept
    done = {n: [r for r in read if r.name not in kept] for n, read in done.items()} if kept else done
    interpret(steps, bound.values, handle, done)
    if bound.kept:
        bound.kept.update((node.name, value) for node, value in sweep.values.items() if node.name in bound.kept)
    return sweep


def beliefs(bound: Bound, sweep: Sweep, dense: Mapping[str, Tensor] | None = None) -> list[Any]:
    """One belief per output, from what a sweep left there; `dense` has whole matrices by the name of the node."""
    results = []
    for output in bound.plan.outputs:
        value = sweep.result(output)
        matrix = dense.get(value.name) if dense and isinstance(value, Value) else None
        results.append(belief_of(value, None if matrix is None else Dense(matrix, value.mean.shape[1:])))
    return results


def surrogate_of(step: Step, values: Mapping[Node, Any], ctx: Context) -> Surrogate | list[Surrogate]:
    """What the rule of an uncertain step makes of its arguments; a list where the operation has several results."""
    node = step.node
    if isinstance(node, FusedNode):
        assert node.root is not None
        known = {n: values[n] for n in node.args[1:]}
        return fused_surrogate(ctx, node, values[node.root], known)
    assert step.rule is not None
    args, kwargs = arguments(node, values)
    return step.rule.function(ctx, *args, **kwargs)


def weight_of(step: Step, values: Mapping[Node, Any], ctx: Context) -> Weight:
    """The weight that a call makes of parameters."""
    assert step.rule is not None
    args, kwargs = arguments(step.node, values)
    return derived_weight(ctx, step.rule.function, args, kwargs, uses=step.uses, mixed=step.mixed)


def note_readings(node: Node, made: Surrogate | list[Surrogate], values: dict[Node, Any]) -> None:
    """Hand what an operation noted of the parameters it read to those who read them next."""
    for surrogate in made if isinstance(made, list) else [made]:
        for source in node.inputs if surrogate.readings else ():
            if isinstance(values[source], Weight):
                values[source] = values[source].read(surrogate.readings)


def evaluate(node: Node, values: Mapping[Node, Any]) -> Any:
    """Run one operation as the model wrote it; a shape query of an uncertain tensor looks at its mean."""

    def plain(n: Node) -> Any:
        value = values[n]
        return value.mean if isinstance(value, Value) else value

    if node.target is operator.getitem:  # one of several results, uncertain or not
        return values[node.args[0]][node.args[1]]
    return node.target(*replace_nodes(node.args, plain), **replace_nodes(node.kwargs, plain))


def pushed_blocks(surrogate: Surrogate, maps: list[tuple[Value, LinearMap]]) -> Blocks:
    """G applied to every named block, blocks of one name added up over the arguments; plus the keyed draws."""
    blocks: Blocks = {}

    def add(name: Hashable, columns: Tensor) -> None:
        blocks[name] = blocks[name] + columns if name in blocks else columns

    for x, G in maps:
        if x.factor is not None:
            sizes = [block.shape[0] for block in x.blocks.values()]
            for name, columns in zip(x.blocks, G.apply(x.factor).split(sizes), strict=True):
                add(name, columns)
    for noise in surrogate.noises:
        if noise.key is not None:
            add(noise.key, noise.columns())
    return blocks


def unexplained(noises: list[Noise], counted: Tensor | None = None) -> list[Noise]:
    """Noises without what secants explain of them, and what is `counted` elsewhere."""
    return [noise.less(counted) if isinstance(noise, Residual) else noise for noise in noises]


class DiagonalOnly(Representation):
    """Variances only, and what else is wanted; all other correlation is forgotten.

    Args:
        kinds: Kinds of knowledge to carry along (`favour.surrogate.carried`).
    """

    def __init__(self, *kinds: type[Carried]) -> None:
        self.kinds = kinds

    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        carried = []
        for kind in self.kinds:
            successor = find(surrogate.carried, kind) or kind.after(surrogate)
            if isinstance(successor, Unavailable):
                sweep.note(step, f"{kind.title} end here: {successor.reason}")
            elif successor is not None:
                carried.append(successor)
        value = Value(surrogate.mean, self._variance(surrogate, step, sweep), carried=tuple(carried))
        if Siblings in self.kinds and (step.forked or surrogate.noises):
            Siblings.origin(value)
        return value

    def source(self, value: Value) -> Value:
        return Value(value.mean, value.variance)

    def _variance(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Tensor:
        """Marginal variances, as if arguments were independent but for what siblings tell of them."""
        if surrogate.variance is not None:
            return surrogate.variance
        parts = [x.through(G) for x, G in surrogate.maps] + [noise.diag() for noise in surrogate.noises]
        total = sum(parts[1:], parts[0]) if parts else torch.zeros_like(surrogate.mean)
        if Siblings not in self.kinds:
            return total
        for (x, G), (y, H) in itertools.combinations(surrogate.maps, 2):
            shared = meeting(x, y, G, H)
            if isinstance(shared, Unavailable):
                sweep.note(step, f"covariance of its arguments: {shared.reason}")
            elif shared is not None:
                total = (total + 2 * shared_variance(*shared, (x, G), (y, H))).clamp_min(0)
        return total
