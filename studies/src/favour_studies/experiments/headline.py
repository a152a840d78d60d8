"""What a pass is worth: the number of samples of the same quality, and what the pass costs.

With q(n) the mean quality of n cached samples, the pass is worth the smallest n whose q is as good as its own, by
linear interpolation of q in log n.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any


def equivalent(curve: Sequence[tuple[int, float]], value: float, better: str = "lower") -> dict[str, Any]:
    """How many samples are as good as `value`; none if the most samples are no better than the fewest.

    >>> equivalent([(10, 3.0), (1000, 1.0)], 2.0)
    {'samples': 100.0, 'at_least': False, 'at_most': False}
    """
    points = sorted(curve)
    gain = (points[0][1] - points[-1][1]) * (1 if better == "lower" else -1)
    if gain <= 0:
        why = "more samples do not improve this measure here, so no number of them is equivalent"
        return {"samples": None, "at_least": False, "at_most": False, "why": why}
    sign = 1 if better == "lower" else -1
    points = sorted((n, sign * q) for n, q in curve)
    value = sign * value
    if points[0][1] <= value:
        return {"samples": float(points[0][0]), "at_least": False, "at_most": True}
    for (n, a), (m, b) in itertools.pairwise(points):
        if b <= value:
            share = (a - value) / (a - b)
            return {
                "samples": round(math.exp(math.log(n) + share * math.log(m / n)), 1),
                "at_least": False,
                "at_most": False,
            }
    return {"samples": float(points[-1][0]), "at_least": True, "at_most": False}


def at_time(curve: Sequence[tuple[int, float]], samples: float) -> float:
    """q(n) at a number of samples that was not run, by interpolation in log n."""
    points = sorted(curve)
    if samples <= points[0][0]:
        return points[0][1]
    for (n, a), (m, b) in itertools.pairwise(points):
        if samples <= m:
            return a + (b - a) * math.log(samples / n) / math.log(m / n)
    return points[-1][1]


def headline(
    title: str,
    curves: Mapping[str, Sequence[tuple[int, float]]],
    values: Mapping[str, float],
    better: Mapping[str, str],
    time: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The headline of a task: worth and cost of `adjoint`, and where sampling of equal time is better."""
    worth = {m: equivalent(curve, values[m], better[m]) for m, curve in curves.items()}
    time = time or {}
    samples = time.get("cached_samples")
    wins = []
    for m, curve in curves.items():
        other = None if samples is None else at_time(curve, samples)
        if other is not None and (other < values[m] if better[m] == "lower" else other > values[m]):
            wins.append(m)

    def words(m: str) -> str:
        w = worth[m]
        if w["samples"] is None:
            return f"no number of samples in {m.upper()}, which more samples do not improve"
        n = f"{w['samples']:,.0f}"
        return f"{'at least ' if w['at_least'] else 'at most ' if w['at_most'] else ''}{n} samples in {m.upper()}"

    cost = ""
    if time.get("forwards") is not None and samples is not None:
        cost = (
            f" It costs {time['forwards']:.1f} forward passes, or {samples:.1f} samples of the sampler that runs the "
            "deterministic trunk once"
        )
        if time.get("naive_samples") is not None:
            cost += f", or {time['naive_samples']:.1f} naive ones"
        cost += "."
    lost = f" Sampling of equal time is better in {', '.join(m.upper() for m in wins)}." if wins else ""
    return {
        "ours": "adjoint",
        "equivalent": worth,
        "forwards": time.get("forwards"),
        "naive_samples": time.get("naive_samples"),
        "cached_samples": samples,
        "sampling_wins": wins,
        "sentence": f"{title}: one adjoint pass is worth {', '.join(words(m) for m in worth)}.{cost}{lost}",
    }


def pareto(points: Sequence[tuple[float, float]]) -> list[bool]:
    """Which (time, badness) points no other beats in both; equal points are all kept.

    >>> pareto([(1, 5), (2, 3), (3, 4), (2, 3)])
    [True, True, False, True]
    """
    return [not any((t <= s and b < a) or (t < s and b <= a) for t, b in points) for s, a in points]
