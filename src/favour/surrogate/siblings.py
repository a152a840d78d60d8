"""Siblings: what a sweep of variances knows of tensors that were made from one.

A value that is drawn, or that several operations read, is an *origin* z. What linear maps and slopes make of it,
x = P δz + rest, carries the path P, and where two such values meet again their covariance is first order,

    Cov(x_i, y_i) = Σ_j P_ij Q_ij Var z_j = ((P∘Q) Var z)_i,

with entries of z counted as independent, as everywhere in such a sweep. So a residual sum has
Var(x + y) = Var x + Var y + 2 Cov(x, y), and a product the mean μ_x μ_y + Cov. Of several origins in common the latest
that can be told counts: its variance holds that of the others. A path ends where two from one origin meet (the result
may be an origin itself), and at its third operation that mixes entries: products of longer compositions do not close.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Self

import torch
from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.linear_map import LinearMap, Scaling, Unavailable, compose, identity, parts
from favour.surrogate.matrices import Matrix, passing
from favour.surrogate.structural import Structural

aten = torch.ops.aten

# Operations on a path that mix entries; a product of longer compositions is not known.
MIXING = 2


@dataclass(frozen=True, eq=False)
class Origin:
    """A value from which others are made.

    Attributes:
        variance: Var z, (batch, *event).
        value: `id` of the value, which a tape keeps.
        carried: What else is known of z.
    """

    variance: Tensor
    value: int = 0
    carried: tuple[Carried, ...] = ()


@dataclass(frozen=True, eq=False)
class Path:
    """How a value follows an origin.

    Attributes:
        origin: z.
        steps: Maps whose composition is P, the first of them acting on z.
    """

    origin: Origin
    steps: tuple[LinearMap, ...] = ()

    def through(self, G: LinearMap) -> Path | None:
        """Of Gx; None where it has become too long."""
        steps = self.steps
        for step in parts(G):
            steps = _joined(steps, step, self.origin.variance.ndim)
        mixing = sum([not isinstance(step, Scaling | Structural) for step in steps])
        return None if mixing > MIXING else Path(self.origin, steps)

    @property
    def map(self) -> LinearMap:
        """P."""
        return reduce(lambda inner, outer: compose(outer, inner), self.steps, identity())


def _joined(steps: tuple[LinearMap, ...], step: LinearMap, ndim: int) -> tuple[LinearMap, ...]:
    """One step more; some rows of a matrix that acts on `ndim` axes are a matrix again."""
    name = step.pattern.name if isinstance(step, Structural) else None
    if isinstance(name, tuple) and name[0] == "take" and steps and isinstance(steps[-1], Matrix):
        _, take, dim, *rest = name
        if dim == ndim - 1 and take is not aten.select.int and not any(isinstance(s, Structural) for s in steps):
            return (*steps[:-1], Matrix(passing(take(steps[-1].weight, 0, *rest))))
    return (*steps, step)


class Siblings(Carried):
    """The origins of a value.

    Args:
        paths: From the earliest to the latest.
    """

    title = "covariances with siblings"

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = tuple(paths)

    @classmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        moved: dict[Origin, Path | None] = {}
        for x, G in y.maps:
            for path in paths_of(x):
                again = path.origin in moved
                moved[path.origin] = None if again else path.through(G)
        kept = [path for path in moved.values() if path is not None]
        return cls(kept) if kept else None

    @staticmethod
    def origin(value: Any) -> None:
        """Make an origin of a value that several operations will read."""
        known = find(value.carried, Siblings)
        others = tuple([one for one in value.carried if one is not known])
        more = Path(Origin(value.variance, id(value), others))
        value.carried = (*others, Siblings([*(known.paths if known else ()), more]))


def paths_of(x: Any) -> tuple[Path, ...]:
    """Of a `Value`."""
    known = find(x.carried, Siblings)
    return () if known is None else known.paths


def meeting(x: Any, y: Any, G: LinearMap, H: LinearMap) -> tuple[Origin, LinearMap] | Unavailable | None:
    """The latest common origin of x and y of which it can be told, and GP∘HQ for their paths P and Q from there.

    None where they have no common origin.
    """
    theirs = {path.origin: path for path in paths_of(y)}
    refused: Unavailable | None = None
    for path in reversed(paths_of(x)):
        other = theirs.get(path.origin)
        if other is None:
            continue
        both = compose(G, path.map).hadamard(compose(H, other.map))
        if not isinstance(both, Unavailable):
            return path.origin, both
        refused = refused or both
    return refused


def covariance_at(origin: Origin, both: LinearMap) -> Tensor:
    """(P∘Q) Var z."""
    return both.apply(origin.variance.unsqueeze(0)).squeeze(0)
