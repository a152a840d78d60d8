"""Arguments as people give them, and as `torch.export` and a graph take them.

An example is a tensor, a tuple of positional arguments or a mapping of keyword arguments (a `BatchEncoding` of
transformers is one). Arrays of numpy, numbers in lists and anything else that `torch.as_tensor` takes for an array
stand for tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import InvalidType


def split_example(example: Any) -> tuple[tuple, dict[str, Any]]:
    """The example as positional and keyword arguments."""
    if isinstance(example, Mapping):
        return (), {name: as_tensors(value) for name, value in example.items()}
    if isinstance(example, tuple):
        return tuple(map(as_tensors, example)), {}
    argument = as_tensors(example)
    if isinstance(argument, Tensor):
        return (argument,), {}
    raise InvalidType(
        f"`example` is a {type(example).__name__}; give a tensor, a tuple of positional arguments "
        "or a dict of keyword arguments."
    )


def as_tensors(value: Any, dtype: torch.dtype | None = None) -> Any:
    """An argument with tensors in the place of arrays and lists of numbers; mappings of other kinds become dicts."""
    if isinstance(value, Mapping) and type(value) is not dict and not _is_tree(value):
        return {name: as_tensors(v, dtype) for name, v in value.items()}
    if _is_array(value):
        tensor = torch.as_tensor(np.asarray(value) if not isinstance(value, (list, tuple)) else value)
        real = tensor.is_floating_point()
        return tensor.to((dtype or torch.get_default_dtype()) if real else tensor.dtype)
    return value


def _is_tree(value: Any) -> bool:
    return type(value) in pytree.SUPPORTED_NODES


def _is_array(value: Any) -> bool:
    """Whether torch would make a tensor of it, and it is none yet."""
    if isinstance(value, Tensor):
        return False
    if isinstance(value, list):
        return bool(value) and all(_is_number(v) or _is_array(v) for v in value)
    return isinstance(value, np.ndarray) and value.dtype.kind in "biuf"


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, np.number))


_PLAIN = (Tensor, bool, int, float, complex, str, type(None), torch.dtype, torch.device)


def without_caches(output: Any) -> Any:
    """A model's output, None in the place of objects that are neither tensors nor containers of them, and of caches."""

    def is_cache(value: Any) -> bool:
        return type(value).__name__.endswith("Cache")

    def kept(leaf: Any) -> Any:
        return leaf if isinstance(leaf, (*_PLAIN, torch.SymInt, torch.SymFloat, torch.SymBool)) else None

    return pytree.tree_map(kept, output, is_leaf=is_cache)


def plain(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call is of tensors alone; a walk through nested arguments takes long beside one small input."""
    return not kwargs and all([isinstance(x, Tensor) for x in args])
