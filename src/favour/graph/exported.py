"""From what `torch.export` returns to a `Graph`: parameters by one name each, calls with their place in the code."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import CaptureError
from favour.graph.node import Graph, Node
from favour.graph.refusals import is_users


def _describe(value: Any) -> tuple[tuple[int | str, ...] | None, torch.dtype | None]:
    if isinstance(value, Tensor):
        # A size that the code turned out to fix prints as a number.
        sizes: list[Any] = [s if isinstance(s, int) else str(s) for s in value.shape]
        return tuple(int(s) if str(s).isdecimal() else s for s in sizes), value.dtype
    return None, None


def _module_path(meta: Mapping[str, Any]) -> str:
    stack = meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if "_empty_nn_module_stack" not in str(path)]
    return re.sub(r"@\d+$", "", str(paths[-1])) if paths else ""


def _source_line(meta: Mapping[str, Any]) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', meta.get("stack_trace") or "")
    own = [(f, line) for f, line in found if is_users(f)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def _storages(value: Any) -> set[int]:
    """Which memory the tensors of a result occupy."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


def from_exported(exported: Any, leaves: list[Any], in_spec: pytree.TreeSpec) -> tuple[Graph, dict[Node, Node]]:
    """Turn an ExportedProgram into a `Graph`, parameters by one name each; and say what is a view of what."""
    kinds = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}
    specs = {spec.arg.name: spec for spec in exported.graph_signature.input_specs if hasattr(spec.arg, "name")}
    canonical: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in exported.state_dict.items():
        aliases[name] = canonical.setdefault(id(tensor), name)

    table: dict[Any, Node] = {}
    by_name: dict[str, Node] = {}
    nodes: list[Node] = []
    inputs: list[Node] = []
    constants: dict[str, Tensor] = {}
    outputs: list[Any] = []
    views: dict[Node, Node] = {}

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return table[value]
        if isinstance(value, (list, tuple)):
            return (
                type(value)(convert(v) for v in value) if type(value) in (list, tuple) else [convert(v) for v in value]
            )
        if isinstance(value, dict):
            return {k: convert(v) for k, v in value.items()}
        return value

    for fx_node in exported.graph.nodes:
        if fx_node.op == "output":
            outputs = list(convert(fx_node.args[0]))
            continue
        shape, dtype = _describe(fx_node.meta.get("val"))
        if fx_node.op == "placeholder":
            spec = specs[fx_node.name]
            kind = kinds.get(spec.kind.name, "input")
            target = aliases.get(spec.target, spec.target) if kind != "input" else fx_node.name
            if kind != "input" and target in by_name:
                table[fx_node] = by_name[target]
                continue
            node = Node(fx_node.name, kind, target, shape=shape, dtype=dtype)
            if kind == "input":
                inputs.append(node)
            else:
                by_name[str(target)] = node
            if kind == "constant":
                constants[str(target)] = exported.constants[spec.target]
        elif fx_node.op == "call_function":
            node = Node(
                fx_node.name,
                "call",
                fx_node.target,
                convert(fx_node.args),
                convert(fx_node.kwargs),
                shape,
                dtype,
                _module_path(fx_node.meta),
                _source_line(fx_node.meta),
            )
            memory = _storages(fx_node.meta.get("val"))
            for source in fx_node.all_input_nodes:
                if memory & _storages(source.meta.get("val")):
                    views.setdefault(node, table[source])
        else:
            raise CaptureError(
                f"torch.export produced a `{fx_node.op}` node ({fx_node.target}); favour reads plain "
                "calls only. Control-flow operators (torch.cond, scan, while_loop) have no rule."
            )
        table[fx_node] = node
        nodes.append(node)

    user = iter(inputs)
    if len(inputs) == len(leaves):
        ordered: list[Node | None] = [next(user) for _ in leaves]
    else:
        ordered = [next(user) if isinstance(leaf, Tensor) else None for leaf in leaves]
    fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    graph = Graph(nodes, ordered, outputs, in_spec, exported.call_spec.out_spec, fixed, constants, aliases)
    return graph, views
