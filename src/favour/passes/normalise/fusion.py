"""Element-wise code on one uncertain tensor, fused into one scalar function.

Hand-written GELU, 0.5·x·(1 + erf(x/√2)), reads x twice. Taking moments of its parts would treat two
functions of the same x as independent; |x| = relu(x) + relu(−x) would get half its variance. So wherever
element-wise paths from one tensor meet again, or two nonlinear element-wise operations follow each other,
the whole stretch becomes a single f whose moments are taken at once. Affine operations before it stay
outside, so that f varies on its own natural scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from favour.graph.interpreter import Values, arguments, interpret
from favour.graph.node import Graph, Node, replace_nodes, rewired
from favour.rules.registry import RULES, pointwise_surrogate
from favour.scalar import ScalarFunction
from favour.scalar.composed import Kinks, Traced
from favour.scalar.function import Exactness
from favour.scalar.moments import Moments, quadrature
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value


@dataclass(eq=False)
class FusedNode(Node):
    """A node that applies one scalar function, written as a body of element-wise nodes on `root`."""

    root: Node | None = None
    body: list[Node] = field(default_factory=list)


def _pointwise(node: Node) -> bool:
    return node.traits.scalar is not None


def fuse(graph: Graph, uncertain: set[Node]) -> None:
    """Replace reconvergent or chained element-wise code by `FusedNode`s. Assumes that no later pass looks inside."""
    position = {node: i for i, node in enumerate(graph.nodes)}
    replaced: dict[Node, FusedNode] = {}

    def sources(node: Node) -> list[Node]:
        return [s for s in node.inputs if s in uncertain]

    for node in graph.nodes:
        if node not in uncertain or not _pointwise(node):
            continue
        if node.dtype is not None and not node.dtype.is_floating_point:
            continue
        region = _body(node, sources, position)
        if region is None:
            continue
        root, body = region
        bends = sum(_bends(n, sources) for n in body)
        alone = node.target in RULES  # could do without fusion
        if not _bends(node, sources) or (alone and bends == 1 and len(sources(node)) == 1):
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
            inner.args = replace_nodes(inner.args, _swap(root, fused.root))
    graph.outputs = replace_nodes(graph.outputs, now)
    graph.nodes = nodes
    graph.prune()


def _swap(old: Node, new: Node) -> Callable[[Node], Node]:
    return lambda node: new if node is old else node


def _copied(body: list[Node]) -> list[Node]:
    """The body's own nodes, so that the graph around it can be rewritten."""
    copies: dict[Node, Node] = {}
    for node in body:
        copies[node] = rewired(node, lambda n: copies.get(n, n))
    return list(copies.values())


def _body(
    node: Node, sources: Callable[[Node], list[Node]], position: dict[Node, int]
) -> tuple[Node, list[Node]] | None:
    """Walk back from `node` through element-wise nodes to the one tensor it is a function of.

    The latest open node is expanded first, so that the walk ends at the nearest such tensor past the point
    where all paths have met; from there it goes on through single element-wise nodes as long as that takes in
    another bend.
    """
    body: list[Node] = []
    best: tuple[Node, list[Node]] | None = None
    front = {node}
    bent = True
    while True:
        latest = max(front, key=position.__getitem__)
        if len(front) == 1 and latest is not node and bent and latest.shape == node.shape:
            best = (latest, sorted(body, key=position.__getitem__))
            bent = False
        if not _pointwise(latest) or latest.shape != node.shape:
            return best
        if any(s.kind != "call" and s.kind != "input" for s in sources(latest)):
            return best
        front.discard(latest)
        body.append(latest)
        bent = bent or _bends(latest, sources)
        front.update(sources(latest))
        if not front:
            return best


def _bends(node: Node, sources: Callable[[Node], list[Node]]) -> bool:
    """Whether an operation is more than an affine function of one tensor."""
    random = sources(node)
    affine = [a for i, a in enumerate(node.args) if i in node.traits.affine or node.traits.keeps]
    return len(random) > 1 or not any(a is random[0] for a in affine)


class _Fused:
    """Stands as the target of fused nodes."""

    def __repr__(self) -> str:
        return "favour.fused"


FUSED = _Fused()


def trace(node: FusedNode, x: Tensor, known: dict[Node, Any]) -> tuple[Traced, Kinks]:
    """Run a fused body at x: the result as value and slope, and where it may have kinks."""
    kinks = Kinks()

    def traced(inner: Node, env: Values) -> Any:
        args, kwargs = arguments(inner, env)
        assert inner.traits.scalar is not None
        return inner.traits.scalar(kinks, *args, **kwargs)

    assert node.root is not None
    env = interpret(node.body, {**known, node.root: Traced(x, 1.0, ((1.0, 0.0),))}, traced)
    return env[node.body[-1]], kinks


def _leaves_its_domain(node: Node) -> bool:
    """A logarithm, a root or a negative power: some of a Gaussian's mass may have no value."""
    exponent = node.claims("power")
    if exponent is not None:
        return not isinstance(exponent, (int, float)) or exponent < 0 or exponent != int(exponent)
    return node.target in RULES and RULES[node.target].exactness == "linearised"


def fused_surrogate(ctx: Context, node: FusedNode, x: Value, known: dict[Node, Any]) -> Surrogate:
    """The surrogate of a fused body."""
    _, kinks = trace(node, x.mean, known)
    partial = any(_leaves_its_domain(n) for n in node.body)

    def value(t: Tensor) -> Tensor:
        return trace(node, t, known)[0].value.expand(t.shape)

    def derivative(t: Tensor) -> Tensor:
        slope = trace(node, t, known)[0].slope
        return torch.as_tensor(slope, dtype=t.dtype, device=t.device).expand(t.shape)

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        places = kinks
        if kinks.hidden:
            spread = variance.detach().clamp(min=0).sqrt()
            places = Kinks([*kinks.places, *(mean.detach() + k * spread for k in range(-3, 4))])
        integrals = quadrature(value, mean, variance, derivative=derivative, kinks=places.ascending())
        if not partial:
            return integrals
        # Part of the Gaussian may lie outside the domain of a logarithm or a root: then f is linearised.
        inside = integrals.mean.isfinite() & integrals.slope.isfinite() & integrals.residual.isfinite()
        slope = derivative(mean)
        slope = torch.where((variance <= 0) & ~slope.isfinite(), 0.0, slope)  # √ at 0, where nothing varies
        tangent = (value(mean), slope, torch.zeros_like(mean))
        return Moments(*(torch.where(inside, a, b) for a, b in zip(integrals, tangent, strict=True)))

    exactness: Exactness = "linearised" if partial else "moment-matched"
    f = ScalarFunction("fused element-wise code", value, derivative, moments, exactness)
    return pointwise_surrogate(ctx, x, f)
