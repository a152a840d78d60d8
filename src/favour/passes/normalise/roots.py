"""Roots of sums that cannot be negative: LP pooling, and norms as people write them.

LP pooling is (Σ x_i^n)^(1/n), which torch writes as an average of powers, a sign and a ReLU against negative sums, a
factor and a root. Where the sum cannot be negative (even n, or x ≥ 0) the sign and the ReLU do nothing, and the root is
taken of a positive variable (`favour.scalar.moments.positive`) instead of a Gaussian one.

Right behind dropout the largest terms are there or not, and the root of their sum follows: dropout, sum and root are
then one operation.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from favour.graph.node import Graph, Node, nodes_in
from favour.graph.traits import Argument, Operation, Traits, declare
from favour.passes.normalise.ranges import bounds
from favour.passes.words import ADD, MUL
from favour.rules.maxima import behind_dropout
from favour.rules.registry import pointwise_surrogate
from favour.rules.windows import Windows, per_axis
from favour.scalar import ScalarFunction
from favour.scalar.moments import Moments
from favour.scalar.moments.positive import dropped_power, positive_power
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value

aten = torch.ops.aten


def root(ctx: Context, x: Value, exponent: float) -> Surrogate:
    """x^exponent for x ≥ 0 and 0 < exponent < 1."""
    return pointwise_surrogate(ctx, x, _function(exponent))


_TOLD_APART = 3


def dropped_root(
    ctx: Context,
    x: Value | Tensor,
    p: Argument,
    exponent: float,
    scale: float,
    label: str,
    op: Operation,
    args: Sequence[Any],
) -> Surrogate:
    """(scale·op(dropout(x, p), *args))^exponent for x ≥ 0 and an average `op` without padding, as one operation."""
    mean = x.mean if isinstance(x, Value) else x
    axes = mean.ndim - 2
    kernel = per_axis(args[0], axes)
    stride = kernel if len(args) < 2 or not args[1] else per_axis(args[1], axes)
    windows = [Windows.regular(i - axes, mean.shape[2 + i], kernel[i], stride[i], 0, 1, False) for i in range(axes)]
    scale = scale / math.prod(kernel)
    return behind_dropout(
        x, p, label, windows, lambda laws, rates: dropped_power(laws, rates, exponent, scale, _TOLD_APART)
    )


declare(dropped_root, traits=Traits(random=True))


def _function(r: float) -> ScalarFunction:
    def derivative(x: Tensor) -> Tensor:
        positive = x > 0
        return torch.where(positive, r * torch.where(positive, x, 1.0) ** (r - 1), 0.0)

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        return positive_power(mean, variance, r)

    return ScalarFunction("root", lambda x: x.clamp(min=0) ** r, derivative, moments, kinks=(0.0,))


def find_roots(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite `graph` in place: roots of sums that cannot be negative become `root`. Assumes nothing."""
    users, outputs = graph.users(), set(nodes_in(graph.outputs))

    def reads(node: Node) -> int:
        """How many read a result, the sign and size of one counted once."""
        signs = [u for u in users[node] if u.target in (aten.sign.default, aten.abs.default)]
        return (node in outputs) + len(users[node]) - max(len(signs) - 1, 0)

    for node in graph.nodes:
        if node not in uncertain or node.kind != "call":
            continue
        exponent = _root_of(node)
        if exponent is None:
            continue
        source, scaled, scale = node.args[0], None, 1.0
        if source.target in MUL and _number(source.args[1], positive=True):
            scaled, scale = source, source.args[1]
            source = source.args[0]
        plain = _without_sign(source)
        if _summed(plain) and bounds(plain)[0] >= 0:
            if scaled is not None and plain is not source:
                scaled.args = (plain, scale)
            average = plain.traits.pool == "regular" and not plain.traits.maximum
            drop = plain.args[0] if average and len(plain.args) <= 3 and not plain.kwargs else None
            if drop is not None and _element_dropout(drop) and reads(drop) == reads(plain) == 1:
                label = drop.module or "dropout"
                node.args = (drop.args[0], drop.rate, exponent, scale, label, plain.target, plain.args[1:])
                node.target, node.kwargs = dropped_root, {}
                continue
            node.target, node.kwargs = root, {}
            node.args = (plain if scaled is None else scaled, exponent)
    graph.prune()


def _element_dropout(node: Node) -> bool:
    return node.draw is not None and node.draw.falls and not node.draw.channels


def _number(value: Argument, *, positive: bool = False) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and (not positive or value > 0)


def _root_of(node: Node) -> float | None:
    power = node.claims("power")
    return float(power) if _number(power) and 0 < power < 1 else None


def _without_sign(node: Node) -> Node:
    """s where `node` is sign(s)·relu(|s|)."""
    if node.target not in MUL:
        return node
    sign, size = node.args[:2]
    if not (isinstance(sign, Node) and isinstance(size, Node) and sign.target is aten.sign.default):
        return node
    inner = size.args[0] if size.target is aten.relu.default else size
    return inner.args[0] if inner.target is aten.abs.default and inner.args[0] is sign.args[0] else node


def _summed(node: Node) -> bool:
    if node.target in ADD and isinstance(node.args[0], Node):
        return _summed(node.args[0])
    return node.traits.sums
