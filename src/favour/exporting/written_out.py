"""Operations that a file has no name for, as others that it has.

pool of means, transposed            a window's covector over its size, spread by a transposed convolution of ones
means of unequal windows             a matrix product on either side
log σ(x)                             min(x, 0) − log(1 + exp(−|x|))
softmax of a masked row              0, where every entry is −∞
diagonal matrices                    x_i [i = j]
batch norm                           x w/√(σ² + ε) + (b − μ w/√(σ² + ε))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten


def squeezed(x: Tensor, dims: Sequence[int]) -> Tensor:
    for dim in sorted((d % x.ndim for d in dims), reverse=True):
        x = x.squeeze(dim)
    return x


def subtracted_from(x: Tensor, other: Any, alpha: Any = 1) -> Tensor:
    return (x if alpha == 1 else x * alpha).neg() + other


def identity_matrix(n: int, m: int | None = None, **options: Any) -> Tensor:
    rows, columns = (torch.arange(size, device=options.get("device")) for size in (n, n if m is None else m))
    return (rows[:, None] == columns).to(options.get("dtype") or torch.get_default_dtype())


def converted(x: Tensor, dtype: torch.dtype, non_blocking: bool = False, copy: bool = False, **_: Any) -> Tensor:
    return aten._to_copy.default(x, dtype=dtype) if copy or dtype != x.dtype else x


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    x = x if dtype is None else x.to(dtype)
    masked = (x == float("-inf")).all(dim, keepdim=True)
    return torch.where(masked, 0.0, torch.where(masked, 0.0, x).softmax(dim))


def log_sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.clamp(max=0) - torch.log1p(torch.exp(-x.abs())), torch.zeros_like(x)


def diagonal_matrices(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    if offset or {d % (x.ndim + 1) for d in (dim1, dim2)} != {x.ndim - 1, x.ndim}:
        return NotImplemented
    return x.unsqueeze(-1) * torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)


def mean_pool(
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0, 0),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """`avg_pool2d` with a divisor of its own, which ONNX passes over."""
    if divisor is None:
        return NotImplemented
    size, stride, padding = _pairs(size, stride, padding)
    y = F.avg_pool2d(x, size, stride, padding, ceil_mode)
    return y * (_counts(x, y, size, stride, padding, padding) / divisor)


def mean_pool_transposed(
    g: Tensor,
    x: Tensor,
    size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor: int | None,
) -> Tensor:
    """`avg_pool2d_backward`."""
    size, stride, padding = _pairs(size, stride, padding)
    channels, (h, w) = x.shape[-3], x.shape[-2:]
    g = g / (divisor or _counts(x, g, size, stride, padding, padding if count_include_pad else (0, 0)))
    kernel = torch.ones(channels, 1, *size, dtype=g.dtype, device=g.device)
    spread = aten.convolution.default(g, kernel, None, stride, [0, 0], [1, 1], True, [0, 0], channels)
    lacking = [n + 2 * p - have for n, p, have in zip((h, w), padding, spread.shape[-2:], strict=True)]
    spread = F.pad(spread, (0, max(lacking[1], 0), 0, max(lacking[0], 0)))
    return spread[..., padding[0] : padding[0] + h, padding[1] : padding[1] + w]


def _pairs(size: Sequence[int], stride: Sequence[int], padding: Sequence[int]) -> tuple[list[int], ...]:
    size = [*size] * (2 // len(size))
    return size, [*stride] * (2 // len(stride)) if stride else size, [*padding] * (2 // len(padding))


def _counts(
    x: Tensor, y: Tensor, size: Sequence[int], stride: Sequence[int], padding: Sequence[int], margin: Sequence[int]
) -> Tensor:
    """How many entries of x each window has, (h, w) of the pooled y."""
    rows, columns = (
        torch.tensor([_within(i * s - p, k, n, more) for i in range(m)], dtype=y.dtype)
        for m, n, k, s, p, more in zip(y.shape[-2:], x.shape[-2:], size, stride, padding, margin, strict=True)
    )
    return rows[:, None] * columns


def _within(start: int, length: int, n: int, margin: int) -> int:
    """How many of the places from `start` on lie between −margin and n + margin."""
    return min(start + length, n + margin) - max(start, -margin)


def adaptive_mean_pool(x: Tensor, size: Sequence[int]) -> Tensor:
    """Means over windows of unequal sizes, as a product with a matrix on either side."""
    rows, columns = (_windows(n, m, x) for n, m in zip(x.shape[-2:], size, strict=True))
    return rows @ x @ columns.mT


def _windows(n: int, m: int, like: Tensor) -> Tensor:
    """(m, n): window i reads from ⌊i n/m⌋ up to ⌈(i + 1) n/m⌉."""
    spans = [(i * n // m, -(-(i + 1) * n // m)) for i in range(m)]
    return torch.tensor([[(a <= j < b) / (b - a) for j in range(n)] for a, b in spans], dtype=like.dtype)


def batch_norm(
    x: Tensor, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, momentum: float, eps: float
) -> Any:
    if training:
        return NotImplemented
    scale = (variance + eps).rsqrt() if weight is None else weight * (variance + eps).rsqrt()
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = [-1, *[1] * (x.ndim - 2)]
    return x * scale.reshape(shape) + shift.reshape(shape), mean.new_zeros(0), mean.new_zeros(0)


def unwritten(size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype)


def unwritten_like(x: Tensor, size: Sequence[int], dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    return torch.zeros(size, dtype=dtype or x.dtype)


# What torch calls inside, and no file names.
INSIDE: dict[Any, Callable[..., Any]] = {
    aten._adaptive_avg_pool2d.default: adaptive_mean_pool,
    aten.log_sigmoid_forward.default: log_sigmoid,
    aten.native_batch_norm.default: batch_norm,
    aten.empty.memory_format: unwritten,
    aten.new_empty.default: unwritten_like,
}
# What ONNX does not have, nor torch's own table.
LACKING: dict[Any, Callable[..., Any]] = {
    aten.squeeze.dims: squeezed,
    aten.rsub.Scalar: subtracted_from,
    aten.rsub.Tensor: subtracted_from,
    aten.to.dtype: converted,
    aten.eye.default: identity_matrix,
    aten.eye.m: identity_matrix,
    aten._safe_softmax.default: safe_softmax,
    aten.diag_embed.default: diagonal_matrices,
    aten.avg_pool2d.default: mean_pool,
    aten.avg_pool2d_backward.default: mean_pool_transposed,
}


def substitutes(form: str) -> dict[Any, Callable[..., Any]]:
    """Operations, and what they are written down as in files of that form."""
    return INSIDE if form == ".pt2" else torch.export.default_decompositions() | LACKING | INSIDE
