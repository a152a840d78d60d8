"""A function of a batch, recorded: run twice, at two batch sizes, and every operation of it written down.

`torch.export` runs a function on symbols, at a thousand times the price of a number, and stops where a size decides
anything. Here it runs on numbers. The two recordings are the same list of calls; every whole number in them, and every
size of a result, is

    n = a·B + b,      a = (n₅ − n₃)/(5 − 3),  b = n₃ − 3a

of the batch size B (a = 0 for most). A list that differs otherwise, or an `a` that is no whole number, is refused, and
`favour.export` compares the file at other batch sizes than these. What depends on parameters and constants alone may
decide things; what depends on the inputs may not.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from favour.errors import UnsupportedOperation
from favour.graph.tracing import TRACING

aten = torch.ops.aten
ROWS = (3, 5)
_MARK = "_favour_node"  # of a recorded tensor: the node that made it


class Layout:
    """What is known of a result at one batch size."""

    def __init__(self, tensor: Tensor) -> None:
        self.dtype, self.sizes, self.strides = tensor.dtype, tuple(tensor.shape), tensor.stride()


class Recorder(TorchDispatchMode):
    """Writes every call down while it is active.

    A node has in `meta` the layouts of its results, and whether inputs matter to them.
    """

    def __init__(self, inputs: Sequence[Tensor], written_out: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()
        self.written_out = written_out
        self.graph, self.constants = fx.Graph(), dict[int, tuple[Tensor, fx.Node]]()
        for i, tensor in enumerate(inputs):
            self.mark(tensor, self.graph.placeholder(f"tensors_{i}"), varies=True)

    def mark(self, tensor: Tensor, node: fx.Node, varies: bool) -> None:
        node.meta = {"layout": Layout(tensor), "varies": varies}
        setattr(tensor, _MARK, (self, node))

    def node_of(self, tensor: Tensor) -> fx.Node:
        mark: tuple[Recorder, fx.Node] | None = getattr(tensor, _MARK, None)
        if mark is not None and mark[0] is self:
            return mark[1]
        if id(tensor) not in self.constants:
            node = self.graph.get_attr(f"constant_{len(self.constants)}")
            node.meta = {"layout": Layout(tensor), "varies": False}
            self.constants[id(tensor)] = tensor, node
        return self.constants[id(tensor)][1]

    def module_constant(self, node: fx.Node) -> Tensor:
        return next(tensor for tensor, other in self.constants.values() if other is node)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self.written_out:
            with self:
                result = self.written_out[func](*args, **kwargs)
            if result is not NotImplemented:
                return result
        if func is aten.lift_fresh.default or (func is aten.as_strided_.default and args[1] == [*args[0].shape]):
            return func(*args, **kwargs)  # the same numbers
        taken = pytree.tree_map_only(Tensor, self.node_of, (args, kwargs))
        varies = any(n.meta["varies"] for n in pytree.tree_leaves(taken) if isinstance(n, fx.Node))
        if varies and _decides(func, args):
            raise UnsupportedOperation(
                f"`{func}` decides by the values of an input, and a file is one fixed sequence of operations."
            )
        result = func(*args, **kwargs)
        leaves = [result] if isinstance(result, Tensor) else result
        if not isinstance(leaves, (tuple, list)) or not any(isinstance(t, Tensor) for t in leaves):
            return result  # a number that no input has a part in
        node = self.graph.call_function(out_of_place(func), *taken)
        node.meta = {"varies": varies, "layouts": [Layout(t) if isinstance(t, Tensor) else None for t in leaves]}
        if leaves is not result:
            self.mark(result, node, varies)
            return result
        for i, part in enumerate(leaves):
            if isinstance(part, Tensor):
                self.mark(part, self.graph.call_function(operator.getitem, (node, i)), varies)
        return result


def out_of_place(func: Any) -> Any:
    """What makes anew what `func` writes into its first argument, a tensor of its own: functions write no others."""
    if not func._schema.is_mutable:
        return func
    packet = getattr(aten, func.overloadpacket.__name__.removesuffix("_"), None)
    pure = getattr(packet, func._overloadname, None)
    if pure is None or pure._schema.is_mutable:
        raise UnsupportedOperation(f"`{func}` writes into a tensor, which no file does.")
    return pure


def _decides(func: Any, args: tuple) -> bool:
    """Whether values make what comes of a call: its being at all, or its size."""
    if func in (aten.index.Tensor, aten.index_put.default):  # by masks, not by numbers
        return any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*func.tags})


def recorded(
    function: Callable[..., dict[str, Tensor]],
    inputs: Sequence[Tensor],
    written_out: Mapping[Any, Callable[..., Any]],
) -> Recorder:
    """The calls of one run; the graph's output is the dict of results.

    Args:
        function: From tensors to named results.
        inputs: Of the run.
        written_out: Operations that are written down as those that they consist of.
    """
    recorder = Recorder(inputs, written_out)
    with recorder:
        results = torch.func.functionalize(function)(*inputs)
    recorder.graph.output({name: recorder.node_of(t) for name, t in results.items()})
    return recorder


@contextlib.contextmanager
def exporting() -> Iterator[None]:
    """As while `torch.export` runs: values are not looked at, weights not followed."""
    from torch._export.utils import _compiling_state_context

    with TRACING, _compiling_state_context():
        yield
