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

from favour.methods.cost import sweep_and_columns, uncertain_sizes
from favour.methods.forward import Representation, Sweep, beliefs, forward, pushed_blocks
from favour.methods.method import Bound, Method, register
from favour.passes.plan.steps import Plan, Step
from favour.surrogate import DiagonalNoise, Surrogate, diagonal_columns
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
        columns = diagonal_columns(value.diag.clamp_min(0).sqrt())
        value.replace(None, {**value.blocks, self._name(): columns})


def _plus(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total + part
