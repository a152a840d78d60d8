"""Whether a plan keeps the inputs of a batch apart.

A belief is per input: row i of a result may depend on row i of what it is made from, and on no other. Shapes tell of
most operations that move or mix rows, since the batch has a symbol of its own; x.flip(0), a lookup in dimension 0 or
x[:, None] − x, whose result has the batch in front as well, they do not tell of. So every rule of a plan is put to the
test that the sentence above states, whatever the operation: three inputs go through the plan, each rule is asked again
with another first row of its uncertain arguments, and the other rows of its mean and variance have to stay as they
were.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.interpreter import interpret
from favour.graph.node import Node
from favour.methods.forward import DiagonalOnly, Sweep, evaluate, note_readings, surrogate_of, weight_of
from favour.passes.normalise.derived import DerivedNode
from favour.passes.plan.steps import Plan
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value, mean_of

ROWS = 3
# Relative to the largest entry: rows that are computed from the same numbers come out the same but for rounding.
_SAME = 1e-3


@torch.no_grad()
def check_rows(plan: Plan, values: Mapping[Node, Any], ctx: Context) -> bool:
    """Raise where an operation of the plan mixes the inputs of a batch.

    Args:
        plan: The steps.
        values: Inputs, parameters and constants by node, for any batch.
        ctx: With the activation mode.

    Returns:
        True; False where the batch is empty, so that there was nothing to try.

    Raises:
        UnsupportedOperation: Names every such operation, with module path and source line.
    """
    if any(node.kind == "input" and getattr(mean_of(value), "shape", ())[:1] == (0,) for node, value in values.items()):
        return False
    taken = {node: _few(node, value, plan) for node, value in values.items()}
    ctx = replace(ctx, cache=None)
    representation, sweep = DiagonalOnly(), Sweep({})
    problems: list[str] = []
    steps = {step.node: step for step in plan.steps}

    def handle(node: Node, values: Mapping[Node, Any]) -> Any:
        step = steps[node]
        if not step.uncertain:
            return evaluate(node, values)
        here = ctx.at(node.name, node.module, node.place)
        if isinstance(node, DerivedNode):  # no input is in it
            return weight_of(step, values, here)
        made = surrogate_of(step, values, here)
        results = [representation.absorb(s, step, sweep) for s in _listed(made)]
        for sign in (1.0, -1.0):
            changed = {**values, **{n: _with_other_row(values[n], sign) for n in node.inputs}}
            again = _listed(surrogate_of(step, changed, here))
            if not all(_alike(a, representation.absorb(b, step, sweep)) for a, b in zip(results, again, strict=True)):
                problems.append(f"`{node.target}` at {node.place}")
                break
        note_readings(node, made, taken)
        return results if isinstance(made, list) else results[0]

    interpret(steps, taken, handle, plan.done)
    if problems:
        lines = "\n".join(f"  - {p}" for p in dict.fromkeys(problems))
        raise UnsupportedOperation(
            f"{len(problems)} operation(s) on uncertain tensors move or mix the inputs of a batch, that is rows of "
            f"dimension 0:\n{lines}\nPredictions are per input: write the model so that a row of its result depends "
            "on the same row of its input only (flip, roll, sort, index or reduce another dimension; reorder the "
            "inputs before the call)."
        )
    return True


def _listed(made: Surrogate | list[Surrogate]) -> list[Surrogate]:
    return made if isinstance(made, list) else [made]


def _few(node: Node, value: Any, plan: Plan) -> Any:
    """The first inputs of a batch, repeated where it has fewer."""
    if node.kind != "input" or node.shape is None or plan.batch is None:
        return value
    dims = [d for d, size in enumerate(node.shape) if size == plan.batch]

    def rows(t: Tensor, lead: int = 0) -> Tensor:
        for d in dims:
            t = t.index_select(d + lead, torch.arange(ROWS, device=t.device) % t.shape[d + lead])
        return t

    if isinstance(value, Value):
        blocks = {name: rows(block, 1) for name, block in value.blocks.items()}
        few = Value(rows(value.mean), None if value.diag is None else rows(value.diag), blocks)
        return Value(few.mean, few.variance, name=value.name)
    return rows(value) if isinstance(value, Tensor) else value


def _with_other_row(value: Any, sign: float) -> Any:
    """An uncertain tensor with another first row, above or below all others; anything else as it is."""
    if isinstance(value, list):
        return [_with_other_row(v, sign) for v in value]
    if not isinstance(value, Value) or not value.mean.numel() or not value.mean.ndim:
        return value
    mean, variance = value.mean.detach().clone(), value.variance.detach().clone()
    size = 1 + mean.nan_to_num(0, 0, 0).abs().max()
    steps = torch.linspace(1, 2, mean[0].numel(), dtype=mean.dtype, device=mean.device).reshape(mean[0].shape)
    mean[0] += 3 * sign * size * steps
    variance[0] = 2 * variance[0] + 0.1 * size.square() * steps
    return Value(mean, variance, name=value.name)


def _alike(a: Value, b: Value) -> bool:
    """Whether all rows but the first are the same."""
    pairs = ((a.mean, b.mean), (a.variance, b.variance))
    return a.mean.ndim > 0 and len(a.mean) == ROWS and all(_close(s[1:], t[1:]) for s, t in pairs)


def _close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape:
        return False
    a, b = (t.nan_to_num(0, 0, 0) for t in (a, b))
    return not a.numel() or bool((a - b).abs().max() <= _SAME * a.abs().max())
