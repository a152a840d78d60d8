"""The call that a belief came from.

A belief is Gaussian; a network is not, and draws of its last layers can tell a score what a Gaussian has lost. So a
predictor leaves with each of its beliefs a copy of the call's inputs and how to ask it, for as long as neither the
predictor nor the belief's mean changes. Moving a belief or choosing rows of it keeps that; whatever makes another
distribution of it does not, nor do copies, files and compiled code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from favour.graph.tracing import traced

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What can be asked of the predictor that made a belief.

    Attributes:
        jsd: The divergence of draws of its last layers, (B,), for all rows of the call.
        unchanged: Whether it would still answer the call as it did.
        rows: Of the call that the belief has, one choice after the other.
    """

    jsd: Callable[[], Tensor]
    unchanged: Callable[[], bool]
    rows: tuple[Any, ...] = ()

    def divergence(self) -> Tensor | None:
        """Of the belief's rows, None where the network or the inputs have changed since."""
        if not self.unchanged():
            return None
        value = self.jsd()
        for chosen in self.rows:
            value = value[chosen]
        return value


_ORIGINS: WeakKeyDictionary[Any, Origin] = WeakKeyDictionary()


def remember(belief: Any, origin: Origin) -> None:
    """A predictor's belief and how to ask for more."""
    _ORIGINS[belief] = origin


def origin_of(belief: Any) -> Origin | None:
    """How to ask for more than the belief says, None where nobody can."""
    return None if traced() else _ORIGINS.get(belief)


def kept(made: T, belief: Any, rows: Any = None) -> T:
    """`made` of the same distributions as `belief`, or of its rows, with its origin."""
    if (origin := origin_of(belief)) is not None:
        _ORIGINS[made] = origin if rows is None else dataclasses.replace(origin, rows=(*origin.rows, rows))
    return made
