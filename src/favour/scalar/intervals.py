"""Arithmetic with intervals: bounds of a result from bounds of its arguments.

    [a, b] + [c, d] = [a + c, b + d],    [a, b]·[c, d] = [min, max of the four products],    f([a, b]) = [f(a), f(b)]

the last for a nondecreasing f. Bounds may be infinite.
"""

from __future__ import annotations

import math

import torch

from favour.scalar.function import ScalarFunction

Range = tuple[float, float]
ANY: Range = (-math.inf, math.inf)
POSITIVE: Range = (0.0, math.inf)
UNIT: Range = (0.0, 1.0)


def union(*ranges: Range) -> Range:
    return min(a for a, _ in ranges), max(b for _, b in ranges)


def add(a: Range, b: Range) -> Range:
    return a[0] + b[0], a[1] + b[1]


def negate(a: Range) -> Range:
    return -a[1], -a[0]


def subtract(a: Range, b: Range) -> Range:
    return add(a, negate(b))


def subtract_from(a: Range, b: Range) -> Range:
    return subtract(b, a)


def multiply(a: Range, b: Range) -> Range:
    corners = [0.0 if 0 in (x, y) else x * y for x in a for y in b]  # 0·∞ = 0: a bound, not a value
    return min(corners), max(corners)


def reciprocal(a: Range) -> Range:
    if a[0] < 0 < a[1]:
        return ANY
    ends = sorted(math.inf if x == 0 else 1 / x for x in a)
    return (ends[0], ends[1]) if a[1] > 0 else (-math.inf, ends[0])


def divide(a: Range, b: Range) -> Range:
    return multiply(a, reciprocal(b))


def absolute(a: Range) -> Range:
    return 0.0, max(abs(a[0]), abs(a[1]))


def square(a: Range) -> Range:
    return 0.0, max(a[0] * a[0], a[1] * a[1])


def rising(f: ScalarFunction, a: Range) -> Range:
    """Of a nondecreasing f."""
    low, high = f.value(torch.tensor(a, dtype=torch.float64)).tolist()
    return (-math.inf if math.isnan(low) else low), (math.inf if math.isnan(high) else high)
