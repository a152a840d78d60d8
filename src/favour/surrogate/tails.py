"""Third and fourth cumulants for maxima, which are made of tails.

The largest of many entries is far out in their tails, where a few dropped units are nothing like a Gaussian. So where a
plan has a maximum, values carry the cumulants that draws gave them through all that follows, sums included,

    κₙ(Gx)_i = Σ_j G_ijⁿ κₙ(x_j),        noises and further arguments add theirs,

as if entries were independent. Nothing is computed before a maximum asks (`favour.scalar.moments.independent`). What a
map or an operation cannot tell counts as Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.linear_map import LinearMap, Unavailable

Pair = tuple[Tensor, Tensor]


class Tails(Carried):
    """κ₃ and κ₄ of every entry of a value, made when asked for.

    Args:
        make: κ₃ and κ₄, (batch, *event), or None where nothing is known of them.
    """

    title = "tails"

    def __init__(self, make: Callable[[], Pair | None]) -> None:
        self._make: Callable[[], Pair | None] | None = make
        self._made: Pair | None = None

    def cumulants(self) -> Pair | None:
        if self._make is not None:
            self._made, self._make = self._make(), None
        return self._made

    @classmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        drawn = [noise.cumulants for noise in y.noises if noise.cumulants is not None]
        curved = y.second is not None and y.second.ends_cumulants
        carried = [] if curved else [(find(x.carried, cls), G) for x, G in y.maps]
        moved = [(known, G) for known, G in carried if known is not None]
        if not drawn and not moved:
            return None

        def make() -> Pair | None:
            parts = [draw() for draw in drawn]
            parts += [part for known, G in moved if (part := _through(known.cumulants(), G)) is not None]
            if not parts:
                return None
            return sum([third for third, _ in parts[1:]], parts[0][0]), sum([k for _, k in parts[1:]], parts[0][1])

        return cls(make)


def _through(cumulants: Pair | None, G: LinearMap) -> Pair | None:
    if cumulants is None:
        return None
    third, fourth = G.power(3), G.power(4)
    if isinstance(third, Unavailable) or isinstance(fourth, Unavailable):
        return None
    return tuple([map_.apply(k.unsqueeze(0)).squeeze(0) for map_, k in zip((third, fourth), cumulants, strict=True)])  # type: ignore[return-value]
