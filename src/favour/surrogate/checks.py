"""What the tensors of a posterior must be: floating-point, finite, variances ≥ 0, matrices symmetric and PSD."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from favour.errors import InvalidType, InvalidValue


def require_floating(name: str, tensors: Mapping[str, Tensor]) -> None:
    for what, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise InvalidType(
                f"posterior of `{name}`: `{what}` has dtype {tensor.dtype}; a floating-point tensor is required."
            )


def require_finite(name: str, what: str, tensor: Tensor) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(tensor.shape)} has {bad} NaN or infinite "
            "entries; all must be finite."
        )


def require_variance(name: str, what: str, tensor: Tensor) -> None:
    require_finite(name, what, tensor)
    bad = int((tensor < 0).sum())
    if bad:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(tensor.shape)} has {bad} negative entries, "
            f"the least {float(tensor.detach().min()):.3g}; pass variances, ≥ 0, not log-variances."
        )


def require_psd(name: str, what: str, matrix: Tensor) -> None:
    """Symmetric, and no eigenvalue below −10·N·ε·max|A_ij|: a shifted Cholesky decides, O(N³/3)."""
    require_finite(name, what, matrix)
    if matrix.numel() == 0:
        return
    wide = matrix.detach()
    wide = wide if wide.dtype == torch.float64 else wide.float()
    scale = float(wide.abs().max())
    tolerance = 10 * matrix.shape[0] * torch.finfo(matrix.dtype).eps * scale
    asymmetry = float((wide - wide.mT).abs().max())
    if asymmetry > tolerance:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(matrix.shape)} is not symmetric, it differs "
            f"from its transpose by up to {asymmetry:.3g}; symmetrise it with (A + Aᵀ)/2."
        )
    if scale == 0:
        return
    shifted = wide + tolerance * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    if int(torch.linalg.cholesky_ex(shifted).info):
        least = float(torch.linalg.eigvalsh(wide)[0])
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(matrix.shape)} is indefinite, its least "
            f"eigenvalue is {least:.3g}; a covariance must be positive semi-definite."
        )


def floating_tensor(name: str, what: str, value: Any) -> Tensor:
    """The value, if it is a tensor of floating-point numbers."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise InvalidType(f"{what} of `{name}` is a {kind}; a floating-point tensor is required.")
    return value
