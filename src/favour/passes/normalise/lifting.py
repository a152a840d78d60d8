"""A graph of one input, made into the graph of a batch in which every tensor has the batch in front.

Models fold the batch into other dimensions, (batch·windows, …), move it, (T, batch, …), or stack before it, (3, batch,
…). For *one* input it is nowhere: the shapes are (windows, …), (T, 1, …), (3, 1, …). So a model is taken as a function
f of one input, and mapped over the batch:

    F(x₁, …, x_N) = (f(x₁), …, f(x_N)),        every tensor t of f becomes T = (t₁, …, t_N), with one axis more.

That this is what the model computes holds wherever it treats its inputs apart (`favour.graph.apart` checks it).

**Layout.** A tensor of shape s for one input is kept as (N, *s); where s begins with a 1, which is where models usually
have their batch, as (N, *s[1:]), so that code which keeps the batch in front comes out as it was. What depends on no
input stays as it is, without the axis.

**Operations** fall into few families, by the schema of the operation: element by element (ones are put between the
batch and the entries, so that the last axes still meet), along named dimensions (which move by one), reshapes (written
by their results), products (broadcast over the axes in front), and those that know one axis of inputs only
(convolutions, pools, norms over channels), where the inputs of an input lie along an axis that they do not mind: beside
the channels for what acts on each channel, beside the positions for what does not. `lifted` holds them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node, replace_nodes
from favour.graph.refusals import listed
from favour.graph.traits import Argument, Operation
from favour.passes.rewriting import Builder, Shape

aten = torch.ops.aten

Lifted = tuple[Node, bool]  # a node, and whether it has the axis of the batch on top of all the tensor's own
Handler = Callable[["Call"], Lifted]

OPERATIONS: dict[Operation, Handler] = {}
KINDS: list[tuple[Callable[[Node], bool], Handler]] = []  # of the others, the first that holds


def lifts(*targets: Operation) -> Callable[[Handler], Handler]:
    """Register how operations are mapped over the batch."""

    def register(handler: Handler) -> Handler:
        OPERATIONS.update(dict.fromkeys(targets, handler))
        return handler

    return register


def lifts_where(holds: Callable[[Node], bool]) -> Callable[[Handler], Handler]:
    """Register how all other operations of a kind are mapped over the batch."""

    def register(handler: Handler) -> Handler:
        KINDS.append((holds, handler))
        return handler

    return register


def is_dropped(shape: Shape) -> bool:
    """Whether a tensor of this shape, for one input, is kept without its first axis."""
    return shape[:1] == (1,)


def lift(graph: Graph, inputs: Collection[Node], batch: str, *, batched: bool) -> Graph:
    """The graph for a batch.

    Args:
        graph: For one input.
        inputs: Those of its inputs that each input of a batch has its own of.
        batch: Symbol of the size of the batch.
        batched: Whether the tensors given and returned have the batch in front in the place of their own first axis, of
            size 1 in `graph`. Otherwise it stands before all of their axes.

    Raises:
        UnsupportedOperation: There is an operation that cannot be mapped; says which and where.
    """
    return _Lifting(graph, inputs, batch, batched).run()


class _Lifting:
    def __init__(self, graph: Graph, inputs: Collection[Node], batch: str, batched: bool) -> None:
        self.graph, self.inputs, self.batch, self.batched = graph, set(inputs), batch, batched
        self.nodes: list[Node] = []
        self.plain: dict[Node, Node] = {}  # what depends on no input
        self.values: dict[Node, Node] = {}  # by node for one input: for the batch
        self.several: dict[Node, tuple[Node, bool]] = {}  # operations with several results
        self.wholes: dict[Node, Node] = {}
        self.size: Node | None = None
        self.problems: list[str] = []

    def run(self) -> Graph:
        graph = self.graph
        lifted_inputs: dict[Node, Node] = {}
        for node in graph.nodes:
            if node.kind == "input" and node in self.inputs:
                lifted_inputs[node] = self._input(node)
            elif node.kind != "call":
                self.nodes.append(node)
                self.plain[node] = node
        for node in graph.calls:
            self._call(node)
        if self.problems:
            raise UnsupportedOperation(
                f"the batch cannot be kept apart from other dimensions:{listed(list(dict.fromkeys(self.problems)))}\n"
                "Uncertain tensors need the batch in front there: reshape or transpose before these lines."
            )
        outputs = [self._output(o) if isinstance(o, Node) else o for o in graph.outputs]
        inputs = [None if n is None else lifted_inputs.get(n, n) for n in graph.inputs]
        result = replace(graph, nodes=self.nodes, inputs=inputs, outputs=outputs, batched=self.batched)
        result.prune()
        return result

    def stored(self, shape: Shape) -> Shape:
        return (self.batch, *(shape[1:] if is_dropped(shape) else shape))

    def _input(self, node: Node) -> Node:
        assert node.shape is not None
        shape = self.stored(node.shape) if self.batched else (self.batch, *node.shape)
        lifted_input = replace(node, shape=shape)
        self.nodes.append(lifted_input)
        new = Builder(lifted_input)
        if self.size is None:
            self.size = new.call(aten.sym_size.int, lifted_input, 0, shape=None)
        value = lifted_input
        if not self.batched and is_dropped(node.shape):
            value = new.call(aten.squeeze.dim, lifted_input, 1, shape=self.stored(node.shape))
        self.nodes += new.nodes
        self.values[node] = value
        return lifted_input

    def _output(self, node: Node) -> Node:
        if node not in self.values:
            return self.plain[node]
        value = self.values[node]
        if self.batched or node.shape is None or not is_dropped(node.shape):
            return value
        new = Builder(value)
        new.like = replace(value, name=f"{value.name}_out")
        whole = new.call(aten.unsqueeze.default, value, 1, shape=(self.batch, *node.shape))
        self.nodes += new.nodes
        return whole

    def _call(self, node: Node) -> None:
        reads = any(s in self.values or s in self.several for s in node.inputs)
        if not reads and not _draws(node):
            again = replace(
                node,
                args=replace_nodes(node.args, self.plain.__getitem__),
                kwargs=replace_nodes(node.kwargs, self.plain.__getitem__),
            )
            self.nodes.append(again)
            self.plain[node] = again
            return
        call = Call(self, node)
        if node.target is operator.getitem:
            self._item(node, call)
            return
        try:
            made, whole = handler_of(node)(call)
        except Unmapped as why:
            self.problems.append(f"`{node.target}` at {node.place} {why}")
            made, whole = self._missing(node), False
        if node.shape is None:
            if node.target is aten.sym_size.int:
                self.plain[node] = made
            else:
                self.several[node] = made, whole
        else:
            self.values[node] = call.settled(made, node.shape, whole)
        self.nodes += call.new.nodes

    def _item(self, node: Node, call: Call) -> None:
        source, whole = self.several[node.args[0]]
        assert node.shape is not None
        shape = (self.batch, *node.shape) if whole else self.stored(node.shape)
        if not whole and not is_dropped(node.shape):
            self.problems.append(f"`{node.args[0].target}` at {node.place} has results of which it is not known how")
        made = call.call(operator.getitem, source, node.args[1], shape=shape)
        self.values[node] = call.settled(made, node.shape, whole)
        self.nodes += call.new.nodes

    def _missing(self, node: Node) -> Node:
        """In the place of what cannot be mapped, so that all of it is found at once."""
        return replace(node, args=(), kwargs={}, shape=None if node.shape is None else self.stored(node.shape))


class Unmapped(Exception):
    """An operation that cannot be mapped over the batch; the words follow the operation's name and place."""


class Call:
    """One operation, and its arguments for the batch."""

    def __init__(self, lifting: _Lifting, node: Node) -> None:
        self._lifting, self.node = lifting, node
        self.new = Builder(node)
        self.batch = lifting.batch

    @property
    def shape(self) -> Shape:
        """Of the result, for one input."""
        assert self.node.shape is not None
        return self.node.shape

    @property
    def size(self) -> Node:
        """How many inputs there are."""
        if self._lifting.size is None:
            raise Unmapped("draws numbers, and no input tells for how many inputs")
        return self._lifting.size

    def depends(self, x: Argument) -> bool:
        """Whether an argument is a tensor that differs from input to input."""
        return isinstance(x, Node) and x in self._lifting.values

    @property
    def tensors(self) -> list[Node]:
        """The arguments that differ from input to input."""
        return [s for s in dict.fromkeys(self.node.inputs) if self.depends(s)]

    def shape_of(self, x: Node) -> Shape:
        """Of an argument, for one input."""
        if x.shape is None:
            raise Unmapped("reads something that is no tensor")
        return x.shape

    def argument(self, name: str) -> Any:
        """An argument by name, or its default."""
        for i, a in enumerate(self.node.target._schema.arguments):
            if a.name == name:
                return self.node.args[i] if i < len(self.node.args) else self.node.kwargs.get(name, a.default_value)
        return None

    def call(self, target: Operation, *args: Argument, shape: Shape | None, **kwargs: Argument) -> Node:
        """A new node."""
        return self.new.call(target, *args, shape=shape, **kwargs)

    def swapped(self, structure: Argument, each: Callable[[Node], Any]) -> Any:
        """Arguments with their tensors replaced: those that depend on the inputs by `each`, others by themselves."""
        values, plain = self._lifting.values, self._lifting.plain
        return replace_nodes(structure, lambda n: each(n) if n in values else plain[n])

    def kept(self, x: Node) -> Node:
        """A tensor as it is stored."""
        lifting = self._lifting
        if x in lifting.values:
            return lifting.values[x]
        shape = lifting.stored(self.shape_of(x))
        now = lifting.plain[x]
        if not is_dropped(x.shape or ()):
            now = self.call(aten.unsqueeze.default, now, 0, shape=(1, *(x.shape or ())), dtype=x.dtype)
        sizes = [self.size, *[-1] * (len(shape) - 1)]
        return self.call(aten.expand.default, now, sizes, shape=shape, dtype=x.dtype)

    def whole(self, x: Node) -> Node:
        """(N, *shape)."""
        value = self.kept(x)
        shape = self.shape_of(x)
        if not is_dropped(shape):
            return value
        known = self._lifting.wholes.get(value)
        if known is None or not self.depends(x):
            known = self.call(aten.unsqueeze.default, value, 1, shape=(self.batch, *shape), dtype=x.dtype)
            if self.depends(x):
                self._lifting.wholes[value] = known
        return known

    def aligned(self, x: Argument, rank: int, dropped: bool) -> Any:
        """An argument that meets others of up to `rank` dimensions, which are stored without their first or not."""
        if not isinstance(x, Node):
            return x
        if not self.depends(x):
            return self._lifting.plain[x]
        value = self.kept(x)
        assert value.shape is not None
        for _ in range(1 + rank - dropped - len(value.shape)):
            assert value.shape is not None
            wide = (self.batch, 1, *value.shape[1:])
            value = self.call(aten.unsqueeze.default, value, 1, shape=wide, dtype=x.dtype)
        return value

    def settled(self, made: Node, shape: Shape, whole: bool) -> Node:
        """A result as it is stored."""
        if not whole or not is_dropped(shape):
            return made
        if made.kind == "call" and made.target is aten.unsqueeze.default and made.args[1] == 1:
            return made.args[0]
        return self.call(aten.squeeze.dim, made, 1, shape=self._lifting.stored(shape))

    def reshaped(self, x: Node, shape: Shape, sizes: Sequence[Any] | None = None) -> Lifted:
        """The entries of a tensor (of the batch) in another shape (for one input), in the same order."""
        stored = self._lifting.stored(shape)
        if x.shape == stored:
            return x, False
        sizes = list(shape) if sizes is None else list(sizes)
        if any(isinstance(s, str) for s in sizes):
            raise Unmapped("reshapes a tensor with a dynamic size")
        sizes = sizes[1:] if is_dropped(shape) else sizes
        return self.call(aten.reshape.default, x, [self.size, *sizes], shape=stored, dtype=x.dtype), False

    def as_it_is(self) -> Lifted:
        """The operation on tensors as they are stored, where the batch has the place of their first axis."""
        node = self.node
        shapes = [self.shape_of(t) for t in self.tensors] + ([] if node.shape is None else [node.shape])
        if not all(map(is_dropped, shapes)):
            raise Unmapped(f"acts on tensors of shapes {', '.join(_written(s) for s in shapes)} for each input")
        args, kwargs = self.swapped((node.args, node.kwargs), self.kept)
        shape = None if node.shape is None else self._lifting.stored(node.shape)
        return self.call(node.target, *args, shape=shape, **kwargs), False


def _written(shape: Shape) -> str:
    return "(" + ", ".join(map(str, shape)) + ")"


def _draws(node: Node) -> bool:
    """Whether what a call draws differs from input to input."""
    return node.draw is not None or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def handler_of(node: Node) -> Handler:
    """How an operation is mapped: as registered for it, else for operations like it, else as it is."""
    kinds = (handler for holds, handler in KINDS if holds(node))
    return OPERATIONS.get(node.target) or next(kinds, Call.as_it_is)


def out_of_place(graph: Graph, batch: str) -> list[Node]:
    """Floating-point tensors that depend on the inputs and do not have the batch in front."""
    depends: set[Node] = set()
    nodes = []
    for node in graph.nodes:
        if node.kind == "input":
            reads = (node.shape or ())[:1] == (batch,)
        else:
            reads = node.target is not aten.sym_size.int and any(s in depends for s in node.inputs)
        drawn = node.draw is not None and node.live and node.rate != 0
        if not (reads or drawn):
            continue
        depends.add(node)
        real = node.shape is not None and node.dtype is not None and node.dtype.is_floating_point
        if real and (node.shape or ())[:1] != (batch,):
            nodes.append(node)
    return nodes


def meetings(graph: Graph, batch: str) -> list[Node]:
    """Operations whose results are about all inputs of a batch together: the batch has gone from the shape."""
    symbol = re.compile(rf"\b{re.escape(batch)}\b")

    def has(node: Node) -> bool:
        return any(isinstance(s, str) and symbol.search(s) for s in node.shape or ())

    return [n for n in graph.calls if n.shape is not None and not has(n) and any(map(has, n.inputs))]


def depends_on_draws(graph: Graph) -> set[Node]:
    """Nodes that are random whatever the inputs and weights are."""
    nodes: set[Node] = set()
    for node in graph.nodes:
        drawn = node.draw is not None and node.live and node.rate != 0
        if node.kind == "call" and (drawn or any(s in nodes for s in node.inputs)):
            nodes.add(node)
    return nodes
