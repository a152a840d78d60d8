"""Predictor files: a captured graph as JSON beside plain tensors, so that nothing in a file is ever executed.

Only names of operations are written. Reading resolves them among aten's operators, those that have a rule,
and a fixed list of Python operators on sizes: a file can name an operation but never bring one, nor one
that reads or writes files.
"""

from __future__ import annotations

import json
import math
import operator
import os
import zipfile
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.capture.graph import Graph, Node
from favour.errors import CorruptFile, UnsupportedOperation
from favour.rules.registry import RULES

FORMAT = "favour-predictor"
VERSION = 1

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

_FORBIDDEN = {"from_file", "_print"}


def write_file(path: str | os.PathLike[str], content: dict[str, Any]) -> None:
    """Write a file of plain values and tensors, in one piece: a crash leaves an earlier file as it was."""
    temporary = f"{os.fspath(path)}.part"
    try:
        torch.save({"format": FORMAT, "version": VERSION, **content}, temporary)
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_file` wrote. Pickled code in the file is refused, not run.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.
    """
    name = os.fspath(path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, PermissionError):
        raise
    except Exception as error:
        kind = "damaged, or holds code" if zipfile.is_zipfile(path) else "no predictor file"
        raise CorruptFile(f"`{name}` is {kind}: {type(error).__name__}: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptFile(f"`{name}` was not written by `Predictor.save`.")
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CorruptFile(f"`{name}` has format version {version}; this favour reads up to {VERSION}. Upgrade favour.")
    return content


def _structure(text: str) -> pytree.TreeSpec:
    """A tree structure from JSON. A defaultdict's would name a function to import, an enumeration's a module."""

    def check(part: Any) -> None:
        if isinstance(part, dict):
            if "defaultdict" in str(part.get("type")):
                raise CorruptFile("the file holds a defaultdict among the arguments or outputs, which is not allowed.")
            if _names_enumeration(part.get("context")):
                raise CorruptFile("the file holds an enumeration among the arguments or outputs, which is not allowed.")
            for child in part.get("children_spec", ()):
                check(child)

    for part in json.loads(text):
        check(part)
    return pytree.treespec_loads(text)


def _names_enumeration(context: Any) -> bool:
    """Whether a node's context, JSON within JSON, holds an `__enum__` anywhere."""
    if isinstance(context, str):
        try:
            inner = json.loads(context)
        except ValueError:
            return False
        return not isinstance(inner, str | int | float | None) and _names_enumeration(inner)
    if isinstance(context, dict):
        return "__enum__" in context or any(map(_names_enumeration, context.values()))
    return isinstance(context, list) and any(map(_names_enumeration, context))


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
    if found not in RULES and (namespace not in ("aten", "favour") or packet in _FORBIDDEN):
        raise CorruptFile(
            f"the file uses an operation `{name}`, which is outside aten and has no rule; if you trust it, "
            "register a rule for it before loading."
        )
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
            _structure(data["in_spec"]),
            _structure(data["out_spec"]),
            decode(data["fixed"], table, tensors),
            constants,
            dict(data["aliases"]),
        )
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"the graph in the file is incomplete: {type(error).__name__}: {error}") from error
