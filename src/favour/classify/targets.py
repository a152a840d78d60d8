"""Targets that go with predictions: their shapes, and pairs of both from a loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from favour.belief.covariance import check_finite
from favour.errors import InvalidType, ShapeMismatch


def fitting(y: Any, mean: Tensor, name: str = "targets") -> Tensor:
    """Targets in the shape of predictions (B, *event), finite.

    Where there is one number for each input, (B,) and (B, 1) mean the same: one is reshaped to the other, never
    broadcast against it, which would make (B, B).

    Raises:
        ShapeMismatch, InvalidValue: They do not fit, or hold NaN or infinity.

    >>> fitting([1.0, 2.0], torch.zeros(2, 1)).shape
    torch.Size([2, 1])
    """
    y = torch.as_tensor(y, device=mean.device)
    if y.is_complex():
        raise InvalidType(f"{name} have dtype {y.dtype}; real numbers are required.")
    y = y if y.is_floating_point() else y.to(mean.dtype)
    shapes = (y.shape, mean.shape)
    if {len(shape) for shape in shapes} == {1, 2} and y.shape[:1] == mean.shape[:1] and y.numel() == mean.numel():
        y = y.reshape(mean.shape)
    if y.shape != mean.shape:
        raise ShapeMismatch(f"{name} of shape {tuple(y.shape)} for predictions of shape {tuple(mean.shape)}.")
    check_finite(name, y)
    return y


def pairs(loader: Iterable[Any]) -> Iterable[tuple[Any, Any]]:
    """(inputs, targets) of a loader, or of one pair of tensors."""
    if isinstance(loader, tuple | list) and len(loader) == 2 and isinstance(loader[1], Tensor):
        first = loader[0]
        if isinstance(first, Tensor) or (isinstance(first, tuple) and all(isinstance(t, Tensor) for t in first)):
            loader = [tuple(loader)]
    for item in loader:
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise InvalidType(f"`loader` gave a {type(item).__name__}; pairs (inputs, targets) are required.")
        yield item[0], item[1]
