"""`predict.refine`: the belief corrected by draws of the network, of which its linear part is known.

The mathematics is in `favour.methods.control` (what is known of a draw) and `favour.belief.refined` (what follows).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.refined import Refined, refined, together
from favour.errors import InvalidValue, UnsupportedOperation
from favour.graph.example import split_example
from favour.methods.control import control_of
from favour.methods.cost import uncertain_sizes
from favour.methods.sampling import Sampler, check_count
from favour.program.program import Program

# Outputs of one input, up to which covectors go back and whole covariances are kept.
MOST_OUTPUTS = 512

# Draws below which nobody asks whether the control variate is as it should be.
FEWEST_TO_JUDGE = 50

_HELD = 2**23  # draws times outputs held at once
_COVECTORS = 2**25  # numbers in all covectors of the widest layer


@dataclass(eq=False)
class Controlled:
    """Draws of one output, and what is known of them.

    Attributes:
        draws: (n, batch, *event).
        line: Of the control variate ℓ at the same draws, (n, batch, n_event).
        known: Cov ℓ, (batch, n_event, n_event).
        missing: What ℓ does not follow.
    """

    draws: Tensor
    line: Tensor
    known: Tensor
    missing: tuple[str, ...]


def refine(
    program: Program, x: Any, n: int, generator: torch.Generator | None, combine: bool, output: int | None
) -> Refined:
    """See `favour.program.propagator.Propagator.refine`."""
    check_count(n)
    if n < 2:
        raise InvalidValue(f"`n` is {n}; a covariance and a standard error take at least two draws.")
    args, kwargs = ((x,), {}) if isinstance(x, Belief) else split_example(x)
    leaves = program.inputs(args, kwargs)
    if program.rows(leaves) == 0:
        raise InvalidValue("`x` is an empty batch; there is nothing to refine.")
    place = output_of(program, output)
    with torch.no_grad():
        size = outputs(program, leaves, place)
        if size > MOST_OUTPUTS:
            raise UnsupportedOperation(
                f"`refine` follows the covariance of all outputs of an input, {size} here and at most {MOST_OUTPUTS}. "
                "Refine a model that returns fewer (the pixels or averages that matter), or take `predict.sample`."
            )
        estimates = []
        for part in slices(program, leaves, n, place):
            bound, method = program.bind(part)
            analytic = method.run(bound)[place]
            seen = controlled(program, part, n, generator, place)
            estimates.append(refined(seen.draws, seen.line, seen.known, analytic, combine, seen.missing))
    return together(estimates)


def controlled(
    program: Program, leaves: list[Any], n: int, generator: torch.Generator | None, place: int
) -> Controlled:
    """Draws of an output with their control variate."""
    posterior = program.posterior()
    bound, method = program.bind(leaves, posterior)
    control, values = control_of(method, bound, place)
    lines: list[Tensor] = []

    def seen(drawn: dict[str, Tensor]) -> None:
        if control.sources:
            lines.append(control.at(drawn))

    sampler = Sampler(bound.graph, posterior.names, [name for name, _ in bound.sources])
    points = {node: values[node.name] for node in bound.graph.nodes if node.kind != "call"}
    draws = sampler(points, n, posterior, generator, program.numerics.memory, seen)[place]
    line = torch.cat(lines) if lines else draws.new_zeros(n, *control.covariance.shape[:2])
    if not _holds(line, control.covariance):
        return Controlled(
            draws, line * 0, control.covariance * 0, ("everything, since a noise is not as its rule says",)
        )
    return Controlled(draws, line, control.covariance, control.missing)


def output_of(program: Program, output: int | None) -> int:
    """Which output has a belief to be corrected."""
    shapes = {i: o for i, o in enumerate(program.graph.outputs) if getattr(o, "shape", None) is not None}
    real = [i for i, o in shapes.items() if o.dtype is not None and o.dtype.is_floating_point]
    return chosen(real, output)


def chosen(places: list[int], output: int | None) -> int:
    """The output that was named, or the only one there is, of those with a belief."""
    if output is None and len(places) != 1:
        raise InvalidValue(f"the model has {len(places)} outputs; choose one with `output`, out of {places}.")
    place = places[0] if output is None else output
    if place not in places:
        raise InvalidValue(f"`output` is {output}; the model's outputs with a belief are {places}.")
    return place


def outputs(program: Program, leaves: list[Any], place: int) -> int:
    """How many numbers an output has for each input of a call."""
    plan, _ = program.plan()
    plan.sizes = program.sizes_besides_batch(leaves)
    return plan.entries(program.graph.outputs[place].shape)


def slices(program: Program, leaves: list[Any], n: int, place: int) -> list[list[Any]]:
    """A call in slices of its batch, by the memory budget, and so that draws can be held."""
    size = max(outputs(program, leaves, place), 1)
    widest = max(uncertain_sizes(program.plan()[0]))
    rows = max(1, min(_HELD // (n * size), _COVECTORS // (size * widest)))
    batched = program.batched()
    pieces = []
    for part in program.slices(leaves, program.posterior()):
        size = program.rows(part) or 1
        for i in range(0, size, rows):
            cut = slice(i, i + rows)
            pieces.append([leaf[cut] if b and size > rows else leaf for leaf, b in zip(part, batched, strict=True)])
    return pieces


def _holds(line: Tensor, known: Tensor) -> bool:
    """Whether draws of ℓ have the mean zero and the variances that they should, far beyond what chance could explain.

    They do for every rule that states its noise exactly. One that does not would bias what is corrected by it.
    """
    if len(line) < FEWEST_TO_JUDGE or not line.numel():
        return True
    n, variance = len(line), known.diagonal(dim1=-2, dim2=-1)
    square = line.square()
    slack = 8 * (square.var(0) / n).sqrt() + 0.1 * variance
    even = line.mean(0).square() <= 64 * square.mean(0) / n
    return bool((even & ((square.mean(0) - variance).abs() <= slack)).all())
