"""What a plan costs, counted in the multiplications of one forward pass.

The unit of cost is one forward pass. With t the share of it that lies behind the first noise source,

    reverse sweep, k covectors    1 + t(1 + k) + t₂k with secants, + t(P + 2) with P groups of pairs
    dplr, rank r, K iterations    1 + t(1 + r + 2rK)

where t₂ is the share that an activation follows, both beside the element-wise work, which is the same.
`benchmarks/choice.py` compares these predictions with measured times.
"""

from __future__ import annotations

from collections.abc import Mapping

from favour.graph.node import Node
from favour.graph.sizes import entries
from favour.passes.plan.steps import Plan


def multiplications(node: Node, sizes: Mapping[str, int] | None = None) -> int:
    """Multiplications per input of an operation that has a weight: one per output entry and weight of one output."""
    if node.shape is None:
        return 0
    weights = [s for s in node.inputs if s.kind == "parameter" and s.shape is not None and len(s.shape) > 1]
    return sum(entries(node.shape[1:], sizes or {}) * entries(w.shape[1:], {}) for w in weights if w.shape is not None)


def forward_pass(plan: Plan) -> int:
    """Multiplications per input of one forward pass."""
    return sum(multiplications(step.node, plan.sizes) for step in plan.steps)


def uncertain_share(plan: Plan, ends: bool = True) -> float:
    """t: the share of the multiplications whose input is uncertain; without those that end the network, t₂."""
    total = tail = 0
    for step in plan.steps:
        work = multiplications(step.node, plan.sizes)
        total += work
        if any(s in plan.uncertain and s.kind in ("call", "input") for s in step.node.inputs):
            tail += work if ends or not step.output else 0
    return tail / total if total else 1.0


def sweep_and_columns(plan: Plan, rank: int, iterations: int) -> float:
    """The mean, a forward sweep, and Algorithm 1 with so many columns and iterations."""
    return 1 + uncertain_share(plan) * (1 + rank + 2 * rank * iterations)


def uncertain_sizes(plan: Plan) -> list[int]:
    """How many numbers every uncertain result has per input."""
    return [plan.entries(step.node.shape) for step in plan.steps if step.node in plan.uncertain] or [1]


def outputs(plan: Plan) -> list[Node]:
    """The uncertain outputs."""
    return [o for o in plan.outputs if isinstance(o, Node) and o in plan.uncertain and o.shape is not None]


def output_entries(plan: Plan) -> int:
    """How many numbers the uncertain outputs have per input, together."""
    return sum(plan.entries(o.shape) for o in outputs(plan))
