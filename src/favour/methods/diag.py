"""Variances only: what earlier work does, and a baseline.

    v_y = (G ∘ G)v + diag N

as if the entries of every tensor were independent. Two forward passes, and all correlation is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from favour.methods.cost import sweep_and_columns, uncertain_sizes
from favour.methods.forward import DiagonalOnly, beliefs, forward
from favour.methods.memory import FORWARD
from favour.methods.method import Bound, Method, register
from favour.passes.plan.steps import Plan


@register
@dataclass(frozen=True, eq=False, repr=False)
class Diag(Method):
    """Every tensor's variances, and nothing else."""

    name = "diag"
    partial = True

    def run(self, bound: Bound) -> list[Any]:
        return beliefs(bound, forward(bound, DiagonalOnly()))

    def held(self) -> str:
        return "A forward sweep holds variances only; all correlation is forgotten."

    def untried(self) -> str:
        return "method='adjoint', which keeps all correlations"

    def cost(self, plan: Plan) -> float:
        return sweep_and_columns(plan, 0, 0)

    def memory(self, plan: Plan) -> int:
        return FORWARD * max(uncertain_sizes(plan))
