"""Whether a model treats the inputs of a batch apart: an input alone gives what it gives beside another.

The model is run as it is for prediction, on a structural copy that shares its tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

_SAME = 1e-3  # relative to the largest entry


def mixes_inputs(model: nn.Module, args: tuple, kwargs: Mapping[str, Any], batch: int) -> bool:
    """Whether the model's output for an input depends on what else is in the batch.

    False also where the model cannot tell: it fails on one input, or draws numbers in evaluation mode.

    Args:
        model: A copy of its own, which is put into evaluation mode.
        args, kwargs: An example of at least one input.
        batch: How many inputs it holds.
    """
    model.eval()

    def rows(two: bool) -> Callable[[Any], Any]:
        def some(t: Any) -> Any:
            if not isinstance(t, Tensor) or not t.ndim or t.shape[0] != batch:
                return t
            first = t[:1].nan_to_num(0, 0, 0) if t.is_floating_point() else t[:1]
            return torch.cat([first, _another(first)]) if two else first

        return some

    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            runs = [
                pytree.tree_leaves(model(*_over(rows(two), args), **_over(rows(two), dict(kwargs))))
                for two in (False, False, True)
            ]
        except Exception:  # the model's own code, which may fail in any way
            return False
    alone, again, beside = runs
    if len(alone) != len(beside) or not all(_within(a, b) for a, b in zip(alone, again, strict=True)):
        return False
    return not all(_within(a, b) for a, b in zip(alone, beside, strict=True))


def _over(function: Callable[[Any], Any], structure: Any) -> Any:
    return pytree.tree_map(function, structure)


def _another(t: Tensor) -> Tensor:
    """Another input: other numbers; where they are whole the same ones in another order, which are as valid."""
    if not t.is_floating_point():
        return t.flip(-1) if t.ndim > 1 else t
    generator = torch.Generator().manual_seed(0)
    return t + (1 + t.abs().mean()) * torch.randn(t.shape, generator=generator).to(t)


def _within(alone: Any, beside: Any) -> bool:
    """Whether an output for one input is found in the output for two, in its place along some axis."""
    if not isinstance(alone, Tensor) or not isinstance(beside, Tensor) or not alone.is_floating_point():
        return True
    if alone.shape == beside.shape:
        return _close(alone, beside)
    if alone.ndim != beside.ndim:
        return False
    axes = [d for d in range(alone.ndim) if alone.shape[d] != beside.shape[d]]
    if len(axes) != 1 or beside.shape[axes[0]] != 2 * alone.shape[axes[0]]:
        return False
    count = alone.shape[axes[0]]
    places = torch.arange(count, device=beside.device)
    return any(_close(alone, beside.index_select(axes[0], p)) for p in (places, 2 * places))


def _close(a: Tensor, b: Tensor) -> bool:
    a, b = a.nan_to_num(0, 0, 0), b.nan_to_num(0, 0, 0)
    return not a.numel() or bool((a - b).abs().max() <= _SAME * a.abs().max() + torch.finfo(a.dtype).tiny)
