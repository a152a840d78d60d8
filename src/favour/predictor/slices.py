"""The batch in slices that fit a memory budget: as many rows as the plan is predicted to hold at once.

The prediction is corrected by what a pass over two rows takes, measured once for each set of sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from favour.belief import Belief
from favour.methods.memory import measure, rows_within
from favour.posterior import Posterior

if TYPE_CHECKING:
    from favour.predictor.predictor import Predictor


def slices(predict: Predictor, leaves: list[Any], posterior: Posterior) -> list[list[Any]]:
    """The inputs in slices of the batch that fit the memory budget."""
    memory = predict.numerics.memory
    if memory is None:
        return [leaves]
    beliefs = frozenset(
        n.name
        for n, leaf in zip(predict.graph.inputs, leaves, strict=True)
        if n is not None and isinstance(leaf, Belief)
    )
    plan = predict._plan(beliefs, posterior)
    plan.sizes = predict._other_sizes(leaves)
    batched = [n is not None and isinstance((n.shape or (0,))[0], str) for n in predict.graph.inputs]
    first = next(leaf for leaf, b in zip(leaves, batched, strict=True) if b)
    mean = first.mean if isinstance(first, Belief) else first
    itemsize = max(mean.element_size(), 4) if mean.is_floating_point() else 4
    method = predict._methods[beliefs]
    rows = rows_within(method, plan, memory, itemsize)

    def part(start: int, stop: int) -> list[Any]:
        return [leaf[start:stop] if b else leaf for leaf, b in zip(leaves, batched, strict=True)]

    known = plan.correction is not None and plan.correction[0] == plan.sizes
    if predict._warm and not known and mean.shape[0] and not torch.compiler.is_compiling():
        few = min(rows, 2, mean.shape[0])
        measure(method, plan, itemsize, few, lambda: predict._predict(part(0, few), posterior))
        rows = rows_within(method, plan, memory, itemsize)
    return [part(i, i + rows) for i in range(0, max(1, mean.shape[0]), rows)]
