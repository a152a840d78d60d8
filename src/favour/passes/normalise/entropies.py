"""Entropies of a softmax as one operation.

Σ_i p_i log p_i, p = softmax(x), multiplies two values that bend against each other: with a noise for each of them most
of the variance would be of what cancels. As one function of x it has its derivatives in closed form
(`favour.rules.attention.negative_entropy`).
"""

from __future__ import annotations

from collections.abc import Collection

import torch

from favour.graph.node import Graph, Node
from favour.graph.traits import Argument
from favour.rules.attention import negative_entropy

aten = torch.ops.aten


def find_entropies(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite `graph` in place: sums of softmax times its logarithm become one operation. Assumes nothing."""
    for node in graph.nodes:
        if node not in uncertain or node.target is not aten.sum.dim_IntList or len(node.args[1]) != 1:
            continue
        source = _scores(node.args[0], node.args[1][0])
        if source is None or node.kwargs:
            continue
        keep = len(node.args) > 2 and bool(node.args[2])
        node.args, node.target = (source, node.args[1][0], keep), negative_entropy
    graph.prune()


def _scores(product: Argument, dim: int) -> Node | None:
    """x where a node is softmax(x)·log softmax(x) along a dimension."""
    if not isinstance(product, Node) or product.target is not aten.mul.Tensor:
        return None
    for p, log in (product.args[:2], product.args[1::-1]):
        if not (isinstance(p, Node) and isinstance(log, Node)) or not _along(p, False, dim):
            continue
        of, logs = (log.args[0], False) if log.target is aten.log.default else (log, True)
        if isinstance(of, Node) and _along(of, logs, dim) and of.args[0] is p.args[0]:
            return p.args[0]
    return None


def _along(node: Node, log: bool, dim: int) -> bool:
    """Whether a node is a softmax along a dimension, or its logarithm."""
    link = node.traits.link if node.kind == "call" else None
    if link is None or not link.joint or link.log != log or node.shape is None or any(node.kwargs.values()):
        return False
    return node.args[1] % len(node.shape) == dim % len(node.shape) and not any(node.args[2:])
