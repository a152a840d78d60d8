"""A program from an archive run on shapes alone, as `favour.graph.rehearsal` runs a graph from a predictor's file.

Tensors of the archive are held against their bytes too: one that repeats a few numbers many times would be small in the
file and large once it is computed with.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import CorruptFile
from favour.graph.operations import program_operation
from favour.graph.rehearsal import META, check_arguments, largest_allowed, made_on_meta, on_meta

_ROWS = 2


def rehearse_program(program: torch.export.ExportedProgram, size: int) -> None:
    """Run a program on shapes.

    Args:
        program: As loaded.
        size: Of its file in bytes.

    Raises:
        CorruptFile: It holds tensors larger than the file, calls what it may not, or makes what nothing explains.
    """
    held = [*program.state_dict.values(), *program.constants.values()]
    if not all(type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided for t in held):
        raise CorruptFile("it holds something other than tensors")
    if sum(t.numel() * t.element_size() for t in held) > 4 * size + 64 * 2**20:
        raise CorruptFile("its tensors are together much larger than the file")
    Interpreter(program, largest_allowed(held)).run_on_shapes()


class Interpreter:
    """Computes the nodes of a program's graph on torch's `meta` device."""

    def __init__(self, program: torch.export.ExportedProgram, largest: int) -> None:
        self.program, self.largest = program, largest
        self.values: dict[Any, Any] = {}

    def run_on_shapes(self) -> None:
        held: dict[str, Any] = {**self.program.constants, **self.program.state_dict}
        signature = self.program.graph_signature
        names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        names |= signature.inputs_to_lifted_tensor_constants
        left = 8 * self.largest
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value = held[names[node.name]].to(META) if node.name in names else _example(node)
                left = max(left, 8 * 256 * _bytes(value))
                self.largest = max(self.largest, 256 * _bytes(value))
            elif node.op == "call_function":
                value = self.computed(node)
                sizes = [_bytes(t) for t in pytree.tree_leaves(value)]
                left -= sum(sizes)
                if max(sizes, default=0) > self.largest or left < 0:
                    raise CorruptFile(f"`{node.target}` makes a tensor which nothing in the file explains")
            elif node.op == "output":
                continue
            else:
                raise CorruptFile(f"its graph has a node of kind {node.op!r}")
            self.values[node] = value

    def computed(self, node: Any) -> Any:
        program_operation(node.target)
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), self.values.__getitem__)
        args, kwargs = pytree.tree_map(on_meta, (args, kwargs))
        if isinstance(node.target, torch._ops.OpOverload):
            check_arguments(node.target, args, kwargs)
            kwargs = made_on_meta(node.target, args, kwargs)
        else:
            whole = all(isinstance(a, (int, float)) and abs(a) < 2**63 for a in args)
            if node.target.__name__ != "getitem" and (not whole or (node.target.__name__ == "pow" and args[1] > 64)):
                raise CorruptFile(f"`{node.name}` computes something that is no size")
        try:
            with torch.no_grad():
                value = node.target(*args, **kwargs)
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0][:300]
            raise CorruptFile(f"`{node.target}` cannot be computed: {type(error).__name__}: {words}") from error
        if isinstance(value, (int, float)) and not abs(value) < 2**63:
            raise CorruptFile(f"`{node.name}` is {str(value)[:40]}, which is no size")
        return value


def _example(node: Any) -> Any:
    """An input of two rows: sizes that may change are those of the example that the program was traced with."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor):
        return value
    sizes = [
        s if isinstance(s, int) else _ROWS if i == 0 else max(2, int(s.node.hint or 2))
        for i, s in enumerate(value.shape)
    ]
    return torch.empty(sizes, dtype=value.dtype, device=META)


def _bytes(value: Any) -> int:
    return value.numel() * value.element_size() if isinstance(value, Tensor) else 0
