"""Replacing nodes of a graph by others."""

from __future__ import annotations

from collections.abc import Callable

from favour.graph.node import Graph, Node, replace_nodes
from favour.graph.traits import Argument, Operation

Shape = tuple[int | str, ...]


class Builder:
    """New nodes in place of one: unique names, its module path and source line."""

    def __init__(self, like: Node) -> None:
        self.like = like
        self.dtype = like.dtype
        self.nodes: list[Node] = []

    def call(
        self, target: Operation, *args: Argument, shape: Shape | None, dtype: Argument = None, **kwargs: Argument
    ) -> Node:
        like = self.like
        name = f"{like.name}_{len(self.nodes)}"
        dtype = dtype or (None if shape is None else self.dtype)
        node = Node(name, "call", target, args, kwargs, shape, dtype, like.module, like.where)
        self.nodes.append(node)
        return node


def rewrite(graph: Graph, expand: Callable[[Node, Builder], Node | None]) -> None:
    """Replace each call for which `expand` gives another node that has its value."""
    replaced: dict[Node, Node] = {}

    def now(node: Node) -> Node:
        return replaced.get(node, node)

    nodes: list[Node] = []
    for node in graph.nodes:
        node.args, node.kwargs = replace_nodes(node.args, now), replace_nodes(node.kwargs, now)
        if node.kind == "call":
            builder = Builder(node)
            result = expand(node, builder)
            if result is not None:
                nodes += builder.nodes
                replaced[node] = result
                continue
        nodes.append(node)
    graph.nodes = nodes
    graph.outputs = replace_nodes(graph.outputs, now)


def replace_node(graph: Graph, old: Node, by: Node, nodes: list[Node]) -> None:
    """Put `nodes` in the place of `old`, and `by` where it is read."""

    def now(node: Node) -> Node:
        return by if node is old else node

    at = graph.nodes.index(old)
    for node in graph.nodes[at + 1 :]:
        node.args, node.kwargs = replace_nodes(node.args, now), replace_nodes(node.kwargs, now)
    graph.nodes[at : at + 1] = nodes
    graph.outputs = replace_nodes(graph.outputs, now)
