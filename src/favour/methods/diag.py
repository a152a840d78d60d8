"""Variances only: what earlier work does, and a baseline.

    v_y = (G ∘ G)v + diag N

as if the entries of every tensor were independent. Two forward passes, and correlation between entries is forgotten.
Where two tensors that were made from one meet again, in a residual sum, a product, a gate, their covariance entry by
entry counts (`favour.surrogate.siblings`), and so does what channels that fall together do in pools.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from favour.methods.cost import sweep_and_columns, uncertain_sizes
from favour.methods.forward import DiagonalOnly, beliefs, forward
from favour.methods.memory import FORWARD
from favour.methods.method import Bound, Method, register
from favour.passes.plan.steps import Plan
from favour.surrogate import Carried
from favour.surrogate.attending import Scores
from favour.surrogate.channels import ChannelCovariance
from favour.surrogate.siblings import Siblings

# What a sweep of variances carries beside them.
VARIANCES: tuple[type[Carried], ...] = (ChannelCovariance, Siblings, Scores)


@register
@dataclass(frozen=True, eq=False, repr=False)
class Diag(Method):
    """Every tensor's variances, and nothing else."""

    name = "diag"
    partial = True

    def run(self, bound: Bound) -> list[Any]:
        return beliefs(bound, forward(bound, DiagonalOnly(*VARIANCES)))

    def held(self) -> str:
        return (
            "A forward sweep holds variances, and what tensors made from one share; all other correlation is forgotten."
        )

    def untried(self) -> str:
        return "method='adjoint', which keeps all correlations"

    def cost(self, plan: Plan) -> float:
        return sweep_and_columns(plan, 0, 0)

    def memory(self, plan: Plan) -> int:
        return FORWARD * max(uncertain_sizes(plan))
