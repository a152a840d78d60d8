"""Parameters with a posterior that are read as plain tensors, made into uncertain tensors with the batch in front.

A linear layer or an embedding knows what to do with an uncertain weight. A norm's weight, a scale, a class token or a
table of positions is read by arithmetic and by shape operations. Such a parameter p of shape S becomes one node of
shape (batch, *S), `favour.rules.parameter`, and what reads it is adjusted:

- arithmetic with a tensor that has the batch in front: ones between the batch and S, so that S meets the last axes;
- shape operations on p alone: their dimensions move by one;
- a first dimension of one stands for the batch and is dropped;
- a norm is written as the norm without weights, a product and a sum;
- products and einsums get one more letter, the batch, at their axes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node, replace_nodes
from favour.graph.traits import Argument, Operation
from favour.passes.normalise.derived import DerivedNode
from favour.passes.rewriting import Builder, Shape, rewrite
from favour.passes.words import MATMUL
from favour.rules.parameter import drawn
from favour.rules.products import einsum_letters, matmul_letters
from favour.rules.registry import RULES

aten = torch.ops.aten

_ONE_DIM = {aten.slice.Tensor, aten.select.int, aten.narrow.default, aten.squeeze.dim}
_VIEWS = {aten.view.default, aten.reshape.default}


def draw_parameters(graph: Graph, uncertain: Collection[Node]) -> None:
    """Rewrite `graph` in place. Assumes that weights made of parameters are found (`derived`)."""
    first = next((n for n in graph.inputs if n is not None and n.shape), None)
    if first is None or first.shape is None:
        return
    users = graph.users()
    chosen: dict[Node, set[Node]] = {}
    for node in uncertain:
        if node.kind != "parameter" and not isinstance(node, DerivedNode):
            continue
        readers = [u for u in users.get(node, ()) if not isinstance(u, DerivedNode)]
        others = {u for u in readers if not _takes(u, node)}
        # A parameter that is added once, or beside a layer that reads it, has a rule of its own.
        added = {u for u in readers if u not in others and not u.traits.weights}
        if len(added) == len(readers) - len(others) and sum(u.inputs.count(node) for u in readers) > 1:
            others |= added
        if others:
            chosen[node] = others
    if chosen:
        _Drawing(first, chosen).run(graph)


def _takes(user: Node, weight: Node) -> bool:
    """Whether the rule of an operation takes a weight where this one stands."""
    if user.traits.weights:
        places = [i for i, a in enumerate(user.args) if a is weight]
        matrix = user.target not in MATMUL or len(weight.shape or ()) == 2
        return matrix and all(i in user.traits.weights for i in places)
    entry = RULES.get(user.target)
    return entry is not None and entry.weights


class _Drawing:
    def __init__(self, first: Node, chosen: Mapping[Node, Collection[Node]]) -> None:
        assert first.shape is not None
        self.first, self.chosen = first, chosen
        self.batch = first.shape[0]
        self.made: dict[Node, Node] = {}  # by parameter: its uncertain tensor
        self.loose: set[Node] = set()  # the graph does not know of their batch axis
        self.led: set[Node] = set()  # the batch stands where the graph has a one

    def run(self, graph: Graph) -> None:
        rewrite(graph, self)
        # Results that changed their shape must not leave the graph.
        assert not any(n in self.loose for n in graph.outputs if isinstance(n, Node))

    def __call__(self, node: Node, new: Builder) -> Node | None:
        swapped = {s: self._drawn(s, new) for s in node.inputs if node in self.chosen.get(s, ())}
        if swapped:
            node.args, node.kwargs = _replaced(node.args, swapped), _replaced(node.kwargs, swapped)
        if not any(s in self.loose or s in self.led for s in node.inputs):
            return self._again(node, new) if new.nodes else None
        return self._adjusted(node, new)

    def _drawn(self, parameter: Node, new: Builder) -> Node:
        if parameter not in self.made:
            assert parameter.shape is not None
            shape = parameter.shape
            squeeze = len(shape) > 1 and shape[0] == 1
            inner = shape[1:] if squeeze else shape
            made = new.call(drawn, parameter, self.first, squeeze, shape=(self.batch, *inner), dtype=parameter.dtype)
            made.name = f"{parameter.name}_drawn"
            (self.led if squeeze else self.loose).add(made)
            self.made[parameter] = made
        return self.made[parameter]

    def _again(self, node: Node, new: Builder) -> Node:
        """The same operation behind the nodes just made."""
        copy = new.call(node.target, *node.args, shape=node.shape, dtype=node.dtype)
        copy.kwargs = node.kwargs
        return copy

    def _adjusted(self, node: Node, new: Builder) -> Node:
        x = next(s for s in node.inputs if s in self.loose or s in self.led)
        shape = node.shape
        assert shape is not None and x.shape is not None
        if node.traits.norm is not None:
            return self._norm(node, new)
        if node.target in (*MATMUL, aten.einsum.default):
            return self._product(node, new, shape)
        if node.target is aten.prelu.default:
            slopes = self._along_channels(new, node.args[1], shape)
            return self._result(node, new, (node.args[0], slopes), shape, None)
        if node.traits.affine and shape[:1] == (self.batch,):
            args = [self._under(new, a, len(shape)) if self._is_drawn(a) else a for a in node.args]
            return self._result(node, new, args, shape, None)
        loose = x in self.loose
        if node.traits.elementwise or node.traits.keeps:
            out = (self.batch, *shape) if loose else (self.batch, *shape[1:])
            return self._result(node, new, node.args, out, self.loose if loose else self.led)
        return self._moved(node, new, x, shape) if loose else self._led(node, new, shape)

    def _is_drawn(self, a: Argument) -> bool:
        return isinstance(a, Node) and (a in self.loose or a in self.led)

    def _under(self, new: Builder, x: Node, dims: int) -> Node:
        """x with ones behind the batch, so that it has `dims` dimensions."""
        assert x.shape is not None
        missing = dims - len(x.shape)
        if missing <= 0:
            return x
        wide = (x.shape[0], *[1] * missing, *x.shape[1:])
        for i in range(missing):
            x = new.call(aten.unsqueeze.default, x, 1, shape=(*wide[:1], *wide[missing - i :]), dtype=x.dtype)
        return x

    def _result(
        self, node: Node, new: Builder, args: Argument, shape: Shape, kind: set[Node] | None, target: Operation = None
    ) -> Node:
        made = new.call(target or node.target, *args, shape=shape, dtype=node.dtype)
        made.kwargs = node.kwargs
        if kind is not None:
            kind.add(made)
        return made

    def _moved(self, node: Node, new: Builder, x: Node, shape: Shape) -> Node:
        """A shape operation on a tensor whose batch the graph does not know of."""
        out = (self.batch, *shape)
        rest = node.args[1:]

        def up(d: int) -> int:
            return d + 1 if d >= 0 else d

        target = node.target
        if target is aten.unsqueeze.default:
            if rest[0] in (0, -len(shape)):  # the one in front is the batch from now on
                return self._result(node, new, (x,), (self.batch, *shape[1:]), self.led, aten.alias.default)
            return self._result(node, new, (x, up(rest[0])), out, self.loose)
        if target in _ONE_DIM:
            return self._result(node, new, (x, up(rest[0] if rest else 0), *rest[1:]), out, self.loose)
        if target in (aten.transpose.int, aten.swapaxes.default):
            return self._result(node, new, (x, up(rest[0]), up(rest[1])), out, self.loose)
        if target is aten.permute.default:
            return self._result(node, new, (x, [0, *[up(d) for d in rest[0]]]), out, self.loose)
        if target in _VIEWS:
            if shape[:1] == (1,):
                return self._result(node, new, (x, [self._size(new), *rest[0][1:]]), (self.batch, *shape[1:]), self.led)
            return self._result(node, new, (x, [self._size(new), *rest[0]]), out, self.loose)
        if target is aten.expand.default:
            if shape[:1] == (self.batch,):
                wide = self._under(new, x, len(shape))
                return self._result(node, new, (wide, *rest), shape, None)
            return self._result(node, new, (x, [-1, *rest[0]]), out, self.loose)
        raise _refused(node)

    def _led(self, node: Node, new: Builder, shape: Shape) -> Node:
        """An operation on a tensor that has the batch where the graph has a one."""
        out = (self.batch, *shape[1:])
        args = node.args
        kind = None if shape[:1] == (self.batch,) else self.led
        if node.target is aten.repeat.default:
            if len(args[1]) != len(shape) or shape[:1] not in ((self.batch,), (1,)):
                raise _refused(node)
            return self._result(node, new, (args[0], [1, *args[1][1:]]), out, kind)
        if node.target is aten.expand.default:
            return self._result(node, new, (args[0], [-1, *args[1][1:]]), out, kind)
        if node.target in _VIEWS and shape[:1] == (1,):
            return self._result(node, new, (args[0], [self._size(new), *args[1][1:]]), out, kind)
        if shape[:1] not in ((1,), (self.batch,)):
            raise _refused(node)
        return self._result(node, new, args, out, kind)

    def _size(self, new: Builder) -> Node:
        return new.call(aten.sym_size.int, self.first, 0, shape=None)

    def _product(self, node: Node, new: Builder, shape: Shape) -> Node:
        """A product with a parameter: one more letter, the batch, in front of its axes."""
        if node.target is aten.einsum.default:
            equation, operands = node.args[0], list(node.args[1])
            dims = [len(t.shape) - self._is_drawn(t) for t in operands]
            if len(operands) != 2:
                raise _refused(node)
            letters = einsum_letters(equation, dims)
        else:
            operands = list(node.args)
            letters = matmul_letters(*[len(t.shape) - self._is_drawn(t) for t in operands])
        terms, result = list(letters[:2]), letters[2]
        others = [term for t, term in zip(operands, terms, strict=True) if not self._is_drawn(t)]
        if any(t in self.led for t in operands) or shape[:1] != (self.batch,) or (others and others[0][0] != result[0]):
            raise _refused(node)
        letter = result[0]
        if any(letter in term for t, term in zip(operands, terms, strict=True) if self._is_drawn(t)):
            raise _refused(node)
        spelled = [letter + term if self._is_drawn(t) else term for t, term in zip(operands, terms, strict=True)]
        made = new.call(aten.einsum.default, f"{','.join(spelled)}->{result}", operands, shape=shape, dtype=node.dtype)
        return made

    def _along_channels(self, new: Builder, x: Node, out: Shape) -> Node:
        """(batch, channels) with ones behind it for the places of a tensor (batch, channels, *places)."""
        for _ in range(len(out) - 2):
            assert x.shape is not None
            x = new.call(aten.unsqueeze.default, x, -1, shape=(*x.shape, 1), dtype=x.dtype)
        return x

    def _norm(self, node: Node, new: Builder) -> Node:
        norm = node.traits.norm
        assert norm is not None
        weight_name, bias_name, channels = norm.weight, norm.bias, norm.channels
        names = [a.name for a in node.target._schema.arguments]
        args = dict(zip(names, node.args, strict=False)) | node.kwargs
        weight, bias = args.get(weight_name), args.get(bias_name) if bias_name else None
        shape = node.shape
        assert shape is not None
        plain = [None if name in (weight_name, bias_name) else args[name] for name in names if name in args]
        y = new.call(node.target, *plain, shape=shape, dtype=node.dtype)
        for parameter, op in ((weight, aten.mul.Tensor), (bias, aten.add.Tensor)):
            if parameter is None:
                continue
            y = new.call(op, y, self._like_output(new, parameter, shape, channels), shape=shape, dtype=node.dtype)
        return y

    def _like_output(self, new: Builder, parameter: Node, out: Shape, channels: bool) -> Node:
        assert parameter.shape is not None
        if not channels:
            return self._under(new, parameter, len(out)) if self._is_drawn(parameter) else parameter
        return self._along_channels(new, parameter, out)


def _replaced(value: Argument, swapped: dict[Node, Node]) -> Any:
    return replace_nodes(value, lambda n: swapped.get(n, n))


def _refused(node: Node) -> UnsupportedOperation:
    names = ", ".join(f"`{name}`" for name in sorted(_parameters(node)))
    return UnsupportedOperation(
        f"`{node.target}` at {node.place} reads {names}, which has a posterior, in a way that has no rule (result of "
        f"shape {node.shape}): arithmetic, norms, slices, transposes, views and expansion are supported. Leave it out "
        "of the posterior, or add it to a tensor directly."
    )


def _parameters(node: Node) -> set[str]:
    """Names of the drawn parameters that a node is computed from."""
    names: set[str] = set()
    seen: set[Node] = set()
    ahead = [node]
    while ahead:
        here = ahead.pop()
        if here in seen:
            continue
        seen.add(here)
        if here.target is drawn:
            weight = here.args[0]
            names.add(weight.name if isinstance(weight, DerivedNode) else str(weight.target))
        else:
            ahead.extend(here.inputs)
    return names
