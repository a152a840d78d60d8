"""What follows the training flag but is no posterior."""

from __future__ import annotations

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph

aten = torch.ops.aten


def freeze(graph: Graph) -> None:
    """Rewrite `graph` in place: norms use running statistics, RReLU its mean slope.

    Assumes a capture with norms in evaluation mode; what still asks for the batch's statistics is refused.
    """
    for node in graph.nodes:
        if node.kind == "call" and node.target is aten.rrelu.default:
            lower, upper = node.args[1:3]
            node.target, node.args = aten.leaky_relu.default, (node.args[0], (lower + upper) / 2)
        if node.kind == "call" and node.target is aten.batch_norm.default and node.args[5]:
            if node.args[3] is None:
                raise UnsupportedOperation(
                    f"batch_norm at {node.place} has no running statistics: its output depends on the whole "
                    "batch. Use `track_running_stats=True` and train before compiling."
                )
            node.args = (*node.args[:5], False, *node.args[6:])
        if node.kind == "call" and node.target is aten.instance_norm.default and node.args[3] is not None:
            node.args = (*node.args[:5], False, *node.args[6:])
