"""A scalar function written as several operations, followed operation by operation.

Every intermediate is a triple (value, slope, lines): its value at x, its derivative in x by the chain rule,
and, while it is piecewise linear, the straight lines a·x + b that it consists of. Where an operation with a
kink at t meets the line, a·x + b = t, the function may have a kink, and quadrature splits there (one place
too many is harmless). Where it meets something curved the kink's place is unknown, and quadrature splits
everywhere, σ by σ.

Operations say how they act on such triples by their trait `scalar`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import Tensor

from favour.graph.traits import Argument
from favour.scalar.function import Line, ScalarFunction

MOST_LINES = 8  # with more of them the places of kinks are not followed


@dataclass
class Traced:
    """An intermediate of a fused body: value, slope d/dx, and the lines it consists of, None if curved."""

    value: Any
    slope: Any = 0.0
    lines: tuple[Line, ...] | None = None


@dataclass
class Kinks:
    """Where f may have kinks: known places, and whether there are others."""

    places: list[Any] = field(default_factory=list)
    hidden: bool = False

    def meet(self, a: Argument, b: Argument) -> None:
        """Record where a and b may cross."""
        la, lb = _lines(a), _lines(b)
        if la is None or lb is None:
            self.hidden = True
            return
        for (slope, offset), (other_slope, other_offset) in product(la, lb):
            rise, gap = slope - other_slope, other_offset - offset
            if isinstance(rise, Tensor):
                self.places.append(torch.where(rise == 0, math.inf, gap / torch.where(rise == 0, 1.0, rise)))
            elif rise != 0:
                self.places.append(gap / rise)

    def ascending(self) -> tuple[Any, ...]:
        if not any(isinstance(t, Tensor) for t in self.places):
            return tuple(sorted(set(self.places)))
        like = next(t for t in self.places if isinstance(t, Tensor))
        tensors = [torch.as_tensor(t, dtype=like.dtype, device=like.device) for t in self.places]
        return torch.stack(torch.broadcast_tensors(*tensors)).sort(0).values.unbind(0)


def _value(a: Argument) -> Any:
    return a.value if isinstance(a, Traced) else a


def _slope(a: Argument) -> Any:
    return a.slope if isinstance(a, Traced) else 0.0


def _lines(a: Argument) -> tuple[Line, ...] | None:
    return a.lines if isinstance(a, Traced) else ((0.0, a),)


def _kept(lines: Iterable[Line]) -> tuple[Line, ...] | None:
    """The lines, each once as far as that is known, unless they are too many."""
    all_lines = list(lines)
    plain = dict.fromkeys(line for line in all_lines if not any(isinstance(part, Tensor) for part in line))
    others = [line for line in all_lines if any(isinstance(part, Tensor) for part in line)]
    return (*plain, *others) if len(plain) + len(others) <= MOST_LINES else None


def add(kinks: Kinks, a: Argument, b: Argument, alpha: Argument = 1) -> Traced:
    la, lb = _lines(a), _lines(b)
    lines = (
        None
        if la is None or lb is None
        else _kept((p + alpha * r, q + alpha * s) for (p, q), (r, s) in product(la, lb))
    )
    return Traced(_value(a) + alpha * _value(b), _slope(a) + alpha * _slope(b), lines)


def subtract(kinks: Kinks, a: Argument, b: Argument, alpha: Argument = 1) -> Traced:
    return add(kinks, a, b, -alpha)


def subtract_from(kinks: Kinks, a: Argument, b: Argument, alpha: Argument = 1) -> Traced:
    return add(kinks, b, a, -alpha)


def negate(kinks: Kinks, a: Traced) -> Traced:
    return multiply(kinks, a, -1.0)


def _flat(lines: tuple[Line, ...] | None) -> bool:
    """Piecewise constant, such as x > 0."""
    return lines is not None and all(not isinstance(a, Tensor) and a == 0 for a, _ in lines)


def multiply(kinks: Kinks, a: Argument, b: Argument) -> Traced:
    la, lb = _lines(a), _lines(b)
    lines = None
    if la is not None and lb is not None and (_flat(la) or _flat(lb)):
        constants, others = (la, lb) if _flat(la) else (lb, la)
        lines = _kept((c * p, c * q) for (_, c), (p, q) in product(constants, others))
    return Traced(_value(a) * _value(b), _slope(a) * _value(b) + _value(a) * _slope(b), lines)


def divide(kinks: Kinks, a: Argument, b: Argument) -> Traced:
    if not isinstance(b, Traced):
        return multiply(kinks, a, 1 / b)
    y = _value(a) / b.value
    return Traced(y, (_slope(a) - y * b.slope) / b.value)


def _chained(outer: Any, inner: Any) -> Any:
    """The product of two slopes: 0 where the inner function is constant, and be the outer one's infinite (√relu)."""
    if not isinstance(inner, Tensor):
        return outer * inner if inner != 0 else 0.0
    return torch.where(inner == 0, 0.0, outer) * inner


def power(kinks: Kinks, a: Traced, exponent: Argument) -> Traced:
    slope = _chained(exponent * a.value ** (exponent - 1), a.slope) if exponent != 0 else 0.0
    return Traced(a.value**exponent, slope, a.lines if exponent == 1 else None)


def compare(op: Callable[[Any, Any], Any]) -> Callable[..., Traced]:
    def apply(kinks: Kinks, a: Argument, b: Argument) -> Traced:
        kinks.meet(a, b)
        return Traced(op(_value(a), _value(b)), 0.0, _BOTH)

    return apply


def logical(op: Callable[..., Any]) -> Callable[..., Traced]:
    def apply(kinks: Kinks, *parts: Argument) -> Traced:
        return Traced(op(*map(_value, parts)), 0.0, _BOTH)

    return apply


_BOTH = ((0.0, 0.0), (0.0, 1.0))  # a truth value is one of two constants


def _tensors(a: Argument, b: Argument, like: Tensor) -> list[Tensor]:
    return [torch.as_tensor(t, dtype=None if isinstance(t, Tensor) else like.dtype, device=like.device) for t in (a, b)]


def choose(kinks: Kinks, condition: Argument, a: Argument, b: Argument) -> Traced:
    c, la, lb = _value(condition), _lines(a), _lines(b)
    like = next((t for t in (_value(a), _value(b)) if isinstance(t, Tensor)), _slope(condition) + torch.zeros(()))
    return Traced(
        torch.where(c, *_tensors(_value(a), _value(b), like)),
        torch.where(c, *_tensors(_slope(a), _slope(b), like)),
        None if la is None or lb is None else _kept((*la, *lb)),
    )


def fill(kinks: Kinks, a: Argument, mask: Argument, value: Argument) -> Traced:
    return choose(kinks, mask, value, a)


def extreme(first: Callable[[Any, Any], Any]) -> Callable[..., Traced]:
    def apply(kinks: Kinks, a: Argument, b: Argument) -> Traced:
        kinks.meet(a, b)
        return choose(kinks, first(_value(a), _value(b)), a, b)

    return apply


def convert(kinks: Kinks, a: Argument, *args: Argument, **kwargs: Argument) -> Traced:
    """A change of dtype: truth values become numbers, and rounding is not followed."""
    value = _value(a)
    return Traced(value if value.is_floating_point() else value + 0.0, _slope(a), _lines(a))


def function(make: Callable[..., ScalarFunction]) -> Callable[..., Traced]:
    """How f acts on an intermediate; `make` of its further arguments is f."""

    def apply(kinks: Kinks, a: Traced, *args: Argument, **kwargs: Argument) -> Traced:
        f = make(*args, **kwargs)
        for place in f.kinks:
            kinks.meet(a, place)
        lines = None
        if f.lines is not None and a.lines is not None:
            lines = _kept((p * c, p * d + q) for (p, q), (c, d) in product(f.lines, a.lines))
        return Traced(f.value(a.value), _chained(f.derivative(a.value), a.slope), lines)

    return apply
