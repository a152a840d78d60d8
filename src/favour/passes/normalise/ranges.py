"""Bounds of the values of a graph, read off what its operations are (`favour.scalar.intervals`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from favour.graph.node import Node
from favour.rules.registry import RULES
from favour.scalar.intervals import ANY, POSITIVE, Range, multiply, rising, square, union

_DEEPEST = 64


Known = Callable[[Node, Callable[[Any], Range]], "Range | None"]


def bounds(node: Node, beside: Known = lambda node, of: None) -> Range:
    """Bounds of a value; everything that is not known to be bounded is ±∞.

    Args:
        node: The value.
        beside: What else is known of a node, given what finds the bounds of its arguments; None where nothing is.
    """
    return _bounds(node, {}, _DEEPEST, beside)


def _bounds(value: Any, known: dict[Node, Range], depth: int, beside: Known) -> Any:
    if isinstance(value, (bool, int, float)):
        return float(value), float(value)
    if isinstance(value, (list, tuple)):
        return [_bounds(v, known, depth, beside) for v in value]
    if not isinstance(value, Node) or value.kind != "call" or depth == 0:
        return ANY
    if value not in known:
        known[value] = ANY  # while it is looked for

        def of(v: Any) -> Any:
            return _bounds(v, known, depth - 1, beside)

        known[value] = beside(value, of) or _of_call(value, of)
    return known[value]


def _of_call(node: Node, of: Callable[[Any], Any]) -> Range:
    traits, args = node.traits, node.args
    if isinstance(traits.bounds, tuple):
        return traits.bounds
    if traits.bounds is multiply and args[0] is args[1]:
        return square(of(args[0]))
    if traits.bounds is not None and not node.kwargs:
        return traits.bounds(*map(of, args))
    entry = RULES.get(node.target)
    if node.claims("monotone") and entry is not None and entry.pointwise is not None:
        return rising(entry.pointwise(*args[1:], **node.kwargs), of(args[0]))
    power = node.claims("power")
    if isinstance(power, (int, float)) and (power % 2 == 0 or of(args[0])[0] >= 0):
        return POSITIVE
    if traits.keeps or traits.ordered or traits.permutes or traits.within:
        return of(args[0])
    if traits.sums or (traits.draws is not None and traits.draws.falls):  # only the sign is known
        return multiply(union((0.0, 0.0), of(args[0])), (0.0, math.inf))
    return ANY
