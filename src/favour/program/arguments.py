"""The arguments of a call, as the leaves that the captured graph takes, or a message that says what does not fit.

Numpy arrays become tensors of the dtype the model was captured with (numpy's own is float64 and most models' float32),
and answers carry no gradient: who gives an array wants numbers back, and `np.asarray(belief.mean)` then works. Tensors
are left as they are, and refused where they do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.errors import InvalidType
from favour.graph.dynamic import key_name
from favour.graph.example import as_tensors, plain
from favour.graph.node import Graph, Node
from favour.graph.tracing import traced

F = TypeVar("F", bound=Callable[..., Any])
_SHOWN = 5  # differences in one message


def leaves_of(graph: Graph, keywords: Sequence[str], args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of a call, in the order of the graph's inputs.

    Args:
        graph: Captured.
        keywords: Names of its keyword arguments, in the example's order.
        args, kwargs: Of the call. Arrays and lists of numbers become tensors, of the dtype that the model takes; one
            mapping is taken for keyword arguments, where the example was one.

    Raises:
        InvalidType: The call has other arguments than the example.
    """
    first = args[0] if len(args) == 1 else None
    if isinstance(first, Mapping) and not kwargs and keywords and not _positional(graph):
        args, kwargs = (), dict(first)
    if not traced():
        reals = (n.dtype for n in graph.inputs if n is not None and n.dtype is not None and n.dtype.is_floating_point)
        dtype = next(reals, None)
        args = tuple(as_tensors(value, dtype) for value in args)
        kwargs = {name: as_tensors(value, dtype) for name, value in kwargs.items()}
    ordered = {k: kwargs[k] for k in keywords if k in kwargs} | dict(kwargs)
    leaves, spec = pytree.tree_flatten((args, ordered), is_leaf=lambda t: isinstance(t, Belief))
    if not traced() and spec != graph.in_spec:
        raise InvalidType(_mismatch(graph, args, ordered))
    return [_fitted(graph, node, leaf) for node, leaf in zip(graph.inputs, leaves, strict=True)]


def _positional(graph: Graph) -> int:
    return len(pytree.tree_unflatten([None] * graph.in_spec.num_leaves, graph.in_spec)[0])


def _fitted(graph: Graph, node: Node | None, leaf: Any) -> Any:
    """A leaf as the graph has it: one event alone gets the axis of a batch in front."""
    if graph.batched or node is None or node.shape is None or not isinstance(leaf, Tensor):
        return leaf
    unbatched = len(node.shape) > 0 and isinstance(node.shape[0], str) and leaf.ndim == len(node.shape) - 1
    return leaf.unsqueeze(0) if unbatched else leaf


def _mismatch(graph: Graph, args: tuple, kwargs: Mapping[str, Any]) -> str:
    """What differs between a call and the example, argument by argument."""
    named = {id(n): n for n in graph.inputs}
    example = pytree.tree_unflatten(list(zip(graph.inputs, graph.fixed, strict=True)), graph.in_spec)
    wanted = _paths(example, lambda t: isinstance(t, tuple) and len(t) == 2 and (t[0] is None or id(t[0]) in named))
    passed = _paths((args, kwargs), lambda t: isinstance(t, Belief))
    lines = []
    for path in dict.fromkeys((*wanted, *passed)):
        if path in wanted and path in passed:
            continue
        if path in wanted:
            lines.append(f"{_name(path)} is missing; in the example it was {_described(*wanted[path])}")
        elif not any(w[: len(path)] == path or path[: len(w)] == w for w in wanted):
            lines.append(f"{_name(path)} was not in the example; it is {_kind(passed[path])}")
        else:
            lines.append(f"{_name(path)} is {_kind(passed[path])}, where the example had something else")
    shown = "".join(f"\n  - {line}" for line in lines[:_SHOWN])
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    if not lines:
        shown = "\n  - a container is of another kind than in the example (a list for a tuple, or other keys)"
    return (
        f"the arguments are not those of the example the predictor was compiled with:{shown}{more}\n"
        "call it the way the example was given."
    )


def _paths(structure: Any, leaf: Any) -> dict[tuple[str, ...], Any]:
    leaves = pytree.tree_flatten_with_path(structure, is_leaf=leaf)[0]
    return {tuple(key_name(k) for k in path): value for path, value in leaves}


def _name(path: tuple[str, ...]) -> str:
    """How the user writes an argument: the first step says whether it is one by position."""
    kind, *rest = path
    if not rest:
        return "the call"
    first = f"positional argument {int(rest[0]) + 1}" if kind == "0" else f"`{rest[0]}`"
    return first + (f" at `{'.'.join(rest[1:])}`" if rest[1:] else "")


def _described(node: Node | None, fixed: Any) -> str:
    if node is None or node.shape is None:
        return repr(fixed)
    sizes = ", ".join("batch" if i == 0 and isinstance(s, str) else str(s) for i, s in enumerate(node.shape))
    return f"a tensor of shape ({sizes})"


def _kind(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return repr(value) if isinstance(value, (int, float, str, bool, type(None))) else f"a {type(value).__name__}"


def accepts_arrays(method: F) -> F:
    """A method of a predictor that takes the model's arguments takes numpy arrays among them."""

    @wraps(method)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        if traced() or not _has_arrays(args, kwargs):
            return method(self, *args, **kwargs)
        args, kwargs = pytree.tree_map(lambda leaf: _tensor(self, leaf), (args, kwargs))
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return cast(F, wrapped)


def _has_arrays(args: tuple, kwargs: dict[str, Any]) -> bool:
    return not plain(args, kwargs) and any(isinstance(x, np.ndarray) for x in pytree.tree_leaves((args, kwargs)))


def _tensor(predict: Any, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    tensor = torch.tensor(leaf, device=predict.device)
    known = [n.dtype for n in predict.graph.inputs if n is not None and n.dtype is not None]
    alike = [d for d in known if d.is_floating_point == tensor.dtype.is_floating_point and d is not torch.bool]
    return tensor.to(alike[0]) if alike and tensor.dtype is not torch.bool else tensor
