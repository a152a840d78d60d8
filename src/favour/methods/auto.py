"""`method="auto"`: which method, from the sizes in the graph.

The reverse sweep over all n outputs is exact for its surrogates, so it is taken while it stays affordable: in forward
passes (`favour.methods.cost`), or in multiplications for each input where the network is small. With more outputs that
are class scores (`task`) it is taken over the leading directions of a softmax and the common shift of all scores
(`directions`); else `dplr` gives every output's marginal and the leading correlations.

| effort     | the reverse sweep takes                                                                     |
|------------|---------------------------------------------------------------------------------------------|
| `fast`     | tangents                                                                                    |
| `balanced` | secants, where they cost at most half a forward pass or the network is small; else tangents |
| `best`     | secants, and 16 groups of pairs                                                             |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from favour.errors import InvalidType, InvalidValue
from favour.methods.adjoint import Adjoint
from favour.methods.cost import forward_pass, output_entries, outputs, uncertain_share
from favour.methods.diag import Diag
from favour.methods.dplr import DPLR
from favour.methods.method import Bound, Method, Numerics, register
from favour.methods.pooled import Pooled, grouping
from favour.passes.plan.steps import Plan

# `auto` goes through all outputs while that is predicted to cost at most this many forward passes.
AFFORDABLE = 24.0

# And this many where they are not known to be class scores, of which few directions matter: what else there is, `dplr`,
# costs more in seconds than it counts, and knows less.
WHOLE = 48.0

# Or this many multiplications for each input, whatever that is in forward passes: some milliseconds on one core.
SMALL = 2e7

# `auto` takes secants while that is predicted to cost at most this many forward passes, or for all outputs this many
# multiplications for each input, which is little beside the launches of operations.
SECANT = 0.5
TINY = 2e6

# Forward passes that draws may take together with their sweep, and bounds on their number.
DRAWN = {"fast": 10.0, "balanced": 24.0, "best": 96.0}
FEWEST, MOST = 8, 100

# Directions of a softmax where there are too many outputs; the common shift is one more.
DIRECTIONS = 8

# Groups of draws whose pairs `effort="best"` counts.
PAIRS = 16

TASKS = (None, "classification", "regression")
EFFORTS = ("fast", "balanced", "best")


@register
@dataclass(frozen=True, eq=False, repr=False)
class Auto(Method):
    """Chooses a method for each plan; its fields are the keywords of `favour.compile`."""

    name = "auto"

    effort: str = "balanced"
    rank: int | None = None
    iterations: int = 2
    weight_rank: int | None = None
    directions: int | Tensor | None = None
    start: str | Mapping[str, Tensor] | None = None
    secant: bool | None = None
    pairs: int | None = None
    task: str | None = None

    def run(self, bound: Bound) -> list[Any]:
        return self.choose(bound.plan).run(bound)

    def cost(self, plan: Plan) -> float:
        return self.choose(plan).cost(plan)

    def memory(self, plan: Plan) -> int:
        return self.choose(plan).memory(plan)

    def validate(self, numerics: Numerics) -> None:
        if self.effort not in EFFORTS:
            raise InvalidValue(f"`effort` is {self.effort!r}; choose one of {', '.join(EFFORTS)}.")
        if self.task not in TASKS:
            raise InvalidValue(f"`task` is {self.task!r}; choose None, 'classification' or 'regression'.")
        if self.secant not in (None, True, False):
            raise InvalidType(f"`secant` is {self.secant!r}; choose True, False, or None to let `effort` decide.")
        self._reverse(self.directions, False, bool(self.secant)).validate(numerics)

    def over(self, outputs: Literal["joint", "logits", "classes"]) -> Method:
        if outputs == "joint":
            return replace(self, directions=None, task=None)
        if outputs == "classes":
            return replace(self, task="classification")
        return replace(self, directions=None) if isinstance(self.directions, Tensor) else self

    def choose(self, plan: Plan) -> Method:
        """The reverse sweep, over all outputs or some directions, or draws, or `dplr`."""
        if self.directions is not None:
            return self._swept(plan, self.directions)
        every = self._swept(plan, None)
        cost = replace(every, rank=0, pairs=0, secant=False).cost(plan)  # what outputs cost, whatever more is asked for
        if cost <= (AFFORDABLE if self.task == "classification" else WHOLE):
            return every
        uncertain = outputs(plan)
        if self.task == "classification" and all(o.shape is not None and len(o.shape) == 2 for o in uncertain):
            return self._swept(plan, DIRECTIONS + 1, shift=True)
        asked = self.secant or self.pairs  # by hand: what only the reverse sweep has
        entries = cost * sum(plan.entries(step.node.shape) for step in plan.steps)
        if asked or max(cost * forward_pass(plan), 10 * entries) <= SMALL:
            return every
        compressed = DPLR(self.rank, self.iterations, self.weight_rank, self.start)
        if compressed.asked() == DPLR().asked() and any(o.shape is not None and len(o.shape) > 2 for o in uncertain):
            return self._drawn(plan)
        return compressed

    def written(self, plan: Plan) -> Method:
        """The sweep of variances alone, where it takes draws to correct one."""
        chosen = self.choose(plan)
        return chosen if chosen.fixed else Diag()

    def _drawn(self, plan: Plan) -> Pooled:
        """As many draws as the budget leaves behind their sweep."""
        left = (DRAWN[self.effort] - Pooled(0).cost(plan)) / max(uncertain_share(plan), 1e-3)
        most = max(FEWEST, min(MOST, int(left)))
        return Pooled(next(n for n in range(most, 0, -1) if grouping(n) < n or n == FEWEST))

    def _swept(self, plan: Plan, directions: int | Tensor | None, shift: bool = False) -> Adjoint:
        method = self._reverse(directions, shift, False)
        return replace(method, secant=self._takes_secants(plan, method.covectors(output_entries(plan))))

    def _reverse(self, directions: int | Tensor | None, shift: bool, secant: bool) -> Adjoint:
        return Adjoint(
            self.rank or 0, directions, secant, self._pairs, self.iterations, self.weight_rank, self.start, shift
        )

    @property
    def _pairs(self) -> int:
        return (PAIRS if self.effort == "best" else 0) if self.pairs is None else self.pairs

    def _takes_secants(self, plan: Plan, covectors: int) -> bool:
        """As told by hand, else with pairs, else by effort: in `balanced` where they are cheap."""
        if self.secant is not None:
            return self.secant
        if self._pairs or self.effort == "best":
            return True
        tiny = output_entries(plan) * forward_pass(plan) <= TINY  # whatever the directions, so that they agree
        return self.effort == "balanced" and (tiny or uncertain_share(plan, ends=False) * covectors <= SECANT)
