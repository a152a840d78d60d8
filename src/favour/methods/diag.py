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
from favour.surrogate.tokens import TokenColumns

# What a sweep of variances carries beside them.
VARIANCES: tuple[type[Carried], ...] = (ChannelCovariance, Siblings, Scores)


def carried_in(plan: Plan) -> tuple[type[Carried], ...]:
    """The same, and columns for every token where a softmax inside the network weighs tokens."""
    return (TokenColumns, *VARIANCES) if attends(plan) else VARIANCES


def attends(plan: Plan) -> bool:
    """Whether attention, or another softmax along one of several axes, lies behind the first noise."""
    for step in plan.steps:
        link, shape = step.node.traits.link, step.node.shape
        if step.uncertain and link is not None and link.joint and not step.output and shape and len(shape) > 2:
            return True
    return False


@register
@dataclass(frozen=True, eq=False, repr=False)
class Diag(Method):
    """Every tensor's variances, and what values carry of siblings, channels and tokens; no other correlation."""

    name = "diag"
    partial = True

    def run(self, bound: Bound) -> list[Any]:
        return beliefs(bound, forward(bound, DiagonalOnly(*carried_in(bound.plan))))

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
