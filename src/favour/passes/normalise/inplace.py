"""In-place operations rewritten as ordinary ones.

`y.relu_()` becomes `z = relu(y)`, and every later reader of `y` reads `z`. Memory may be shared: a slice of
x sees what is written into x, and x what is written into its slice. So each tensor of the exported graph is
a *variable*, and the views of a variable form a tree over it. A write

1. carries the new value up to the root: `x[:, 0] = 0` becomes a `select_scatter` into x,
2. makes every other view of that root stale: it is taken again from the new root when it is next read.

Which variables share memory is known from the storages that export recorded, not guessed from the
operations, so that `reshape` and `contiguous`, which copy only when they must, are treated as they ran.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node, replace_nodes
from favour.graph.traits import Operation, traits_of

aten = torch.ops.aten

_COMPARISONS = {"gt", "ge", "lt", "le", "eq", "ne", "logical_and", "logical_or", "logical_not", "logical_xor"}

_END = 2**63 - 1  # how export writes the open end of a slice


class _Lost:
    """Target of a value that cannot be written back; harmless unless something reads it."""

    def __repr__(self) -> str:
        return "favour.lost"


LOST = _Lost()


def functionalise(graph: Graph, views: Mapping[Node, Node]) -> None:
    """Rewrite every in-place operation of `graph`, in place (the graph's, not the user's).

    Args:
        graph: As exported.
        views: For each node whose result shares memory with one of its arguments, that argument.

    Raises:
        UnsupportedOperation: A write into a view with no known inverse reaches the output, or an operation
            has no out-of-place form.
    """
    _Rewriter(graph, views).run()
    graph.prune()
    for node in graph.nodes:
        if node.target is LOST:
            raise UnsupportedOperation(
                f"the in-place operation at {node.place} writes into a view made by "
                f"`{node.kwargs['view']}` of a tensor that is used again; write the model without "
                "the in-place operation."
            )


class _Rewriter:
    def __init__(self, graph: Graph, views: Mapping[Node, Node]) -> None:
        self.graph, self.views = graph, views
        self.result: list[Node] = []
        self.same: dict[Node, Node] = {}  # another name of the same variable
        self.base: dict[Node, Node] = {}
        self.value: dict[Node, tuple[Node, int]] = {}  # a variable's value, and the root's version it was taken at
        self.version: dict[Node, int] = {}
        self.written: dict[Node, tuple[tuple, dict[str, Any]]] = {}  # arguments as exported
        self.count = 0

    def run(self) -> None:
        for node in self.graph.nodes:
            if node.target is aten.detach_.default:
                self.same[node] = self._own(node.args[0])
                continue
            if node.kind == "call" and self._in_place(node):
                self._write_node(node)
                continue
            if node.kind == "call" and node in self.views:
                source = self._own(self.views[node])
                if _whole(node):
                    self.same[node] = source
                    continue
                if node.target is not operator.getitem:
                    self.base[node] = source
                elif source in self.base:  # a piece is a view of what was split; other lists hold fresh tensors
                    self.base[node] = self.base[source]
            self._read_arguments(node)
            self.result.append(node)
            self.value[node] = (node, self.version.get(self._root(node), 0))
        self.graph.outputs = replace_nodes(self.graph.outputs, self.now)
        self.graph.nodes = self.result

    def _read_arguments(self, node: Node) -> None:
        self.written[node] = (node.args, node.kwargs)
        node.args, node.kwargs = replace_nodes(self.written[node], self.now)

    def _own(self, variable: Node) -> Node:
        while variable in self.same:
            variable = self.same[variable]
        return variable

    def _root(self, variable: Node) -> Node:
        while variable in self.base:
            variable = self.base[variable]
        return variable

    def now(self, variable: Node) -> Node:
        """The value of a variable after all writes so far."""
        variable = self._own(variable)
        value, version = self.value[variable]
        current = self.version.get(self._root(variable), 0)
        if version != current:  # a view that is older than a write
            args, kwargs = replace_nodes(self.written[variable], self.now)
            value = self._new(variable, variable.target, args, kwargs, variable)
            self.value[variable] = (value, current)
        return value

    def _new(self, like: Node, target: Operation, args: tuple, kwargs: dict[str, Any], place: Node) -> Node:
        self.count += 1
        name = f"{place.name}_now{self.count}"
        node = Node(name, "call", target, args, kwargs, like.shape, like.dtype, place.module, place.where)
        self.result.append(node)
        return node

    # ------------------------------------------------------------------- writes

    def _in_place(self, node: Node) -> bool:
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return False
        if torch.Tag.inplace_view in node.target.tags:
            raise UnsupportedOperation(
                f"`{node.target}` at {node.place} changes a shape in place; use the form without `_`."
            )
        return True

    def _write_node(self, node: Node) -> None:
        """Run an in-place operation: compute the new value and store it in its first argument."""
        variable = self._own(node.args[0])
        if node.target is aten.copy_.default and self._same_place(variable, self._own(node.args[1])):
            self.same[node] = variable  # `x[:, 1:] += 1` ends with a copy of the slice onto itself
            return
        self._read_arguments(node)
        value = self._out_of_place(node)
        self._store(variable, value, node)
        self.same[node] = variable

    def _out_of_place(self, node: Node) -> Node:
        """The new value, in the dtype and shape of what is overwritten."""
        old = node.args[0]
        others = [n for n in node.inputs if n is not old and n.dtype is not None]
        converted = any(n.dtype != old.dtype for n in others)
        if node.target in (aten.copy_.default, aten.fill_.Tensor):
            source = node.args[1]
            if source.shape == old.shape and not converted:
                return source
            blank = self._new(old, aten.zeros_like.default, (old,), {}, node)
            node.target, node.args, node.kwargs = aten.add.Tensor, (blank, source), {}
        elif node.target is aten.fill_.Scalar:
            node.target = aten.full_like.default
        elif node.target is aten.zero_.default:
            node.target = aten.zeros_like.default
        else:
            plain = _without_underscore(node.target)
            random = torch.Tag.nondeterministic_seeded in node.target.tags
            if plain is None and not random:  # random ones are refused together with others, when planning
                raise UnsupportedOperation(
                    f"`{node.target}` at {node.place} writes into its argument and has no out-of-place "
                    "form here; write the model without it."
                )
            node.target = plain or node.target
            converted = converted or node.target._schema.name.split("::")[1] in _COMPARISONS
        self.result.append(node)
        return self._new(old, aten.to.dtype, (node, old.dtype), {}, node) if converted else node

    def _store(self, variable: Node, value: Node, node: Node) -> None:
        """Give a variable a new value, and its bases with it."""
        root = self._root(variable)
        chain = [(variable, value)]
        while variable in self.base:
            value = self._put_back(variable, value, node)
            variable = self.base[variable]
            chain.append((variable, value))
        self.version[root] = self.version.get(root, 0) + 1
        for member, new in chain:
            self.value[member] = (new, self.version[root])

    def _put_back(self, view: Node, value: Node, node: Node) -> Node:
        """The base of a view, after `value` was written into the view."""
        base, target, rest = self.base[view], view.target, self.written[view][0][1:]
        if target is operator.getitem:
            pieces = self._own(self.written[view][0][0])
            piece = pieces.traits.pieces
            made = None if piece is None or base.shape is None else piece(rest[0], base.shape, *pieces.args[1:])
            if made is not None:
                target, rest = made
        inverse = traits_of(target).inverse
        back = None if inverse is None else inverse(self.now(base), value, *rest)
        if back is not None:
            return self._new(base, *back, dict(view.kwargs), node)
        if _in_order(view) and base.shape is not None and base.dtype == view.dtype:
            return self._reshaped(value, base, node)
        return self._new(base, LOST, (), {"view": target}, node)

    def _reshaped(self, value: Node, base: Node, node: Node) -> Node:
        assert base.shape is not None
        sizes = [s if isinstance(s, int) else -1 for s in base.shape]
        if sizes.count(-1) > 1:
            return self._new(base, aten.reshape_as.default, (value, self.now(base)), {}, node)
        return self._new(base, aten.reshape.default, (value, sizes), {}, node)

    def _same_place(self, a: Node, b: Node) -> bool:
        """Whether two variables are the same part of the same memory."""
        if a is b:
            return True
        if a not in self.base or b not in self.base:
            return False
        (args, kwargs), (others, options) = self.written[a], self.written[b]
        alike = a.target is b.target and args[1:] == others[1:] and kwargs == options
        return alike and a.target is not operator.getitem and self._same_place(self.base[a], self.base[b])


def _in_order(view: Node) -> bool:
    """Whether reshaping takes a view back; dropout that is off returns its argument."""
    return view.traits.ordered or view.traits.keeps or (view.draw is not None and not view.live)


def _whole(node: Node) -> bool:
    """A slice that takes everything, such as the first of the two slices in `x[:, 1:]`."""
    if node.target is not aten.slice.Tensor or node.kwargs:
        return False
    start, end, step = (*node.args[2:], None, None, None)[:3]
    return start in (None, 0) and end in (None, _END) and step in (None, 1)


def _without_underscore(target: Operation) -> Any:
    """`aten.relu_.default` to `aten.relu.default`, or None."""
    name = target._schema.name.split("::")[1]
    if not name.endswith("_") or name.endswith("__"):
        return None
    packet = getattr(getattr(torch.ops, target.namespace), name[:-1], None)
    if packet is None:
        return None
    types = [str(a.type) for a in target._schema.arguments]  # `pow_.Scalar` is `pow.Tensor_Scalar`
    names = sorted(packet.overloads(), key=lambda name: name != target._overloadname)
    known = (getattr(packet, name) for name in names)
    return next((o for o in known if [str(a.type) for a in o._schema.arguments] == types), None)
