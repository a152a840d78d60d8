"""Which numbers index tables, and how large they may be.

A lookup reads row i of a table with n rows, 0 ≤ i < n (indexing in Python's way counts −n ≤ i < 0 from the end). Torch
refuses other numbers on a CPU; ONNX runtimes count −1 from the end of an embedding too, and fail at n with an error of
their own. So the numbers are looked at before, wherever they follow from the inputs by known operations: the index
itself is computed, with whatever offsets, columns and casts the model puts between it and the input.

What an input may hold is told from three probes of an index i(x): zeros give the offsets, the position of every entry
in its place tells which entry an index reads, and i(x) = x[position] + offset has to hold for a third.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.graph.interpreter import call, interpret
from favour.graph.node import Graph, Node, draws_numbers, replace_nodes, rewired
from favour.graph.traits import Argument

aten = torch.ops.aten


@dataclass(eq=False)
class Lookup:
    """A use of whole numbers as an index.

    Attributes:
        user: The operation that looks up.
        index: What it looks for.
        low, high: The least and the largest number that a row has.
        needed: The calls between inputs and index, in order.
    """

    user: Node
    index: Node
    low: int
    high: int
    needed: list[Node]


def find_lookups(graph: Graph) -> list[Lookup]:
    """The lookups whose index follows from inputs without chance, in tables of known size."""
    ancestors: dict[Node, set[Node]] = {}
    lookups = []
    for node in graph.nodes:
        ancestors[node] = set().union(*(ancestors[s] for s in node.inputs), {node}) if node.inputs else {node}
        if node.kind != "call":
            continue
        for index, low, high in _indices(node):
            behind = ancestors[index]
            chance = any(n.draw is not None or draws_numbers(n) for n in behind)
            if not chance and any(n.kind == "input" for n in behind):
                needed = [n for n in graph.nodes if n in behind and n.kind == "call"]
                lookups.append(Lookup(node, index, low, high, needed))
    return lookups


def _indices(node: Node) -> list[tuple[Node, int, int]]:
    """The indices that an operation reads, and what they may be."""

    def size(table: Argument, axis: int) -> int | None:
        shape = table.shape if isinstance(table, Node) else tuple(table.shape) if isinstance(table, Tensor) else None
        length = shape[axis] if shape and -len(shape) <= axis < len(shape) else None
        return length if isinstance(length, int) else None

    if node.traits.lookup is None:
        return []
    wanted = [(index, size(table, axis), wraps) for index, table, axis, wraps in node.traits.lookup(*node.args)]
    return [
        (index, -n if wraps else 0, n - 1)
        for index, n, wraps in wanted
        if isinstance(index, Node) and n is not None and index.dtype is not None and index.dtype is not torch.bool
    ]


def guarded(graph: Graph, lookups: Sequence[Lookup]) -> Graph:
    """A copy of the graph whose lookups read the nearest row there is: what they make of others has to be discarded."""
    by_user: dict[Node, list[Lookup]] = {}
    for lookup in lookups:
        by_user.setdefault(lookup.user, []).append(lookup)
    copies: dict[Node, Node] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        clamped: dict[Node, Node] = {}
        for i, known in enumerate(by_user.get(node, ())):
            index = copies[known.index]
            name = f"{node.name}_within_{i}"
            within = Node(
                name, "call", aten.clamp.default, (index, known.low, known.high), {}, index.shape, index.dtype
            )
            clamped[known.index] = within
            nodes.append(within)
        copies[node] = rewired(node, lambda n, clamped=clamped: clamped.get(n, copies[n]))  # type: ignore[misc]
        nodes.append(copies[node])
    return replace(
        graph,
        nodes=nodes,
        inputs=[None if n is None else copies[n] for n in graph.inputs],
        outputs=replace_nodes(graph.outputs, copies.__getitem__),
    )


def _computed(lookup: Lookup, values: Mapping[str, Any]) -> Tensor:
    """The index, given inputs, parameters and constants by name."""
    read = [lookup.index, *(s for n in lookup.needed for s in n.inputs)]
    leaves = {n: values[n.name] for n in read if n.kind != "call"}
    return interpret(lookup.needed, leaves, call)[lookup.index]


def inside(lookups: Sequence[Lookup], values: Mapping[str, Any], batch: int) -> Tensor:
    """Whether all that a row looks for exists, (batch,)."""
    result: Tensor | None = None
    for lookup in lookups:
        index = _computed(lookup, values)
        good = (index >= lookup.low) & (index <= lookup.high)
        if index.ndim and lookup.index.shape and isinstance(lookup.index.shape[0], str):
            good = good.flatten(1).all(1) if good.ndim > 1 else good
        else:
            good = good.all().expand(batch)
        result = good if result is None else result & good
    assert result is not None
    return result


def check_lookups(lookups: Sequence[Lookup], values: Mapping[str, Any]) -> None:
    """Raise `InvalidValue` where an input asks for rows that a table does not have."""
    for lookup in lookups:
        index = _computed(lookup, values)
        bad = (index < lookup.low) | (index > lookup.high)
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            raise InvalidValue(
                f"the input asks for row {int(index[tuple(where)])} of a table at {lookup.user.place}, first at index "
                f"{where} of what is looked up; there are rows {lookup.low} to {lookup.high}."
            )


def input_range(
    lookups: Sequence[Lookup], name: str, example: Tensor, values: Mapping[str, Any]
) -> tuple[list[int | None], list[int | None]] | None:
    """What an input of whole numbers may hold at every entry of a row, least and most; None where probes do not tell.

    Args:
        lookups: All of the graph.
        name: Of the input's node.
        example: A tensor of its shape and dtype.
        values: Inputs, parameters and constants by name.
    """
    n = example[0].numel() if example.ndim else 0
    if not n:
        return None
    low: list[int | None] = [None] * n
    high: list[int | None] = [None] * n
    third = ((torch.arange(example.numel(), dtype=example.dtype) * 7 + 3) % 11).reshape(example.shape)
    places = torch.arange(n, dtype=example.dtype).reshape(example[0].shape).expand(example.shape)
    for lookup in lookups:
        if name not in {s.name for s in (lookup.index, *(s for node in lookup.needed for s in node.inputs))}:
            continue
        try:
            offset, at, check = (
                _computed(lookup, {**values, name: probe})[0].flatten()
                for probe in (torch.zeros_like(example), places, third)
            )
            if torch.equal(offset, at) and torch.equal(offset, check):
                continue  # it reads the input's sizes, not its numbers
            place = at - offset
            if not bool(((place >= 0) & (place < n)).all()) or not torch.equal(
                check, third[0].flatten()[place] + offset
            ):
                return None
        except Exception:  # the probes are not what the model takes: it is left to the guard in the graph
            return None
        for p, o in zip(place.tolist(), offset.tolist(), strict=True):
            least, most = lookup.low - o, lookup.high - o
            low[p] = least if low[p] is None else max(low[p], least)
            high[p] = most if high[p] is None else min(high[p], most)
    return (low, high) if any(v is not None for v in low) else None
