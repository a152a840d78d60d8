"""Capture of the user's model as a small graph of aten operations.

`capture` runs `torch.export` on a *structural copy* of the model: new module objects that share the
user's tensors, so that training flags can be set without touching the original. In the copy dropout is
live and norms with running statistics are frozen, which keeps attention dropout and stochastic depth
visible. The exported graph is not decomposed: one aten overload per operation is one key of the rule
registry. The batch dimension stays symbolic.

What comes out is a `Graph`: nodes in topological order, each with the module path and the source line it
came from. It is plain data, so a predictor can be written to a file without pickling code.
"""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import CaptureError, InvalidType, InvalidValue, UnsupportedOperation
from favour.inplace import functionalise
from favour.nn import dropout as _favour_dropout  # noqa: F401  (registers favour::dropout)

aten = torch.ops.aten


@dataclass(eq=False)
class Node:
    """One value of the graph: an input, a parameter or the result of an operation.

    Attributes:
        name: Unique name.
        kind: `"input"`, `"parameter"`, `"buffer"`, `"constant"` or `"call"`.
        target: For a call, the aten overload (or a Python operator on sizes); otherwise the qualified name.
        args, kwargs: Arguments of a call; other nodes appear as `Node`.
        shape: Sizes, symbolic ones as strings; None where the value is not a tensor.
        dtype: Of a tensor value, else None.
        module: Path of the module whose `forward` made the call.
        where: `file.py:line` in the user's code.
    """

    name: str
    kind: str
    target: Any
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: tuple[int | str, ...] | None = None
    dtype: torch.dtype | None = None
    module: str = ""
    where: str = ""

    def __repr__(self) -> str:
        return f"%{self.name}"

    @property
    def place(self) -> str:
        """Where this came from, for messages: module path and source line."""
        path = f"`{self.module}`" if self.module else "the model's own forward"
        return f"{path} ({self.where})" if self.where else path

    @property
    def inputs(self) -> list[Node]:
        """The nodes among the arguments, with repetitions, in order."""
        return list(nodes_in((self.args, self.kwargs)))


def nodes_in(structure: Any) -> Iterator[Node]:
    """Every `Node` in nested lists, tuples and dicts."""
    if isinstance(structure, Node):
        yield structure
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            yield from nodes_in(item)
    elif isinstance(structure, dict):
        for item in structure.values():
            yield from nodes_in(item)


def replace_nodes(structure: Any, function: Callable[[Node], Any]) -> Any:
    """Copy nested lists, tuples and dicts with every `Node` replaced by `function(node)`."""
    if isinstance(structure, Node):
        return function(structure)
    if isinstance(structure, (list, tuple)):
        return type(structure)(replace_nodes(item, function) for item in structure)
    if isinstance(structure, dict):
        return {key: replace_nodes(item, function) for key, item in structure.items()}
    return structure


@dataclass(eq=False)
class Graph:
    """A captured model.

    Attributes:
        nodes: Every node in topological order.
        inputs: Input nodes, in the order of the flattened call arguments; None for a leaf that is not used
            as a tensor (a flag, say), whose value was fixed at capture.
        outputs: One entry per flattened output; a `Node` or a constant.
        in_spec, out_spec: Tree structures of `(args, kwargs)` and of the result.
        fixed: The example's value of each input leaf that is not a tensor.
        constants: Tensors that export lifted out of the code, by node name.
        aliases: Qualified name to the one name used here, for parameters tied under several names.
    """

    nodes: list[Node]
    inputs: list[Node | None]
    outputs: list[Any]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    fixed: list[Any]
    constants: dict[str, Tensor]
    aliases: dict[str, str]

    def users(self) -> dict[Node, list[Node]]:
        """For each node, the nodes that read it."""
        table: dict[Node, list[Node]] = {node: [] for node in self.nodes}
        for node in self.nodes:
            for source in dict.fromkeys(node.inputs):
                table[source].append(node)
        return table

    def prune(self) -> None:
        """Drop calls that no output depends on."""
        alive = set(nodes_in(self.outputs))
        kept = []
        for node in reversed(self.nodes):
            if node in alive or node.kind != "call":
                alive.update(node.inputs)
                kept.append(node)
        self.nodes = kept[::-1]

    @property
    def dropout_modules(self) -> list[str]:
        """Paths of the modules in which dropout happens."""
        return list(dict.fromkeys(n.module for n in self.nodes if n.kind == "call" and n.target in DROPOUTS))


DROPOUTS = {
    aten.dropout.default,
    aten.feature_dropout.default,
    aten.alpha_dropout.default,
    aten.feature_alpha_dropout.default,
    torch.ops.favour.dropout.default,
}


def split_example(example: Any) -> tuple[tuple, dict[str, Any]]:
    """The example as positional and keyword arguments."""
    if isinstance(example, dict):
        return (), dict(example)
    if isinstance(example, tuple):
        return example, {}
    if isinstance(example, Tensor):
        return (example,), {}
    raise InvalidType(
        f"`example` is a {type(example).__name__}; give a tensor, a tuple of positional arguments "
        "or a dict of keyword arguments."
    )


def _copy_structure(model: nn.Module) -> nn.Module:
    """Copy the module objects, share every tensor."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for value in module.__dict__.values():
            for leaf in value.values() if isinstance(value, dict) else (value,):
                if isinstance(leaf, Tensor):
                    memo[id(leaf)] = leaf
    return copy.deepcopy(model, memo)


def _set_capture_flags(model: nn.Module) -> None:
    for module in model.modules():
        # Norms that keep running statistics are deterministic functions at prediction time.
        frozen = hasattr(module, "running_mean") or hasattr(module, "track_running_stats")
        module.training = not frozen
        if hasattr(module, "favour_posterior"):
            module.sampling = False  # type: ignore[assignment]
        if hasattr(module, "capturing"):
            module.capturing = True  # type: ignore[assignment]


def _widen(leaf: Any, batch: int | None) -> Any:
    """Repeat a batch of fewer than two rows: export would take a size of 0 or 1 for a constant."""
    if isinstance(leaf, Tensor) and leaf.ndim and batch is not None and leaf.shape[0] == batch and batch < 2:
        return leaf.new_zeros((2, *leaf.shape[1:])) if batch == 0 else leaf.repeat(2, *[1] * (leaf.ndim - 1))
    return leaf


def capture(model: nn.Module, example: Any, *, dynamic: Any = None) -> Graph:
    """Capture `model` with `torch.export`.

    Args:
        model: Any module that `torch.export` can take. It is not modified.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        dynamic: For each tensor leaf of the example (in order) a set of further dimensions that may change.

    Raises:
        CaptureError: The model cannot be exported; says which line and what to do.
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"`model` is a {type(model).__name__}; favour.compile takes a torch.nn.Module.")
    args, kwargs = split_example(example)
    leaves, in_spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim]
    if not tensors:
        raise InvalidValue("`example` holds no tensor with a batch dimension; give at least one.")
    batch = tensors[0].shape[0]
    leaves = [_widen(leaf, batch) for leaf in leaves]
    args, kwargs = pytree.tree_unflatten(leaves, in_spec)

    dim = torch.export.Dim.DYNAMIC
    wide = tensors[0].shape[0] if batch >= 2 else 2
    extra = list(dynamic) if dynamic is not None else []
    shapes = []
    for i, leaf in enumerate(leaves):
        if not isinstance(leaf, Tensor):
            shapes.append(None)
            continue
        spec = {0: dim} if leaf.ndim and leaf.shape[0] == wide else {}
        spec |= {d: dim for d in (extra[i] if i < len(extra) and extra[i] else ())}
        shapes.append(spec)
    arg_shapes, kwarg_shapes = pytree.tree_unflatten(shapes, in_spec)

    clone = _copy_structure(model)
    _set_capture_flags(clone)
    positional = {f"*{i}": s for i, s in enumerate(arg_shapes)}
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                clone,
                args,
                kwargs,
                dynamic_shapes=(tuple(positional.values()), kwarg_shapes) if kwargs else tuple(arg_shapes),
                strict=False,
            )
    except Exception as error:
        raise CaptureError(_explain(error)) from error
    graph = _from_exported(exported, leaves, in_spec)
    functionalise(graph)
    _freeze_norms(graph)
    graph.prune()
    return graph


def _explain(error: Exception) -> str:
    """What torch.export said, the user's line it happened on, and what can be done."""
    text = str(error).strip()
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if not re.search(r"[/\\](torch|favour)[/\\]", name) and not name.startswith("<"):
            frames.append(f"{name}:{traceback.tb_lineno} in {traceback.tb_frame.f_code.co_name}")
        traceback = traceback.tb_next
    quoted = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    frames += [f"{f}:{line} in {n}" for f, line, n in quoted if not re.search(r"[/\\]torch[/\\]", f)]
    where = frames[-1] if frames else "an unknown line"
    first = next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    hint = (
        "The prediction has to be one fixed sequence of tensor operations. Replace branches on tensor values "
        "by `torch.where`, sizes read with `.item()` by shapes, and calls into other libraries by torch "
        "operations; keep the batch size out of literals (`x.flatten(1)` instead of `x.view(32, -1)`)."
    )
    return f"torch.export could not capture the model at {where}: {type(error).__name__}: {first}\n{hint}"


def _describe(value: Any) -> tuple[tuple[int | str, ...] | None, torch.dtype | None]:
    if isinstance(value, Tensor):
        return tuple(s if isinstance(s, int) else str(s) for s in value.shape), value.dtype
    return None, None


def _module_path(meta: Mapping[str, Any]) -> str:
    stack = meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if "_empty_nn_module_stack" not in str(path)]
    return re.sub(r"@\d+$", "", str(paths[-1])) if paths else ""


def _source_line(meta: Mapping[str, Any]) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', meta.get("stack_trace") or "")
    own = [(f, line) for f, line in found if not re.search(r"(^|[/\\])torch[/\\]", f)]
    return f"{own[-1][0]}:{own[-1][1]}" if own else ""


def _from_exported(exported: Any, leaves: list[Any], in_spec: pytree.TreeSpec) -> Graph:
    """Turn an ExportedProgram into a `Graph`, parameters by their (canonical) names."""
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

    def convert(value: Any) -> Any:
        if isinstance(value, torch.fx.Node):
            return table[value]
        if isinstance(value, (list, tuple)):
            return type(value)(convert(v) for v in value) if type(value) in (list, tuple) else [convert(v) for v in value]
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
        else:
            raise CaptureError(
                f"torch.export produced a `{fx_node.op}` node ({fx_node.target}); favour reads plain call graphs "
                "only. Control-flow operators (torch.cond, scan, while_loop) have no rule."
            )
        table[fx_node] = node
        nodes.append(node)

    user = iter(inputs)
    if len(inputs) == len(leaves):
        ordered: list[Node | None] = [next(user) for _ in leaves]
    else:
        ordered = [next(user) if isinstance(leaf, Tensor) else None for leaf in leaves]
    fixed = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return Graph(nodes, ordered, outputs, in_spec, exported.call_spec.out_spec, fixed, constants, aliases)


def _freeze_norms(graph: Graph) -> None:
    """What follows the training flag but is no posterior: norms use running statistics, RReLU its mean slope."""
    for node in graph.nodes:
        if node.kind == "call" and node.target is aten.rrelu.default:
            node.args = (*node.args[:3], False)
        if node.kind == "call" and node.target is aten.batch_norm.default and node.args[5]:
            if node.args[3] is None:
                raise UnsupportedOperation(
                    f"batch_norm at {node.place} has no running statistics: its output depends on the whole "
                    "batch. Use `track_running_stats=True` and train before compiling."
                )
            node.args = (*node.args[:5], False, *node.args[6:])
        if node.kind == "call" and node.target is aten.instance_norm.default and node.args[3] is not None:
            node.args = (*node.args[:5], False, *node.args[6:])
