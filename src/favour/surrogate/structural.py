"""Maps whose matrices are patterns of zeros and ones, weighted: most operations that move, select, join and add.

    G = diag(outer) P diag(inner),        G∘H = diag(outer_G outer_H) P diag(inner_G inner_H)    for one pattern P,

since P∘P = P. A sum is a pattern, an average one with a weight for each row, a broadcast product one behind a weight.
Two patterns are one where they are the same object or bear the same name.

`Sum` adds maps whose patterns nowhere overlap, (A + B)∘(C + D) = A∘C + B∘D if A does not meet D, nor B C.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from favour.surrogate.linear_map import Factor, LinearMap, Rows, Unavailable, meet, scaled, taken

Act = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Pattern:
    """A matrix P of zeros and ones.

    Attributes:
        apply: δ ↦ Pδ, with the fold axis.
        transpose: g ↦ Pᵀg, with the fold axis.
        one_per_row, one_per_column, alike, channelwise: See `LinearMap`.
        name: Patterns of one name, between the same tensors, are the same.
    """

    apply: Act
    transpose: Act
    one_per_row: bool = False
    one_per_column: bool = True
    alike: bool = True
    channelwise: bool = False
    name: Hashable | None = None

    def agrees(self, other: Pattern) -> bool:
        return self is other or (self.name is not None and self.name == other.name)


def _is_one(factor: Factor) -> bool:
    return isinstance(factor, int | float) and factor == 1  # a symbolic size is neither, and is not asked


def _times(factor: Factor, d: Tensor) -> Tensor:
    return d if _is_one(factor) else scaled(d, factor)


class Structural(LinearMap):
    """G = diag(outer) P diag(inner); the factors broadcast to the result's and the input's shape."""

    def __init__(self, pattern: Pattern, outer: Factor = 1.0, inner: Factor = 1.0) -> None:
        self.pattern, self.outer, self.inner = pattern, outer, inner
        self.one_per_row, self.one_per_column = pattern.one_per_row, pattern.one_per_column
        self.channelwise = pattern.channelwise
        self.alike = pattern.alike and not isinstance(outer, Tensor) and not isinstance(inner, Tensor)

    def apply(self, d: Tensor) -> Tensor:
        return _times(self.outer, self.pattern.apply(_times(self.inner, d)))

    def transpose(self, g: Tensor) -> Tensor:
        return _times(self.inner, self.pattern.transpose(_times(self.outer, g)))

    def power(self, n: int) -> LinearMap:
        return self if _is_one(self.outer) and _is_one(self.inner) else self._with(self.outer**n, self.inner**n)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(other, Structural) and self.pattern.agrees(other.pattern):
            return self._with(self.outer * other.outer, self.inner * other.inner)
        return Unavailable(f"{self} and {other} do not move the same entries")

    def rows(self, take: Rows, like: Tensor) -> LinearMap | Unavailable:
        if not self.pattern.alike:
            return Unavailable("a lookup that differs from input to input")
        outer = self.outer
        if isinstance(outer, Tensor):
            outer = taken(outer, take, self.pattern.apply(like))
        return self._with(outer, taken(self.inner, take, like))

    def scaled_after(self, factor: Factor) -> LinearMap:
        return self._with(self.outer * factor, self.inner)

    def scaled_before(self, factor: Factor) -> LinearMap:
        return self._with(self.outer, self.inner * factor)

    def _with(self, outer: Factor, inner: Factor) -> Structural:
        return Structural(self.pattern, outer, inner)


def structural(
    apply: Act,
    transpose: Act,
    *,
    one_per_row: bool = False,
    disjoint: bool = True,
    alike: bool = True,
    channelwise: bool = False,
    name: Hashable | None = None,
) -> Structural:
    """A map whose matrix has entries 0 and 1 only. `apply` and `transpose` take a leading fold axis.

    Args:
        apply: δ ↦ Gδ.
        transpose: g ↦ Gᵀg.
        one_per_row: Every output entry is one input entry, or 0.
        disjoint: Every input entry feeds at most one output entry (`LinearMap.one_per_column`).
        alike: The same for every input.
        channelwise: See `LinearMap`.
        name: See `Pattern`.
    """
    return Structural(Pattern(apply, transpose, one_per_row, disjoint, alike, channelwise, name))


def weighted_sum(weights: Factor, axis: int, keepdim: bool, size: int) -> LinearMap:
    """G: δ ↦ Σ over `axis` of weights ∘ δ; `axis` counts from the front of a tensor with `size` entries there."""

    def apply(d: Tensor) -> Tensor:
        return d.sum(axis + 1, keepdim=keepdim)

    def transpose(g: Tensor) -> Tensor:
        wide = g if keepdim else g.unsqueeze(axis + 1)
        return wide.expand(*wide.shape[: axis + 1], size, *wide.shape[axis + 2 :])

    return structural(apply, transpose).scaled_before(weights)


class Sum(LinearMap):
    """Σ parts, of maps between the same tensors that nowhere hold a number at the same place."""

    def __init__(self, *parts: LinearMap) -> None:
        self.parts = parts
        self.alike = all([part.alike for part in parts])
        self.thin = all([part.thin for part in parts])

    def apply(self, d: Tensor) -> Tensor:
        made = [part.apply(d) for part in self.parts]
        return sum(made[1:], made[0])

    def transpose(self, g: Tensor) -> Tensor:
        made = [part.transpose(g) for part in self.parts]
        return sum(made[1:], made[0])

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if not isinstance(other, Sum) or len(other.parts) != len(self.parts):
            return meet(self, other)
        made = [one.hadamard(two) for one, two in zip(self.parts, other.parts, strict=True)]
        refused = next((m for m in made if isinstance(m, Unavailable)), None)
        return refused or Sum(*[m for m in made if isinstance(m, LinearMap)])

    def rows(self, take: Rows, like: Tensor) -> LinearMap | Unavailable:
        made = [part.rows(take, like) for part in self.parts]
        refused = next((m for m in made if isinstance(m, Unavailable)), None)
        return refused or Sum(*[m for m in made if isinstance(m, LinearMap)])


class WindowEntries(Protocol):
    """What `Routing` asks of windows."""

    @property
    def disjoint(self) -> bool:
        """No entry is in two windows."""

    @property
    def channelwise(self) -> bool:
        """No window holds two channels of (batch, channels, *space)."""

    def entries(self, t: Tensor, fill: float) -> list[Tensor]:
        """The first, second, … entry of every window; `fill` where there is none."""

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The adjoint of `entries`."""


class Routing(LinearMap):
    """(Gx)_window = Σ_j weights_j · entry j of the window: the slopes of a maximum over windows.

    Args:
        windows: Lists the entries of every window, and gathers them (`favour.rules.windows.Box`); equal ones agree.
        weights: One tensor for each entry of a window, of the result's shape.
        one_per_column: Windows do not overlap.
    """

    def __init__(self, windows: WindowEntries, weights: Sequence[Tensor]) -> None:
        self.windows, self.weights = windows, list(weights)
        self.channelwise = windows.channelwise
        self.one_per_column = windows.disjoint

    def apply(self, d: Tensor) -> Tensor:
        parts = self.windows.entries(d, 0.0)
        total = parts[0] * self.weights[0]
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            total = torch.addcmul(total, part, weight)
        return total

    def transpose(self, g: Tensor) -> Tensor:
        return self.windows.gather([g * w for w in self.weights])

    def power(self, n: int) -> LinearMap:
        return Routing(self.windows, [w**n for w in self.weights])

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(other, Routing) and other.windows == self.windows:
            return Routing(self.windows, [a * b for a, b in zip(self.weights, other.weights, strict=True)])
        return meet(self, other)

    def rows(self, take: Rows, like: Tensor) -> LinearMap:
        return Routing(self.windows, [take(w) for w in self.weights])

    def scaled_after(self, factor: Factor) -> LinearMap:
        return Routing(self.windows, [w * factor for w in self.weights])
