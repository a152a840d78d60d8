"""`predict.joint`: one belief over the outputs at several inputs.

    (y(x₁), …, y(x_q)) ~ N(μ, Σ),     Σ = [Cov(y(x_a), y(x_b))]_ab,  (q·n) × (q·n) for n outputs

under one draw of the network for all inputs: the weights of a posterior are the same wherever the network is asked, and
so, by default, are the units that dropout leaves out. This is the belief over *functions* that Thompson sampling, batch
active learning and q-batch acquisition need. The mathematics is in `favour.methods.across`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.covariance import Dense
from favour.belief.joint import Joint, concatenated, split
from favour.errors import InvalidType, InvalidValue
from favour.graph.node import Node
from favour.graph.tracing import traced
from favour.methods.across import covariance_between, moments_between
from favour.methods.adjoint import Adjoint, ReverseSweep
from favour.program.program import Program
from favour.surrogate.value import Value, Weight

MASKS = ("shared", "independent")


def joint_outputs(program: Program, args: tuple, kwargs: Mapping[str, Any]) -> Joint:
    """See `Predictor.joint_outputs`."""

    def together() -> Program:
        return program.clone(outputs=concatenated(program.graph), method=program.asked.over("joint"))

    leaves = program.inputs(args, kwargs)
    results = program.once("together", together).run(leaves)
    return split(program.graph, results, program.sizes_of(leaves))


def joint(program: Program, args: tuple, kwargs: Mapping[str, Any], group: int | None, masks: str) -> Any:
    """See `Predictor.joint`."""
    if masks not in MASKS:
        raise InvalidValue(f"`masks` is {masks!r}; it must be one of {', '.join(map(repr, MASKS))}.")
    leaves = program.inputs(args, kwargs)
    batch = program.rows(leaves)
    if batch is None:
        raise InvalidType("the model has no input with a batch in front, so there is no belief across inputs.")
    q = _group(group, batch)
    bound, method = program.bind(leaves)
    _in_weight_space(bound.values, bound.plan)
    secant = isinstance(method, ReverseSweep) and method.takes_secants
    sweep, inputs = Adjoint().swept(bound)
    pairs = moments_between(sweep, inputs, q, masks == "shared")
    results = []
    for output in bound.plan.outputs:
        value = sweep.result(output)
        if isinstance(value, Value):
            covariance = covariance_between(sweep, value, inputs, pairs, q, secant)
        elif isinstance(value, Tensor) and value.is_floating_point() and value.ndim and value.shape[0] == batch:
            n = q * value[0].numel()
            covariance = value.new_zeros(batch // q, n, n)
            value = Value(value)
        else:
            results.append(value)
            continue
        event = (q, *value.mean.shape[1:])
        mean = value.mean.reshape(batch // q, *event)
        results.append(Belief(mean, covariance=Dense(covariance.to(mean.dtype), event), validate=False))
    return pytree.tree_unflatten(results, program.graph.out_spec)


def _group(group: int | None, batch: int) -> int:
    q = batch if group is None else group
    if isinstance(q, bool) or not isinstance(q, (int, torch.SymInt)):
        raise InvalidType(f"`group` is {q!r}; the number of inputs that belong together is a whole number.")
    if not traced() and (q < 1 or batch % q):
        raise InvalidValue(
            f"{batch} inputs do not make groups of {q}; `group` must be a positive number that divides the batch "
            "(None takes all inputs together), and there must be an input."
        )
    return q


def _in_weight_space(values: dict[Node, Any], plan: Any) -> None:
    """Hold draws in weight space, where they are the same for all inputs, unless inputs meet them entry by entry."""
    lookups = {
        s for step in plan.steps for s in step.node.inputs if step.node.target is torch.ops.aten.embedding.default
    }
    for node, weight in list(values.items()):
        if isinstance(weight, Weight):
            entrywise = weight.gaussian is None or weight.gaussian.by_rows
            mixed = weight.mixed or weight.uses > 1 or not entrywise or node in lookups
            values[node] = replace(weight, mixed=mixed)
