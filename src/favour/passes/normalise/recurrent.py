"""Recurrent layers, unrolled over their sequence.

An LSTM, GRU or plain recurrent layer is one operation of aten and T steps of a few primitive ones. With σ the logistic
function, ∘ the element-wise product, x_t the layer's input and h_t, c_t its state,

    LSTM    (i, f, g, o) = W x_t + b + V h_{t−1} + b′,   c_t = σ(f)∘c_{t−1} + σ(i)∘tanh(g),   h_t = σ(o)∘tanh(c_t)
    GRU     (r, z, n) = W x_t + b,   (r′, z′, n′) = V h_{t−1} + b′,   m = tanh(n + σ(r + r′)∘n′),
            h_t = m + σ(z + z′)∘(h_{t−1} − m)
    RNN     h_t = tanh or relu of W x_t + b + V h_{t−1} + b′

with h_t = P(…) in place of (…) where an LSTM projects its state. Written out, each step has its own rule, every method
works on it, a weight with a posterior stays one draw for all steps (the steps read one parameter), and the dropout
between layers is a dropout like any other. W x_t + b is one product for all t. T is the example's, a number.

**The batch behind the sequence.** Recurrent layers like their batch second, (T, batch, n), and give their last state
that way, while uncertain tensors keep the batch in front. In a model that has such a layer, stretches with the batch
second are rewritten with the two axes exchanged: they begin at a transposition or at a recurrent layer, go on through
operations that treat the two axes alike (layers on the last axis, element-wise code, reductions over T), and end where
a position is picked or the axes are exchanged again.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

from favour.graph.node import Graph, Node, nodes_in, replace_nodes
from favour.passes.normalise.steps import Weights, run, side_by_side, step
from favour.passes.rewriting import Builder, Shape, rewrite

aten = torch.ops.aten

_LAYERS = {
    aten.lstm.input: "lstm",
    aten.gru.input: "gru",
    aten.rnn_tanh.input: "tanh",
    aten.rnn_relu.input: "relu",
}
_CELLS = {
    aten.lstm_cell.default: "lstm",
    aten.gru_cell.default: "gru",
    aten.rnn_tanh_cell.default: "tanh",
    aten.rnn_relu_cell.default: "relu",
}


def unroll(graph: Graph) -> None:
    """Rewrite the recurrent layers and cells of `graph` in place. Assumes a known number of time steps."""
    if any(node.kind == "call" and node.target in (*_LAYERS, *_CELLS) for node in graph.nodes):
        unrolling = _Unrolling(graph)
        rewrite(graph, unrolling)
        unrolling.finish(graph)
        graph.prune()


class _Unrolling:
    """Expands recurrent operations, and takes stretches with the batch second to the front."""

    def __init__(self, graph: Graph) -> None:
        self.batch = next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)
        self.turned: dict[Node, Node] = {}  # by the node with the batch in front: the one it stands for
        self.results: dict[Node, list[Node]] = {}  # of an operation with several results, by its first
        self.steps: dict[Node, list[Node]] = {}  # of a tensor (batch, T, n) that was stacked: its entries

    def __call__(self, node: Node, new: Builder) -> Node | None:
        target = node.target
        if target in _LAYERS:
            return self._layer(node, new)
        if target in _CELLS:
            return self._cell(node, new)
        if target is operator.getitem and node.args[0] in self.results:
            return self.results[node.args[0]][node.args[1]]
        if target is aten.select.int and node.args[0] in self.steps and node.args[1] in (1, -2):
            return self.steps[node.args[0]][node.args[2]]
        x = node.args[0] if node.args else None
        if isinstance(x, Node) and x not in self.turned and x.shape is not None and x.shape[:1] == (self.batch,):
            if _swaps_first_two(node) and isinstance(x.shape[1], int):
                return self._turn(new.call(aten.alias.default, x, shape=x.shape), node)
            if target is aten.unsqueeze.default and self.batch is not None and node.args[1] in (0, -len(x.shape) - 1):
                return self._turn(new.call(target, x, 1, shape=(self.batch, 1, *x.shape[1:])), node)
        if any(s in self.turned for s in node.inputs):
            return self._exchanged(node, new) or self._give_up(node, new)
        return None

    def finish(self, graph: Graph) -> None:
        """Exchange the axes of the model's outputs again."""
        for node in [n for n in nodes_in(graph.outputs) if n in self.turned]:
            new = Builder(self.turned[node])
            back = {node: self._back(node, new)}
            graph.outputs = replace_nodes(graph.outputs, lambda n, back=back: back.get(n, n))  # type: ignore[misc]
            graph.nodes += new.nodes

    def _turn(self, node: Node, was: Node) -> Node:
        self.turned[node] = was
        return node

    def _back(self, node: Node, new: Builder) -> Node:
        return new.call(aten.transpose.int, node, 0, 1, shape=_swapped(node.shape), dtype=node.dtype)

    def _give_up(self, node: Node, new: Builder) -> Node:
        """The operation as it was, on tensors with the batch second again."""
        back = {x: self._back(x, new) for x in dict.fromkeys(node.inputs) if x in self.turned}
        args, kwargs = replace_nodes((node.args, node.kwargs), lambda n: back.get(n, n))
        made = Node(node.name, "call", node.target, args, kwargs, node.shape, node.dtype, node.module, node.where)
        new.nodes.append(made)
        return made

    # ------------------------------------------------------- the batch in front

    def _exchanged(self, node: Node, new: Builder) -> Node | None:
        """The same operation on tensors with the batch in front, if it is known; turned if its result still is."""
        target, x, rest = node.target, node.args[0], node.args[1:]
        if target is aten.cat.default:
            return self._joined(node, new)
        sources = [s for s in node.inputs if s in self.turned]
        if node.traits.elementwise or len(sources) > 1:
            return self._entry_wise(node, new)
        if x not in self.turned or x.shape is None:
            return None
        out = node.shape
        if target is aten.sym_size.int:
            return new.call(target, x, _exchange(rest[0] % len(x.shape)), shape=None)
        if _swaps_first_two(node):
            return new.call(aten.alias.default, x, shape=x.shape, dtype=x.dtype)
        if target is aten.permute.default:
            axes = [_exchange(d % len(x.shape)) for d in rest[0]]
            return new.call(target, x, axes, shape=out) if axes[0] == 0 else None
        if target is aten.unbind.int and (not rest or rest[0] % len(x.shape) == 0):
            return new.call(target, x, 1, shape=None)
        if target in (aten.select.int, aten.squeeze.dim):
            dim = rest[0] % len(x.shape)
            if dim == 0 and x in self.steps and target is aten.select.int:
                return self.steps[x][rest[1]]
            made = None if dim == 1 else new.call(target, x, _exchange(dim), *rest[1:], shape=out)
            return made if made is None or dim == 0 else self._reshaped(made, node)
        if target is aten.slice.Tensor:
            args: tuple[Any, ...] = (*rest, *(0, None, None, 1)[len(rest) :])
            dim, start, end, step = args
            dim %= len(x.shape)
            whole = start in (0, None) and (end is None or (isinstance(end, int) and end > 2**62)) and step == 1
            if dim == 1 and not whole:
                return None
            return self._reshaped(new.call(target, x, _exchange(dim), start, end, step, shape=out), node)
        if node.traits.reduces and node.shape is not None:
            return self._reduced(node, new)
        if target is aten.flip.default:
            axes = [_exchange(d % len(x.shape)) for d in rest[0]]
            return None if 0 in axes else self._reshaped(new.call(target, x, axes, shape=out), node)
        if node.claims("row_wise") or node.traits.keeps:
            made = new.call(target, *node.args, shape=out)
            made.kwargs = node.kwargs
            return self._reshaped(made, node)
        return None

    def _reshaped(self, made: Node, was: Node) -> Node:
        made.shape, made.dtype = _swapped(was.shape), was.dtype
        return self._turn(made, was)

    def _entry_wise(self, node: Node, new: Builder) -> Node | None:
        """A sum or product of tensors that all have the batch second, or of one with numbers or a bias."""
        if not node.traits.elementwise or node.shape is None:
            return None
        for s in node.inputs:
            alike = s in self.turned and s.shape == _swapped(node.shape)
            if not alike and (s.shape is None or len(s.shape) > 1):
                return None
        made = new.call(node.target, *node.args, shape=node.shape)
        made.kwargs = node.kwargs
        return self._reshaped(made, node)

    def _joined(self, node: Node, new: Builder) -> Node | None:
        parts, dim = node.args[0], node.args[1] if len(node.args) > 1 else 0
        assert node.shape is not None
        dim %= len(node.shape)
        if dim == 1 or not all(p in self.turned for p in parts):
            return None
        return self._reshaped(new.call(node.target, parts, _exchange(dim), shape=node.shape), node)

    def _reduced(self, node: Node, new: Builder) -> Node | None:
        x = node.args[0]
        dims = node.args[1] if len(node.args) > 1 else None
        keep = bool(node.args[2]) if len(node.args) > 2 else False
        if not isinstance(dims, (list, tuple, int)) or x.shape is None:
            return None
        axes = [_exchange(d % len(x.shape)) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
        if 0 in axes:
            return None
        made = new.call(node.target, x, axes, keep, shape=node.shape, dtype=node.dtype)
        made.kwargs = node.kwargs
        return self._reshaped(made, node) if keep or 1 not in axes else made

    # ---------------------------------------------------------------- unrolling

    def _state(self, new: Builder, states: Node, index: int) -> Node:
        """The (batch, n) state of one layer and direction, out of (layers, batch, n)."""
        axis = 1 if states in self.turned else 0
        assert states.shape is not None
        if states in self.steps:
            return self.steps[states][index]
        return new.call(
            aten.select.int, states, axis, index, shape=(states.shape[1 - axis], states.shape[2]), dtype=states.dtype
        )

    def _layer(self, node: Node, new: Builder) -> Node:
        kind = _LAYERS[node.target]
        x, initial, weights, biased, layers, p, train, both, batch_first = node.args
        states = list(initial) if kind == "lstm" else [initial]
        new.dtype = x.dtype
        if not batch_first and x not in self.turned:
            x = new.call(aten.transpose.int, x, 0, 1, shape=_swapped(x.shape))
        assert x.shape is not None and isinstance(x.shape[1], int)
        directions = 2 if both else 1
        count = len(weights) // (layers * directions)
        last: list[list[Node]] = [[] for _ in states]
        outputs: list[Node] = []
        for layer in range(layers):
            runs: list[list[Node]] = []
            for direction in range(directions):
                index = layer * directions + direction
                layer_weights = Weights(kind, weights[index * count : (index + 1) * count], biased)
                first = [self._state(new, s, index) for s in states]
                ran, final = run(new, layer_weights, x, first, reverse=direction == 1)
                runs.append(ran)
                for held, state in zip(last, final, strict=True):
                    held.append(state)
            outputs = [side_by_side(new, pair) for pair in zip(*runs, strict=True)]
            x = self._stacked(new, outputs)
            if p and train and layer < layers - 1:
                x = new.call(aten.dropout.default, x, p, True, shape=x.shape)
        results = [self._stacked(new, held) for held in last]
        for result in results:
            self._turn(result, _standing_for(node, result))
        if not batch_first:
            self._turn(x, _standing_for(node, x))
        self.results[x] = [x, *results]
        return x

    def _stacked(self, new: Builder, parts: Sequence[Node]) -> Node:
        """(batch, n) each to (batch, T, n), remembered so that picking one costs nothing."""
        assert parts[0].shape is not None
        batch, n = parts[0].shape
        stacked = new.call(aten.stack.default, list(parts), 1, shape=(batch, len(parts), n))
        self.steps[stacked] = list(parts)
        return stacked

    def _cell(self, node: Node, new: Builder) -> Node:
        kind = _CELLS[node.target]
        x, initial, *weights = node.args
        states = list(initial) if kind == "lstm" else [initial]
        new.dtype = x.dtype
        weights += [None] * (4 - len(weights))
        cell_weights = Weights(kind, weights, True)
        state = step(new, cell_weights, cell_weights.seen(new, x), states)
        self.results[state[0]] = state
        return state[0]


def _standing_for(node: Node, result: Node) -> Node:
    return Node(result.name, "call", None, shape=_swapped(result.shape), dtype=result.dtype, module=node.module)


# --------------------------------------------------------------- exchanged axes


def _exchange(axis: int) -> int:
    return 1 - axis if axis < 2 else axis


def _swapped(shape: Shape | None) -> Shape:
    assert shape is not None
    return (shape[1], shape[0], *shape[2:])


def _swaps_first_two(node: Node) -> bool:
    if node.target is aten.transpose.int:
        x, *axes = node.args
        return x.shape is not None and {a % len(x.shape) for a in axes} == {0, 1}
    if node.target is aten.permute.default:
        x, axes = node.args
        n = len(axes)
        return [a % n for a in axes] == [1, 0, *range(2, n)]
    return False
