"""What a prediction did, operation by operation: `Predictor.explain`.

Every uncertain operation was replaced by y ≈ m + G(x − E x) + noise. An explanation lists which rule said so, how exact
that is, and what a method wanted of it and could not have: maps answer `Unavailable` with a reason, methods note it in
their sweep (`favour.methods.forward.Sweep.note`), and here it is read. With inputs it also says how large the variance
was before and after, averaged over inputs and entries.

    exact            mean and covariance are exact for every argument with these second moments
    moment-matched   mean and variance of each entry are exact for a Gaussian argument, correlations to first order
    linearised       a straight line about the mean, second-order terms where the rule knows them
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node
from favour.graph.sizes import size_of

if TYPE_CHECKING:
    from favour.methods import Bound, Method
    from favour.methods.forward import Entry
    from favour.surrogate.value import Value

MOST = 24  # lines of a table that is printed
APPROXIMATED = {
    "exact": "nothing",
    "moment-matched": "correlations beyond first order; the argument is taken for Gaussian",
    "linearised": "a line about the mean; more where the rule knows it",
}


@dataclass(frozen=True)
class Operation:
    """One uncertain operation of a prediction.

    Attributes:
        name: Of its node in the graph.
        operation: What the model calls.
        place: Module path and source line.
        rule: Family of the rule.
        exactness: `"exact"`, `"moment-matched"` or `"linearised"`.
        left_out: What a method wanted of it and could not have, and why.
        before: Variance of its uncertain arguments, averaged over inputs and entries and added over arguments; None
            without inputs.
        after: Variance of its result, likewise.
    """

    name: str
    operation: str
    place: str
    rule: str
    exactness: str
    left_out: tuple[str, ...] = ()
    before: float | None = None
    after: float | None = None

    @property
    def approximated(self) -> str:
        """What the rule approximates."""
        return APPROXIMATED[self.exactness]


@dataclass(frozen=True, repr=False)
class Explanation:
    """Operation by operation, what was done; `print` shows it on one screen.

    Attributes:
        method: That ran.
        held: What its sweeps keep of a covariance and what they forget.
        operations: The uncertain ones, in order.
        plain: How many operations ran as the model wrote them, because nothing before them is uncertain.
    """

    method: str
    held: str
    operations: tuple[Operation, ...]
    plain: int

    @property
    def left_out(self) -> dict[str, tuple[str, ...]]:
        """What was left out, and where: reasons with the names of operations."""
        places: dict[str, list[str]] = {}
        for operation in self.operations:
            for reason in operation.left_out:
                places.setdefault(reason, []).append(operation.name)
        return {reason: tuple(names) for reason, names in places.items()}

    def __repr__(self) -> str:
        return "\n".join([*self._head(), *_aligned(self._table()), *self._tail()])

    def _repr_html_(self) -> str:
        head, *rows = self._table()
        lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
        heads = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
        text = [f"<p>{html.escape(line)}</p>" for line in self._head()]
        text.append(f"<table><tr>{heads}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>")
        return "".join([*text, *[f"<p>{html.escape(line)}</p>" for line in self._tail() if line]])

    def _head(self) -> list[str]:
        counts = {how: sum(o.exactness == how for o in self.operations) for how in APPROXIMATED}
        said = ", ".join(f"{n} {how}" for how, n in counts.items() if n) or "none"
        return [
            f"{len(self.operations)} uncertain operations ({said}), {self.plain} before any noise, run as they are.",
            *([f"{self.method}: {self.held}"] if self.held else []),
        ]

    def _table(self) -> list[list[str]]:
        """Operations of one kind in one line, the first of them by its place."""
        measured = any(o.after is not None for o in self.operations)
        groups: dict[Any, list[Operation]] = {}
        for o in self.operations:
            groups.setdefault((o.operation, o.rule, o.exactness, o.left_out), []).append(o)
        marks = {reason: f"[{i}]" for i, reason in enumerate(self.left_out, 1)}
        table = [["operation", "at", "rule", "exactness", *(["variance"] if measured else []), "left out"]]
        for (operation, rule, how, left_out), members in list(groups.items())[:MOST]:
            row = [operation, members[0].place, rule, how]
            if len(members) > 1:
                row[0], row[1] = f"{len(members)} × {operation}", f"{members[0].place}, …"
            if measured:
                row.append(_span(members))
            table.append([*row, " ".join(marks[reason] for reason in left_out)])
        if len(groups) > MOST:
            table.append([f"… and {len(groups) - MOST} more kinds, in `.operations`", *[""] * (len(table[0]) - 1)])
        return table

    def _tail(self) -> list[str]:
        present = [how for how in APPROXIMATED if how != "exact" and any(o.exactness == how for o in self.operations)]
        legend = [f"{how} approximates: {APPROXIMATED[how]}" for how in present]
        reasons = [f"[{i}] {reason}" for i, reason in enumerate(self.left_out, 1)]
        return [*legend, *(reasons or ["Nothing that the method asked for was left out."])]


def explanation(bound: Bound, method: Method, measured: bool) -> Explanation:
    """What a method does with a call, from the plan, and the tape and notes of its sweep.

    Args:
        bound: The call.
        method: That answers it.
        measured: Say how large variances were: the inputs were somebody's.
    """
    bound.watched = True
    method.run(bound)
    plan, sweep = bound.plan, bound.sweep
    if sweep is None:
        raise UnsupportedOperation(
            f"method={method.name!r} asks no rule for a surrogate, so there are no operations to explain."
        )
    entries: dict[str, list[Entry]] = {}
    for entry in sweep.tape:
        entries.setdefault(entry.step.node.name, []).append(entry)
    operations = []
    for name, made in entries.items():
        step = made[0].step
        arguments = {id(x): x for entry in made for x, _ in entry.surrogate.maps}
        operations.append(
            Operation(
                name,
                _operation(step.node),
                step.node.module or step.node.where or "forward",
                "element-wise" if step.rule is None else step.rule.family,
                "moment-matched" if step.rule is None else step.rule.exactness,
                tuple(sweep.notes.get(name, ())),
                sum(map(_average, arguments.values())) if measured else None,
                sum(_average(entry.value) for entry in made) / len(made) if measured else None,
            )
        )
    return Explanation(method.name, method.held(), tuple(operations), len(plan.steps) - len(entries))


def stand_in(graph: Graph, sizes: Mapping[str, int]) -> list[Any]:
    """Two inputs of the right shapes, for what does not depend on their numbers: standard normals, and zeros."""
    generator = torch.Generator().manual_seed(0)
    known = dict(sizes)
    leaves: list[Any] = []
    for node, fixed in zip(graph.inputs, graph.fixed, strict=True):
        if node is None or node.shape is None:
            leaves.append(fixed)
            continue
        for size in node.shape:
            if isinstance(size, str) and size.isidentifier():
                known.setdefault(size, 2)
        shape = [size_of(size, known) for size in node.shape]
        floating = node.dtype is not None and node.dtype.is_floating_point
        made = torch.randn(shape, generator=generator) if floating else torch.zeros(shape)
        leaves.append(made.to(node.dtype))
    return leaves


def _operation(node: Node) -> str:
    """`linear`, or the operations that were fused into one function."""
    body: Iterable[Node] = getattr(node, "body", ()) or (node,)
    names = [str(getattr(n.target, "_schema", n.target)).split("(")[0].split("::")[-1].split(".")[0] for n in body]
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _average(value: Value) -> float:
    return float(value.variance.detach().mean()) if value.variance.numel() else 0.0


def _span(members: Sequence[Operation]) -> str:
    """Variance before and after, of several operations the range."""

    def said(values: list[float]) -> str:
        low, high = f"{min(values):.2g}", f"{max(values):.2g}"
        return low if low == high else f"{low}–{high}"

    before, after = ([getattr(o, name) or 0.0 for o in members] for name in ("before", "after"))
    return f"{said(before)} → {said(after)}"


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [min(max(map(len, column)), 40) for column in zip(*(row for row in table), strict=True)]
    lines = []
    for row in table:
        cells = [cell if len(cell) <= 40 else f"…{cell[-39:]}" for cell in row]
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip())
    return [lines[0], "  ".join("─" * width for width in widths), *lines[1:]]
