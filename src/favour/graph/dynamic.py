"""Which sizes of the inputs may change from call to call.

The batch always may. `dynamic=` names further ones, in the user's terms:

    True                          all that the model does not fix itself
    2, or (2, 3)                  these dimensions of every tensor among the inputs that has them
    {"image": (2, 3)}             these dimensions of one argument; of a tensor inside it as "batch.image"
    {"image": True}               all of that argument that the model does not fix

A size that was named has to be free: where the model's code fixes it, capture fails and says so. Under `True` it is
left fixed.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import InvalidType, InvalidValue, UnknownName

Dimensions = int | Collection[int] | bool
Dynamic = Dimensions | Mapping[str, Dimensions] | None

REQUIRED, ALLOWED = torch.export.Dim.DYNAMIC, torch.export.Dim.AUTO


def input_names(signature: inspect.Signature, in_spec: pytree.TreeSpec) -> list[str]:
    """A name for each leaf of the arguments: `x`, or `batch.image` inside a container."""
    args, kwargs = pytree.tree_unflatten(list(range(in_spec.num_leaves)), in_spec)
    names = [""] * in_spec.num_leaves
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        for path, leaf in pytree.tree_flatten_with_path(value)[0]:
            names[leaf] = ".".join([name, *map(key_name, path)])
    return names


def key_name(key: Any) -> str:
    """How one step into a container is written."""
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def free_sizes(dynamic: Any, names: Sequence[str], leaves: Sequence[Any]) -> list[dict[int, Any]]:
    """For each leaf, dimension to `Dim.DYNAMIC` (named) or `Dim.AUTO` (under `True`), without the batch.

    Raises:
        InvalidType, InvalidValue, UnknownName: `dynamic` names what is not there, or has size 1 in the example.
    """
    shapes = [tuple(leaf.shape) if isinstance(leaf, Tensor) else None for leaf in leaves]
    if dynamic is None or dynamic is False:
        return [{} for _ in leaves]
    if not isinstance(dynamic, Mapping):
        sizes = [_spread(dynamic, name, shape, strict=False) for name, shape in zip(names, shapes, strict=True)]
        if dynamic is not True and not any(sizes):
            raise InvalidValue(
                f"`dynamic` is {dynamic!r}, but no input has such a dimension; there are {_list(names, shapes)}."
            )
        return sizes
    result: list[dict[int, Any]] = [{} for _ in leaves]
    for key, dimensions in dynamic.items():
        hits = [i for i, n in enumerate(names) if shapes[i] is not None and (n == key or n.startswith(f"{key}."))]
        if not hits:
            raise UnknownName(f"`dynamic` names {key!r}, which is no tensor input; there are {_list(names, shapes)}.")
        for i in hits:
            result[i] |= _spread(dimensions, names[i], shapes[i], strict=True)
    return result


def _list(names: Sequence[str], shapes: Sequence[tuple[int, ...] | None]) -> str:
    return ", ".join(f"`{n}` {s}" for n, s in zip(names, shapes, strict=True) if s is not None)


def _spread(dimensions: Any, name: str, shape: tuple[int, ...] | None, *, strict: bool) -> dict[int, Any]:
    if shape is None:
        return {}
    if dimensions is True:
        return {d: ALLOWED for d in range(1, len(shape)) if shape[d] > 1}
    numbers = [dimensions] if isinstance(dimensions, int) else dimensions
    if isinstance(numbers, str) or not isinstance(numbers, Collection) or any(type(d) is not int for d in numbers):
        raise InvalidType(
            f"`dynamic` gives {dimensions!r}; give True, dimensions as whole numbers, or a mapping from the name of an "
            "argument to those."
        )
    chosen: dict[int, Any] = {}
    for d in numbers:
        if not -len(shape) <= d < len(shape):
            if strict:
                raise InvalidValue(f"`dynamic` names dimension {d} of `{name}`, whose example has shape {shape}.")
            continue
        if d % len(shape) == 0:
            continue  # the batch
        if shape[d] < 2:
            raise InvalidValue(
                f"`dynamic` names dimension {d} of `{name}`, which has size {shape[d]} in the example {shape}; "
                "torch.export takes sizes of 0 and 1 for constants. Give an example with at least 2 there."
            )
        chosen[d % len(shape)] = REQUIRED
    return chosen
