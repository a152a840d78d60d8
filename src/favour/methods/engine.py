"""Which method to run with which settings, and from its sweep to beliefs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.covariance import Covariance, Dense, DiagonalPlusFactor
from favour.errors import InvalidType, InvalidValue
from favour.graph import Node
from favour.methods import adjoint
from favour.methods.dplr import Compressed, Start, given_start
from favour.methods.forward import DiagonalOnly, Explicit, Representation, run
from favour.methods.start import random_start, warm_start
from favour.plan import Plan, check_activation
from favour.surrogate import inner
from favour.value import Context, Value

METHODS = ("auto", "adjoint", "dplr", "full", "diag")

# Ranks where the user names none.
DEFAULT_RANK = {"dplr": 4, "adjoint": 0}

# `auto` takes the reverse sweep over all outputs up to this many.
FEW_OUTPUTS = 64


@dataclass(frozen=True)
class Settings:
    """The keyword arguments of `favour.compile` that concern the method."""

    method: str = "auto"
    rank: int | None = None
    iterations: int = 2
    activation: str = "price"
    weight_rank: int | None = None
    directions: Any = None
    precision: str | None = None
    start: Any = None
    seed: int = 0
    memory: int | None = None

    def validate(self) -> None:
        """Raise for values that make no sense."""
        if self.method not in METHODS:
            raise InvalidValue(f"`method` is {self.method!r}; choose one of {', '.join(METHODS)}.")
        check_activation(self.activation)
        for name, least in (("rank", 0), ("iterations", 0), ("weight_rank", 1), ("seed", 0), ("memory", 1)):
            value = getattr(self, name)
            if value is None and name not in ("iterations", "seed"):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidType(f"`{name}` is {value!r}; a whole number is needed.")
            if value < least:
                raise InvalidValue(f"`{name}` is {value}; it must be at least {least}.")
        if self.precision not in (None, "tf32", "bf16"):
            raise InvalidValue(f"`precision` is {self.precision!r}; choose None, 'tf32' or 'bf16'.")
        if self.start not in (None, "warm", "random") and not isinstance(self.start, Mapping):
            raise InvalidValue(f"`start` is {self.start!r}; choose None, 'warm', 'random' or a mapping from module name.")

    def describe(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able settings, and the tensors among them."""
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value
            elif isinstance(value, Mapping):
                plain[field.name] = {"keys": list(value)}
                tensors |= {f"{field.name}.{k}": v for k, v in value.items()}
            else:
                plain[field.name] = value
        return plain, tensors

    @classmethod
    def restore(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Settings:
        """The inverse of `describe`."""
        known: dict[str, Any] = dict(plain)
        for name, value in plain.items():
            if isinstance(value, dict):
                known[name] = {k: tensors[f"{name}.{k}"] for k in value["keys"]}
        known |= {k: v for k, v in tensors.items() if "." not in k}
        return cls(**known)


def infer(
    plan: Plan,
    values: dict[Node, Any],
    settings: Settings,
    ctx: Context,
    sources: list[tuple[str, Value]],
    starts: dict[str, Tensor],
) -> list[Any]:
    """Run a method over a plan: one belief per floating-point output, other outputs as they are.

    Args:
        plan: The steps.
        values: Leaves of the graph by node.
        settings: Method and its parameters.
        ctx: For the rules.
        sources: Uncertain inputs by name.
        starts: Random starts by step name; filled in eager calls.
    """
    method = _method(plan, settings)
    if method == "adjoint":
        return _adjoint(plan, values, settings, ctx, sources, starts)
    representation = _representation(method, settings, starts)
    _take_in(representation, sources, plan)
    sweep = run(plan, values, representation, ctx)
    beliefs = []
    for output in plan.outputs:
        value = sweep.values[output] if isinstance(output, Node) else output
        dense = representation.dense.get(value.name) if isinstance(representation, Compressed) and isinstance(value, Value) else None
        beliefs.append(_belief(value, Dense(dense, value.mean.shape[1:]) if dense is not None else None))
    return beliefs


def _method(plan: Plan, settings: Settings) -> str:
    if settings.method != "auto":
        return settings.method
    entries = 0
    for output in plan.outputs:
        if isinstance(output, Node) and output in plan.uncertain and output.shape is not None:
            size = 1
            for s in output.shape[1:]:
                size *= s if isinstance(s, int) else FEW_OUTPUTS
            entries += size
    return "adjoint" if entries <= FEW_OUTPUTS else "dplr"


def _representation(method: str, settings: Settings, starts: dict[str, Tensor]) -> Representation:
    rank = settings.rank if settings.rank is not None else DEFAULT_RANK.get(method, 0)
    if method == "full":
        return Explicit()
    if method == "diag" or (method == "adjoint" and rank == 0):
        return DiagonalOnly()
    start: Start = random_start(starts, settings.seed) if settings.start == "random" else warm_start(starts, settings.seed)
    if isinstance(settings.start, Mapping):
        start = given_start(settings.start, start)
    small = 0 if method == "adjoint" else None
    return Compressed(rank, settings.iterations, start, settings.weight_rank, small)


def _take_in(representation: Representation, sources: list[tuple[str, Value]], plan: Plan) -> None:
    for name, value in sources:
        taken = representation.source(value, name, True)
        value.replace(taken.diag, taken.blocks)


def _belief(value: Any, covariance: Covariance | None = None) -> Any:
    """A belief for a tensor, uncertain or not; anything else as it is."""
    if isinstance(value, Tensor):
        if not value.is_floating_point():
            return value
        value = Value(value)
    if not isinstance(value, Value):
        return value
    if covariance is None:
        columns = value.factor
        n = value.mean[:1].numel()
        if columns is not None and value.diag is None and columns.shape[0] >= n > 0:
            covariance = Dense(inner(*[columns.transpose(0, -1).reshape(n, value.mean.shape[0], -1)] * 2), value.mean.shape[1:]) if value.mean.ndim == 2 else None
        if covariance is None:
            diag = torch.zeros_like(value.mean) if value.diag is None else value.diag.expand(value.mean.shape)
            factor = value.mean.new_zeros(0, *value.mean.shape) if columns is None else columns
            covariance = DiagonalPlusFactor(diag, factor)
    return Belief(value.mean, covariance=covariance, validate=False)


def _adjoint(
    plan: Plan,
    values: dict[Node, Any],
    settings: Settings,
    ctx: Context,
    sources: list[tuple[str, Value]],
    starts: dict[str, Tensor],
) -> list[Any]:
    representation = _representation("adjoint", settings, starts)
    before = [(name, Value(v.mean, v.diag, dict(v.blocks), v.name)) for name, v in sources]
    _take_in(representation, sources, plan)
    sweep = run(plan, values, representation, ctx, keep_tape=True)
    beliefs = []
    for output in plan.outputs:
        value = sweep.values[output] if isinstance(output, Node) else output
        if not isinstance(value, Value):
            beliefs.append(_belief(value))
            continue
        covectors = adjoint.all_outputs(value.mean)
        inputs = [(name, original, value_) for (name, original), (_, value_) in zip(before, sources, strict=True)]
        parts = adjoint.reverse(sweep, value, covectors, inputs)
        matrix = adjoint.total(parts, value.mean, covectors.shape[0])
        beliefs.append(_belief(value, Dense(matrix, value.mean.shape[1:])))
    return beliefs
