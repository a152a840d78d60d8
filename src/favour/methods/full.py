"""Every dimension of every noise as a column of its own, never compressed: the reference of the tests.

    Σ = Σ_k u_k u_kᵀ,    u_k ↦ G u_k through every map

Exact algebra for given surrogates, at the price of as many columns as the network has noisy entries. A diagonal noise
is held as a diagonal until a map would mix it or a fork would share it.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from favour.errors import InsufficientMemory
from favour.graph.tracing import traced
from favour.methods.cost import sweep_and_columns, uncertain_sizes
from favour.methods.forward import Representation, Sweep, beliefs, forward, pushed_blocks
from favour.methods.memory import free_memory
from favour.methods.method import Bound, Method, register
from favour.passes.plan.steps import Plan, Step
from favour.surrogate import DiagonalNoise, Surrogate, diagonal_columns, root
from favour.surrogate.value import Value


@register
@dataclass(frozen=True, eq=False, repr=False)
class Full(Method):
    """Nothing is forgotten. Thousands of columns: for small networks, and to hold other methods against."""

    name = "full"

    def run(self, bound: Bound) -> list[Any]:
        return beliefs(bound, forward(bound, Explicit()))

    def held(self) -> str:
        return "A forward sweep holds every draw as a column of its own and forgets nothing."

    def cost(self, plan: Plan) -> float:
        return sweep_and_columns(plan, sum(uncertain_sizes(plan)), 0)

    def memory(self, plan: Plan) -> int:
        sizes = uncertain_sizes(plan)
        return 2 * sum(sizes) * max(sizes)


class Explicit(Representation):
    """Columns for everything, under names of their own."""

    def __init__(self) -> None:
        self.count = 0

    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        mixed = [x for x, G in surrogate.maps if not G.one_per_column or len(surrogate.maps) > 1]
        check_room(surrogate, mixed, step)
        for x in mixed:
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

    def source(self, value: Value) -> Value:
        self._expand(value)
        return value

    def _name(self) -> Hashable:
        self.count += 1
        return ("noise", self.count)

    def _expand(self, value: Value) -> None:
        """Turn the diagonal into columns."""
        if value.diag is None:
            return
        columns = diagonal_columns(root(value.diag))
        value.replace(None, {**value.blocks, self._name(): columns})


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part


def check_room(surrogate: Surrogate, mixed: list[Value], step: Step) -> None:
    """Raise before columns are made that memory has no room for: a system out of memory ends the process.

    Args:
        surrogate: What is about to be taken in.
        mixed: Arguments whose diagonals become columns.
        step: Where.
    """
    if traced():
        return
    known = {id(x): x for x, _ in surrogate.maps}.values()
    before = {id(x): 0 if x.factor is None else x.factor.shape[0] for x in known}
    before |= {id(x): before[id(x)] + entries_of(x.mean) for x in mixed if x.diag is not None}
    dense = [noise for noise in surrogate.noises if noise.key is not None or not isinstance(noise, DiagonalNoise)]
    count = sum(before.values()) + len(dense) * entries_of(surrogate.mean)
    numbers = count * surrogate.mean.numel() + sum(before[id(x)] * x.mean.numel() for x in known)
    needed, free = 2 * numbers * surrogate.mean.element_size(), free_memory(surrogate.mean.device)
    if needed > free:
        raise InsufficientMemory(
            f"method='full' would hold {count:,} columns of {entries_of(surrogate.mean):,} entries at "
            f"`{step.node.target}` at {step.node.place}: for {len(surrogate.mean)} inputs {needed / 2**30:.2f} GiB, "
            f"where {free / 2**30:.2f} are free. method='adjoint' has the same covariance without columns; fewer "
            "inputs at a time take less (`memory=` in bytes does that)."
        )


def entries_of(mean: Tensor) -> int:
    """How many numbers a tensor has for each input."""
    return mean[:1].numel()
