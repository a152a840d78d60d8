"""Linear maps, known by what they do.

An operation's surrogate holds a map G for each uncertain argument. Methods apply it to deviations, send covectors
through its transpose, and carry variances, curvatures and cumulants by products of its entries; nobody forms its
matrix.

Three primitives carry all of it,

    apply(δ) = Gδ,      transpose(g) = Gᵀg,      hadamard(H) = G∘H, the map with entries G_ij H_ij,

and what follows from them is written once, here:

    square(v)           (G∘G)v, the variances that independent entries of variance v give
    power(n)            the map with entries G_ijⁿ, which carries n-th cumulants
    between(c, q)       (G_a∘G_b)c, the covariances between the same entries of two inputs a and b

G∘H is not a product of maps, so every kind says how it closes: diagonal maps, weighted patterns of zeros and ones,
matrices (one for each input too), convolutions of one geometry, separable ones, and diagonals plus low rank stay what
they are. Where a kind knows no closed form the answer is `Unavailable`, with the reason; who wanted the product says so
(`Predictor.explain`), and nothing falls back in silence.

A composition, (AB)_ij = Σ_k A_ik B_kj, closes where every entry has one path, that is where a row of A or a column of B
holds at most one number: then (AB)∘(CD) = (A∘C)(B∘D), if A and C, or B and D, hold theirs at the same places.

Shapes. A tensor of the graph is (batch, *event). Deviations and covectors carry one more axis in front, the fold axis
F: (F, batch, *event). Variances and cumulants are (batch, *event).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation

Factor = Tensor | float
Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Unavailable:
    """In place of a map that has no closed form here.

    Attributes:
        reason: What is missing, in words that `Predictor.explain` shows.
    """

    reason: str


class LinearMap(ABC):
    """A linear map G between tensors.

    Traits, of the matrix:

    Attributes:
        one_per_row: Every output entry reads at most one input entry.
        one_per_column: Every input entry feeds at most one output entry, so that G diag(v) Gᵀ stays diagonal.
        alike: The same for every input of a batch.
        thin: Takes covectors with a batch of one, for those that are the same for every input.
        channelwise: Keeps the channels of a tensor (batch, channels, *space) apart.
        weighted: Multiplies by a weight of the network, which `low_rank` may approximate.
        near_diagonal: Every output entry follows one input entry, and all others little beside it.
    """

    one_per_row: bool = False
    one_per_column: bool = False
    alike: bool = False
    thin: bool = False
    weighted: bool = False
    channelwise: bool = False

    @property
    def near_diagonal(self) -> bool:
        return self.one_per_row

    @abstractmethod
    def apply(self, d: Tensor) -> Tensor:
        """Gδ, (F, *input shape) to (F, *output shape)."""

    @abstractmethod
    def transpose(self, g: Tensor) -> Tensor:
        """Gᵀg, (F, *output shape) to (F, *input shape)."""

    @abstractmethod
    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        """G∘H, the map with entries G_ij H_ij, for a map H between the same tensors."""

    def diagonal(self) -> Factor | Unavailable:
        """G_ii of a map from a tensor to one of the same shape; broadcasts to it."""
        return Unavailable(f"the diagonal of {self} is not known")

    def diagonal_after(self, there: LinearMap, factor: Factor) -> Factor | Unavailable:
        """(G diag(factor) H)_ii for a map H there from a tensor and this one, G, back to it."""
        return Unavailable(f"the diagonal of {self} of {there} is not known")

    def rows(self, take: Rows, like: Tensor) -> LinearMap | Unavailable:
        """The same map for other inputs.

        Args:
            take: Of a tensor (batch, …), the rows of those inputs.
            like: An empty deviation, (0, *input shape), which tells factors that have a batch from those that have not.
        """
        if self.alike:
            return self
        return Unavailable(f"{self} is not known for other inputs than its own")

    def low_rank(self, q: int) -> LinearMap:
        """The map through a rank-q approximation of its weight (paper section 4.1); itself where it has none."""
        return self

    def scaled_after(self, factor: Factor) -> LinearMap:
        """diag(factor)·G."""
        return Composition(Scaling(factor), self)

    def scaled_before(self, factor: Factor) -> LinearMap:
        """G·diag(factor)."""
        return Composition(self, Scaling(factor))

    # ------------------------------------------------------ what follows

    def power(self, n: int) -> LinearMap | Unavailable:
        """The map with entries G_ijⁿ, n ≥ 1."""
        made: LinearMap | Unavailable = self
        for _ in range(n - 1):
            if isinstance(made, Unavailable):
                return made
            made = made.hadamard(self)
        return made

    def square(self, v: Tensor) -> Tensor:
        """(G∘G)v, (*input shape) to (*output shape).

        Raises:
            UnsupportedOperation: The squares of the entries have no closed form.
        """
        squared = self.power(2)
        if isinstance(squared, Unavailable):
            raise UnsupportedOperation(f"variances cannot be carried: {squared.reason}")
        return squared.apply(v.unsqueeze(0)).squeeze(0)

    def between(self, c: Tensor, q: int) -> Tensor | Unavailable:
        """(G_a∘G_b)c, (q, *input shape) to (q, *output shape): covariances between the same entries of two inputs.

        Entry (a, (g, b)) of c is about the inputs a and b of group g; see `partners`.
        """
        if self.alike:
            squared = self.power(2)
            return squared if isinstance(squared, Unavailable) else squared.apply(c)
        parts = []
        for a in range(q):
            theirs = self.rows(partial(_partner, q=q, a=a), c[:0])
            both = theirs if isinstance(theirs, Unavailable) else self.hadamard(theirs)
            if isinstance(both, Unavailable):
                return both
            parts.append(both.apply(c[a : a + 1]))
        return torch.cat(parts)

    def __repr__(self) -> str:
        return type(self).__name__


def partners(t: Tensor, q: int) -> Tensor:
    """What every input's partners have: (batch, *event) to (q, batch, *event), or (1, 1, *event) for a batch of one."""
    if t.shape[0] == 1:  # the same for every input
        return t.unsqueeze(0)
    groups, event = t.shape[0] // q, t.shape[1:]
    rows = t.reshape(groups, q, *event).transpose(0, 1).unsqueeze(2)  # (a, g, 1, *event)
    return rows.expand(q, groups, q, *event).reshape(q, groups * q, *event)


def scaled(d: Tensor, factor: Factor) -> Tensor:
    """factor ∘ d for d with a fold axis in front; `factor` broadcasts to the rest."""
    if not isinstance(factor, Tensor) or factor.ndim != d.ndim - 1:
        return d * factor
    # Written batch first: covectors that were the same for every input come out stored that way, which is how
    # their Gram matrices and products with weights read them.
    return (d.transpose(0, 1) * factor.unsqueeze(1)).transpose(0, 1)


def taken(factor: Factor, take: Rows, like: Tensor) -> Factor:
    """A factor of a map for other inputs, see `LinearMap.rows`; it broadcasts to what `like` is an empty fold of."""
    each = isinstance(factor, Tensor) and factor.ndim == like.ndim - 1 and factor.shape[0] != 1
    return take(factor) if each else factor  # type: ignore[arg-type]


def meet(G: LinearMap, H: LinearMap) -> LinearMap | Unavailable:
    """G∘H for a G that does not know H: the product is symmetric, and scaled maps and diagonals meet every kind."""
    if isinstance(H, Scaling) or (isinstance(H, Composition) and H.scaled):
        return H.hadamard(G)
    return Unavailable(f"{G} has no product with {H}")


def _partner(t: Tensor, q: int, a: int) -> Tensor:
    """What the a-th input of every group has, for all inputs of the group."""
    return t if t.shape[0] == 1 else partners(t, q)[a]


class Scaling(LinearMap):
    """G = diag(factor), `factor` broadcasting to the input's shape without enlarging it."""

    one_per_row = one_per_column = thin = channelwise = True

    def __init__(self, factor: Factor) -> None:
        self.factor = factor
        self.alike = not isinstance(factor, Tensor)

    def apply(self, d: Tensor) -> Tensor:
        return scaled(d, self.factor)

    def transpose(self, g: Tensor) -> Tensor:
        return scaled(g, self.factor)

    def square(self, v: Tensor) -> Tensor:
        return v * (self.factor * self.factor)

    def power(self, n: int) -> LinearMap:
        return Scaling(self.factor**n)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        theirs = other.diagonal()
        return theirs if isinstance(theirs, Unavailable) else Scaling(self.factor * theirs)

    def diagonal(self) -> Factor:
        return self.factor

    def rows(self, take: Rows, like: Tensor) -> LinearMap:
        return Scaling(taken(self.factor, take, like))

    def scaled_after(self, factor: Factor) -> LinearMap:
        return Scaling(self.factor * factor)

    scaled_before = scaled_after


class Identity(Scaling):
    """G = I."""

    def __init__(self) -> None:
        super().__init__(1.0)

    def apply(self, d: Tensor) -> Tensor:
        return d

    def transpose(self, g: Tensor) -> Tensor:
        return g

    def square(self, v: Tensor) -> Tensor:
        return v

    def power(self, n: int) -> LinearMap:
        return self

    def rows(self, take: Rows, like: Tensor) -> LinearMap:
        return self


class Composition(LinearMap):
    """outer ∘ inner."""

    def __init__(self, outer: LinearMap, inner: LinearMap) -> None:
        self.outer, self.inner = outer, inner
        self.one_per_row = outer.one_per_row and inner.one_per_row
        self.one_per_column = outer.one_per_column and inner.one_per_column
        self.alike = outer.alike and inner.alike
        self.thin = outer.thin and inner.thin
        self.channelwise = outer.channelwise and inner.channelwise

    def apply(self, d: Tensor) -> Tensor:
        return self.outer.apply(self.inner.apply(d))

    def transpose(self, g: Tensor) -> Tensor:
        return self.inner.transpose(self.outer.transpose(g))

    def square(self, v: Tensor) -> Tensor:
        return self.outer.square(self.inner.square(v)) if self._one_path else super().square(v)

    @property
    def near_diagonal(self) -> bool:
        return self.outer.near_diagonal and self.inner.near_diagonal

    @property
    def scaled(self) -> bool:
        """A map between or behind factors."""
        return isinstance(self.outer, Scaling) or isinstance(self.inner, Scaling)

    @property
    def _one_path(self) -> bool:
        return self.outer.one_per_row or self.inner.one_per_column

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(self.outer, Scaling):  # (SA)∘H = S(A∘H)
            made = self.inner.hadamard(other)
            return made if isinstance(made, Unavailable) else made.scaled_after(self.outer.factor)
        if isinstance(self.inner, Scaling):
            made = self.outer.hadamard(other)
            return made if isinstance(made, Unavailable) else made.scaled_before(self.inner.factor)
        if not isinstance(other, Composition) or other.scaled:
            return meet(self, other)
        if not self._one_path:
            return Unavailable(f"an entry of {self} has several paths")
        outer = self.outer.hadamard(other.outer)
        if isinstance(outer, Unavailable):  # and what is in between may differ in shape
            return outer
        inner = self.inner.hadamard(other.inner)
        return inner if isinstance(inner, Unavailable) else Composition(outer, inner)

    def rows(self, take: Rows, like: Tensor) -> LinearMap | Unavailable:
        inner = self.inner.rows(take, like)
        outer = self.outer if self.outer.alike else self.outer.rows(take, self.inner.apply(like))
        if isinstance(outer, Unavailable):
            return outer
        return inner if isinstance(inner, Unavailable) else Composition(outer, inner)

    def scaled_after(self, factor: Factor) -> LinearMap:
        return Composition(self.outer.scaled_after(factor), self.inner)

    def scaled_before(self, factor: Factor) -> LinearMap:
        return Composition(self.outer, self.inner.scaled_before(factor))

    def diagonal(self) -> Factor | Unavailable:
        steps = parts(self)
        mixing = [i for i, step in enumerate(steps) if not isinstance(step, Scaling)]
        if len(mixing) > 2:
            return Unavailable(f"the diagonal of {self} is not known")
        first, last = mixing[0], mixing[-1]
        between = math.prod([s.factor for s in steps[first + 1 : last] if isinstance(s, Scaling)])
        G = steps[last]
        known = G.diagonal() if first == last else G.diagonal_after(steps[first], between)
        if isinstance(known, Unavailable):
            return known
        return math.prod([s.factor for s in steps[:first] + steps[last + 1 :] if isinstance(s, Scaling)], start=known)

    def low_rank(self, q: int) -> LinearMap:
        return Composition(self.outer.low_rank(q), self.inner.low_rank(q))

    def __repr__(self) -> str:
        return f"{self.outer} of {self.inner}"


def parts(G: LinearMap) -> list[LinearMap]:
    """The maps that a composition is made of, the first to act in front."""
    if isinstance(G, Composition):
        return [*parts(G.inner), *parts(G.outer)]
    return [] if isinstance(G, Identity) else [G]


def compose(outer: LinearMap, inner: LinearMap) -> LinearMap:
    """outer ∘ inner, in the simplest kind that holds it."""
    if isinstance(inner, Identity):
        return outer
    if isinstance(outer, Identity):
        return inner
    if isinstance(outer, Scaling):
        return inner.scaled_after(outer.factor)
    return outer.scaled_before(inner.factor) if isinstance(inner, Scaling) else Composition(outer, inner)


def identity() -> LinearMap:
    """G = I."""
    return Identity()


def scaling(factor: Factor) -> LinearMap:
    """G = diag(factor), `factor` broadcasting to the input's shape without enlarging it."""
    return Scaling(factor)
