"""From what `torch.export` returns to a `Graph`: parameters by one name each, calls with their place in the code."""

from __future__ import annotations

import operator
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
from favour.graph.traits import Argument


def _describe(value: Argument) -> tuple[tuple[int | str, ...] | None, torch.dtype | None]:
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
    frames = re.findall(r'File "([^"]+)", line (\d+)', meta.get("stack_trace") or "")
    user_frames = [(f, line) for f, line in frames if is_users(f)]
    return f"{os.path.basename(user_frames[-1][0])}:{user_frames[-1][1]}" if user_frames else ""


def _storages(value: Argument) -> set[int]:
    """Which memory the tensors of a result occupy."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


def from_exported(exported: Any, leaves: list[Any], in_spec: pytree.TreeSpec) -> tuple[Graph, dict[Node, Node]]:
    """Turn an ExportedProgram into a `Graph`, parameters by one name each; and say what is a view of what."""
    reading = _Reading(exported)
    outputs = reading.read(exported.graph_module, {})
    inputs = reading.inputs
    user = iter(inputs)
    if len(inputs) == len(leaves):
        ordered: list[Node | None] = [next(user) for _ in leaves]
    else:
        ordered = [next(user) if isinstance(leaf, Tensor) else None for leaf in leaves]
    fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    out_spec = exported.call_spec.out_spec
    graph = Graph(reading.nodes, ordered, outputs, in_spec, out_spec, fixed, reading.constants, reading.aliases)
    return graph, reading.views


_KINDS = {"PARAMETER": "parameter", "BUFFER": "buffer", "CONSTANT_TENSOR": "constant"}


class _Reading:
    """Nodes of a program, those of the blocks inside it (`torch.no_grad`, autocast that is off) among them."""

    def __init__(self, exported: Any) -> None:
        signature = exported.graph_signature.input_specs
        self.exported = exported
        self.specs = {spec.arg.name: spec for spec in signature if hasattr(spec.arg, "name")}
        canonical: dict[int, str] = {}
        self.aliases: dict[str, str] = {}
        for name, tensor in exported.state_dict.items():
            self.aliases[name] = canonical.setdefault(id(tensor), name)
        self.by_name: dict[str, Node] = {}
        self.nodes: list[Node] = []
        self.names: set[str] = set()
        self.inputs: list[Node] = []
        self.constants: dict[str, Tensor] = {}
        self.views: dict[Node, Node] = {}

    def read(self, module: Any, table: dict[Any, Any]) -> list[Any]:
        """Take over the nodes of a module and return its outputs; `table` has what its placeholders stand for."""
        outputs: list[Any] = []
        for fx_node in module.graph.nodes:
            if fx_node.op == "output":
                outputs = list(_converted(fx_node.args[0], table))
            elif fx_node.op == "placeholder" and fx_node not in table:
                table[fx_node] = self._given(fx_node)
            elif fx_node.op == "get_attr":
                table[fx_node] = getattr(module, fx_node.target)
            elif fx_node.op == "call_function":
                table[fx_node] = self._call(fx_node, table)
        return outputs

    def _given(self, fx_node: Any) -> Node:
        spec = self.specs[fx_node.name]
        kind = _KINDS.get(spec.kind.name, "input")
        target = self.aliases.get(spec.target, spec.target) if kind != "input" else fx_node.name
        if kind != "input" and target in self.by_name:
            return self.by_name[target]
        shape, dtype = _describe(fx_node.meta.get("val"))
        node = self._added(Node(fx_node.name, kind, target, shape=shape, dtype=dtype))
        if kind == "input":
            self.inputs.append(node)
        else:
            self.by_name[str(target)] = node
        if kind == "constant":
            self.constants[str(target)] = self.exported.constants[spec.target]
        return node

    def _added(self, node: Node) -> Node:
        name, count = node.name, 0
        while node.name in self.names:  # blocks have names of their own
            count += 1
            node.name = f"{name}_b{count}"
        self.names.add(node.name)
        self.nodes.append(node)
        return node

    def _call(self, fx_node: Any, table: dict[Any, Any]) -> Any:
        args, kwargs = _converted(fx_node.args, table), _converted(fx_node.kwargs, table)
        block = next((a for a in args if isinstance(a, torch.fx.GraphModule)), None)
        if block is not None:
            return self._block(fx_node, block, args)
        if fx_node.target is operator.getitem and isinstance(args[0], list):  # of what a block returns
            return args[0][args[1]]
        shape, dtype = _describe(fx_node.meta.get("val"))
        place = _module_path(fx_node.meta), _source_line(fx_node.meta)
        node = self._added(Node(fx_node.name, "call", fx_node.target, args, kwargs, shape, dtype, *place))
        memory = _storages(fx_node.meta.get("val"))
        for source in fx_node.all_input_nodes:
            if isinstance(table[source], Node) and memory & _storages(source.meta.get("val")):
                self.views.setdefault(node, table[source])
        return node

    def _block(self, fx_node: Any, block: Any, args: tuple) -> list[Any]:
        """What a block returns. Whether gradients are on is no matter here, nor is autocast that is off."""
        name = getattr(fx_node.target, "__name__", str(fx_node.target))
        where = f"at `{_module_path(fx_node.meta) or 'the model'}` ({_source_line(fx_node.meta)})"
        if name not in ("wrap_with_set_grad_enabled", "wrap_with_autocast"):
            raise CaptureError(
                f"the model uses `{name}` {where}: control flow (torch.cond, scan, while_loop) has no rule. Write it "
                "as `torch.where`, or as a loop of Python's."
            )
        if name == "wrap_with_autocast" and _computes_in_low_precision(block):
            raise CaptureError(
                f"an autocast block {where} computes in lower precision inside the model. Leave it out while "
                'predicting (`enabled=False`), and ask for `precision="bf16"` of the sweeps instead.'
            )
        operands = args[args.index(block) + 1 :]
        holders = [n for n in block.graph.nodes if n.op == "placeholder"]
        return self.read(block, dict(zip(holders, operands, strict=True)))


def _computes_in_low_precision(block: Any) -> bool:
    low = (torch.bfloat16, torch.float16)
    vals = [n.meta.get("val") for n in block.graph.nodes]
    inputs = [n.meta.get("val") for n in block.graph.nodes if n.op == "placeholder"]
    has = [any(isinstance(t, Tensor) and t.dtype in low for t in pytree.tree_leaves(v)) for v in (vals, inputs)]
    return has[0] and not has[1]


def _converted(value: Argument, table: dict[Any, Any]) -> Any:
    if isinstance(value, torch.fx.Node):
        return table[value]
    if isinstance(value, (list, tuple)):
        items = [_converted(v, table) for v in value]
        return tuple(items) if type(value) is tuple else items
    if isinstance(value, dict):
        return {k: _converted(v, table) for k, v in value.items()}
    return value
