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

from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import CaptureError, FavourError, InvalidType, InvalidValue, UnsupportedOperation
from favour.graph.apart import mixes_inputs, same_function
from favour.graph.dynamic import Dynamic
from favour.graph.example import split_example
from favour.graph.node import Graph, Node
from favour.graph.refusals import named
from favour.graph.silent import warn_of_functions
from favour.graph.taking import Taking, copied_structure
from favour.passes.normalise import lifted, lifted_layers, lifted_products  # noqa: F401  they register
from favour.passes.normalise.lifting import depends_on_draws, lift, meetings, out_of_place
from favour.passes.normalise.one_input import of_one_input
from favour.passes.pipeline import normalise


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
    taking = Taking(model, leaves, in_spec, tensors[0].shape[0], dynamic)
    graph = _of_batches(taking) if batched else _of_one_event(taking)
    warn_of_functions(model, graph)
    return graph


def _of_batches(taking: Taking) -> Graph:
    try:
        graph = _normalised(*taking.export(max(taking.batch, 2)))
    except (CaptureError, UnsupportedOperation) as error:
        if (one := _of_one_input(taking, error)) is None:
            raise
        return one
    symbol = next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)
    displaced = out_of_place(graph, symbol) if isinstance(symbol, str) else []
    if not isinstance(symbol, str) or not displaced:
        return graph
    single, made = of_one_input(graph, symbol)
    batch_inputs = [made[n] for n in graph.inputs if n is not None and n.shape and n.shape[0] == symbol]
    uncertain = any(node in depends_on_draws(graph) for node in displaced)
    try:
        mapped = lift(single, batch_inputs, symbol, batched=True)
    except UnsupportedOperation:
        if uncertain:
            raise
        return graph
    if same_function(graph, mapped, symbol, *taking.tensors(3)):
        return mapped
    if uncertain:
        raise UnsupportedOperation(_MIXED.format(named(meetings(graph, symbol))))
    return graph


_MIXED = (
    "the model's output for one input depends on the other inputs of the batch: it mixes rows of dimension 0{}\n"
    "Predictions are per input: write the model so that a row of its result depends on the same row of its input only, "
    "or take all of a call for one event with `favour.compile(..., batched=False)`."
)


def _normalised(graph: Graph, views: dict[Node, Node]) -> Graph:
    normalise(graph, views)
    return graph


def _of_one_input(taking: Taking, error: FavourError) -> Graph | None:
    """The model captured with one input, whose code then sees no symbolic batch at all, and mapped over the batch.

    None where it cannot be captured so either. `error` is why it could not be captured with many.
    """
    try:
        graph = _normalised(*taking.export(1))
    except FavourError:
        return None
    batch_inputs = [
        n for n, leaf in zip(graph.inputs, taking.leaves, strict=True) if n is not None and taking.has_batch(leaf)
    ]
    clone = copied_structure(taking.model)
    for module in clone.modules():
        if hasattr(module, "favour_posterior"):
            module.sampling = False  # type: ignore[assignment]
    args, kwargs = pytree.tree_unflatten(taking.tensors(2)[0], taking.in_spec)
    if mixes_inputs(clone, args, kwargs):
        raise error if isinstance(error, UnsupportedOperation) else UnsupportedOperation(_MIXED.format(""))
    return lift(graph, batch_inputs, _unused(graph), batched=True)


def _of_one_event(taking: Taking) -> Graph:
    """The model captured with the example as it is, all of it one event."""
    graph = _normalised(*taking.export(None))
    tensors = [n for n in graph.inputs if n is not None and n.shape is not None]
    # Whole numbers say how the event is made up (edges, indices), and are shared by all events; where there is nothing
    # else, they are the event.
    event_inputs = [n for n in tensors if n.dtype is not None and n.dtype.is_floating_point] or tensors[:1]
    return lift(graph, event_inputs, _unused(graph), batched=False)


def _unused(graph: Graph) -> str:
    """A symbol for the batch where torch.export gave none."""
    taken = {str(s) for n in graph.inputs if n is not None for s in n.shape or ()}
    return next(f"s{i}" for i in range(len(taken) + 1) if f"s{i}" not in taken)
