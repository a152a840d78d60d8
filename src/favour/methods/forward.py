"""Forward sweeps: from surrogates to beliefs, one step at a time.

A *representation* decides how much of the covariance a value carries: nothing but variances (`DiagonalOnly`), every
noise as explicit columns (`Explicit`), or a diagonal plus a few columns compressed by Algorithm 1 (`Compressed`). The
sweep itself only walks the plan and hands each surrogate to the representation.
"""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from favour.graph.interpreter import arguments, interpret
from favour.graph.node import Node, replace_nodes
from favour.passes.normalise.fusion import FusedNode, fused_surrogate
from favour.passes.plan.steps import Plan, Step
from favour.surrogate import (
    Carried,
    DiagonalNoise,
    LinearMap,
    Noise,
    Residual,
    Surrogate,
    Unavailable,
    diagonal_columns,
)
from favour.surrogate.carried import find
from favour.surrogate.value import Context, Value

Blocks = dict[Hashable, Tensor]


class Representation(ABC):
    """How values hold their covariance."""

    @abstractmethod
    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        """The value an operation results in; what could not be carried is noted in the sweep."""

    def source(self, value: Value, step_name: str, forked: bool) -> Value:
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

    def note(self, step: Step, text: str) -> None:
        """Something that a method wanted and an operation could not tell; `Predictor.explain` shows it."""
        known = self.notes.setdefault(step.node.name, [])
        if text not in known:
            known.append(text)


def run(
    plan: Plan,
    values: dict[Node, Any],
    representation: Representation,
    ctx: Context,
    *,
    keep_tape: bool = False,
    keep: Collection[str] = (),
) -> Sweep:
    """Execute a plan.

    Args:
        plan: The steps.
        values: Inputs, parameters and constants by node; uncertain inputs as `Value`, parameters with a posterior as
            `Weight`.
        representation: How covariances are held.
        ctx: Settings and scratch space for the rules.
        keep_tape: Record surrogates for a reverse sweep (and keep what they refer to alive).
        keep: Names of nodes whose values are wanted at the end, and stay; others go once nobody reads them.
    """
    sweep = Sweep(values)
    steps = {step.node: step for step in plan.steps}

    def handle(node: Node, values: Mapping[Node, Any]) -> Any:
        step = steps[node]
        if not step.uncertain:
            return evaluate(node, values)
        made = surrogate_of(step, values, ctx.at(node.name, node.module, node.place))
        results = []
        for surrogate in made if isinstance(made, list) else [made]:
            value = representation.absorb(surrogate, step, sweep)
            value.name = node.name
            results.append(value)
            if keep_tape:
                sweep.tape.append(Entry(value, surrogate, step))
        return results if isinstance(made, list) else results[0]

    done = {n: [r for r in read if r.name not in keep] for n, read in plan.done.items()} if keep else plan.done
    interpret(steps, values, handle, done)
    return sweep


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
            told = find(surrogate.carried, kind) or kind.after(surrogate)
            if isinstance(told, Unavailable):
                sweep.note(step, f"{kind.title} end here: {told.reason}")
            elif told is not None:
                carried.append(told)
        return Value(surrogate.mean, _variance(surrogate), carried=tuple(carried))

    def source(self, value: Value, step_name: str, forked: bool) -> Value:
        return Value(value.mean, value.variance)


def _variance(surrogate: Surrogate) -> Tensor:
    """Marginal variances, as if arguments were independent."""
    if surrogate.variance is not None:
        return surrogate.variance
    parts = [x.through(G) for x, G in surrogate.maps] + [noise.diag() for noise in surrogate.noises]
    return sum(parts[1:], parts[0]) if parts else torch.zeros_like(surrogate.mean)


class Explicit(Representation):
    """Every dimension of every noise is a column of its own. Exact algebra, thousands of columns: the reference.

    A diagonal noise is held as a diagonal until a map would mix it or a fork would share it.
    """

    def __init__(self) -> None:
        self.count = 0

    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        for x, G in surrogate.maps:
            if not G.one_per_column or len(surrogate.maps) > 1:
                self._expand(x)
        blocks = pushed_blocks(surrogate, surrogate.maps)
        diag: Tensor | None = None
        for x, G in surrogate.maps:
            if x.diag is not None:
                diag = _plus(diag, G.square(x.diag))
        for noise in surrogate.noises:
            if isinstance(noise, DiagonalNoise):
                diag = _plus(diag, noise.variance)
            elif noise.key is None:
                blocks[self._name()] = noise.columns()
        value = Value(surrogate.mean, diag, blocks)
        if step.forked or step.output:
            self._expand(value)
        return value

    def source(self, value: Value, step_name: str, forked: bool) -> Value:
        self._expand(value)
        return value

    def _name(self) -> Hashable:
        self.count += 1
        return ("noise", self.count)

    def _expand(self, value: Value) -> None:
        """Turn the diagonal into columns."""
        if value.diag is None:
            return
        columns = diagonal_columns(value.diag.clamp_min(0).sqrt())
        value.replace(None, {**value.blocks, self._name(): columns})


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


__all__ = [
    "DiagonalOnly",
    "Entry",
    "Explicit",
    "Noise",
    "Representation",
    "Sweep",
    "evaluate",
    "pushed_blocks",
    "run",
    "surrogate_of",
]
