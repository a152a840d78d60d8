"""A small network for every registered operation, from the cases that every rule has: a new rule is tried at once.

`dropout` hands it inputs with dropout, `layer` inputs behind dropout, a matrix and a ReLU, `belief` beliefs.
"""

from __future__ import annotations

from typing import Any

from cases import Batched, Case, Uncertain
from hostile import PROBED, SMALL, WAYS, Probe
from torch import Tensor

import favour

# Live it draws, and nothing maps draws over a batch; captured networks have its mean instead.
DRAWS = "aten.rrelu.default"


class Ordinary(Probe):
    """On the case's own values."""

    def _rows(self, v: Uncertain | Batched) -> Tensor:
        return self._converted(v.mean if isinstance(v, Uncertain) else v.tensor)

    def _beliefs(self) -> list[Any]:
        return [
            favour.Belief(t, diag=v.variance) if isinstance(v, Uncertain) else t
            for v, t in zip(self.given, self.plain, strict=True)
        ]

    @property
    def answers(self) -> bool:
        """Whether the network has an answer: half of a dropout's entries are 0, where logarithms and poles are."""
        return all(bool(t.isfinite().all()) for t in self.samples(16))


def probes() -> list[tuple[Case, str]]:
    """All that there are."""
    return [(case, way) for case in PROBED + SMALL for way in WAYS if case.overload != DRAWS or way == "belief"]


def name(case: Case, way: str) -> str:
    return f"{case.name}, {way}"
