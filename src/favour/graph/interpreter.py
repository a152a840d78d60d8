"""The one walk through a graph: calls in order, each handed to whoever asked for the walk.

    values[node] = handle(node, values)        for every call, in order

What a graph is run *for* is the handler's business, and all that differs: a surrogate for each uncertain call (forward
sweeps), a draw in the place of each dropout (sampling), nothing there (a model without its noise), tables of masks (the
head), values with slopes and kinks (fused code), sizes alone (graphs from files). Where a handler has nothing to say of
a call, `call` runs it as the model wrote it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from favour.graph.node import Node, replace_nodes

Values = Mapping[Node, Any]
Handler = Callable[[Node, Values], Any]


def interpret(
    calls: Iterable[Node],
    values: dict[Node, Any],
    handle: Handler,
    done: Mapping[Node, Iterable[Node]] | None = None,
) -> dict[Node, Any]:
    """Walk through calls and return `values`, to which their results are added.

    Args:
        calls: In topological order.
        values: Of all that is no call: inputs, parameters, constants, and calls made before.
        handle: Makes the value of one call.
        done: By node, what nobody reads once its value is there, and may go.
    """
    for node in calls:
        values[node] = handle(node, values)
        for read in done.get(node, ()) if done else ():
            values.pop(read, None)
    return values


def arguments(node: Node, values: Values) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, its nodes replaced by their values."""
    return replace_nodes(node.args, values.__getitem__), replace_nodes(node.kwargs, values.__getitem__)


def call(node: Node, values: Values) -> Any:
    """The call as the model wrote it."""
    args, kwargs = arguments(node, values)
    if node.target is torch.ops.aten.sym_size.int:  # which vmap does not know
        return args[0].shape[args[1]]
    return node.target(*args, **kwargs)


def noiseless(node: Node, values: Values) -> Any:
    """The same, with every dropout left out."""
    return values[node.args[0]] if node.draw is not None else call(node, values)
