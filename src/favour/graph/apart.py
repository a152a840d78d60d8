"""Whether inputs are treated apart, and whether a rewritten graph still computes what the captured one does.

Both are tried, on inputs that all differ and with every dropout left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.graph.interpreter import interpret, noiseless
from favour.graph.node import Graph, Node
from favour.graph.traits import Argument

_SAME = 1e-3  # relative to the largest entry


def different(t: Tensor) -> Tensor:
    """The same inputs made different: other numbers; where they are whole the same in another order, as valid."""
    if not len(t):
        return t
    if not t.is_floating_point():
        return torch.stack([row.roll(i, -1) if row.ndim else row for i, row in enumerate(t)])
    t = t.nan_to_num(0, 0, 0)
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).to(t)
    noise[0] = 0
    return t + (1 + t.abs().mean()) * noise


def same_function(one: Graph, other: Graph, batch: str, leaves: list[Any], tensors: Mapping[str, Tensor]) -> bool:
    """Whether two graphs have the same outputs, up to where `one` has the batch, which `other` has in front."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            pairs = list(zip(_outputs(one, leaves, tensors), _outputs(other, leaves, tensors), strict=True))
    except (RuntimeError, IndexError, ValueError):  # an operation of torch's that cannot be done for these sizes
        return False
    in_front = [isinstance(o, Node) and (o.shape or ())[:1] == (batch,) for o in one.outputs]
    return all(_alike(a, b, first) for (a, b), first in zip(pairs, in_front, strict=True))


def _outputs(graph: Graph, leaves: list[Any], tensors: Mapping[str, Tensor]) -> list[Any]:
    values: dict[Node, Any] = {n: leaf for n, leaf in zip(graph.inputs, leaves, strict=True) if n is not None}
    for node in graph.nodes:
        if node.kind in ("parameter", "buffer"):
            values[node] = tensors[str(node.target)]
        elif node.kind == "constant":
            values[node] = graph.constants[str(node.target)]
    interpret(graph.calls, values, noiseless)
    return [values[o] if isinstance(o, Node) else o for o in graph.outputs]


def _alike(a: Argument, b: Argument, in_front: bool) -> bool:
    """Whether two outputs hold the same numbers, the batch of `b` in front and that of `a` too, or anywhere."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return True
    return any(a.shape == b.shape and close(a, b) for a in ([a] if in_front else places(a, b)))


def places(a: Tensor, b: Tensor) -> Iterator[Tensor]:
    """`a` with its batch moved to the front, wherever that gives the shape of `b`, (batch, ...)."""
    if a.shape == b.shape:
        yield a
    if a.numel() != b.numel() or not b.ndim:
        return
    batch = len(b)
    for d, size in enumerate(a.shape):
        if batch and size % batch == 0:
            for parts, at in (((batch, size // batch), d), ((size // batch, batch), d + 1)):
                moved = a.unflatten(d, parts).movedim(at, 0)
                if moved.numel() == b.numel():
                    yield moved.reshape(b.shape)


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape are equal up to rounding."""
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return not a.numel() or bool((a - b).abs().max() <= _SAME * a.abs().max() + torch.finfo(a.dtype).tiny)


def mixes_inputs(model: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether the model's output for an input depends on what else is in the batch.

    False also where the model cannot tell: it fails on one input, or draws numbers in evaluation mode.

    Args:
        model: A copy of its own, which is put into evaluation mode.
        args, kwargs: Two inputs, and what belongs to neither.
    """
    model.eval()

    def outputs(chosen: slice) -> list[Tensor]:
        def few(t: Argument) -> Any:
            return t[chosen] if isinstance(t, Tensor) and t.ndim and len(t) == 2 else t

        some, named = pytree.tree_map(few, (args, dict(kwargs)))
        return [t for t in pytree.tree_leaves(model(*some, **named)) if isinstance(t, Tensor)]

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            first, again = outputs(slice(0, 1)), outputs(slice(0, 1))
            second, both = outputs(slice(1, 2)), outputs(slice(0, 2))  # a recurrence's first step looks at no other
        except Exception:  # the model's own code, which may fail in any way
            return False
    if not len(first) == len(second) == len(both) or not all(map(close, first, again)):
        return False
    return not all(_within(a, c, 0) and _within(b, c, 1) for a, b, c in zip(first, second, both, strict=True))


def _within(alone: Tensor, beside: Tensor, index: int) -> bool:
    """Whether an output for one input is found in the output for two, in its place along some axis."""
    if not alone.is_floating_point():
        return True
    if alone.shape == beside.shape:
        return close(alone, beside)
    axes = [d for d in range(min(alone.ndim, beside.ndim)) if alone.shape[d] != beside.shape[d]]
    if alone.ndim != beside.ndim or len(axes) != 1 or beside.shape[axes[0]] != 2 * alone.shape[axes[0]]:
        return False
    count = torch.arange(alone.shape[axes[0]], device=beside.device)
    ways = (count + index * len(count), 2 * count + index)  # the inputs outside, or inside
    return any(close(alone, beside.index_select(axes[0], chosen)) for chosen in ways)
