"""A graph captured for batches of any size, taken for one input: the size of the batch becomes the number 1.

Sizes that follow from it become numbers too, in shapes and where they are arguments.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.interpreter import call
from favour.graph.node import Graph, Node, replace_nodes
from favour.graph.sizes import size_of
from favour.passes.rewriting import Shape

aten = torch.ops.aten


def of_one_input(graph: Graph, batch: str) -> tuple[Graph, dict[Node, Node]]:
    """The graph of one input, and its nodes by those of `graph`. `graph` stays as it is."""
    symbol = re.compile(rf"\b{re.escape(batch)}\b")

    def size(written: int | str) -> int | str:
        if isinstance(written, int):
            return written
        try:
            return size_of(written, {batch: 1})
        except UnsupportedOperation:  # of another dynamic size too
            rest = symbol.sub("1", written)
            return re.sub(r"\b1\*|\*1\b", "", rest)

    def at_one(shape: Shape | None) -> Shape | None:
        return None if shape is None else tuple(map(size, shape))

    made: dict[Node, Node] = {}
    numbers: dict[Node, Any] = {}

    def now(node: Node) -> Any:
        return numbers[node] if node in numbers else made[node]

    nodes = []
    for node in graph.nodes:
        args, kwargs = replace_nodes(node.args, now), replace_nodes(node.kwargs, now)
        new = replace(node, args=args, kwargs=kwargs, shape=at_one(node.shape))
        number = _number(new)
        if number is not None:
            numbers[node] = number
            continue
        made[node] = new
        nodes.append(new)
    inputs = [None if n is None else made[n] for n in graph.inputs]
    return replace(graph, nodes=nodes, inputs=inputs, outputs=replace_nodes(graph.outputs, now)), made


def _number(node: Node) -> Any:
    """The value of a size that follows from numbers, or None."""
    if node.kind != "call" or node.shape is not None:
        return None
    if node.target is aten.sym_size.int:
        x, dim = node.args
        size = x.shape[dim]
        return size if isinstance(size, int) else None
    if isinstance(node.target, torch._ops.OpOverload) or any(s.shape is not None for s in node.inputs):
        return None
    known = node.args and all(isinstance(a, (int, float)) for a in node.args) and not node.kwargs
    return call(node, {}) if known else None
