"""A graph from a file run on shapes alone, before anything of it is computed.

Torch's `meta` device computes sizes and dtypes and no numbers. Every call of the graph is made there with two rows, and
what it results in is held against what the file says of it. So a negative size, an argument that does not fit, a shape
that is not what the rules were chosen by, and a tensor of a size that nothing in the file explains are found while
loading, in little time and no memory.

    largest tensor      the more of 1 GiB and 256 × the bytes of the file's tensors and of two rows of input
    all results         8 × that
    whole numbers       below 2⁶³, whatever sizes are multiplied
    integer division    never truncating by a tensor: the least integer by −1 ends the process
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import CorruptFile, FavourError
from favour.files.tensors import DTYPES
from favour.graph.interpreter import arguments, interpret
from favour.graph.node import Graph, Node, nodes_in, replace_nodes
from favour.graph.sizes import size_of
from favour.graph.traits import Argument

aten = torch.ops.aten
GIB = 2**30
_KNOWN = set(DTYPES.values())
_DEVICES = ("cpu", "cuda", "mps", "xpu")
META = torch.device("meta")
_SYMBOL = re.compile(r"u\d+")  # a size that torch.export leaves to the data


def rehearse(graph: Graph, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
    """Run a graph on shapes.

    Args:
        graph: From a file.
        tensors: Its parameters, buffers and constants, by the names of their nodes.
        sizes: Symbolic sizes of the example, besides the batch.

    Raises:
        CorruptFile: A call cannot be made, or does not result in what the file says.
    """
    _Rehearsal(graph, tensors, sizes).run()


class _Rehearsal:
    def __init__(self, graph: Graph, tensors: Mapping[str, Tensor], sizes: Mapping[str, int]) -> None:
        self.graph, self.tensors = graph, tensors
        self.sizes: dict[str, int] = {}
        self.values: dict[Node, Any] = {}
        for node in graph.inputs:
            for position, size in enumerate((node.shape if node is not None else None) or ()):
                if isinstance(size, str):
                    self.sizes.setdefault(size, sizes.get(size, 2 if position == 0 else 3))
        self.largest = largest_allowed(tensors.values())

    def run(self) -> None:
        for node, fixed in zip(self.graph.inputs, self.graph.fixed, strict=True):
            if node is not None:
                self.values[node] = fixed if node.shape is None else self._declared(node)
        self.largest = max(self.largest, largest_allowed(t for t in self.values.values() if isinstance(t, Tensor)))
        left = 8 * self.largest

        def handle(node: Node, values: Mapping[Node, Any]) -> Any:
            nonlocal left
            value = self._value(node)
            for tensor in pytree.tree_leaves(value) if node.kind == "call" else ():
                if isinstance(tensor, Tensor):
                    size = tensor.numel() * tensor.element_size()
                    left -= size
                    if size > self.largest or left < 0:
                        raise CorruptFile(
                            f"`{node.target}` at {node.place} makes a tensor of shape {tuple(tensor.shape)}, which "
                            "nothing in the file explains"
                        )
            return value

        interpret(self.graph.nodes, self.values, handle)
        unknown = [n for n in nodes_in(self.graph.outputs) if n not in self.values]
        if unknown:
            raise CorruptFile(f"its outputs are {unknown}, which are not among its nodes")

    def _value(self, node: Node) -> Any:
        if node.kind == "input":
            return self.values[node]
        if node.kind in ("parameter", "buffer", "constant"):
            tensor = self.tensors[node.name]
            if node.shape is not None and (tuple(tensor.shape), tensor.dtype) != (node.shape, node.dtype):
                raise CorruptFile(
                    f"`{node.target}` has shape {tuple(tensor.shape)} and dtype {tensor.dtype}; the graph was made for "
                    f"{node.shape} and {node.dtype}"
                )
            return tensor.to(META)
        if node.kind != "call":
            raise CorruptFile(f"it has a node of kind {node.kind!r}")
        if not isinstance(node.target, torch._ops.OpOverload):
            return self._number(node)
        args, kwargs = pytree.tree_map(on_meta, arguments(node, self.values))
        if node.draw is not None and args and isinstance(args[0], Tensor):  # its rate may be a tensor, unlike torch's
            self._compare(node, args[0])
            return args[0]
        check_arguments(node.target, args, kwargs)
        kwargs = made_on_meta(node.target, args, kwargs)
        try:
            with torch.no_grad():
                value = node.target(*args, **kwargs)
        except FavourError:
            raise
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0][:300]
            raise CorruptFile(
                f"`{node.target}` at {node.place} cannot be computed: {type(error).__name__}: {words}"
            ) from error
        self._compare(node, value)
        return value

    def _number(self, node: Node) -> Any:
        """A Python operator on sizes, or one of several results."""
        args = replace_nodes(node.args, self.values.__getitem__)
        if node.target is operator.getitem:
            source, which = args
            if not isinstance(source, (list, tuple)) or type(which) is not int or not 0 <= which < len(source):
                raise CorruptFile(f"`{node.name}` takes entry {which!r} of something that has none")
            self._compare(node, source[which])
            return source[which]
        if node.kwargs or any(not isinstance(a, (int, float)) or abs(a) >= 2**63 for a in args):
            raise CorruptFile(f"`{node.name}` computes {node.target.__name__} of something that is no size")
        if node.target is operator.pow and (len(args) != 2 or not 0 <= args[1] <= 64):
            raise CorruptFile(f"`{node.name}` raises a size to the power {args[1:]}")
        value = node.target(*args)
        if not isinstance(value, (int, float)) or not abs(value) < 2**63:
            raise CorruptFile(f"`{node.name}` is {str(value)[:40]}, which is no size")
        return value

    def _declared(self, node: Node) -> Tensor:
        if node.dtype is None:
            raise CorruptFile(f"input `{node.name}` has no dtype")
        shape = self._shape(node)
        assert shape is not None
        return torch.empty(shape, dtype=node.dtype, device=META)

    def _shape(self, node: Node) -> tuple[int, ...] | None:
        """The shape that the file gives a node, or None where its symbols follow from no input."""
        sizes = []
        for written in node.shape or ():
            try:
                size = size_of(written, self.sizes)
            except FavourError:
                if _SYMBOL.fullmatch(str(written)) is None:
                    raise CorruptFile(
                        f"`{node.name}` has a size {str(written)[:80]!r}, which does not follow"
                    ) from None
                return None
            if type(size) is not int or not 0 <= size < 2**63:
                raise CorruptFile(f"`{node.name}` has the shape {str(node.shape)[:80]}")
            sizes.append(size)
        return tuple(sizes)

    def _compare(self, node: Node, value: Argument) -> None:
        if (node.shape is not None) != isinstance(value, Tensor):
            raise CorruptFile(f"`{node.name}` is said to have the shape {node.shape}, and is a {type(value).__name__}")
        if not isinstance(value, Tensor):
            return
        shape = self._shape(node)
        if (shape is not None and tuple(value.shape) != shape) or value.dtype != node.dtype:
            raise CorruptFile(
                f"`{node.target}` at {node.place} makes {tuple(value.shape)} of {value.dtype}; the file says "
                f"{shape} of {node.dtype}"
            )


def on_meta(value: Argument) -> Any:
    if isinstance(value, Tensor):
        return value if value.is_meta else value.to(META)
    if isinstance(value, torch.device):
        if value.type not in _DEVICES:
            raise CorruptFile(f"it computes on the device {value}")
        return META
    if isinstance(value, torch.dtype) and value not in _KNOWN:
        raise CorruptFile(f"it computes in {value}")
    if isinstance(value, torch.layout) and value is not torch.strided:
        raise CorruptFile(f"it holds tensors as {value}")
    return value


def made_on_meta(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments by which an operation that makes a tensor of nothing but sizes makes it without memory too."""
    if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves((args, dict(kwargs)))):
        return dict(kwargs)
    by_name = {a.name: value for a, value in zip(target._schema.arguments, args, strict=False)} | dict(kwargs)
    places = any(a.name == "device" and by_name.get("device") is None for a in target._schema.arguments)
    return {**kwargs, "device": META} if places else dict(kwargs)


_ENUMERATIONS = {"ScalarType": torch.dtype, "Layout": torch.layout, "MemoryFormat": torch.memory_format}


def check_arguments(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise for arguments on which torch does not fail but ends the process.

    A dtype, layout or order of memory given as a number is taken as it is, whatever it is; and truncating division of
    the least whole number by −1 is a fault of the processor.
    """
    by_name = {a.name: value for a, value in zip(target._schema.arguments, args, strict=False)} | dict(kwargs)
    for argument in target._schema.arguments:
        kind = next((t for name, t in _ENUMERATIONS.items() if name in str(argument.real_type)), None)
        value = by_name.get(argument.name)
        if kind is not None and value is not None and not isinstance(value, kind):
            raise CorruptFile(
                f"`{target}` is given {str(value)[:40]} for its {argument.name}, which is no {kind.__name__}"
            )
    if by_name.get("rounding_mode") == "trunc":
        safe = len(args) == 2 and isinstance(args[1], (int, float)) and args[1] > 0
        if not safe and not any(isinstance(a, Tensor) and a.is_floating_point() for a in by_name.values()):
            raise CorruptFile(f"`{target}` divides whole numbers by a tensor and truncates")


def largest_allowed(tensors: Iterable[Tensor]) -> int:
    """Bytes of the largest tensor that may be made from these."""
    return max(GIB, 256 * sum(t.numel() * t.element_size() for t in tensors))
