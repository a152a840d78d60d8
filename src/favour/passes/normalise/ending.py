"""What a network ends in: logits, or probabilities that it has already made of them.

A softmax of probabilities is close to uniform and wrong, so whoever wants probabilities asks here first. Two things are
read off the graph, from the output backwards:

- **The link**: a softmax over all outputs, or a sigmoid of each, followed by nothing but changes of shape and dtype,
  e^(log y), log(y + ε) and a clamp that hardly moves a probability. `without_links` gives the graph of what goes into
  it, the logits. Log-probabilities count as logits behind their link.
- **The range**, by arithmetic with intervals: outputs within [0, 1] that are no link's (a product of sigmoids, one
  class of a softmax, the mean of two) are probabilities that must be used as they are.

    [a, b] + [c, d] = [a + c, b + d],    [a, b]·[c, d] = [min, max of the four products],    f([a, b]) = [f(a), f(b)]

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

aten = torch.ops.aten

Range = tuple[float, float]
_ANY: Range = (-math.inf, math.inf)

SOFTMAX, SIGMOID = "softmax", "sigmoid"
_SOFTMAX = {aten.softmax.int, aten._softmax.default, aten._safe_softmax.default}
_LOG_SOFTMAX = {aten.log_softmax.int, aten._log_softmax.default}
_SIGMOID = {aten.sigmoid.default, aten.sigmoid_.default, aten.special_expit.default}
_LOG_SIGMOID = {aten.log_sigmoid.default}
_LOG = {aten.log.default, aten.log_.default}
_EXP = {aten.exp.default, aten.exp_.default}
_SAME = {  # each number stays what it is
    *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.flatten.using_ints),
    *(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default, aten.permute.default),
    *(aten.transpose.int, aten.movedim.int, aten.movedim.intlist, aten.contiguous.default, aten.clone.default),
    *(aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default, aten._to_copy.default),
    *(aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default),
}
_SOME = {  # some of the numbers, or means of them
    *(aten.select.int, aten.slice.Tensor, aten.narrow.default, aten.index_select.default, aten.flip.default),
    *(aten.expand.default, aten.repeat.default, aten.gather.default, aten.index.Tensor),
    *(aten.mean.dim, aten.amax.default, aten.amin.default, aten.roll.default, aten.max_pool2d.default),
    *(aten.avg_pool1d.default, aten.avg_pool2d.default, aten.adaptive_avg_pool2d.default),
    *(aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec),
}
_LINEAR = {
    *(aten.linear.default, aten.addmm.default, aten.matmul.default, aten.mm.default, aten.bilinear.default),
    *(aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.conv2d.padding, aten.embedding.default),
}
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
        if node.target in _SAME:
            path.append(node)
        elif node.target in _EXP:
            depth += 1
        elif node.target in _LOG:
            depth -= 1
        elif not _careful(node):
            break
        node = before
    return Ending(within=within, linear=node.target in _LINEAR)


def without_links(graph: Graph) -> Graph | None:
    """The graph with logits for every output that ends in a link; None if none does."""
    found = [ending(graph, i) for i in range(len(graph.outputs))]
    if not any(e.logits is not None for e in found):
        return None
    nodes, outputs = list(graph.nodes), list(graph.outputs)
    for i, end in enumerate(found):
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
    if depth in (0, -1):
        if node.target in _SOFTMAX:
            return SOFTMAX, node.args[0]
        if node.target in _SIGMOID:
            return SIGMOID, node.args[0]
        x = _normalised(node)
        if x is not None and x.target in _EXP:
            return SOFTMAX, x.args[0]
    if depth in (0, 1):
        if node.target in _LOG_SOFTMAX or _less_logsumexp(node):
            return SOFTMAX, node.args[0]
        if node.target in _LOG_SIGMOID:
            return SIGMOID, node.args[0]
    return None


def _less_logsumexp(node: Node) -> bool:
    """x − log Σ e^x, a logarithm of a softmax by hand."""
    if node.target not in (aten.sub.Tensor, aten.sub_.Tensor) or len(node.args) != 2 or node.kwargs:
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
    while node.target in _SAME:
        node = node.args[0]
        axes = [s for s in (node.shape or ())[1:] if s != 1]
        if node.shape == output.shape and len(axes) < 2:  # one axis keeps its order whatever is done to shapes
            return node, ()
    return logits, () if logits.shape == output.shape and len(logits.shape or ()) < 3 else tuple(path)


def _careful(node: Node) -> bool:
    """A clamp or an added ε that keeps a logarithm from −∞."""
    rest = [*node.args[1:], *node.kwargs.values()]
    if node.target in (aten.add.Tensor, aten.add_.Tensor, aten.add.Scalar):
        return len(rest) == 1 and isinstance(rest[0], float) and 0 <= rest[0] <= _HARMLESS
    if node.target in (aten.clamp.default, aten.clamp_.default, aten.clamp_min.default, aten.clamp_max.default):
        bounds = [b for b in rest if b is not None]
        return all(isinstance(b, (int, float)) and min(abs(b), abs(1 - b)) <= _HARMLESS for b in bounds)
    return False


def _masked(logits: Node) -> bool:
    """Whether some logits may be −∞: they have no mean."""
    open_, seen = [logits], {logits}
    while open_:
        node = open_.pop()
        if node.kind != "call" or node.target in _LINEAR:
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
    if node.target not in (aten.div.Tensor, aten.div_.Tensor) or len(node.args) != 2:
        return None
    x, total = node.args
    while isinstance(total, Node) and (total.target in (aten.expand_as.default, *_SOME) or _careful(total)):
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


# ---- ranges


def _within(output: Node) -> bool:
    low, high = _range(output, {}, 64)
    return low >= 0 and high <= 1


def _range(value: Argument, known: dict[Node, Range], depth: int) -> Range:
    """Bounds of a value; everything that is not known to be bounded is ±∞."""
    if isinstance(value, (bool, int, float)):
        return float(value), float(value)
    if not isinstance(value, Node) or value.kind != "call" or depth == 0:
        return _ANY
    if value not in known:
        known[value] = _ANY  # while it is looked for
        known[value] = _range_of(value, lambda v: _range(v, known, depth - 1))
    return known[value]


def _range_of(node: Node, of: Callable[[Any], Range]) -> Range:
    target, args = node.target, node.args
    if target in _SOFTMAX or target in _SIGMOID or target is aten.hardsigmoid.default:
        return 0.0, 1.0
    if target in _LOG_SOFTMAX or target in _LOG_SIGMOID:
        return -math.inf, 0.0
    if target in _FUNCTIONS:
        return _FUNCTIONS[target](of(args[0]))
    if target in _SAME or target in _SOME:
        return of(args[0])
    if target in (aten.cat.default, aten.concat.default, aten.stack.default):
        parts = [of(part) for part in args[0]]
        return min(a for a, _ in parts), max(b for _, b in parts)
    if target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar):
        return _union(of(args[1]), of(args[2]))
    if target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        return _union(of(args[0]), of(args[2]))
    if target in _ARITHMETIC and not node.kwargs and len(args) == 2:
        if _normalised(node) is not None and of(args[0])[0] >= 0:
            return 0.0, 1.0
        return _ARITHMETIC[target](of(args[0]), of(args[1]))
    if target in (aten.clamp.default, aten.clamp_.default, aten.hardtanh.default):
        bounds = [*args[1:], *[None] * (3 - len(args))]
        low, high = node.kwargs.get("min", bounds[0]), node.kwargs.get("max", bounds[1])
        if target is aten.hardtanh.default:
            low, high = (-1.0 if low is None else low), (1.0 if high is None else high)
        a, b = of(args[0])
        low = low if isinstance(low, (int, float)) else -math.inf
        high = high if isinstance(high, (int, float)) else math.inf
        return min(max(a, low), high), max(min(b, high), low)
    return _ANY


def _union(a: Range, b: Range) -> Range:
    return min(a[0], b[0]), max(a[1], b[1])


def _product(a: Range, b: Range) -> Range:
    corners = [0.0 if 0 in (x, y) else x * y for x in a for y in b]  # 0·∞ = 0: a bound, not a value
    return min(corners), max(corners)


def _reciprocal(a: Range) -> Range:
    if a[0] < 0 < a[1]:
        return _ANY
    ends = sorted(math.inf if x == 0 else 1 / x for x in a)
    return (ends[0], ends[1]) if a[1] > 0 else (-math.inf, ends[0])


def _exponential(a: Range) -> Range:
    return tuple(0.0 if x == -math.inf else math.exp(x) if x < 700 else math.inf for x in a)  # type: ignore[return-value]


def _sum(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def _negative(a: Range) -> Range:
    return -a[1], -a[0]


_FUNCTIONS: dict[Any, Callable[[Range], Range]] = {
    **dict.fromkeys(_EXP, _exponential),
    aten.tanh.default: lambda a: (-1.0, 1.0),
    aten.relu.default: lambda a: (max(a[0], 0.0), max(a[1], 0.0)),
    aten.softplus.default: lambda a: (0.0, math.inf),
    aten.abs.default: lambda a: (0.0, max(abs(a[0]), abs(a[1]))),
    aten.square.default: lambda a: (0.0, max(abs(a[0]), abs(a[1])) ** 2),
    aten.neg.default: _negative,
    aten.reciprocal.default: _reciprocal,
}
_ARITHMETIC: dict[Any, Callable[[Range, Range], Range]] = {
    aten.mul.Tensor: _product,
    aten.mul.Scalar: _product,
    aten.add.Tensor: _sum,
    aten.add.Scalar: _sum,
    aten.sub.Tensor: lambda a, b: _sum(a, _negative(b)),
    aten.sub.Scalar: lambda a, b: _sum(a, _negative(b)),
    aten.rsub.Scalar: lambda a, b: _sum(_negative(a), b),
    aten.rsub.Tensor: lambda a, b: _sum(_negative(a), b),
    aten.div.Tensor: lambda a, b: _product(a, _reciprocal(b)),
    aten.div.Scalar: lambda a, b: _product(a, _reciprocal(b)),
}
