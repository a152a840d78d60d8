"""A captured graph as JSON, so that predictors are saved without pickled code.

Only names of operations are written. Reading resolves them among torch's registered operators and a fixed list of Python
operators on sizes, so a file can name an operation but never bring one.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import CorruptFile, UnsupportedOperation
from favour.graph import Graph, Node

_SIZE_OPERATORS = {
    f.__name__: f
    for f in (
        operator.getitem,
        operator.add,
        operator.sub,
        operator.mul,
        operator.floordiv,
        operator.truediv,
        operator.mod,
        operator.neg,
        operator.pow,
        operator.eq,
        operator.ne,
        operator.lt,
        operator.le,
        operator.gt,
        operator.ge,
        math.ceil,
        math.floor,
        torch.sym_max,
        torch.sym_min,
        torch.sym_int,
        torch.sym_float,
    )
}


def _target_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    name = getattr(target, "__name__", "")
    if _SIZE_OPERATORS.get(name) is target:
        return f"python.{name}"
    raise UnsupportedOperation(f"an operation `{target}` cannot be written to a file.")


def _target(name: str) -> Any:
    namespace, _, rest = name.partition(".")
    if namespace == "python" and rest in _SIZE_OPERATORS:
        return _SIZE_OPERATORS[rest]
    packet, _, overload = rest.rpartition(".")
    found = getattr(getattr(getattr(torch.ops, namespace, None), packet, None), overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CorruptFile(f"the file uses an operation `{name}` that this version of torch does not have.")
    return found


def encode(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A JSON-able form of an argument; tensors are put aside under a name."""
    if isinstance(value, Node):
        return {"node": value.name}
    if isinstance(value, Tensor):
        name = f"argument{len(tensors)}"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, tuple):
        return {"tuple": [encode(v, tensors) for v in value]}
    if isinstance(value, list):
        return [encode(v, tensors) for v in value]
    if isinstance(value, dict):
        return {"dict": {k: encode(v, tensors) for k, v in value.items()}}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise UnsupportedOperation(f"an argument of type {type(value).__name__} cannot be written to a file.")


def decode(value: Any, nodes: dict[str, Node], tensors: dict[str, Tensor]) -> Any:
    """The inverse of `encode`."""
    if isinstance(value, list):
        return [decode(v, nodes, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "tensor":
        return tensors[content]
    if kind == "torch":
        found = getattr(torch, content, None)
        if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
            raise CorruptFile(f"the file names `torch.{content}`, which is no dtype, layout or memory format.")
        return found
    if kind == "device":
        return torch.device(content)
    if kind == "tuple":
        return tuple(decode(v, nodes, tensors) for v in content)
    if kind == "dict":
        return {k: decode(v, nodes, tensors) for k, v in content.items()}
    if kind == "float":
        return float(content)
    raise CorruptFile(f"the file holds an argument of unknown kind {kind!r}.")


def graph_to_json(graph: Graph, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Describe a graph; tensors among its arguments go to `tensors`."""
    nodes = []
    for node in graph.nodes:
        nodes.append(
            {
                "name": node.name,
                "kind": node.kind,
                "target": _target_name(node.target) if node.kind == "call" else node.target,
                "args": encode(list(node.args), tensors),
                "kwargs": encode(node.kwargs, tensors),
                "shape": None if node.shape is None else list(node.shape),
                "dtype": None if node.dtype is None else str(node.dtype).removeprefix("torch."),
                "module": node.module,
                "where": node.where,
            }
        )
    return {
        "nodes": nodes,
        "inputs": [None if n is None else n.name for n in graph.inputs],
        "outputs": encode(graph.outputs, tensors),
        "in_spec": pytree.treespec_dumps(graph.in_spec),
        "out_spec": pytree.treespec_dumps(graph.out_spec),
        "fixed": encode(graph.fixed, tensors),
        "aliases": graph.aliases,
    }


def graph_from_json(data: dict[str, Any], tensors: dict[str, Tensor], constants: dict[str, Tensor]) -> Graph:
    """Read a graph back.

    Raises:
        CorruptFile: It names unknown nodes, operations or kinds.
    """
    table: dict[str, Node] = {}
    try:
        for item in data["nodes"]:
            node = Node(
                item["name"],
                item["kind"],
                _target(item["target"]) if item["kind"] == "call" else item["target"],
                tuple(decode(item["args"], table, tensors)),
                decode(item["kwargs"], table, tensors),
                None if item["shape"] is None else tuple(item["shape"]),
                None if item["dtype"] is None else decode({"torch": item["dtype"]}, table, tensors),
                item["module"],
                item["where"],
            )
            table[node.name] = node
        return Graph(
            list(table.values()),
            [None if name is None else table[name] for name in data["inputs"]],
            decode(data["outputs"], table, tensors),
            pytree.treespec_loads(data["in_spec"]),
            pytree.treespec_loads(data["out_spec"]),
            decode(data["fixed"], table, tensors),
            constants,
            dict(data["aliases"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"the graph in the file is incomplete: {type(error).__name__}: {error}") from error
