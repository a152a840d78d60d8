"""The steps of recurrent layers in primitive operations; `favour.passes.normalise.recurrent` states what they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from favour.graph.node import Node
from favour.graph.traits import Argument, Operation
from favour.passes.rewriting import Builder, Shape

aten = torch.ops.aten

GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}


class Weights:
    """The parameters of one layer and direction, in aten's order."""

    def __init__(self, kind: str, tensors: Sequence[Node | None], biased: bool) -> None:
        self.kind = kind
        self.inputs, self.states = tensors[:2]
        self.input_bias, self.state_bias = tensors[2:4] if biased else (None, None)
        rest = tensors[4 if biased else 2 :]
        self.projection = rest[0] if rest else None
        assert self.states is not None and self.states.shape is not None
        rows = self.states.shape[0]
        assert isinstance(rows, int)
        self.rows, self.hidden = rows, rows // GATES[kind]

    def seen(self, new: Builder, x: Node) -> Node:
        """W x + b, for one step or all of them."""
        assert x.shape is not None
        return new.call(aten.linear.default, x, self.inputs, self.input_bias, shape=(*x.shape[:-1], self.rows))

    def remembered(self, new: Builder, h: Node) -> Node:
        """V h + b′."""
        assert h.shape is not None
        return new.call(aten.linear.default, h, self.states, self.state_bias, shape=(h.shape[0], self.rows))


def run(new: Builder, weights: Weights, x: Node, state: list[Node], *, reverse: bool) -> tuple[list[Node], list[Node]]:
    """All steps of one layer in one direction: h at every position, and the last state."""
    seen = weights.seen(new, x)
    assert seen.shape is not None and isinstance(seen.shape[1], int)
    batch, rows = seen.shape[0], seen.shape[2]
    places = range(seen.shape[1])
    outputs: list[Node] = []
    for t in reversed(places) if reverse else places:
        at = new.call(aten.select.int, seen, 1, t, shape=(batch, rows))
        state = step(new, weights, at, state)
        outputs.append(state[0])
    return (outputs[::-1] if reverse else outputs), state


def step(new: Builder, weights: Weights, seen: Node, state: list[Node]) -> list[Node]:
    """The next state from W x_t + b and the last one."""
    h = state[0]
    remembered = weights.remembered(new, h)
    assert seen.shape is not None
    shape: Shape = (seen.shape[0], weights.hidden)

    def apply(target: Operation, *args: Argument) -> Node:
        return new.call(target, *args, shape=shape)

    def part(x: Node, index: int) -> Node:
        return apply(aten.slice.Tensor, x, 1, index * weights.hidden, (index + 1) * weights.hidden)

    def add(a: Node, b: Node) -> Node:
        return apply(aten.add.Tensor, a, b)

    def product(a: Node, b: Node) -> Node:
        return apply(aten.mul.Tensor, a, b)

    if weights.kind == "gru":
        reset, update = (apply(aten.sigmoid.default, add(part(seen, i), part(remembered, i))) for i in (0, 1))
        candidate = apply(aten.tanh.default, add(part(seen, 2), product(reset, part(remembered, 2))))
        return [add(candidate, product(update, apply(aten.sub.Tensor, h, candidate)))]
    total = new.call(aten.add.Tensor, seen, remembered, shape=seen.shape)
    if weights.kind != "lstm":
        return [apply(aten.tanh.default if weights.kind == "tanh" else aten.relu.default, total)]
    enter, forget, leave = (apply(aten.sigmoid.default, part(total, i)) for i in (0, 1, 3))
    c = add(product(forget, state[1]), product(enter, apply(aten.tanh.default, part(total, 2))))
    h = product(leave, apply(aten.tanh.default, c))
    if weights.projection is not None:
        assert weights.projection.shape is not None
        h = new.call(aten.linear.default, h, weights.projection, shape=(shape[0], weights.projection.shape[0]))
    return [h, c]


def side_by_side(new: Builder, parts: Sequence[Node]) -> Node:
    if len(parts) == 1:
        return parts[0]
    assert parts[0].shape is not None
    batch, n = parts[0].shape
    assert isinstance(n, int)
    return new.call(aten.cat.default, list(parts), 1, shape=(batch, n * len(parts)))
