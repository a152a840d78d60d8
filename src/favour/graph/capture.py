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
import inspect
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import CaptureError, FavourError, InvalidType, InvalidValue, UnsupportedOperation
from favour.graph.dynamic import Dynamic, free_sizes, input_names
from favour.graph.node import Graph, Node, draws_numbers, nodes_in, replace_nodes
from favour.graph.silent import quiet, warn_of_functions
from favour.graph.tracing import TRACING
from favour.passes.normalise.decompose import decompose
from favour.passes.normalise.inplace import functionalise
from favour.passes.normalise.multihead import put_batch_first
from favour.passes.normalise.recurrent import check_recurrent, unroll

__all__ = [
    "Graph",
    "Node",
    "capture",
    "copied_structure",
    "draws_numbers",
    "nodes_in",
    "replace_nodes",
    "split_example",
]

aten = torch.ops.aten

_TORCH = os.path.dirname(torch.__file__) + os.sep
_FAVOUR = os.path.dirname(os.path.dirname(__file__)) + os.sep


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


def copied_structure(model: nn.Module) -> nn.Module:
    """Copy the module objects, share every tensor."""
    memo: dict[int, Any] = {}
    seen: set[int] = set()
    open_: list[Any] = [model]
    while open_:
        value = open_.pop()
        if isinstance(value, Tensor):
            memo[id(value)] = value
        elif isinstance(value, (nn.Module, dict, list, tuple)) and id(value) not in seen:
            seen.add(id(value))  # modules in lists and dicts too, which torch does not see
            held = vars(value) if isinstance(value, nn.Module) else value
            open_ += held.values() if isinstance(held, dict) else held
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
    quiet(model)


def _widen(leaf: Any, batch: int | None) -> Any:
    """Repeat a batch of fewer than two rows: export would take a size of 0 or 1 for a constant."""
    if isinstance(leaf, Tensor) and leaf.ndim and batch is not None and leaf.shape[0] == batch and batch < 2:
        return leaf.new_zeros((2, *leaf.shape[1:])) if batch == 0 else leaf.repeat(2, *[1] * (leaf.ndim - 1))
    return leaf


def _spell_out_keywords(model: nn.Module, kwargs: Mapping[str, Any]) -> inspect.Signature:
    """The signature of `forward`, with what `**kwargs` would gather by name: torch.export mistakes it otherwise."""
    signature = inspect.signature(model.forward)
    kinds = [p.kind for p in signature.parameters.values()]
    extra = [name for name in kwargs if name not in signature.parameters]
    if inspect.Parameter.VAR_KEYWORD not in kinds or not extra:
        return signature
    forward = model.forward

    def explicit(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    parameters = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    parameters += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in extra]
    explicit.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    model.forward = explicit
    return inspect.signature(model.forward)


def capture(model: nn.Module, example: Any, *, dynamic: Dynamic = None) -> Graph:
    """Capture `model` with `torch.export`.

    Args:
        model: Any module that `torch.export` can take. It is not modified.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        dynamic: Sizes besides the batch that may change; see `favour.graph.dynamic`.

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

    clone = copied_structure(model)
    _set_capture_flags(clone)
    put_batch_first(clone)
    check_recurrent(clone)
    signature = _spell_out_keywords(clone, kwargs)
    try:
        names = input_names(signature, in_spec)
    except TypeError as error:
        raise InvalidType(
            f"`example` holds {len(args)} positional and {len(kwargs)} keyword arguments "
            f"({', '.join(kwargs) or 'none'}), which do not fit the model's "
            f"forward{signature}: {error}."
        ) from error
    wide = max(batch, 2)
    free = free_sizes(dynamic, names, leaves)
    shapes: list[dict[int, Any] | None] = [
        ({0: torch.export.Dim.DYNAMIC} if leaf.ndim and leaf.shape[0] == wide else {}) | extra
        if isinstance(leaf, Tensor)
        else None
        for leaf, extra in zip(leaves, free, strict=True)
    ]
    arg_shapes, kwarg_shapes = pytree.tree_unflatten(shapes, in_spec)
    named_shapes = signature.bind(*arg_shapes, **kwarg_shapes).arguments
    try:
        with TRACING, warnings.catch_warnings(), torch.no_grad(), _plain_einsum():
            warnings.simplefilter("ignore")
            exported = torch.export.export(
                clone,
                args,
                kwargs,
                dynamic_shapes=dict(named_shapes),
                strict=False,
            )
    except FavourError:
        raise
    except Exception as error:
        raise CaptureError(_explain(error, dynamic)) from error
    graph, views = _from_exported(exported, leaves, in_spec)
    functionalise(graph, views)
    warn_of_functions(model, graph)
    _freeze_norms(graph)
    decompose(graph)
    unroll(graph)
    return graph


@contextmanager
def _plain_einsum() -> Iterator[None]:
    """Contract from left to right: opt_einsum, where installed, plans for the example's sizes and so fixes them."""
    before = torch.backends.opt_einsum.enabled
    torch.backends.opt_einsum.enabled = False
    try:
        yield
    finally:
        torch.backends.opt_einsum.enabled = before


def _explain(error: Exception, dynamic: Dynamic = None) -> str:
    """What torch.export said, the user's line it happened on, and what can be done."""
    text = str(error).strip()
    frames = []
    traceback = error.__traceback__
    while traceback is not None:
        name = traceback.tb_frame.f_code.co_filename
        if _users(name):
            frames.append(f"{name}:{traceback.tb_lineno} in {traceback.tb_frame.f_code.co_name}")
        traceback = traceback.tb_next
    quoted = re.findall(r'File "([^"]+)", line (\d+), in (\w+)', text)
    frames += [f"{f}:{line} in {n}" for f, line, n in quoted if _users(f)]
    fixed = [(n, int(d)) for n, d in re.findall(r"L\['(\w+)'\]\S*?\.size\(\)\[(\d+)\]", text) if d != "0"]
    if dynamic is not None and fixed:
        which = ", ".join(f"dimension {d} of `{n}`" for n, d in dict.fromkeys(fixed))
        return (
            f"torch.export cannot let {which} change, as `dynamic={dynamic!r}` asks: the model's code fixes it to the "
            "size in the example (a layer with that many features, a literal size, a branch on it). Leave it out, or "
            f"use `dynamic=True` to free whatever the model lets vary. It said: {text}"
        )
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
        # A size that the code turned out to fix prints as a number.
        sizes: list[Any] = [s if isinstance(s, int) else str(s) for s in value.shape]
        return tuple(int(s) if str(s).isdecimal() else s for s in sizes), value.dtype
    return None, None


def _module_path(meta: Mapping[str, Any]) -> str:
    stack = meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values() if "_empty_nn_module_stack" not in str(path)]
    return re.sub(r"@\d+$", "", str(paths[-1])) if paths else ""


def _users(file: str) -> bool:
    """Whether a source file is the user's: neither torch's, nor favour's, nor generated."""
    return not file.startswith((_TORCH, _FAVOUR, f"torch{os.sep}", "<frozen", "<string>", "<eval_with_key>"))


def _source_line(meta: Mapping[str, Any]) -> str:
    found = re.findall(r'File "([^"]+)", line (\d+)', meta.get("stack_trace") or "")
    own = [(f, line) for f, line in found if _users(f)]
    return f"{os.path.basename(own[-1][0])}:{own[-1][1]}" if own else ""


def _storages(value: Any) -> set[int]:
    """Which memory the tensors of a result occupy."""
    tensors = [t for t in pytree.tree_leaves(value) if isinstance(t, Tensor)]
    return {t.untyped_storage()._cdata for t in tensors}


def _from_exported(exported: Any, leaves: list[Any], in_spec: pytree.TreeSpec) -> tuple[Graph, dict[Node, Node]]:
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


def _freeze_norms(graph: Graph) -> None:
    """What follows the training flag but is no posterior: norms use running statistics, RReLU its mean."""
    for node in graph.nodes:
        if node.kind == "call" and node.target is aten.rrelu.default:
            lower, upper = node.args[1:3]
            node.target, node.args = aten.leaky_relu.default, (node.args[0], (lower + upper) / 2)
        if node.kind == "call" and node.target is aten.batch_norm.default and node.args[5]:
            if node.args[3] is None:
                raise UnsupportedOperation(
                    f"batch_norm at {node.place} has no running statistics: its output depends on the whole "
                    "batch. Use `track_running_stats=True` and train before compiling."
                )
            node.args = (*node.args[:5], False, *node.args[6:])
        if node.kind == "call" and node.target is aten.instance_norm.default and node.args[3] is not None:
            node.args = (*node.args[:5], False, *node.args[6:])
