"""Which values of a graph are random, for one combination of uncertain inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection

from favour.graph.node import Graph, Node

Marks = Callable[[Graph], set[Node]]


def mark_uncertain(graph: Graph, inputs: Collection[str], posterior: Collection[str]) -> set[Node]:
    """Nodes whose value is random."""
    uncertain: set[Node] = set()
    for node in graph.nodes:
        if node.kind == "input":
            random = node.name in inputs
        elif node.kind in ("parameter", "buffer"):
            random = node.target in posterior
        elif node.kind == "call" and not node.traits.shape_only:
            random = node.draw is not None or node.traits.random or any(source in uncertain for source in node.inputs)
        else:
            random = False
        if random:
            uncertain.add(node)
    return uncertain
