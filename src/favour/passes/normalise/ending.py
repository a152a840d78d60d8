"""What a network ends in: logits, or probabilities that it has already made of them.

A softmax of probabilities is close to uniform and wrong, so whoever wants probabilities asks here first. Two things are
read off the graph, from the output backwards:

- **The link**: a softmax over all outputs, or a sigmoid of each, followed by nothing but changes of shape and dtype,
  e^(log y), log(y + ε) and a clamp that hardly moves a probability. `without_links` gives the graph of what goes into
  it, the logits. Log-probabilities count as logits behind their link.
- **The range**, by arithmetic with intervals (`ranges`): outputs within [0, 1] that are no link's (a product of
  sigmoids, one class of a softmax, the mean of two) are probabilities that must be used as they are.

x/Σx of the same x ≥ 0 lies in [0, 1], whether Σ is a softmax's or not; for x = e^z it is the softmax of z.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from favour.graph.node import Graph, Node, rewired
from favour.graph.traits import Argument
from favour.passes.normalise.ranges import bounds
from favour.passes.words import ADD, CLAMP
from favour.scalar.intervals import Range

aten = torch.ops.aten

SOFTMAX, SIGMOID = "softmax", "sigmoid"
_HARMLESS = 1e-2  # how far a clamp or an ε may move a probability and still count as numerical care


@dataclass(frozen=True, eq=False)
class Ending:
    """What one output of a graph is.

    Attributes:
        link: `"softmax"` or `"sigmoid"` if it ends in one; else None.
        logits: What goes into the link, None if that cannot stand alone (masked with −∞).
        path: Changes of shape and dtype that make them the output's, last first.
        within: It lies in [0, 1], by its link or by the range of what it is made of.
        sums: Its numbers sum to one.
        linear: It comes straight from weights, as logits do, or its values do not sum to one: it is no distribution.
    """

    link: str | None = None
    logits: Node | None = None
    path: tuple[Node, ...] = ()
    within: bool = False
    sums: bool = False
    linear: bool = False


def ending(graph: Graph, index: int = 0) -> Ending:
    """What output `index` of a graph is."""
    output = graph.outputs[index]
    if not isinstance(output, Node) or output.kind != "call":
        return Ending()
    within = _within(output)
    path: list[Node] = []
    node, depth = output, 0  # depth: exponentials less logarithms between the link and the output
    while node.kind == "call":
        before = node.args[0] if node.args and isinstance(node.args[0], Node) else None
        link = _link(node, depth)
        if link is not None:
            name, logits = link
            fits = name == SIGMOID or _over_all(node, output)
            if not fits:
                return Ending(within=within)
            if _masked(logits):
                return Ending(name, within=True, sums=name == SOFTMAX)
            return Ending(name, *_bare(logits, path, output), within=True, sums=name == SOFTMAX)
        if depth == 0 and _normalised(node) is not None and within and _over_all(node, output):
            return Ending(within=True, sums=True)
        if before is None:
            break
        if _same(node):
            path.append(node)
        elif node.target is aten.exp.default:
            depth += 1
        elif node.target is aten.log.default:
            depth -= 1
        elif not _careful(node):
            break
        node = before
    return Ending(within=within, linear=bool(node.traits.weights))


def without_links(graph: Graph) -> Graph | None:
    """The graph with logits for every output that ends in a link; None if none does."""
    endings = [ending(graph, i) for i in range(len(graph.outputs))]
    if not any(e.logits is not None for e in endings):
        return None
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    for i, end in enumerate(endings):
        if end.logits is None:
            continue
        at = end.logits
        for call in reversed(end.path):
            at = _moved(call, at)
            nodes.append(at)
        outputs[i] = at
    result = replace(graph, nodes=nodes, outputs=outputs)
    result.prune()
    return result


def _moved(call: Node, source: Node) -> Node:
    """The same change of shape or dtype, of the logits."""
    moved = rewired(call, lambda n: source if n is call.args[0] else n)
    moved.name = f"{call.name}_logits"
    return moved


def _link(node: Node, depth: int) -> tuple[str, Node] | None:
    """Whether `node` makes probabilities (depth 0, or −1 for their logarithms), and of what."""
    link = node.traits.link
    if link is not None and depth in ((0, 1) if link.log else (0, -1)):
        return SOFTMAX if link.joint else SIGMOID, node.args[0]
    if depth in (0, -1):
        x = _normalised(node)
        if x is not None and x.target is aten.exp.default:
            return SOFTMAX, x.args[0]
    if depth in (0, 1) and _less_logsumexp(node):
        return SOFTMAX, node.args[0]
    return None


def _same(node: Node) -> bool:
    """Each number stays what it is."""
    return node.traits.keeps or node.traits.ordered or node.traits.permutes


def _less_logsumexp(node: Node) -> bool:
    """x − log Σ e^x, a logarithm of a softmax by hand."""
    if node.target is not aten.sub.Tensor or len(node.args) != 2 or node.kwargs:
        return False
    x, total = node.args
    return isinstance(total, Node) and total.target is aten.logsumexp.default and _alike(x, total.args[0])


def _over_all(node: Node, output: Node) -> bool:
    """Whether the link is over the whole of every input's output, one axis (C,)."""
    shape, last = node.shape, output.shape
    if shape is None or last is None or len(last) != 2 or not isinstance(last[1], int):
        return False
    if _less_logsumexp(node):
        total = node.args[1]
        keeps = [*total.args[2:], *total.kwargs.values()] == [True]
        return keeps and len(shape) == 2 and [d % 2 for d in total.args[1]] == [1] and shape[1] == last[1]
    dim = node.args[1] if len(node.args) > 1 and isinstance(node.args[1], int) else -1
    if _normalised(node) is not None:
        dim = next((i for i, s in enumerate(shape) if i and s == last[1]), 0)
    others = [s for i, s in enumerate(shape) if i and i != dim % len(shape)]
    return shape[dim % len(shape)] == last[1] and all(s == 1 for s in others)


def _bare(logits: Node, path: list[Node], output: Node) -> tuple[Node, tuple[Node, ...]]:
    """The logits before changes of shape and dtype that the path behind the link undoes or that need not be."""
    node = logits
    while _same(node):
        node = node.args[0]
        axes = [s for s in (node.shape or ())[1:] if s != 1]
        if node.shape == output.shape and len(axes) < 2:  # one axis keeps its order whatever is done to shapes
            return node, ()
    return logits, () if logits.shape == output.shape and len(logits.shape or ()) < 3 else tuple(path)


def _careful(node: Node) -> bool:
    """A clamp or an added ε that keeps a logarithm from −∞."""
    rest = [*node.args[1:], *node.kwargs.values()]
    if node.target in ADD:
        return len(rest) == 1 and isinstance(rest[0], float) and 0 <= rest[0] <= _HARMLESS
    if node.target in CLAMP:
        bounds = [b for b in rest if b is not None]
        return all(isinstance(b, (int, float)) and min(abs(b), abs(1 - b)) <= _HARMLESS for b in bounds)
    return False


def _masked(logits: Node) -> bool:
    """Whether some logits may be −∞: they have no mean."""
    open_, seen = [logits], {logits}
    while open_:
        node = open_.pop()
        if node.kind != "call" or node.traits.weights:
            continue
        for value in (*node.args, *node.kwargs.values()):
            if isinstance(value, float) and math.isinf(value):
                return True
        for source in node.inputs:
            if source not in seen:
                seen.add(source)
                open_.append(source)
    return False


def _normalised(node: Node) -> Node | None:
    """x of x/Σx."""
    if node.target is not aten.div.Tensor or len(node.args) != 2:
        return None
    x, total = node.args
    while isinstance(total, Node) and (_same(total) or total.traits.within or _careful(total)):
        total = total.args[0]
    if isinstance(x, Node) and isinstance(total, Node) and total.target is aten.sum.dim_IntList:
        of = total.args[0]
        while isinstance(of, Node) and of.target is aten.abs.default:
            of = of.args[0]
        return x if _alike(x, of) else None
    return None


def _alike(a: Argument, b: Argument) -> bool:
    """Whether two values are made by the same operations of the same things."""
    if a is b:
        return True
    if isinstance(a, Node) and isinstance(b, Node):
        random = torch.Tag.nondeterministic_seeded in getattr(a.target, "tags", ())
        return a.kind == b.kind == "call" and a.target == b.target and not random and _alike(a.args, b.args)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_alike, a, b))
    return type(a) is type(b) and not isinstance(a, (Node, Tensor)) and bool(a == b)


def _within(output: Node) -> bool:
    low, high = bounds(output, _share)
    return low >= 0 and high <= 1


def _share(node: Node, of: Callable[[Any], Range]) -> Range | None:
    """x/Σx of the same x ≥ 0."""
    return (0.0, 1.0) if _normalised(node) is not None and of(node.args[0])[0] >= 0 else None
