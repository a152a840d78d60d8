"""The default: forward for second moments, then back with covectors to every source of noise.

The forward sweep gives every operation its surrogate from what it knows of its input: variances, and rank-r columns or
cumulants where asked. The reverse sweep (`favour.methods.reverse`) is then exact for these surrogates,

    Σ_out = Σ_s A_s N_s A_sᵀ,    A_s = ∂out/∂(source s),

in all outputs, or in some directions (`favour.methods.directions`), with secants and pairs where dropout takes long
steps (`favour.methods.pairs`). Where memory is short covectors go in groups, two at a time, so that every entry of the
covariance is met.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from favour.belief.covariance import Dense
from favour.errors import InvalidType, InvalidValue
from favour.methods.cost import output_entries, sweep_and_columns, uncertain_share, uncertain_sizes
from favour.methods.diag import carried_in
from favour.methods.directions import directional
from favour.methods.dplr import Compressed, check_compression
from favour.methods.forward import DiagonalOnly, Representation, Sweep, forward
from favour.methods.memory import COLUMN, COVECTOR, TAPE, TAPE_COLUMN
from favour.methods.method import Bound, Method, Numerics, belief_of, check_whole, register
from favour.methods.pairs import Pairs
from favour.methods.reverse import Inputs, all_outputs, reverse, total
from favour.methods.start import start_of
from favour.passes.plan.steps import Plan
from favour.surrogate import Carried, Cumulants, LoneCumulants
from favour.surrogate.tails import Tails
from favour.surrogate.value import Value


class ReverseSweep(Method):
    """Methods that end in a reverse sweep; each has a forward sweep of its own.

    Attributes:
        directions: How many leading directions of a softmax to follow, or covectors (k, *event) or (k, batch, *event);
            None for all outputs.
        shift: One of so many directions is the common shift of all class scores.
        weight_rank: q, for covectors through rank-q approximations of the weights.
        pairs: Groups of draws whose joint effects on one activation count.
    """

    directions: int | Tensor | None = None
    shift: bool = False
    weight_rank: int | None = None
    pairs: int = 0

    @property
    def takes_secants(self) -> bool:
        """Whether dropout's noise meets secants."""
        return False

    @abstractmethod
    def representation(self, bound: Bound) -> Representation:
        """How the forward sweep holds covariances."""

    def swept(self, bound: Bound) -> tuple[Sweep, Inputs]:
        """The forward sweep with its tape, and the uncertain inputs as given and as the sweep saw them."""
        exact_inputs = [Value(v.mean, v.diag, dict(v.blocks), v.name) for _, v in bound.sources]
        sweep = forward(bound, self.representation(bound), keep_tape=True)
        return sweep, [(name, exact, seen) for exact, (name, seen) in zip(exact_inputs, bound.sources, strict=True)]

    def run(self, bound: Bound) -> list[Any]:
        sweep, inputs = self.swept(bound)
        pairs = self._paired(sweep, inputs)
        results = [sweep.result(output) for output in bound.plan.outputs]
        last = None if bound.watched else len(results) - 1  # a tape that somebody looks at stays whole
        return [self._belief(value, bound, sweep, inputs, pairs, i == last) for i, value in enumerate(results)]

    def parts(self, bound: Bound) -> list[tuple[Any, dict[str, Tensor]]]:
        """Over all outputs with sources kept apart: for each output its mean, and covariances by source."""
        sweep, inputs = self.swept(bound)
        pairs = self._paired(sweep, inputs)
        results: list[tuple[Any, dict[str, Tensor]]] = []
        for output in bound.plan.outputs:
            value = sweep.result(output)
            if not isinstance(value, Value):
                results.append((value, {}))
                continue
            basis, batch = all_outputs(value.mean), value.mean.shape[0]
            grams = reverse(sweep, value, basis, inputs, apart=True, secant=self.takes_secants, pairs=pairs)
            results.append((value.mean, {label: gram.expand(batch, -1, -1) for label, gram in grams.items()}))
        return results

    def covectors(self, outputs: int) -> int:
        """How many of them go back, for so many outputs."""
        if self.directions is None:
            return outputs
        return self.directions if isinstance(self.directions, int) else len(self.directions)

    def tape(self, plan: Plan) -> int:
        """Numbers per input that the reverse sweep holds besides covectors."""
        return (TAPE + self.pairs) * sum(uncertain_sizes(plan))

    def each_covector(self, plan: Plan) -> int:
        """Numbers per input and covector."""
        return (COVECTOR * (1 + self.takes_secants) + self.pairs) * max(uncertain_sizes(plan))

    def cost(self, plan: Plan) -> float:
        k = self.covectors(output_entries(plan))
        secants = uncertain_share(plan, ends=False) * k if self.takes_secants else 0.0
        pairs = self.pairs + 2 if self.pairs else 0
        return sweep_and_columns(plan, 0, 0) + uncertain_share(plan) * (k + pairs) + secants

    def memory(self, plan: Plan) -> int:
        return self.tape(plan) + self.covectors(output_entries(plan)) * self.each_covector(plan)

    def validate(self, numerics: Numerics) -> None:
        if self.directions is not None and not isinstance(self.directions, Tensor):
            check_whole("directions", self.directions, 1)

    def over(self, outputs: Literal["joint", "logits", "classes"]) -> Method:
        if self.directions is None or (outputs != "joint" and isinstance(self.directions, int)):
            return self
        return replace(self, directions=None)  # type: ignore[type-var]

    def _paired(self, sweep: Sweep, inputs: Inputs) -> Pairs | None:
        return Pairs(sweep, [seen for _, _, seen in inputs], self.pairs) if self.pairs else None

    def _belief(self, value: Any, bound: Bound, sweep: Sweep, inputs: Inputs, pairs: Pairs | None, last: bool) -> Any:
        if not isinstance(value, Value):
            return belief_of(value)
        n = value.mean.flatten(1).shape[1] if value.mean.ndim > 1 else 1

        def gram(basis: Tensor) -> Tensor:
            return self._gram(value, basis, bound, sweep, inputs, pairs, last)

        if not isinstance(self.directions, Tensor) and self.covectors(n) >= n:
            return belief_of(value, Dense(gram(all_outputs(value.mean)), value.mean.shape[1:]))
        assert self.directions is not None
        made = next((entry for entry in reversed(sweep.tape) if entry.value is value), None) if self.shift else None
        return belief_of(value, directional(value, self.directions, made, gram))

    def _gram(
        self, value: Value, basis: Tensor, bound: Bound, sweep: Sweep, inputs: Inputs, pairs: Pairs | None, last: bool
    ) -> Tensor:
        """Covariance in the directions of `basis`, (batch, k, k), in groups of covectors where memory is short.

        Nobody reads the tape after the `last` sweep, which may take it apart.
        """
        k, batch = basis.shape[0], value.mean.shape[0]
        together = k
        if bound.numerics.memory is not None:
            numbers = bound.numerics.memory // (max(value.mean.element_size(), 4) * max(batch, 1))
            together = max(1, min(k, (numbers - self.tape(bound.plan)) // self.each_covector(bound.plan)))

        def swept(some: Tensor, last: bool = False) -> Tensor:
            secant = self.takes_secants
            grams = reverse(
                sweep, value, some, inputs, weight_rank=self.weight_rank, secant=secant, pairs=pairs, last=last
            )
            return total(grams, value.mean, len(some))

        if together >= k:
            return swept(basis, last)
        groups = list(torch.arange(k).split(max(1, together // 2)))
        matrix = value.mean.new_zeros(batch, k, k)
        for i, rows in enumerate(groups):
            for columns in groups[i:]:
                pair = rows if columns is rows else torch.cat([rows, columns])
                matrix[:, pair[:, None], pair] = swept(basis[pair])
        return matrix


@register
@dataclass(frozen=True, eq=False, repr=False)
class Adjoint(ReverseSweep):
    """A forward sweep of second moments, and a reverse sweep of covectors.

    Args:
        rank: Of what the forward sweep keeps beside variances.
        directions: Of the outputs, see `ReverseSweep`.
        secant: Take secants, not tangents, over what dropout does; None where `pairs` do.
        pairs: Groups of draws, 16 say, whose joint effects on one activation count; 0 for none.
        iterations: K of Algorithm 1, for a rank above 0.
        weight_rank: q, for products and covectors through rank-q approximations of the weights.
        start: Of Algorithm 1: None (warm), `"random"`, or a mapping from module name to columns.
        shift: One of `directions` is the common shift of all class scores.
    """

    name = "adjoint"

    rank: int = 0
    directions: int | Tensor | None = None
    secant: bool | None = None
    pairs: int = 0
    iterations: int = 2
    weight_rank: int | None = None
    start: str | Mapping[str, Tensor] | None = None
    shift: bool = False

    def held(self) -> str:
        held = f"variances and a factor of rank {self.rank}" if self.rank else "variances, entries independent"
        return (
            f"Means and slopes come from a forward sweep that holds {held}; the covariance from a reverse sweep, which "
            "forgets nothing."
        )

    def untried(self) -> str:
        if self.directions is not None:
            return "more `directions`, or method='adjoint' for all outputs"
        tried = {"secant=True": self.takes_secants, "pairs=16": self.pairs, "rank=8": self.rank}
        more = " or ".join(keyword for keyword, done in tried.items() if not done)
        return f"{more}, or take samples: `favour.sample(model, x, n)`" if more else ""

    @property
    def takes_secants(self) -> bool:
        return bool(self.pairs) if self.secant is None else self.secant

    def representation(self, bound: Bound) -> Representation:
        if self.rank:
            start = start_of(self.start, bound.starts, bound.numerics.seed)
            return Compressed(self.rank, self.iterations, start, self.weight_rank, 0)
        # And cumulants, where something is made of them.
        kinds: list[type[Carried]] = [*carried_in(bound.plan)]
        if self.pairs:
            kinds.append(Cumulants)
        elif self.takes_secants:
            kinds.append(LoneCumulants)
        if any(step.node.traits.maximum for step in bound.plan.steps):
            kinds.append(Tails)
        return DiagonalOnly(*kinds)

    def cost(self, plan: Plan) -> float:
        columns = sweep_and_columns(plan, self.rank, self.iterations) - sweep_and_columns(plan, 0, 0)
        return super().cost(plan) + columns

    def tape(self, plan: Plan) -> int:
        sizes = uncertain_sizes(plan)
        return super().tape(plan) + self.rank * (TAPE_COLUMN * sum(sizes) + COLUMN * max(sizes))

    def validate(self, numerics: Numerics) -> None:
        super().validate(numerics)
        check_compression(self.rank, self.iterations, self.weight_rank, self.start)
        check_whole("pairs", self.pairs, 0)
        if self.pairs == 1:
            raise InvalidValue("`pairs` is 1; two groups of draws make the first pair. Choose 0, or 8.")
        if self.secant not in (None, True, False):
            raise InvalidType(f"`secant` is {self.secant!r}; choose True, False or None.")
        asked = [name for name in ("secant", "pairs") if getattr(self, name)]
        if asked and numerics.activation != "price":
            raise InvalidValue(
                f"`{asked[0]}` goes with the moments of activation='price'; `activation` is {numerics.activation!r}."
            )
