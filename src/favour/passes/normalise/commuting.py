"""Operations put into an order in which their moments are known better.

**Functions behind dropout.** With D ∈ {0, 1/q}, f(D x) is f(0) or f(x/q), so that for every draw

    f(D x) = f(0) + D·q(f(x/q) − f(0)),          relu(D x) = D relu(x),   (D x)² = D x²/q.

On the left f meets two values far apart, which no Gaussian describes; on the right it meets x, and the rule of dropout
is exact. So functions move in front of the dropout they read.

**Maxima.** Max pooling takes no notice of a nondecreasing function that acts alike on all entries of a window,

    pool(relu(x)) = relu(pool(x)),         pool(D_c x) = D_c pool(x)   for one D_c ≥ 0 per channel,

again for every draw. So

- channel dropout moves behind the maximum, where its rule is exact (before it, neighbours that fall together look like
  independent ones),
- a ReLU moves behind it, where fewer entries are left and its argument has not lost its shape,
- element-wise dropout, which does not commute, joins the maximum in one operation (`favour.rules.maxima`).

Only where nothing else reads what lies between: another reader would need the same draws.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch

from favour.graph.node import Graph, Node, nodes_in, replace_nodes
from favour.passes.normalise.decompose import Builder
from favour.passes.normalise.roots import dropped_root, root
from favour.rules.maxima import POOLS, WITH_INDICES, dropped_max_pool
from favour.rules.registry import RULES, Rule

aten = torch.ops.aten

_RELUS = {aten.relu.default}
_HOMOGENEOUS = {aten.relu.default, aten.leaky_relu.default, aten.abs.default}
_MAXIMA = {*POOLS, *WITH_INDICES} - {aten.max.dim}


# Operations that no model contains, only plans.
JOINED = {f: Rule(f, "moment-matched", "pooling") for f in (dropped_max_pool, dropped_root, root)}


RANDOM = {dropped_max_pool, dropped_root}  # they draw, whatever they read


def rule_for(target: Any) -> Rule | None:
    """The rule of an operation, of a captured model or of a plan."""
    return JOINED.get(target) or RULES.get(target)


def commute(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite `graph` in place."""
    for node in [n for n in graph.nodes if n in uncertain and n.kind == "call"]:
        _before_dropout(graph, node)
    for node in [n for n in graph.nodes if n in uncertain and n.kind == "call" and n.target in _MAXIMA]:
        _commute_one(graph, node)
    graph.prune()


def _before_dropout(graph: Graph, node: Node) -> None:
    """f(dropout(x)) as dropout of a function of x."""
    entry = RULES.get(node.target)
    drop = node.args[0] if node.args else None
    if entry is None or entry.pointwise is None or not isinstance(drop, Node) or node.inputs != [drop]:
        return
    if not _falls(drop) or len(graph.users()[drop]) > 1 or drop in set(nodes_in(graph.outputs)):
        return
    new = Builder(node)
    shape, p = node.shape, drop.rate
    others, x = node.args[1:], drop.args[0]
    if node.target in _HOMOGENEOUS:
        made = new.call(node.target, x, *others, shape=shape, **node.kwargs)
        _replace(graph, node, _moved(new, drop, made, shape), new.nodes)
        return
    if isinstance(p, Node) or node.dtype != drop.dtype or node.dtype is None or not node.dtype.is_floating_point:
        return
    rest = node.target(torch.zeros((), dtype=torch.float64), *others, **node.kwargs).item()
    if not math.isfinite(rest):
        return
    q = 1 - p
    made = new.call(aten.mul.Tensor, x, 1 / q, shape=shape)
    made = new.call(node.target, made, *others, shape=shape, **node.kwargs)
    if rest:
        made = new.call(aten.add.Tensor, made, -rest, shape=shape)
    made = _moved(new, drop, new.call(aten.mul.Tensor, made, q, shape=shape), shape)
    if rest:
        made = new.call(aten.add.Tensor, made, rest, shape=shape)
    _replace(graph, node, made, new.nodes)


def _commute_one(graph: Graph, pool: Node) -> None:
    users = graph.users()
    outputs = set(nodes_in(graph.outputs))

    def only_reader(node: Node) -> bool:
        return len(users[node]) == 1 and node not in outputs

    result = pool
    if pool.target in WITH_INDICES:
        if not only_reader(pool) or users[pool][0].target is not operator.getitem or users[pool][0].args[1] != 0:
            return
        result = users[pool][0]
    source: Node = pool.args[0]
    relu: Node | None = None
    elements: Node | None = None
    channels: list[Node] = []
    while source.kind == "call" and only_reader(source):
        if source.target in _RELUS:
            relu = source
        elif _falls(source) and not _by_channel(source) and elements is None:
            elements = source
        elif _by_channel(source) and len(source.shape or ()) > 2 and (relu is None or _falls(source)):
            channels.append(source)
        else:
            break
        source = source.args[0]
    if elements is not None and relu is None and only_reader(result) and users[result][0].target in _RELUS:
        relu = result = users[result][0]
    if relu is None and elements is None and not channels:
        return
    new = Builder(pool)
    shape, new.dtype = result.shape, result.dtype
    if elements is not None:
        p = elements.rate
        arguments: Any = (source, p, relu is not None, elements.module or "dropout", pool.target, pool.args[1:])
        made = new.call(dropped_max_pool, *arguments, pool.kwargs, shape=shape)
    else:
        made = new.call(pool.target, source, *pool.args[1:], shape=pool.shape, dtype=pool.dtype, **pool.kwargs)
        if pool.target in WITH_INDICES:
            made = new.call(operator.getitem, made, 0, shape=shape)
        if relu is not None:
            made = _moved(new, relu, made, shape)
    for channel in reversed(channels):
        made = _moved(new, channel, made, shape)
    _replace(graph, result, made, new.nodes)


def _falls(node: Node) -> bool:
    return node.draw is not None and node.draw.falls


def _by_channel(node: Node) -> bool:
    return node.draw is not None and node.draw.channels


def _moved(new: Builder, node: Node, x: Node, shape: Any) -> Node:
    """`node` on another argument, with its own module and line."""
    made = new.call(node.target, x, *node.args[1:], shape=shape, **node.kwargs)
    made.module, made.where = node.module, node.where
    return made


def _replace(graph: Graph, old: Node, by: Node, nodes: list[Node]) -> None:
    def now(node: Node) -> Node:
        return by if node is old else node

    at = graph.nodes.index(old)
    for node in graph.nodes[at + 1 :]:
        node.args, node.kwargs = replace_nodes(node.args, now), replace_nodes(node.kwargs, now)
    graph.nodes[at : at + 1] = nodes
    graph.outputs = replace_nodes(graph.outputs, now)
