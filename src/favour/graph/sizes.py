"""Symbolic sizes of a captured graph: `s0`, `2*s0`, `(s1 - 1)//2 + 1`.

The batch is always symbolic, other sizes where `dynamic=` asked for it. Expressions may come from a file, so they are
read as arithmetic and never run as code.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph

_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
    ast.Mod: operator.mod,
}
_LONGEST, _LARGEST_POWER = 1000, 16  # of an expression in characters; a file may hold any
_FUNCTIONS: dict[str, Callable[..., int]] = {"Max": max, "Min": min, "Mod": operator.mod}


def size_of(size: int | str, sizes: Mapping[str, int]) -> int:
    """The value of a size, given those of its symbols.

    Example:
        >>> size_of("(s1 - 1)//2 + 1", {"s1": 8})
        4
    """

    def value(e: ast.AST) -> int:
        if isinstance(e, ast.Expression):
            return value(e.body)
        if isinstance(e, ast.Constant) and isinstance(e.value, int):
            return e.value
        if isinstance(e, ast.Name) and e.id in sizes:
            return sizes[e.id]
        if isinstance(e, ast.BinOp) and type(e.op) in _OPERATORS:
            left, right = value(e.left), value(e.right)
            if not isinstance(e.op, ast.Pow) or 0 <= right <= _LARGEST_POWER:
                return _OPERATORS[type(e.op)](left, right)
        if isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub):
            return -value(e.operand)
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id in _FUNCTIONS and not e.keywords:
            return _FUNCTIONS[e.func.id](*map(value, e.args))
        raise UnsupportedOperation(f"the size `{size}` does not follow from the sizes of the inputs, {dict(sizes)}.")

    if isinstance(size, int):
        return size
    if len(size) > _LONGEST:
        raise UnsupportedOperation(f"a size is an expression of {len(size)} characters; at most {_LONGEST} are read.")
    return value(ast.parse(size, mode="eval"))


def entries(shape: Sequence[int | str], sizes: Mapping[str, int]) -> int:
    """How many numbers a tensor holds; a symbolic size that does not follow from `sizes` counts as 1."""

    def known(size: int | str) -> int:
        try:
            return size_of(size, sizes)
        except UnsupportedOperation:
            return 1

    return math.prod(known(s) for s in shape)


def bound_sizes(graph: Graph, shapes: Sequence[Sequence[int] | None]) -> dict[str, Any]:
    """Symbols of the inputs' sizes and their values, for inputs of the given shapes (None where it is no tensor)."""
    sizes: dict[str, Any] = {}
    for node, shape in zip(graph.inputs, shapes, strict=True):
        if node is not None and node.shape is not None and shape is not None:
            sizes |= {s: have for s, have in zip(node.shape, shape, strict=True) if isinstance(s, str)}
    return sizes
