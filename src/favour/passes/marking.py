"""Which values of a graph are random, for one combination of uncertain inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from favour.graph.node import Graph, Node
from favour.passes.normalise.commuting import RANDOM

aten = torch.ops.aten
Marks = Callable[[Graph], set[Node]]

# Read the shape of their argument, never its values.
SHAPE_ONLY = {
    aten.sym_size.int,
    aten.sym_numel.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
}


def mark_uncertain(graph: Graph, inputs: Collection[str], posterior: Collection[str]) -> set[Node]:
    """Nodes whose value is random."""
    uncertain: set[Node] = set()
    for node in graph.nodes:
        if node.kind == "input":
            random = node.name in inputs
        elif node.kind in ("parameter", "buffer"):
            random = node.target in posterior
        elif node.kind == "call" and node.target not in SHAPE_ONLY:
            random = (
                node.draw is not None or node.target in RANDOM or any(source in uncertain for source in node.inputs)
            )
        else:
            random = False
        if random:
            uncertain.add(node)
    return uncertain
