"""What a predictor's network computes without its noise."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from favour.belief import Belief
from favour.graph.interpreter import interpret, noiseless
from favour.graph.node import Node
from favour.posterior import Posterior
from favour.predictor.tensors import graph_values

if TYPE_CHECKING:
    from favour.predictor.predictor import Predictor


def plain_outputs(predict: Predictor, leaves: list[Any]) -> list[Any]:
    """The outputs with every dropout left out and weights at their means, flat; inputs that are beliefs at theirs."""
    graph = predict.graph
    points = [leaf.mean if isinstance(leaf, Belief) else leaf for leaf in leaves]
    values, _ = graph_values(graph, predict.store, points, Posterior({}))
    env = interpret(graph.calls, {n: values[n.name] for n in graph.nodes if n.kind != "call"}, noiseless)
    return [env[o] if isinstance(o, Node) else o for o in graph.outputs]
