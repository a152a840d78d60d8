"""How much memory a prediction takes, and how to stay within a budget.

Per input of the batch, with a the total size of the uncertain tensors, w the largest of them, k covectors and forward
sweeps of rank r, a prediction holds at its peak about

    reverse sweep     (4 + 2r)a + 3kw + 10rw     the tape, the covectors before and after a map, Algorithm 1's products
    forward methods   (16 + 10r)w                what a rule works with, the columns, their images, the products

numbers (measured by tests/test_adjoint.py, which holds these to be upper bounds on multilayer perceptrons). `full`
keeps a column per noise dimension. Predictions are made in slices of the batch that fit the budget; where a single
input does not fit, covectors go in groups, two groups at a time, so that every entry of the covariance is met.
"""

from __future__ import annotations

import math

from favour.methods.choice import DEFAULT_RANK, Choice, outputs
from favour.methods.settings import Settings
from favour.node import Node
from favour.plan import Plan

TAPE, TAPE_COLUMN, COVECTOR, FORWARD, COLUMN = 4, 2, 3, 16, 10


def _size(node: Node) -> int:
    return math.prod(s if isinstance(s, int) else 1 for s in (node.shape or ())[1:])


def _sizes(plan: Plan) -> list[int]:
    return [_size(step.node) for step in plan.steps if step.node in plan.uncertain] or [1]


def _rank(settings: Settings, method: str) -> int:
    return settings.rank if settings.rank is not None else DEFAULT_RANK.get(method, 0)


def tape_numbers(plan: Plan, settings: Settings) -> int:
    """Numbers per input that the reverse sweep holds besides covectors."""
    rank, sizes = _rank(settings, "adjoint"), _sizes(plan)
    return (TAPE + TAPE_COLUMN * rank) * sum(sizes) + COLUMN * rank * max(sizes)


def covector_numbers(plan: Plan) -> int:
    """Numbers per input and covector."""
    return COVECTOR * max(_sizes(plan))


def numbers_per_input(plan: Plan, settings: Settings, choice: Choice) -> int:
    """Numbers that a prediction holds per input at its peak."""
    sizes = _sizes(plan)
    if choice.method == "adjoint":
        k = choice.covectors or sum(_size(o) for o in outputs(plan))
        return tape_numbers(plan, settings) + k * covector_numbers(plan)
    if choice.method == "full":
        return 2 * sum(sizes) * max(sizes)
    return (FORWARD + COLUMN * _rank(settings, choice.method)) * max(sizes)


def rows_within(plan: Plan, settings: Settings, choice: Choice, itemsize: int) -> int | None:
    """How many inputs fit the budget at a time; None without one."""
    if settings.memory is None:
        return None
    return max(1, settings.memory // (itemsize * numbers_per_input(plan, settings, choice)))


def covectors_within(plan: Plan, settings: Settings, k: int, itemsize: int) -> int:
    """How many covectors fit the budget at a time, for one input."""
    if settings.memory is None:
        return k
    left = settings.memory // itemsize - tape_numbers(plan, settings)
    return max(1, min(k, left // covector_numbers(plan)))
