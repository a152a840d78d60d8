"""Every registered operation in a small network, on rows of hostile values; see `test_hostile`.

A case of `cases` becomes a network that applies its operation to uncertain arguments, in three ways:

    dropout   op(D(x)):               an argument of two values
    layer     op(relu(W D(x))):       an argument that is skewed, and has an entry that is always 0
    belief    op(x), x a Belief:      variances that are 0, tiny, huge, or 0 here and not there

The rows of one batch are what is hostile, so that one prediction tries them all.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from cases import F64, Batched, Case, Uncertain, of_kind, x
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import favour
from favour.graph.node import Graph, Node
from favour.graph.traits import traits_of
from favour.methods import Numerics
from favour.methods.keywords import method_of
from favour.passes.plan.steps import configure
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor
from favour.program.program import Program

aten = torch.ops.aten

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


_ONE = (
    ("aten.layer_norm.default", lambda: (x(1), [1])),
    ("aten.layer_norm.default", lambda: (x(4, 1), [1])),
    ("aten.rms_norm.default", lambda: (x(1), [1])),
    ("aten.group_norm.default", lambda: (x(4), 4)),
    ("aten.instance_norm.default", lambda: (x(3, 1), None, None, None, None, True, 0.1, 1e-5, False)),
    ("aten.softmax.int", lambda: (x(1), -1)),
    ("aten.log_softmax.int", lambda: (x(2, 1), -1)),
    ("aten.logsumexp.default", lambda: (x(1), [-1])),
    ("aten.var.correction", lambda: (x(1), [1]), {"correction": 0}),
    ("aten.amax.default", lambda: (x(3, 1), [2])),
    ("aten.max_pool1d.default", lambda: (x(2, 3), [1])),
    ("aten.max_pool2d.default", lambda: (x(2, 1, 1), [1, 1])),
    ("aten.sum.dim_IntList", lambda: (x(1), [1])),
    ("aten.bmm.default", lambda: (x(1, 1), x(1, 1))),
)
# Groups, windows and sums of one entry, and norms without a weight.
SMALL = [
    Case(name, "curved", build, options[0] if options else {}, f"one entry, {i}")
    for i, (name, build, *options) in enumerate(_ONE)
]
_RANGES = {
    ("sigmoid", "hardsigmoid", "softmax", "_softmax", "_safe_softmax"): (0.0, 1.0),
    ("tanh", "erf", "sin", "cos", "sign", "hardtanh"): (-1.0, 1.0),
    ("hardtanh [bounds]",): (-0.5, 2.0),
    ("erfc",): (0.0, 2.0),
    ("atan",): (-1.571, 1.571),
    ("relu6",): (0.0, 6.0),
    ("layer_norm [two axes, no weight]",): (-(5**0.5), 5**0.5),
    ("group_norm [one group, no weight]",): (-(15**0.5), 15**0.5),
    ("rms_norm [no weight]",): (-(5**0.5), 5**0.5),
    ("rms_norm [one entry, 2]",): (-1.0, 1.0),
    ("layer_norm [one entry, 0]", "layer_norm [one entry, 1]", "instance_norm [one entry, 4]"): (0.0, 0.0),
    ("group_norm [one entry, 3]", "var [one entry, 8]", "log_softmax [one entry, 6]"): (0.0, 0.0),
    ("softmax [one entry, 5]",): (1.0, 1.0),
}
# What an operation's values cannot leave.
RANGES = {name: ends for names, ends in _RANGES.items() for name in names}


def bounds(case: Case) -> tuple[float, float] | None:
    """The range of a case's operation, where it is bounded."""
    name = case.overload.split(".")[1]
    return RANGES.get(f"{name} [{case.label}]") or (None if case in SMALL else RANGES.get(name))


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


def mixing(n: int, dtype: torch.dtype) -> Tensor:
    """A matrix whose first row is 0."""
    weight = torch.randn(n, n, generator=torch.Generator().manual_seed(n), dtype=F64)
    if n > 1:
        weight[0] = 0
    return weight.to(dtype)


def numbered(shape: torch.Size) -> tuple[int | str, ...]:
    """Sizes as a captured graph has them: the batch is a symbol."""
    return ("s0", *shape[1:])


class Probe:
    """A case's operation in a graph of its own, to be predicted with many options."""

    def __init__(self, case: Case, way: str, dtype: torch.dtype = F64) -> None:
        torch.manual_seed(0)
        self.case, self.way, self.dtype = case, way, dtype
        leaves, self.spec = pytree.tree_flatten(tuple(case.build()))
        self.leaves = [self._converted(v) if isinstance(v, Tensor) else v for v in leaves]
        self.given = list({id(v): v for v in self.leaves if isinstance(v, (Uncertain, Batched))}.values())
        self.plain = [self._rows(v) for v in self.given]
        self.args = self._beliefs() if way == "belief" else self.plain
        self.graph = self._graph()

    def _converted(self, t: Tensor) -> Tensor:
        return t.to(self.dtype) if t.dtype == F64 else t

    def _rows(self, v: Uncertain | Batched) -> Tensor:
        if isinstance(v, Batched):
            return self._converted(v.tensor[torch.arange(ROWS) % len(v.tensor)])
        return self._converted(hostile(*v.mean.shape[1:], dtype=v.mean.dtype))

    def _beliefs(self) -> list[Any]:
        return [
            favour.Belief(t, diag=hostile_variances(*t.shape[1:], dtype=t.dtype)) if isinstance(v, Uncertain) else t
            for v, t in zip(self.given, self.plain, strict=True)
        ]

    def _graph(self) -> Graph:
        nodes: list[Node] = []
        constants: dict[str, Tensor] = {}

        def made(name: str, kind: str, value: Any, target: Any = None, args: tuple = (), **kwargs: Any) -> Node:
            shape = dtype = None
            if isinstance(value, Tensor):
                shape, dtype = tuple(value.shape) if kind == "constant" else numbered(value.shape), value.dtype
            nodes.append(Node(name, kind, target or name, args, kwargs, shape, dtype, "layer", "model.py:1"))
            return nodes[-1]

        def constant(name: str, value: Tensor) -> Node:
            constants[name] = value
            return made(name, "constant", value)

        inputs = [made(f"x{i}", "input", t) for i, t in enumerate(self.plain)]
        table = {id(v): node for v, node in zip(self.given, inputs, strict=True)}
        for i, (v, t) in enumerate(zip(self.given, self.plain, strict=True)):
            if self.way == "belief" or not isinstance(v, Uncertain):
                continue
            front = made(f"drop{i}", "call", t, aten.dropout.default, (inputs[i], 0.5, True))
            if self.way == "layer" and t.ndim > 1:
                weight = constant(f"w{i}", mixing(t.shape[-1], t.dtype))
                front = made(f"linear{i}", "call", t, aten.linear.default, (front, weight))
                front = made(f"relu{i}", "call", t, aten.relu.default, (front,))
            table[id(v)] = front
        leaves, values = [], []
        for i, v in enumerate(self.leaves):
            plain = {id(g): t for g, t in zip(self.given, self.plain, strict=True)}
            values.append(plain.get(id(v), v))
            leaves.append(table[id(v)] if id(v) in table else constant(f"c{i}", v) if isinstance(v, Tensor) else v)
        result = self.case.on_means(*pytree.tree_unflatten(values, self.spec))
        args = pytree.tree_unflatten(leaves, self.spec)
        several = isinstance(result, (list, tuple)) or traits_of(self.case.op).indices
        call = made("op", "call", None if several else result, self.case.op, args, **self.case.kwargs)
        outputs = [call]
        if several:
            results = result if isinstance(result, (list, tuple)) else [result]
            outputs = [made(f"out{i}", "call", t, operator.getitem, (call, i)) for i, t in enumerate(results)]
        in_spec = pytree.tree_structure((tuple(self.plain), {}))
        out_spec = pytree.tree_structure([0] * len(outputs))
        return Graph(nodes, list(inputs), outputs, in_spec, out_spec, [None] * len(inputs), constants, {})

    def predictor(self, option: str) -> Predictor:
        """Over the graph, with one of `OPTIONS`."""
        asked = method_of(**OPTIONS[option])
        asked.validate(Numerics())
        return Predictor(Program(configure(self.graph, None), asked, Posterior.wrap(None), nn.Module()))

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
        return [t[0].unflatten(0, (n, -1)) for t in drawn]


def found(results: Any) -> Iterator[tuple[int, favour.Belief]]:
    """The beliefs among the outputs, by their number."""
    for i, belief in enumerate(results):
        if isinstance(belief, favour.Belief):
            yield i, belief
