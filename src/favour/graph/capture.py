"""Capture of the user's model as a small graph of aten operations.

`capture` runs `torch.export` on a *structural copy* of the model: new module objects that share the
user's tensors, so that training flags can be set without touching the original. In the copy dropout is
live and norms with running statistics are frozen, which keeps attention dropout and stochastic depth
visible. The exported graph is not decomposed: one aten overload per operation is one key of the rule
registry. The batch dimension stays symbolic. Where tensors have it elsewhere than in front, or code has
to know it, the model is taken for one input and mapped over the batch (`favour.passes.normalise.lifting`).

What comes out is a `Graph`: nodes in topological order, each with the module path and the source line it
came from. It is plain data, so a predictor can be written to a file without pickling code.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import CaptureError, FavourError, InvalidType, InvalidValue, UnsupportedOperation
from favour.graph.apart import different, mixes_inputs, same_function
from favour.graph.dynamic import Dynamic, free_sizes, input_names
from favour.graph.example import split_example
from favour.graph.exported import from_exported
from favour.graph.node import Graph, Node, draws_numbers, nodes_in, replace_nodes
from favour.graph.refusals import explain, named
from favour.graph.silent import quiet, warn_of_functions
from favour.graph.tracing import TRACING
from favour.passes.normalise.decompose import decompose
from favour.passes.normalise.inplace import functionalise
from favour.passes.normalise.lifting import depends_on_draws, lift, meetings, out_of_place
from favour.passes.normalise.multihead import put_batch_first
from favour.passes.normalise.one_input import of_one_input
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


def capture(model: nn.Module, example: Any, *, dynamic: Dynamic = None, batched: bool = True) -> Graph:
    """Capture `model` with `torch.export`.

    Args:
        model: Any module that `torch.export` can take. It is not modified.
        example: A tensor, a tuple of positional arguments or a dict of keyword arguments.
        dynamic: Sizes besides the batch that may change; see `favour.graph.dynamic`.
        batched: Whether tensors have a batch in front; otherwise all of a call is one event.

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
    taking = _Taking(model, leaves, in_spec, tensors[0].shape[0], dynamic)
    graph = _of_batches(taking) if batched else _of_one_event(taking)
    warn_of_functions(model, graph)
    return graph


def _of_batches(taking: _Taking) -> Graph:
    try:
        graph = _normalised(*taking.export(max(taking.batch, 2)))
    except CaptureError:
        if (one := _of_one_input(taking)) is None:
            raise
        return one
    symbol = next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)
    displaced = out_of_place(graph, symbol) if isinstance(symbol, str) else []
    if not isinstance(symbol, str) or not displaced:
        return graph
    single, made = of_one_input(graph, symbol)
    own = [made[n] for n in graph.inputs if n is not None and n.shape and n.shape[0] == symbol]
    uncertain = any(node in depends_on_draws(graph) for node in displaced)
    try:
        lifted = lift(single, own, symbol, batched=True)
    except UnsupportedOperation:
        if uncertain:
            raise
        return graph
    if same_function(graph, lifted, symbol, *taking.tensors(3)):
        return lifted
    if uncertain:
        raise UnsupportedOperation(_MIXED.format(named(meetings(graph, symbol))))
    return graph


_MIXED = (
    "the model's output for one input depends on the other inputs of the batch: it mixes rows of dimension 0{}\n"
    "Predictions are per input: write the model so that a row of its result depends on the same row of its input only, "
    "or take all of a call for one event with `favour.compile(..., batched=False)`."
)


class _Taking:
    """A model and an example to capture it with."""

    def __init__(
        self, model: nn.Module, leaves: list[Any], in_spec: pytree.TreeSpec, batch: int, dynamic: Dynamic
    ) -> None:
        self.model, self.leaves, self.in_spec, self.batch, self.dynamic = model, leaves, in_spec, batch, dynamic

    def has_batch(self, leaf: Any) -> bool:
        """Whether a leaf of the example has its batch in front."""
        return isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == self.batch

    def rows(self, count: int) -> list[Any]:
        """The example with so many inputs: torch.export would take a symbolic size of 0 or 1 for a constant."""

        def few(t: Tensor) -> Tensor:
            if self.batch == 0:
                return t.new_zeros((count, *t.shape[1:]))
            return t[:count] if self.batch >= count else t.repeat(count, *[1] * (t.ndim - 1))[:count]

        if count == self.batch:
            return self.leaves
        return [few(leaf) if self.has_batch(leaf) else leaf for leaf in self.leaves]

    def tensors(self, rows: int) -> tuple[list[Any], dict[str, Tensor]]:
        """That many inputs, all different, and the model's tensors by name."""
        leaves = [different(leaf) if self.has_batch(given) else leaf for leaf, given in self._pairs(rows)]
        named = self.model.named_parameters(remove_duplicate=False), self.model.named_buffers(remove_duplicate=False)
        return leaves, {name: t for group in named for name, t in group}

    def _pairs(self, rows: int) -> list[tuple[Any, Any]]:
        return list(zip(self.rows(rows), self.leaves, strict=True))

    def export(self, rows: int | None) -> tuple[Graph, dict[Node, Node]]:
        """The graph, and what is a view of what.

        Args:
            rows: Inputs in the example, their number symbolic if it is more than 1; None for the example as it is.
        """
        leaves = self.leaves if rows is None else self.rows(rows)
        args, kwargs = pytree.tree_unflatten(leaves, self.in_spec)
        clone = copied_structure(self.model)
        _set_capture_flags(clone)
        put_batch_first(clone)
        check_recurrent(clone)
        signature = _spell_out_keywords(clone, kwargs)
        try:
            names = input_names(signature, self.in_spec)
        except TypeError as error:
            raise InvalidType(
                f"`example` holds {len(args)} positional and {len(kwargs)} keyword arguments "
                f"({', '.join(kwargs) or 'none'}), which do not fit the model's "
                f"forward{signature}: {error}."
            ) from error
        free = free_sizes(self.dynamic, names, leaves)
        symbolic = rows is not None and rows > 1
        shapes: list[dict[int, Any] | None] = [
            ({0: torch.export.Dim.DYNAMIC} if symbolic and self.has_batch(given) else {}) | extra
            if isinstance(leaf, Tensor)
            else None
            for leaf, given, extra in zip(leaves, self.leaves, free, strict=True)
        ]
        arg_shapes, kwarg_shapes = pytree.tree_unflatten(shapes, self.in_spec)
        named = signature.bind(*arg_shapes, **kwarg_shapes).arguments
        try:
            with TRACING, warnings.catch_warnings(), torch.no_grad(), _plain_einsum():
                warnings.simplefilter("ignore")
                exported = torch.export.export(clone, args, kwargs, dynamic_shapes=dict(named), strict=False)
        except FavourError:
            raise
        except Exception as error:
            raise CaptureError(explain(error, self.dynamic)) from error
        return from_exported(exported, leaves, self.in_spec)


def _normalised(graph: Graph, views: dict[Node, Node]) -> Graph:
    functionalise(graph, views)
    _freeze_norms(graph)
    decompose(graph)
    unroll(graph)
    return graph


def _of_one_input(taking: _Taking) -> Graph | None:
    """The model captured with one input, whose code then sees no symbolic batch at all, and mapped over the batch.

    None where it cannot be.
    """
    try:
        graph = _normalised(*taking.export(1))
    except FavourError:
        return None
    own = [n for n, leaf in zip(graph.inputs, taking.leaves, strict=True) if n is not None and taking.has_batch(leaf)]
    clone = copied_structure(taking.model)
    for module in clone.modules():
        if hasattr(module, "favour_posterior"):
            module.sampling = False  # type: ignore[assignment]
    args, kwargs = pytree.tree_unflatten(taking.tensors(2)[0], taking.in_spec)
    if mixes_inputs(clone, args, kwargs):
        raise UnsupportedOperation(_MIXED.format(""))
    try:
        return lift(graph, own, _unused(graph), batched=True)
    except UnsupportedOperation:
        return None


def _of_one_event(taking: _Taking) -> Graph:
    """The model captured with the example as it is, all of it one event."""
    graph = _normalised(*taking.export(None))
    tensors = [n for n in graph.inputs if n is not None and n.shape is not None]
    # Whole numbers say how the event is made up (edges, indices), and are shared by all events; where there is nothing
    # else, they are the event.
    own = [n for n in tensors if n.dtype is not None and n.dtype.is_floating_point] or tensors[:1]
    return lift(graph, own, _unused(graph), batched=False)


def _unused(graph: Graph) -> str:
    """A symbol for the batch where torch.export gave none."""
    taken = {str(s) for n in graph.inputs if n is not None for s in n.shape or ()}
    return next(f"s{i}" for i in range(len(taken) + 1) if f"s{i}" not in taken)


@contextmanager
def _plain_einsum() -> Iterator[None]:
    """Contract from left to right: opt_einsum, where installed, plans for the example's sizes and so fixes them."""
    before = torch.backends.opt_einsum.enabled
    torch.backends.opt_einsum.enabled = False
    try:
        yield
    finally:
        torch.backends.opt_einsum.enabled = before


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
