"""Two recordings at two batch sizes brought together to one program of `torch.export`, with the batch free."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import (
    ExportGraphSignature,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    TensorArgument,
)

from favour.errors import UnsupportedOperation
from favour.exporting.recording import ROWS, Layout, Recorder, exporting, recorded

aten = torch.ops.aten


class Frame(nn.Module):
    """Inputs and named outputs, with nothing between them: what `torch.export` makes of sizes and specs."""

    def __init__(self, outputs: Sequence[str]) -> None:
        super().__init__()
        self.outputs = outputs

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        return {name: tensors[0].clone() for name in self.outputs}


def program_of(
    function: Callable[..., dict[str, Tensor]],
    examples: tuple[Sequence[Tensor], Sequence[Tensor]],
    simplify: Callable[[fx.GraphModule], fx.GraphModule],
    written_out: Mapping[Any, Callable[..., Any]],
) -> torch.export.ExportedProgram:
    """A program of `torch.export` for any batch size.

    Args:
        function: From tensors to named results.
        examples: Its inputs, at `ROWS` rows.
        simplify: What to do with the graph before it is fixed.
        written_out: Operations, and of what others they are made.
    """
    with exporting():
        recorders = recorded(function, examples[0], written_out), recorded(function, examples[1], written_out)
        names = list(next(n for n in recorders[0].graph.nodes if n.op == "output").args[0])
        batch = torch.export.Dim("batch", min=1)
        shapes = [
            {i: batch for i, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m}
            for a, b in zip(*examples, strict=True)
        ]
        frame = torch.export.export(Frame(names), tuple(examples[0]), dynamic_shapes=(tuple(shapes),))
        program = lifted(simplify(Alignment(recorders, frame).aligned()), frame)
    program.run_decompositions = lambda *_: program  # written out already, and slow
    return program


def lifted(module: fx.GraphModule, frame: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The graph as a program, its attributes as inputs in front of the others."""
    graph, state, inputs = module.graph, dict[str, Tensor](), list[InputSpec]()
    places: dict[str, fx.Node] = {}
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            name = str(node.target)
            if name not in places:
                with graph.inserting_before(first):
                    places[name] = graph.placeholder(f"b_{name}")
                places[name].meta["val"] = node.meta["val"]
                state[name] = module.get_buffer(name)
                inputs.append(InputSpec(InputKind.BUFFER, TensorArgument(places[name].name), name, persistent=True))
            node.replace_all_uses_with(places[name])
            graph.erase_node(node)
    entering = [n for n in graph.nodes if n.op == "placeholder" and n not in places.values()]
    inputs += [InputSpec(InputKind.USER_INPUT, TensorArgument(n.name), None) for n in entering]
    last = next(n for n in reversed(graph.nodes) if n.op == "output")
    results = list(last.args[0].values())
    last.args = (tuple(results),)
    outputs = [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(n.name), None) for n in results]
    (whole,) = frame.module_call_graph
    assert whole.signature is not None
    whole.signature.inputs = [TensorArgument(n.name) for n in entering]
    whole.signature.outputs = [TensorArgument(n.name) for n in results]
    return torch.export.ExportedProgram(
        module, graph, ExportGraphSignature(inputs, outputs), state, frame.range_constraints, [whole]
    )


class Alignment:
    """Writes the nodes of two recordings into one graph.

    Args:
        recorders: At `ROWS` rows.
        frame: The program of `Inputs`, whose batch is a symbol.
    """

    def __init__(self, recorders: tuple[Recorder, Recorder], frame: torch.export.ExportedProgram) -> None:
        self.recorders = recorders
        self.frame = [n.meta["val"] for n in frame.graph.nodes if n.op == "placeholder"]
        places = [(i, d) for i, t in enumerate(self.frame) for d, s in enumerate(t.shape) if type(s) is not int]
        self.place = places[0] if places else (0, 0)  # a graph of no batch has no size that changes
        self.batch = self.frame[self.place[0]].shape[self.place[1]]
        self.graph, self.nodes = fx.Graph(), dict[fx.Node, fx.Node]()
        self.module = nn.Module()
        self.written: dict[tuple[int, int], fx.Node] = {}
        self.made: dict[Any, Tensor] = {}

    def aligned(self) -> fx.GraphModule:
        first, second = (list(r.graph.nodes) for r in self.recorders)
        if len(first) != len(second):
            raise self.refusal(f"there are {len(first)} operations for {ROWS[0]} rows and {len(second)} for {ROWS[1]}")
        inputs = iter(self.frame)
        for a, b in zip(first, second, strict=True):
            if (a.op, a.target) != (b.op, b.target):
                raise self.refusal(f"`{a.target}` for {ROWS[0]} rows is `{b.target}` for {ROWS[1]}")
            if a.op == "placeholder":
                node = self.graph.placeholder(a.name)
                node.meta["val"] = next(inputs)
            elif a.op == "get_attr":
                node = self.constant(a, b)
            elif a.op == "output":
                node = self.graph.output(self.both(a.args[0], b.args[0]))
            else:
                target = aten.view.default if a.target is aten._unsafe_view.default else a.target
                args, kwargs = self.both(a.args, b.args), self.both(a.kwargs, b.kwargs)
                node = self.graph.call_function(target, args, kwargs)
                node.meta["val"] = self.value(a, b)
            self.nodes[a] = node
        return fx.GraphModule(self.module, self.graph)

    def constant(self, a: fx.Node, b: fx.Node) -> fx.Node:
        tensors = [r.module_constant(n) for r, n in zip(self.recorders, (a, b), strict=True)]
        if tensors[0] is not tensors[1] and not torch.equal(*tensors):
            raise self.refusal(f"a constant of {tuple(tensors[0].shape)} depends on the number of rows")
        self.module.register_buffer(str(a.target), tensors[0].detach())
        node = self.graph.get_attr(str(a.target))
        node.meta["val"] = self.like(*[n.meta["layout"] for n in (a, b)])
        return node

    def both(self, a: Any, b: Any) -> Any:
        """The argument that is `a` for few rows and `b` for more."""
        if isinstance(a, fx.Node):
            return self.nodes[a]
        if isinstance(a, (list, tuple)):
            if len(a) != len(b):
                raise self.refusal("a list grows with the number of rows")
            return type(a)(self.both(x, y) for x, y in zip(a, b, strict=True))
        if isinstance(a, dict):
            return {k: self.both(v, b[k]) for k, v in a.items()}
        if a == b or a != a:
            return a
        if type(a) is not int:
            raise self.refusal(f"a number is {a} for {ROWS[0]} rows and {b} for {ROWS[1]}")
        return self.size(*self.line(a, b))

    def line(self, a: int, b: int) -> tuple[int, int]:
        slope, rest = divmod(b - a, ROWS[1] - ROWS[0])
        if rest:
            raise self.refusal(f"a size is {a} for {ROWS[0]} rows and {b} for {ROWS[1]}")
        return slope, a - slope * ROWS[0]

    def size(self, slope: int, more: int) -> fx.Node:
        """The node of slope · B + more."""
        if not self.written:
            place, dim = self.place
            batch = next(n for i, n in enumerate(self.nodes.values()) if i == place)
            self.written[1, 0] = self.graph.call_function(aten.sym_size.int, (batch, dim))
            self.written[1, 0].meta["val"] = self.batch
        if (slope, more) not in self.written:
            call, of, number = (operator.add, (slope, 0), more) if more else (operator.mul, (1, 0), slope)
            node = self.graph.call_function(call, (self.size(*of), number))
            node.meta["val"] = call(self.written[of].meta["val"], number)
            self.written[slope, more] = node
        return self.written[slope, more]

    def value(self, a: fx.Node, b: fx.Node) -> Any:
        if "layout" in a.meta:
            return self.like(a.meta["layout"], b.meta["layout"])
        return [
            None if x is None else self.like(x, y) for x, y in zip(a.meta["layouts"], b.meta["layouts"], strict=True)
        ]

    def like(self, a: Layout, b: Layout) -> Tensor:
        """A tensor without numbers of the layout that follows from both."""
        sizes, strides = (
            tuple((x, 0) if x == y else self.line(x, y) for x, y in zip(of, to, strict=True))
            for of, to in ((a.sizes, b.sizes), (a.strides, b.strides))
        )
        key = a.dtype, sizes, strides, a.sizes == b.sizes, a.strides == b.strides
        if key not in self.made:
            shapes = [
                [n if m == n else self.batch * s + o for m, n, (s, o) in zip(of, to, lines, strict=True)]
                for of, to, lines in ((a.sizes, b.sizes, sizes), (a.strides, b.strides, strides))
            ]
            with self.frame[0].fake_mode:
                self.made[key] = torch.empty_strided(*shapes, dtype=a.dtype)
        return self.made[key]

    @staticmethod
    def refusal(words: str) -> UnsupportedOperation:
        return UnsupportedOperation(f"the operations of this model change with the number of rows: {words}.")
