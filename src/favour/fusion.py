"""Element-wise code on one uncertain tensor, fused into one scalar function.

Hand-written GELU, 0.5·x·(1 + erf(x/√2)), reads x twice. Taking moments of its parts would treat two functions of the
same x as independent; |x| = relu(x) + relu(−x) would get half its variance. So wherever element-wise paths from one
tensor meet again, or two nonlinear element-wise operations follow each other, the whole stretch becomes a single f
whose moments are taken at once.

Inside a fused body every intermediate is followed as a triple (value, slope, line): its value at x, its derivative in x
by the chain rule, and, while it is still a straight line a·x + b, the pair (a, b). When an operation with kinks meets a
straight line, the kinks' positions in x are known, and quadrature splits there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from favour.graph import Graph, Node, replace_nodes
from favour.moments import Moments, quadrature
from favour.rules.registry import RULES, pointwise_surrogate
from favour.scalar import ScalarFunction
from favour.surrogate import Surrogate
from favour.value import Context, Value

aten = torch.ops.aten


@dataclass(eq=False)
class FusedNode(Node):
    """A node that applies one scalar function, written as a body of element-wise nodes on `root`."""

    root: Node | None = None
    body: list[Node] = field(default_factory=list)


@dataclass
class Traced:
    """An intermediate of a fused body: value, slope d/dx, and (a, b) while it equals a·x + b."""

    value: Any
    slope: Any = 0.0
    line: tuple[Any, Any] | None = None


def _value(a: Any) -> Any:
    return a.value if isinstance(a, Traced) else a


def _slope(a: Any) -> Any:
    return a.slope if isinstance(a, Traced) else 0.0


def _line(a: Any) -> tuple[Any, Any] | None:
    return a.line if isinstance(a, Traced) else (0.0, a)


def _add(kinks: list, a: Any, b: Any, alpha: Any = 1) -> Traced:
    la, lb = _line(a), _line(b)
    line = (la[0] + alpha * lb[0], la[1] + alpha * lb[1]) if la and lb else None
    return Traced(_value(a) + alpha * _value(b), _slope(a) + alpha * _slope(b), line)


def _sub(kinks: list, a: Any, b: Any, alpha: Any = 1) -> Traced:
    return _add(kinks, a, b, -alpha)


def _rsub(kinks: list, a: Any, b: Any, alpha: Any = 1) -> Traced:
    return _add(kinks, b, a, -alpha)


def _neg(kinks: list, a: Traced) -> Traced:
    return _mul(kinks, a, -1.0)


def _mul(kinks: list, a: Any, b: Any) -> Traced:
    line = None
    for known, other in ((a, b), (b, a)):
        if not isinstance(known, Traced) and isinstance(other, Traced) and other.line:
            line = (known * other.line[0], known * other.line[1])
    return Traced(_value(a) * _value(b), _slope(a) * _value(b) + _value(a) * _slope(b), line)


def _div(kinks: list, a: Any, b: Any) -> Traced:
    if not isinstance(b, Traced):
        return _mul(kinks, a, 1 / b)
    y = _value(a) / b.value
    return Traced(y, (_slope(a) - y * b.slope) / b.value)


def _pow(kinks: list, a: Traced, exponent: Any) -> Traced:
    return Traced(a.value**exponent, exponent * a.value ** (exponent - 1) * a.slope)


def _crossing(kinks: list, a: Any, b: Any) -> None:
    """Record where a and b cross, if both are straight lines."""
    la, lb = _line(a), _line(b)
    if la and lb:
        rise = la[0] - lb[0]
        if isinstance(rise, Tensor) or rise != 0:
            kinks.append((lb[1] - la[1]) / rise)


def _compare(op: Callable[[Any, Any], Any]) -> Callable[..., Traced]:
    def apply(kinks: list, a: Any, b: Any) -> Traced:
        _crossing(kinks, a, b)
        return Traced(op(_value(a), _value(b)))

    return apply


def _where(kinks: list, condition: Any, a: Any, b: Any) -> Traced:
    c = _value(condition)
    like = next(t for t in (_value(a), _value(b), _value(condition)) if isinstance(t, Tensor))
    slopes = [torch.as_tensor(_slope(t), dtype=like.dtype, device=like.device) for t in (a, b)]
    return Traced(torch.where(c, _value(a), _value(b)), torch.where(c, *slopes))


def _extreme(op: Callable[..., Any], first: Callable[[Any, Any], Any]) -> Callable[..., Traced]:
    def apply(kinks: list, a: Any, b: Any) -> Traced:
        _crossing(kinks, a, b)
        va, vb = _value(a), _value(b)
        like = va if isinstance(va, Tensor) else vb
        sa, sb = (torch.as_tensor(_slope(t), dtype=like.dtype, device=like.device) for t in (a, b))
        return Traced(op(torch.as_tensor(va), torch.as_tensor(vb)), torch.where(first(va, vb), sa, sb))

    return apply


ARITHMETIC: dict[Any, Callable[..., Traced]] = {
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _sub,
    aten.sub.Scalar: _sub,
    aten.rsub.Scalar: _rsub,
    aten.rsub.Tensor: _rsub,
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.mul.Scalar: _mul,
    aten.div.Tensor: _div,
    aten.div.Scalar: _div,
    aten.pow.Tensor_Scalar: _pow,
    aten.where.self: _where,
    aten.maximum.default: _extreme(torch.maximum, lambda a, b: a > b),
    aten.minimum.default: _extreme(torch.minimum, lambda a, b: a < b),
    aten.gt.Scalar: _compare(lambda a, b: a > b),
    aten.ge.Scalar: _compare(lambda a, b: a >= b),
    aten.lt.Scalar: _compare(lambda a, b: a < b),
    aten.le.Scalar: _compare(lambda a, b: a <= b),
    aten.gt.Tensor: _compare(lambda a, b: a > b),
    aten.ge.Tensor: _compare(lambda a, b: a >= b),
    aten.lt.Tensor: _compare(lambda a, b: a < b),
    aten.le.Tensor: _compare(lambda a, b: a <= b),
}
_AFFINE = {
    aten.add.Tensor,
    aten.add.Scalar,
    aten.sub.Tensor,
    aten.sub.Scalar,
    aten.rsub.Scalar,
    aten.rsub.Tensor,
    aten.neg.default,
    aten.mul.Tensor,
    aten.mul.Scalar,
    aten.div.Tensor,
    aten.div.Scalar,
}


def _pointwise(node: Node) -> bool:
    if node.kind != "call":
        return False
    entry = RULES.get(node.target)
    return node.target in ARITHMETIC or (entry is not None and entry.pointwise is not None)


def fuse(graph: Graph, uncertain: set[Node]) -> None:
    """Replace reconvergent or chained element-wise code by `FusedNode`s."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    replaced: dict[Node, FusedNode] = {}

    def sources(node: Node) -> list[Node]:
        return [s for s in node.inputs if s in uncertain]

    for node in graph.nodes:
        if node not in uncertain or not _pointwise(node):
            continue
        if node.dtype is not None and not node.dtype.is_floating_point:
            continue
        found = _body(node, sources, position)
        if found is None:
            continue
        root, body = found
        bends = sum(n.target not in _AFFINE or len(sources(n)) > 1 for n in body)
        last_bends = node.target not in _AFFINE or len(sources(node)) > 1
        if not (last_bends and (bends > 1 or len(sources(node)) > 1)):
            continue
        known = [s for n in body for s in n.inputs if s not in uncertain]
        replaced[node] = FusedNode(
            node.name + "_fused",
            "call",
            FUSED,
            (root, *dict.fromkeys(known)),
            {},
            node.shape,
            node.dtype,
            node.module,
            node.where,
            root=root,
            body=_copied(body),
        )
    if not replaced:
        return

    def now(node: Node) -> Node:
        return replaced.get(node, node)

    nodes = []
    for node in graph.nodes:
        node.args = replace_nodes(node.args, now)
        node.kwargs = replace_nodes(node.kwargs, now)
        nodes.append(replaced.get(node, node))
    for fused in replaced.values():
        assert fused.root is not None
        fused.args = replace_nodes(fused.args, now)
        root, fused.root = fused.root, now(fused.root)
        for inner in fused.body:
            inner.args = replace_nodes(inner.args, lambda n, a=root, b=fused.root: b if n is a else n)
    graph.outputs = replace_nodes(graph.outputs, now)
    graph.nodes = nodes
    graph.prune()


def _copied(body: list[Node]) -> list[Node]:
    """The body's own nodes, so that the graph around it can be rewritten."""
    copies: dict[Node, Node] = {}
    for node in body:
        copies[node] = Node(
            node.name,
            node.kind,
            node.target,
            replace_nodes(node.args, lambda n: copies.get(n, n)),
            replace_nodes(node.kwargs, lambda n: copies.get(n, n)),
            node.shape,
            node.dtype,
            node.module,
            node.where,
        )
    return list(copies.values())


def _body(
    node: Node, sources: Callable[[Node], list[Node]], position: dict[Node, int]
) -> tuple[Node, list[Node]] | None:
    """Walk back from `node` through element-wise nodes to the one tensor it is a function of.

    The latest open node is expanded first, so that the walk ends at the nearest such tensor past the point where all
    paths have met; from there it goes on through single element-wise nodes.
    """
    body: list[Node] = []
    best: tuple[Node, list[Node]] | None = None
    front = {node}
    while True:
        latest = max(front, key=position.__getitem__)
        if len(front) == 1 and latest is not node:
            best = (latest, sorted(body, key=position.__getitem__))
        if not _pointwise(latest) or latest.shape != node.shape:
            return best
        if any(s.kind != "call" and s.kind != "input" for s in sources(latest)):
            return best
        front.discard(latest)
        body.append(latest)
        front.update(sources(latest))
        if not front:
            return best


class _Fused:
    """Stands as the target of fused nodes."""

    def __repr__(self) -> str:
        return "favour.fused"


FUSED = _Fused()


def trace(node: FusedNode, x: Tensor, known: dict[Node, Any]) -> tuple[Traced, list[Any]]:
    """Run a fused body at x: the result as value and slope, and the kinks' positions."""
    kinks: list[Any] = []
    env: dict[Node, Any] = dict(known)
    assert node.root is not None
    env[node.root] = Traced(x, 1.0, (1.0, 0.0))
    result: Any = None
    for inner in node.body:
        args = replace_nodes(inner.args, env.__getitem__)
        kwargs = {k: v for k, v in replace_nodes(inner.kwargs, env.__getitem__).items() if k == "alpha"}
        if inner.target in ARITHMETIC:
            result = ARITHMETIC[inner.target](kinks, *args, **kwargs)
        else:
            function = RULES[inner.target].pointwise
            assert function is not None
            f = function(*args[1:], **replace_nodes(inner.kwargs, env.__getitem__))
            a: Traced = args[0]
            if a.line is not None:
                kinks += [(t - a.line[1]) / a.line[0] for t in getattr(f, "kinks", ())]
            result = Traced(f.value(a.value), f.derivative(a.value) * a.slope)
        env[inner] = result
    return result, kinks


def fused_surrogate(ctx: Context, node: FusedNode, x: Value, known: dict[Node, Any]) -> Surrogate:
    """The surrogate of a fused body."""
    _, kinks = trace(node, x.mean, known)

    def value(t: Tensor) -> Tensor:
        return trace(node, t, known)[0].value.expand(t.shape)

    def derivative(t: Tensor) -> Tensor:
        slope = trace(node, t, known)[0].slope
        return torch.as_tensor(slope, dtype=t.dtype, device=t.device).expand(t.shape)

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        return quadrature(value, mean, variance, derivative=derivative, kinks=tuple(kinks))

    f = ScalarFunction("fused element-wise code", value, derivative, moments)
    return pointwise_surrogate(ctx, x, f)

