"""From a plan and settings to beliefs: picks the method, runs its sweeps, and shapes the result."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor, Directional
from favour.graph.capture import Node
from favour.methods import adjoint
from favour.methods.choice import DEFAULT_RANK, Choice
from favour.methods.directions import common_shift, given_directions, softmax_directions, with_shift
from favour.methods.dplr import Compressed, Start, given_start
from favour.methods.forward import DiagonalOnly, Entry, Explicit, Representation, Sweep, run
from favour.methods.memory import covectors_within
from favour.methods.pairs import Pairs
from favour.methods.settings import Settings
from favour.methods.start import random_start, warm_start
from favour.passes.plan.steps import Plan
from favour.surrogate import Carried, Cumulants, LoneCumulants, flat
from favour.surrogate.channels import ChannelCovariance
from favour.surrogate.value import Context, Value

__all__ = ["Settings", "forward_for_adjoint", "infer", "infer_parts", "result_of"]

Sources = list[tuple[str, Value]]


def infer(
    plan: Plan,
    values: dict[Node, Any],
    settings: Settings,
    choice: Choice,
    ctx: Context,
    sources: Sources,
    starts: dict[str, Tensor],
    kept: dict[str, Any] | None = None,
    sweeps: list[Sweep] | None = None,
) -> list[Any]:
    """Run a method over a plan: one belief per floating-point output, other outputs as they are.

    Args:
        plan: The steps.
        values: Leaves of the graph by node.
        settings: The method's parameters.
        choice: The method, and how many covectors it takes.
        ctx: For the rules.
        sources: Uncertain inputs by name.
        starts: Random starts by step name; filled in eager calls.
        kept: Names of nodes, whose values are put in.
        sweeps: Takes the forward sweep, with its tape and notes, once the method is done with it.
    """
    if choice.method == "adjoint":
        sweep, inputs = forward_for_adjoint(plan, values, settings, ctx, sources, starts, choice.secant, kept or ())
        _keep(sweep, kept)
        results = [result_of(o, sweep) for o in plan.outputs]
        pairs = pairs_of(sweep, inputs, settings)
        _hand_over(sweep, sweeps)
        last = len(results) - 1 if sweeps is None else None  # what is handed over stays whole
        return [
            _adjoint_belief(value, plan, sweep, inputs, settings, choice, pairs, i == last)
            for i, value in enumerate(results)
        ]
    representation = _representation(choice.method, settings, starts)
    _take_in(representation, sources)
    sweep = run(plan, values, representation, ctx, keep_tape=sweeps is not None, keep=kept or ())
    _keep(sweep, kept)
    _hand_over(sweep, sweeps)
    beliefs = []
    for output in plan.outputs:
        value = result_of(output, sweep)
        matrix = (
            representation.dense.get(value.name)
            if isinstance(representation, Compressed) and isinstance(value, Value)
            else None
        )
        beliefs.append(_belief(value, None if matrix is None else Dense(matrix, value.mean.shape[1:])))
    return beliefs


def infer_parts(
    plan: Plan,
    values: dict[Node, Any],
    settings: Settings,
    ctx: Context,
    sources: Sources,
    starts: dict[str, Tensor],
    secant: bool = False,
) -> list[tuple[Any, dict[str, Tensor]]]:
    """The reverse sweep over all outputs with its sources kept apart: for each output, covariances by source."""
    sweep, inputs = forward_for_adjoint(plan, values, settings, ctx, sources, starts, secant)
    pairs = pairs_of(sweep, inputs, settings)
    result: list[tuple[Any, dict[str, Tensor]]] = []
    for output in plan.outputs:
        value = result_of(output, sweep)
        if not isinstance(value, Value):
            result.append((value, {}))
            continue
        grams = adjoint.reverse(
            sweep, value, adjoint.all_outputs(value.mean), inputs, apart=True, secant=secant, pairs=pairs
        )
        batch = value.mean.shape[0]
        result.append((value.mean, {label: gram.expand(batch, -1, -1) for label, gram in grams.items()}))
    return result


def pairs_of(sweep: Sweep, inputs: adjoint.Inputs, settings: Settings) -> Pairs | None:
    """What pairs of draws do, where that is asked for."""
    return Pairs(sweep, [seen for _, _, seen in inputs], settings.pairs) if settings.pairs else None


def _keep(sweep: Sweep, kept: dict[str, Any] | None) -> None:
    if kept:
        kept.update((node.name, value) for node, value in sweep.values.items() if node.name in kept)


def _hand_over(sweep: Sweep, sweeps: list[Sweep] | None) -> None:
    if sweeps is not None:
        sweeps.append(sweep)


def result_of(output: Any, sweep: Sweep) -> Any:
    """What a sweep found for an output of the plan."""
    return sweep.values[output] if isinstance(output, Node) else output


def _representation(method: str, settings: Settings, starts: dict[str, Tensor], secant: bool = False) -> Representation:
    rank = settings.rank if settings.rank is not None else DEFAULT_RANK.get(method, 0)
    if method == "full":
        return Explicit()
    if method == "diag" or (method == "adjoint" and rank == 0):
        return DiagonalOnly(*_carried(method, settings, secant))
    start: Start = (
        random_start(starts, settings.seed) if settings.start == "random" else warm_start(starts, settings.seed)
    )
    if isinstance(settings.start, Mapping):
        start = given_start(settings.start, start)
    small = 0 if method == "adjoint" else None
    return Compressed(rank, settings.iterations, start, settings.weight_rank, small)


def _carried(method: str, settings: Settings, secant: bool) -> list[type[Carried]]:
    """What a sweep of variances knows beside them: cumulants where something is made of them."""
    kinds: list[type[Carried]] = [] if method == "diag" else [ChannelCovariance]
    if settings.pairs:
        kinds.append(Cumulants)
    elif secant:
        kinds.append(LoneCumulants)
    return kinds


def _take_in(representation: Representation, sources: Sources) -> None:
    for name, value in sources:
        taken = representation.source(value, name, True)
        value.replace(taken.diag, taken.blocks)


def forward_for_adjoint(
    plan: Plan,
    values: dict[Node, Any],
    settings: Settings,
    ctx: Context,
    sources: Sources,
    starts: dict[str, Tensor],
    secant: bool = False,
    keep: Collection[str] = (),
) -> tuple[Sweep, adjoint.Inputs]:
    """The forward sweep with its tape, and the uncertain inputs as given and as the sweep saw them."""
    representation = _representation("adjoint", settings, starts, secant)
    given = [Value(v.mean, v.diag, dict(v.blocks), v.name) for _, v in sources]
    _take_in(representation, sources)
    sweep = run(plan, values, representation, ctx, keep_tape=True, keep=keep)
    return sweep, [(name, exact, seen) for exact, (name, seen) in zip(given, sources, strict=True)]


def _adjoint_belief(
    value: Any,
    plan: Plan,
    sweep: Sweep,
    inputs: adjoint.Inputs,
    settings: Settings,
    choice: Choice,
    pairs: Pairs | None,
    last: bool,
) -> Any:
    if not isinstance(value, Value):
        return _belief(value)
    n = value.mean.flatten(1).shape[1] if value.mean.ndim > 1 else 1
    given = settings.directions if isinstance(settings.directions, Tensor) else None
    k = n if choice.covectors is None else choice.covectors

    def gram(basis: Tensor) -> Tensor:
        return _gram(value, basis, plan, sweep, inputs, settings, choice.secant, pairs, last)

    if given is None and k >= n:
        basis = adjoint.all_outputs(value.mean)
        matrix = gram(basis)
        return _belief(value, Dense(matrix, value.mean.shape[1:]))
    diag = value.variance.to(value.mean.dtype)
    shift = common_shift(_made(value, sweep)) if choice.shift and given is None else None
    if given is not None:
        basis = given_directions(given, value.mean)
    elif shift is not None:
        w, share = shift
        basis = with_shift(softmax_directions(value.mean, k - 1), w)
        diag = (diag - share).clamp_min(0)
    else:
        basis = softmax_directions(value.mean.flatten(1), k).reshape(k, *value.mean.shape)
    return _belief(value, Directional(diag, basis, gram(basis)))


def _made(value: Value, sweep: Sweep) -> Entry | None:
    """The line of the tape that a value comes from."""
    for entry in reversed(sweep.tape):
        if entry.value is value:
            return entry
    return None


def _gram(
    value: Value,
    basis: Tensor,
    plan: Plan,
    sweep: Sweep,
    inputs: adjoint.Inputs,
    settings: Settings,
    secant: bool,
    pairs: Pairs | None,
    last: bool,
) -> Tensor:
    """Covariance in the directions of `basis`, (batch, k, k), in groups of covectors where memory is short.

    Nobody reads the tape after the `last` sweep, which may take it apart.
    """
    k, batch = basis.shape[0], value.mean.shape[0]
    together = covectors_within(plan, settings, k, max(value.mean.element_size(), 4) * max(batch, 1), secant)

    def swept(some: Tensor, last: bool = False) -> Tensor:
        grams = adjoint.reverse(
            sweep, value, some, inputs, weight_rank=settings.weight_rank, secant=secant, pairs=pairs, last=last
        )
        return adjoint.total(grams, value.mean, len(some))

    if together >= k:
        return swept(basis, last)
    groups = list(torch.arange(k).split(max(1, together // 2)))
    matrix = value.mean.new_zeros(batch, k, k)
    for i, rows in enumerate(groups):
        for columns in groups[i:]:
            pair = rows if columns is rows else torch.cat([rows, columns])
            matrix[:, pair[:, None], pair] = swept(basis[pair])
    return matrix


def _belief(value: Any, covariance: Covariance | None = None) -> Any:
    """A belief for a tensor, uncertain or not; anything else as it is."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        value = Value(value)
    if not isinstance(value, Value):
        return value
    mean = value.mean
    if covariance is None:
        columns = value.factor
        n = mean.flatten(1).shape[1] if mean.ndim > 1 else 1
        if columns is not None and value.diag is None and columns.shape[0] >= n:
            rows = flat(columns)  # (k, batch, n): fewer numbers as n × n
            covariance = Dense(torch.einsum("kbi,kbj->bij", rows, rows), mean.shape[1:])
        else:
            diag = torch.zeros_like(mean) if value.diag is None else value.diag.to(mean.dtype).expand(mean.shape)
            factor = mean.new_zeros(0, *mean.shape) if columns is None else columns.to(mean.dtype)
            covariance = DiagonalPlusFactor(diag, factor)
    return Belief(mean, covariance=covariance, validate=False)
