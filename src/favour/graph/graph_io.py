"""Predictor files: a captured graph as JSON beside plain tensors, so that nothing in a file is ever executed.

Only names of operations are written. Reading looks them up among those that `favour.graph.operations` admits: a file
can name an operation but never bring one. A checksum covers the whole file (`favour.files.checksum`).
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import CorruptFile, UnsupportedOperation
from favour.files.checksum import check_archive, expect_checksum, seal_archive
from favour.files.members import Members
from favour.files.replacing import replaced
from favour.files.tensors import read_values
from favour.graph.node import Graph, Node
from favour.graph.operations import operation, operation_name, without_memory_format
from favour.graph.traits import Argument

FORMAT = "favour-predictor"
VERSION = 1


def write_file(path: str | os.PathLike[str], content: Mapping[str, Any]) -> None:
    """Write a file of plain values and tensors, with a checksum and in one step: a crash leaves an earlier one."""
    with replaced(path) as temporary, open(temporary, "wb+") as file:
        write_content(file, content)


def write_content(file: BinaryIO, content: Mapping[str, Any]) -> None:
    """As `write_file`, to a file open for writing and reading."""
    torch.save({"format": FORMAT, "version": VERSION, "checksum": True, **_dense(content)}, file)
    seal_archive(file)


def _dense(value: Argument) -> Any:
    """Plain tensors that hold no number twice."""
    if isinstance(value, Mapping):
        return {key: _dense(item) for key, item in value.items()}
    if isinstance(value, Tensor):
        repeats = any(step == 0 and size > 1 for step, size in zip(value.stride(), value.shape, strict=True))
        return value.detach().contiguous() if repeats else value.detach()
    return value


def read_file(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What `write_file` wrote. Code in the file is refused, not run.

    Raises:
        CorruptFile: Not such a file, damaged, or from a newer version.
    """
    with open(path, "rb") as file:
        return read_content(file, os.fspath(path))


def read_content(file: BinaryIO, name: str) -> dict[str, Any]:
    """As `read_file`, from an open file."""
    try:
        sealed = check_archive(file, name)
        content = read_values(Members(file, sealed))
    except CorruptFile as error:
        words = str(error)
        where = "" if words.startswith(f"`{name}`") else f"`{name}` is damaged, or no predictor file: "
        raise CorruptFile(f"{where}{words.rstrip('.')}.") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise CorruptFile(f"`{name}` was not written by `Predictor.save`.")
    version = content.get("version")
    if not isinstance(version, int) or version > VERSION:
        raise CorruptFile(f"`{name}` has format version {version}; this favour reads up to {VERSION}. Upgrade favour.")
    expect_checksum(name, sealed, content.get("checksum") is True, "Save it again: `favour.load(path).save(path)`.")
    return content


def _structure(text: str) -> pytree.TreeSpec:
    """A tree structure from JSON. A defaultdict's would name a function to import, an enumeration's a module."""

    def check(part: Argument) -> None:
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


def _names_enumeration(context: Argument) -> bool:
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


def encode(value: Argument, tensors: dict[str, Tensor]) -> Any:
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


def decode(value: Argument, nodes: dict[str, Node], tensors: dict[str, Tensor]) -> Any:
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
        constant = getattr(torch, content, None)
        if not isinstance(constant, (torch.dtype, torch.layout, torch.memory_format)):
            raise CorruptFile(f"the file names `torch.{content}`, which is no dtype, layout or memory format.")
        return constant
    if kind == "device":
        return torch.device(content)  # which ones may be is decided where the graph is rehearsed
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
                "target": operation_name(node.target) if node.kind == "call" else node.target,
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
        "batched": graph.batched,
    }


def graph_from_json(data: dict[str, Any], tensors: dict[str, Tensor], constants: dict[str, Tensor]) -> Graph:
    """Read a graph back.

    Raises:
        CorruptFile: It names unknown nodes, operations or kinds.
    """
    table: dict[str, Node] = {}
    try:
        for item in data["nodes"]:
            shape = item["shape"]
            texts = (item["name"], item["kind"], item["target"], item["module"], item["where"])
            if not all(isinstance(text, str) for text in texts) or item["name"] in table:
                raise CorruptFile(
                    f"the file has a node {str(item['name'])[:80]!r} that is described wrongly, or twice."
                )
            if shape is not None and not all(type(size) in (int, str) for size in shape):
                raise CorruptFile(f"the file gives `{item['name']}` the shape {str(shape)[:80]}.")
            node = Node(
                item["name"],
                item["kind"],
                operation(item["target"]) if item["kind"] == "call" else item["target"],
                tuple(decode(item["args"], table, tensors)),
                without_memory_format(item["target"], decode(item["kwargs"], table, tensors)),
                None if shape is None else tuple(shape),
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
            data.get("batched", True) is True,
        )
    except CorruptFile:
        raise
    except Exception as error:
        raise CorruptFile(f"the graph in the file is incomplete: {type(error).__name__}: {error}") from error
