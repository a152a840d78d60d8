"""What a `Belief` asks of its arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from favour.belief.covariance import Covariance, check_batched, check_finite
from favour.errors import InvalidType, ShapeMismatch


def check_arguments(mean: Any, diag: Any, factor: Any, covariance: Any) -> None:
    """Raise unless they are tensors of the right kinds, and say one thing only."""
    check_batched("mean", mean)
    if covariance is not None and (diag is not None or factor is not None):
        raise InvalidType("give either `diag`/`factor` or `covariance`, not both.")
    if covariance is not None and not isinstance(covariance, Tensor | Covariance):
        raise InvalidType(f"`covariance` must be a (B, n, n) tensor or a Covariance, got {type(covariance).__name__}.")
    if diag is not None:
        check_batched("diag", diag)
        if diag.shape != mean.shape:
            raise ShapeMismatch(
                f"`diag` has shape {tuple(diag.shape)} but `mean` {tuple(mean.shape)}; they must agree."
            )


def check_fit(mean: Tensor, covariance: Covariance) -> None:
    """Raise unless mean and covariance are of one shape, dtype and device."""
    if (covariance.batch_size, *covariance.event_shape) != tuple(mean.shape):
        raise ShapeMismatch(
            f"`covariance` has batch {covariance.batch_size} and event {tuple(covariance.event_shape)}, "
            f"but `mean` has shape {tuple(mean.shape)}."
        )
    if (covariance.dtype, covariance.device) != (mean.dtype, mean.device):
        raise InvalidType(
            f"the covariance is {covariance.dtype} on {covariance.device} but `mean` is {mean.dtype} on "
            f"{mean.device}; they must agree."
        )


def check_noise(variance: Tensor, mean: Tensor) -> None:
    """Raise unless a noise variance is finite, not negative, and broadcasts to the mean."""
    check_finite("variance", variance, nonnegative=True)
    tail = mean.shape[max(0, mean.dim() - variance.dim()) :]
    if len(tail) != variance.dim() or any(a not in (1, m) for a, m in zip(variance.shape, tail, strict=False)):
        raise ShapeMismatch(
            f"`variance` has shape {tuple(variance.shape)}, which does not broadcast to {tuple(mean.shape)}."
        )


def chosen(rows: int | slice | Tensor | Sequence[int], batch: int, device: torch.device) -> slice | Tensor:
    """An index of rows as a slice or a tensor; a single row stays a batch of one."""
    if isinstance(rows, int):
        if not -batch <= rows < batch:
            raise IndexError(f"row {rows} of a belief with a batch of {batch}")
        return slice(rows % batch, rows % batch + 1)
    if isinstance(rows, slice):
        return rows
    rows = torch.as_tensor(rows, device=device)
    return rows.reshape(1) if rows.dim() == 0 else rows
