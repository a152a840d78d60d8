"""Weights that the code computes from parameters: transposes, sums, products and functions of them, W′ = f(W, …).

A layer's rule reads a weight with its posterior. Where the code makes the weight first (a tied `w.T`, a low-rank update
W + BA, a softplus, a weight norm), everything that depends on parameters alone is computed once for all inputs, as a
weight again (`favour.rules.derived`): its mean, and to first order its draws as images of the parameters' own.

Rules know tensors with the batch in front, so such a call is made with a batch of one: dimensions are counted from the
end, sizes of views get a 1 in front. A weight norm is written as a norm of rows and a product, a flattened `t()` as a
transpose.

Assumes nothing of the graph but which nodes are uncertain; the function it computes stays the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from favour.graph.node import Graph, Node
from favour.passes.rewriting import Builder, rewrite
from favour.passes.words import MATMUL

aten = torch.ops.aten

_TRANSPOSES = (aten.t.default, aten.mT.default)
_DIMS = ("dim", "dim0", "dim1", "dims", "start_dim", "end_dim", "axis0", "axis1")
_SIZES = ("size", "shape", "repeats")


@dataclass(eq=False)
class DerivedNode(Node):
    """A call that makes a weight; its arguments are those of the same call with a batch of one in front."""


def derive(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite `graph` in place."""
    _spell_out(graph, uncertain)
    batch = next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)
    alone: set[Node] = set()  # what depends on uncertain parameters and on nothing else that is uncertain
    for node in graph.nodes:
        if node.kind in ("parameter", "buffer") and node in uncertain:
            alone.add(node)
        sources = [s for s in node.inputs if s in uncertain or s in alone]
        fixed = node.kind == "call" and node.draw is None and node.shape is not None and batch not in node.shape
        if fixed and sources and all(s in alone for s in sources) and _can_lead(node):
            alone.add(node)
    wanted: set[Node] = set()
    for node in reversed(graph.nodes):
        places = range(len(node.args)) if node in wanted else node.traits.weights
        read = [node.args[i] for i in places if i < len(node.args)]
        wanted |= {s for s in read if isinstance(s, Node) and s in alone and s.kind == "call"}
    if not wanted:
        return

    def made(node: Node, new: Builder) -> Node | None:
        if node not in wanted:
            return None
        args = _led(node, lambda t: _with_dims(t, node, new) if t in alone or isinstance(t, DerivedNode) else t)
        new.nodes.append(DerivedNode(node.name, "call", node.target, args, node.kwargs, node.shape, node.dtype))
        new.nodes[-1].module, new.nodes[-1].where = node.module, node.where
        return new.nodes[-1]

    rewrite(graph, made)


def final_reads(node: Node, users: dict[Node, list[Node]]) -> list[tuple[Node, Node]]:
    """Who reads a parameter in the end, through the weights derived from it, and the weight that it reads."""
    reads: list[tuple[Node, Node]] = []
    for user in users[node]:
        times = user.inputs.count(node)
        reads += times * (final_reads(user, users) if isinstance(user, DerivedNode) else [(user, node)])
    return reads


def _spell_out(graph: Graph, uncertain: Collection[Node]) -> None:
    def expand(node: Node, new: Builder) -> Node | None:
        if node.target in _TRANSPOSES and node.shape is not None and len(node.shape) > 1 and _reads(node, uncertain):
            return new.call(aten.transpose.int, node.args[0], -2, -1, shape=node.shape)
        if node.target is aten._weight_norm.default and _reads(node, uncertain):
            return _weight_norm(node, new)
        return None

    if any(_reads(n, uncertain) and n.target in (*_TRANSPOSES, aten._weight_norm.default) for n in graph.nodes):
        rewrite(graph, expand)


def _reads(node: Node, uncertain: Collection[Node]) -> bool:
    """A call of parameters alone, an uncertain one among them; calls of such calls too, where shapes are the same."""
    return node in uncertain and node.kind == "call" and not any(s.kind == "input" for s in node.inputs)


def _weight_norm(node: Node, new: Builder) -> Node | None:
    """g·v/‖v‖ over all but the first dimension: rows of root mean square 1, times g/√n."""
    v, g, *rest = node.args
    shape, kwargs = node.shape, node.kwargs
    dim = rest[0] if rest else kwargs.get("dim", 0)
    if shape is None or dim not in (0, -len(shape)):
        return None
    n = 1
    for size in shape[1:]:
        n *= int(size)
    rows: tuple[int, ...] = (int(shape[0]), n)
    flat = new.call(aten.reshape.default, v, list(rows), shape=rows)
    unit = new.call(aten.rms_norm.default, flat, [n], None, 1e-30, shape=rows)
    gains = new.call(aten.reshape.default, g, [rows[0], 1], shape=(rows[0], 1))
    scaled = new.call(aten.mul.Tensor, gains, n**-0.5, shape=(rows[0], 1))
    product = new.call(aten.mul.Tensor, unit, scaled, shape=rows)
    return new.call(aten.reshape.default, product, [int(size) for size in shape], shape=shape)


def _can_lead(node: Node) -> bool:
    """Whether it is known how to make a call with a batch of one in front."""
    schema = getattr(node.target, "_schema", None)
    tensors = [a for a in node.args if isinstance(a, Node)]
    if schema is None or any(k in (*_DIMS, *_SIZES) for k in node.kwargs) or len(tensors) != len(node.inputs):
        return False
    if not tensors or tensors[0] is not node.args[0] or any(t.shape is None for t in tensors):
        return False
    if node.traits.elementwise or node.target in MATMUL:
        return True
    names = [argument.name for argument, _ in zip(schema.arguments, node.args, strict=False)]
    left = [a.name for a in schema.arguments[len(node.args) :]]
    known = any(name in (*_DIMS, *_SIZES, "normalized_shape") for name in names) or node.traits.keeps
    return len(tensors) == 1 and known and not any(name in _DIMS for name in left)


def _led(node: Node, tensor: Callable[[Node], Node]) -> tuple:
    """The arguments of the same call with a batch of one in front."""
    first = node.args[0]
    assert isinstance(first, Node) and first.shape is not None
    ndim = len(first.shape)
    if node.target is aten.permute.default:
        return tensor(first), [0, *[d % ndim + 1 for d in node.args[1]]]
    args: list[Any] = []
    for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
        if argument.name in _DIMS and value is not None:
            extra = ndim + (1 if node.target is aten.unsqueeze.default else 0)
            value = value - extra * (value >= 0) if isinstance(value, int) else [d - extra * (d >= 0) for d in value]
        elif argument.name in _SIZES:
            value = [1, *value]
        args.append(tensor(value) if isinstance(value, Node) else value)
    return tuple(args)


def _with_dims(t: Node, node: Node, new: Builder) -> Node:
    """An uncertain operand of element-wise code with as many dimensions as the result has."""
    assert t.shape is not None and node.shape is not None
    missing = len(node.shape) - len(t.shape)
    if missing <= 0 or not node.traits.elementwise:
        return t
    shape = (*[1] * missing, *t.shape)
    name = f"{node.name}_{t.name}"
    made = DerivedNode(name, "call", aten.reshape.default, (t, [1, *shape]), {}, shape, t.dtype)
    made.module, made.where = node.module, node.where
    new.nodes.append(made)
    return made
