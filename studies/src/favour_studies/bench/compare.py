"""What changed between two records, beyond noise.

A cost is in forward passes, f, with a spread s that holds those of both times; it changed if

    |f₂ − f₁| > s₁ + s₂

and by more than a fiftieth. Errors are of the same inputs and seeds; one changed if it moved by more than the reference
sample can blur it, c/√(N · inputs), and by more than a fiftieth.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from favour_studies.bench.record import KEYS, key

LEAST = 0.02
CONDITIONS = ("cpu", "gpu", "threads", "torch", "allocator")


@dataclass(frozen=True)
class Change:
    """A number that moved: `noise` is how far it might have by accident."""

    place: str
    what: str
    old: float
    new: float
    noise: float

    @property
    def ratio(self) -> float:
        return self.new / self.old if self.old else math.inf

    @property
    def better(self) -> bool:
        return self.new < self.old

    def __str__(self) -> str:
        verdict = "better" if self.better else "worse"
        return (
            f"{self.place}: {self.what} {self.old:.4g} → {self.new:.4g} (×{self.ratio:.3f}, {verdict}; "
            f"noise ±{self.noise:.2g})"
        )


@dataclass(frozen=True)
class Comparison:
    """Changes, how many rows were compared, rows only one record has, and conditions that differ."""

    changes: list[Change]
    compared: int
    added: list[str]
    removed: list[str]
    conditions: dict[str, tuple[Any, Any]]

    def __str__(self) -> str:
        lines = [
            f"note: {name} was {old!r} and is {new!r}, so costs are not strictly comparable."
            for name, (old, new) in self.conditions.items()
        ]
        lines += [str(change) for change in self.changes]
        lines += [f"new: {place}" for place in self.added] + [f"gone: {place}" for place in self.removed]
        changed = len({c.place for c in self.changes})
        lines.append(f"{self.compared} rows compared, {changed} changed beyond noise.")
        return "\n".join(lines)


def place(row: Mapping[str, Any]) -> str:
    """A row's name."""
    parts = dict(zip(KEYS, key(row), strict=True))
    return f"{parts['network']}, {parts['method']}, batch {parts['batch']}, {parts['mode']}, {parts['device']}"


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare two records of `favour bench`, rows of the same network, method, batch, mode and device."""
    before, after = {key(r): r for r in old["rows"]}, {key(r): r for r in new["rows"]}
    changes: list[Change] = []
    common = [k for k in after if k in before]
    for k in common:
        a, b = before[k], after[k]
        changes += _changed(place(b), "forwards", a, b, a["forwards spread"] + b["forwards spread"])
        about = new["networks"][b["network"]]
        blur = about["error of n samples times √n"] / math.sqrt(about["reference samples"] * about["inputs judged"])
        changes += _changed(place(b), "error", a, b, blur)
    conditions = {
        name: (old["environment"].get(name), new["environment"].get(name))
        for name in CONDITIONS
        if old["environment"].get(name) != new["environment"].get(name)
    }
    added = [place(after[k]) for k in after if k not in before]
    removed = [place(before[k]) for k in before if k not in after]
    return Comparison(changes, len(common), added, removed, conditions)


def _changed(where: str, what: str, a: Mapping[str, Any], b: Mapping[str, Any], noise: float) -> list[Change]:
    distance = abs(b[what] - a[what])
    return [Change(where, what, a[what], b[what], noise)] if distance > max(noise, LEAST * abs(a[what])) else []
