"""Targets that go with predictions: their shapes, and pairs of both from a loader."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from favour.belief.arrays import Array
from favour.belief.covariance import check_finite
from favour.errors import InvalidType, InvalidValue, ShapeMismatch


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
    if not torch.compiler.is_compiling():
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


def checked_labels(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Probabilities as float64 and labels as int64 on one device, or an error that says what is wrong."""
    p, y = torch.as_tensor(probabilities).detach(), torch.as_tensor(labels).detach()
    if not p.is_floating_point():
        raise InvalidType(f"`probabilities` has dtype {p.dtype}; a floating-point dtype is required.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidType(f"`labels` has dtype {y.dtype}; integer class indices are required.")
    if p.ndim != 2 or p.numel() == 0:
        raise ShapeMismatch(
            f"`probabilities` has shape {tuple(p.shape)}; (N, C) with N ≥ 1 and C ≥ 1 is required. "
            "Flatten other axes into the first."
        )
    if y.shape != p.shape[:1]:
        raise ShapeMismatch(
            f"`labels` has shape {tuple(y.shape)} and `probabilities` {tuple(p.shape)}; labels of shape "
            f"({p.shape[0]},) are required. Pass class indices, not one-hot rows."
        )
    rounding = max(1e-4, 2 * torch.finfo(p.dtype).eps)  # a softmax in bfloat16 sums to one within 2⁻⁷
    p, y = p.double(), y.to(p.device, torch.int64)
    if not p.isfinite().all():
        raise InvalidValue(
            f"`probabilities` of shape {tuple(p.shape)} contains {int((~p.isfinite()).sum())} values "
            "that are NaN or infinite. Look for them in the logits first."
        )
    sums = p.sum(1)
    if p.min() < 0 or (sums - 1).abs().max() > rounding:
        raise InvalidValue(
            f"`probabilities` of shape {tuple(p.shape)} has a least entry of {p.min():.4g} and row sums from "
            f"{sums.min():.4g} to {sums.max():.4g}; entries ≥ 0 and row sums of 1 are required. "
            "Logits need a softmax first."
        )
    if y.min() < 0 or y.max() >= p.shape[1]:
        raise InvalidValue(
            f"`labels` runs from {int(y.min())} to {int(y.max())}, but `probabilities` of shape "
            f"{tuple(p.shape)} has classes 0 to {p.shape[1] - 1}."
        )
    return p, y
