"""What stored tensors must satisfy, beyond the definiteness each structure checks for itself.

    batched      floating point, the first dimension is the batch
    finite       |t_i| < ∞, and t_i ≥ 0 for variances
    like diag    (rank, B, *event) beside a diagonal (B, *event), of one dtype and on one device

Shapes and types cost nothing to check. Values do (a GPU has to finish first), and only eager code can.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.errors import InvalidType, InvalidValue, ShapeMismatch


def check_finite(name: str, t: Tensor, nonnegative: bool = False) -> None:
    """Raises `InvalidValue`, naming argument and index, for NaN, infinite or (if asked) negative entries."""
    # Sums and minima are quicker than looking at each number, which is for those that are bad, or overflow in sums.
    if bool(t.sum().isfinite()) and not (nonnegative and t.numel() and bool(t.amin() < 0)):
        return
    bad = ~torch.isfinite(t)
    if nonnegative:
        bad |= t < 0
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        need = "finite and ≥ 0" if nonnegative else "finite"
        raise InvalidValue(
            f"`{name}` {tuple(t.shape)} holds {t[index].item()} at index {index} ({int(bad.sum())} bad in "
            f"all); it must be {need}."
        )


def check_batched(name: str, t: Tensor) -> None:
    """Raises unless t is a floating-point tensor with a batch dimension."""
    if not isinstance(t, Tensor) or not t.dtype.is_floating_point:
        raise InvalidType(f"`{name}` must be a floating-point tensor, got {getattr(t, 'dtype', type(t).__name__)}.")
    if t.dim() == 0:
        raise ShapeMismatch(f"`{name}` has no batch dimension; use `{name}.unsqueeze(0)`.")


def check_like(name: str, t: Tensor, like: Tensor) -> None:
    """Raises unless t is (rank, *like.shape) with the dtype and device of `like`, the diagonal beside it."""
    check_batched(name, t)
    if t.shape[1:] != like.shape:
        need = ", ".join(map(str, ("rank", *like.shape)))
        raise ShapeMismatch(
            f"`{name}` has shape {tuple(t.shape)}; with `diag` {tuple(like.shape)} it must be ({need}), the "
            "rank axis first."
        )
    if t.dtype != like.dtype or t.device != like.device:
        raise InvalidType(
            f"`{name}` is {t.dtype} on {t.device} but `diag` {like.dtype} on {like.device}; they must agree."
        )
