"""What a forward sweep may carry with a value beside its mean and variances.

A sweep of variances forgets that entries vary together and that noises are skewed. Some of it can be had for little:
covariances within channels (`favour.surrogate.channels`), the third and fourth cumulants of noises (`Cumulants`). One
kind of such knowledge is one class, which says once how an operation's surrogate moves it (`after`), and what variances
follow from it behind a map (`through`). A rule that knows better says so in its surrogate (`Surrogate.carried`); what
nothing can be said of any more ends, with a reason (`Unavailable`). Methods name the kinds they want and get no others.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

from torch import Tensor

from favour.surrogate.linear_map import LinearMap, Unavailable

K = TypeVar("K", bound="Carried")


class Carried(ABC):
    """One kind of knowledge about a value.

    Attributes:
        title: What it is called where it ends.
    """

    title: str

    @classmethod
    @abstractmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        """What is known of the result of an operation, from its `Surrogate`; None where there was nothing to know."""

    def through(self, variance: Tensor, G: LinearMap) -> Tensor | None:
        """Var Gx for x of that variance, where this tells more of it than (G∘G)v; else None."""
        return None


def find(carried: Sequence[Carried], kind: type[K]) -> K | None:
    """What is known of one kind."""
    for one in carried:
        if isinstance(one, kind):
            return one
    return None


@dataclass(frozen=True, eq=False)
class Cumulants(Carried):
    """κ₃ and κ₄ of every entry of a value, as if entries were independent.

    Maps carry them by powers of their entries, κₙ(Gx)_i = Σ_j G_ijⁿ κₙ(x_j); noises and further arguments add theirs.
    An activation takes them in (`favour.scalar.effective`), and they end there.

    Attributes:
        third: κ₃, (batch, *event).
        fourth: κ₄, likewise.
    """

    third: Tensor
    fourth: Tensor

    title = "cumulants"

    @classmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        terms: list[tuple[Tensor, Tensor]] = [n.cumulants() for n in y.noises if n.cumulants is not None]
        ended: Unavailable | None = None
        if y.second is None or not y.second.ends_cumulants:
            for x, G in y.maps:
                known = find(x.carried, Cumulants)
                if known is None:
                    continue
                moved = known._moved(G)
                if isinstance(moved, Unavailable):
                    ended = moved
                else:
                    terms.append(moved)
        if not terms:
            return ended
        return cls(sum([k for k, _ in terms[1:]], terms[0][0]), sum([k for _, k in terms[1:]], terms[0][1]))

    def _moved(self, G: LinearMap) -> tuple[Tensor, Tensor] | Unavailable:
        third, fourth = G.power(3), G.power(4)
        if isinstance(third, Unavailable):
            return third
        if isinstance(fourth, Unavailable):
            return fourth
        return third.apply(self.third.unsqueeze(0)).squeeze(0), fourth.apply(self.fourth.unsqueeze(0)).squeeze(0)


class LoneCumulants(Cumulants):
    """Cumulants as long as every entry reads a single one, or nearly: sums of many are near to a Gaussian."""

    def _moved(self, G: LinearMap) -> tuple[Tensor, Tensor] | Unavailable:
        return super()._moved(G) if G.near_diagonal else Unavailable("sums are taken for Gaussian")
