"""Every registered operation in a small network, on rows of hostile values; see `test_hostile`.

A case of `cases` becomes a network that applies its operation to uncertain arguments, in three ways:

    dropout   op(D(x)):               an argument of two values
    layer     op(relu(W D(x))):       an argument that is skewed, and has an entry that is always 0
    belief    op(x), x a Belief:      variances that are 0, tiny, huge, or 0 here and not there

The rows of one batch are what is hostile, so that one prediction tries them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from cases import F64, Batched, Case, Uncertain, of_kind
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import favour
from favour.capture.graph import capture
from favour.methods.settings import Settings
from favour.plan import configure
from favour.posterior import Posterior
from favour.predictor import Predictor

WAYS = ("dropout", "layer", "belief")
OPTIONS: dict[str, dict[str, Any]] = {
    "adjoint": {"method": "adjoint"},
    "secant": {"method": "adjoint", "secant": True},
    "pairs": {"method": "adjoint", "pairs": 16},
    "rank": {"method": "adjoint", "rank": 4},
    "pairs and rank": {"method": "adjoint", "pairs": 16, "rank": 4},
    "dplr": {"method": "dplr"},
    "diag": {"method": "diag"},
    "full": {"method": "full"},
    "directions": {"method": "adjoint", "directions": 2},
    "matched": {"method": "adjoint", "activation": "matched"},
    "taylor": {"method": "dplr", "activation": "taylor"},
}
# Row-wise cases that a prediction can take. Of a `refused` one there is nothing to probe.
PROBED = [case for case in of_kind("linear", "scalar", "delta", "dropout", "curved") if case.per_row]


def first_of_each(cases: list[Case]) -> list[Case]:
    """The first case of every operation and kind."""
    return list({(case.overload, case.kind): case for case in reversed(cases)}.values())[::-1]


def hostile(*event: int, dtype: torch.dtype = F64) -> Tensor:
    """Rows (9, *event): zeros, ones, minus ones, ties, one entry alone, tiny, huge, huge with signs, ordinary."""
    generator = torch.Generator().manual_seed(3)
    some = torch.randn(event, generator=generator, dtype=F64)
    signs = torch.where(some > 0, 1.0, -1.0).to(F64)
    alone = torch.zeros(event, dtype=F64)
    alone.reshape(-1)[:1] = 2.0
    one = torch.ones(event, dtype=F64)
    rows = [0 * one, one, -one, 0.5 * signs, alone, 1e-6 * some, 1e4 * one, 1e3 * some, some]
    return torch.stack(rows).to(dtype)


ROWS = len(hostile(1))


def hostile_variances(*event: int, dtype: torch.dtype = F64) -> Tensor:
    """By row of `hostile`: 0, ordinary, huge, 0 for every other entry, tiny, huge beside tiny means, and so on."""
    other = torch.zeros(event, dtype=F64)
    other.reshape(-1)[::2] = 1.0
    one = torch.ones(event, dtype=F64)
    rows = [0 * one, one, 1e6 * one, other, 1e-12 * one, 1e4 * one, one, 1e6 * other, one]
    return torch.stack(rows).to(dtype)


class Layer(nn.Module):
    """relu(W D(x)) over the last axis, with one entry that is 0."""

    def __init__(self, n: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(n)
        weight = torch.randn(n, n, generator=generator, dtype=F64)
        if n > 1:
            weight[0] = 0
        self.weight = nn.Parameter(weight.to(dtype))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(nn.functional.linear(self.drop(x), self.weight))


class Network(nn.Module):
    """A case's operation; its uncertain and batched arguments are the network's."""

    def __init__(self, case: Case, way: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.case = case
        self.leaves, self.spec = pytree.tree_flatten(tuple(case.build()))
        self.given = list({id(v): v for v in self.leaves if isinstance(v, (Uncertain, Batched))}.values())
        self.known = nn.ParameterList([v for v in self.leaves if isinstance(v, Tensor) and v.is_floating_point()])
        self.fronts = nn.ModuleDict()
        for i, v in enumerate(self.given):
            if isinstance(v, Uncertain) and way == "dropout":
                self.fronts[str(i)] = nn.Dropout(0.5)
            elif isinstance(v, Uncertain) and way == "layer":
                self.fronts[str(i)] = Layer(v.mean.shape[-1], v.mean.dtype) if v.mean.ndim > 1 else nn.Dropout(0.5)

    def forward(self, *args: Tensor) -> Any:
        table = {
            id(v): self.fronts[str(i)](t) if str(i) in self.fronts else t
            for i, (v, t) in enumerate(zip(self.given, args, strict=True))
        }
        known = iter(self.known)
        leaves = [
            table[id(v)] if id(v) in table else next(known) if isinstance(v, Tensor) and v.is_floating_point() else v
            for v in self.leaves
        ]
        result = self.case.op(*pytree.tree_unflatten(leaves, self.spec), **self.case.kwargs)
        tensors = [t for t in (result if isinstance(result, (list, tuple)) else [result]) if t.is_floating_point()]
        return tuple(t + 0 for t in tensors)  # an output of its own, so that it has a reader

    def inputs(self) -> list[Tensor]:
        """Hostile rows for every argument."""
        made = []
        for v in self.given:
            if isinstance(v, Uncertain):
                made.append(hostile(*v.mean.shape[1:], dtype=v.mean.dtype))
            else:
                rows = torch.arange(ROWS) % len(v.tensor)
                made.append(v.tensor[rows])
        return made

    def beliefs(self) -> list[Any]:
        return [
            favour.Belief(t, variance=hostile_variances(*t.shape[1:], dtype=t.dtype)) if isinstance(v, Uncertain) else t
            for v, t in zip(self.given, self.inputs(), strict=True)
        ]


@dataclass
class Probe:
    """One network, predicted with many options."""

    network: Network
    way: str

    def __post_init__(self) -> None:
        self.plain = self.network.inputs()
        self.args = self.network.beliefs() if self.way == "belief" else self.plain
        self.graph = capture(self.network, tuple(self.plain))

    def predictor(self, option: str) -> Predictor:
        settings = Settings(**OPTIONS[option])
        return Predictor(configure(self.graph, None), settings, Posterior.wrap(None), self.network)

    def samples(self, n: int) -> list[Tensor]:
        """(n, rows, *event) of every output, by the network itself."""
        generator = torch.Generator().manual_seed(1)
        args = []
        for t in self.args:
            if isinstance(t, favour.Belief):
                noise = torch.randn(n, *t.mean.shape, generator=generator, dtype=F64).to(t.mean.dtype)
                args.append((t.mean + t.variance.sqrt() * noise).flatten(0, 1))
            else:
                args.append(t.expand(n, *t.shape).flatten(0, 1))
        drawn = self.predictor("diag").sample(*args, n=1, generator=generator)
        return [t[0].unflatten(0, (n, ROWS)) for t in drawn]


def found(results: Any) -> Iterator[tuple[int, favour.Belief]]:
    """The beliefs among the outputs, by their number."""
    for i, belief in enumerate(results):
        if isinstance(belief, favour.Belief):
            yield i, belief
