"""Numpy arrays as inputs: they become tensors of the dtype the model was captured with, and answers carry no gradient.

numpy's own floating-point dtype is float64 and most models' is float32, so a floating-point array takes the model's;
tensors are left as they are, and refused where they do not fit. Who gives an array wants numbers back: nothing can be
differentiated in it, and `np.asarray(belief.mean)` then works.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np
import torch
from torch.utils import _pytree as pytree

if TYPE_CHECKING:
    from favour.predictor.predictor import Predictor

F = TypeVar("F", bound=Callable[..., Any])


def accepts_arrays(method: F) -> F:
    """A method of a predictor that takes the model's arguments takes numpy arrays among them."""

    @wraps(method)
    def wrapped(self: Predictor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not _has_arrays(args, kwargs):
            return method(self, *args, **kwargs)
        args, kwargs = pytree.tree_map(lambda leaf: _tensor(self, leaf), (args, kwargs))
        with torch.no_grad():
            return method(self, *args, **kwargs)

    return cast(F, wrapped)


def _has_arrays(args: tuple, kwargs: dict[str, Any]) -> bool:
    return any(isinstance(leaf, np.ndarray) for leaf in pytree.tree_leaves((args, kwargs)))


def _tensor(predict: Predictor, leaf: Any) -> Any:
    if not isinstance(leaf, np.ndarray):
        return leaf
    tensor = torch.tensor(leaf, device=predict.device)
    known = [n.dtype for n in predict.graph.inputs if n is not None and n.dtype is not None]
    alike = [d for d in known if d.is_floating_point == tensor.dtype.is_floating_point and d is not torch.bool]
    return tensor.to(alike[0]) if alike and tensor.dtype is not torch.bool else tensor
