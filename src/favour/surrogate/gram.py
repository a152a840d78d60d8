"""Gram products of covectors, and the shapes they are taken in: (F, batch, *event) to (batch, F, F)."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.surrogate.linear_map import scaled


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Σ_event a_f b_g: (F, batch, *event) and (G, batch, *event) to (batch, F, G)."""
    outside = _outside(a)
    if outside and _outside(b) == outside and a.shape[1] == b.shape[1]:
        return _in_place(a, outside).matmul(_in_place(b, outside).mT).flatten(1, -3).sum(1)
    a, b = flat(a).transpose(0, 1), flat(b).permute(1, 2, 0)
    if a.shape[0] != b.shape[0]:
        return a @ b  # one of them is the same for every input
    parts = _parts(a)
    return torch.bmm(a, b) if parts == 1 else product_in_parts(a, b, parts)


def _outside(a: Tensor) -> int:
    """How many axes of an event (heads, say) are stored outside of the fold axis, as products of attention leave them.

    Summing over these after the products saves a copy of covectors into rows.
    """
    if a.ndim < 4 or torch.compiler.is_compiling() or a.device.type != "cpu":
        return 0
    strides, fold = a.stride(), a.stride(0)
    count = sum(s > fold for s in strides[2:])
    if not count or count == a.ndim - 2 or strides[1] < max(strides):
        return 0
    return count if _in_place(a, count).is_contiguous() else 0


def _in_place(a: Tensor, outside: int) -> Tensor:
    """(F, batch, *outer, *inner) to (batch, *outer, F, n)."""
    return a.movedim(0, 1 + outside).flatten(2 + outside)


def product_in_parts(a: Tensor, b: Tensor, parts: int) -> Tensor:
    """(batch, F, n) @ (batch, n, G), the sum over n taken in equal parts."""
    a, b = a.unflatten(2, (parts, -1)), b.unflatten(1, (parts, -1))
    return torch.einsum("bfsn,bsng->bsfg", a, b).sum(1)


def _parts(a: Tensor) -> int:
    """In how many parts a GPU sums long rows: its products of few rows with few columns walk along them one by one."""
    n = a.shape[2]
    if a.device.type != "cuda" or not isinstance(n, int) or n < LONG:
        return 1
    return math.gcd(n, 64)


LONG = 2**14


# Up to here all pairs of covectors are formed, F × F × n numbers, where every input has the same.
FEW_COVECTORS = 64


def weighted_gram(g: Tensor, variance: Tensor) -> Tensor:
    """g diag(variance) gᵀ, (batch, F, F), for covectors (F, batch or 1, *event) and variances (batch, *event)."""
    if g.shape[1] == 1 and variance.shape[0] != 1 and g.shape[0] <= FEW_COVECTORS:
        # Covectors that are the same for every input: Σ_n v_n (g_f g_h)_n is one product with all pairs.
        rows = flat(g).squeeze(1)
        k, n = rows.shape
        pairs = (rows.unsqueeze(0) * rows.unsqueeze(1)).reshape(k * k, n)
        return (flat(variance.unsqueeze(0)).squeeze(0) @ pairs.T).unflatten(1, (k, k))
    if g.shape[0] == 1:
        return (flat(g * g).squeeze(0) * flat(variance.unsqueeze(0)).squeeze(0)).sum(-1)[:, None, None]
    if g.requires_grad or variance.requires_grad:
        return inner(scaled(g, variance), g)
    rooted = scaled(g, stored(_positive(variance).sqrt()))  # one product less, and exactly symmetric
    return inner(rooted, rooted)


def _positive(variance: Tensor) -> Tensor:
    """Variances, and 0 for what rounding made of 0: a CPU takes the roots of subnormal numbers one by one."""
    if torch.compiler.is_compiling() or variance.dtype.itemsize < 4:
        return variance.clamp_min(0)
    return F.threshold(variance, torch.finfo(variance.dtype).tiny, 0.0)


def root(variance: Tensor) -> Tensor:
    """√ of what is at least 0 up to rounding; at 0 its gradient is 0, not infinite.

    >>> v = torch.zeros(1, requires_grad=True)
    >>> root(v).backward()
    >>> v.grad
    tensor([0.])
    """
    if not variance.requires_grad:
        return variance.clamp_min(0).sqrt()
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1.0).sqrt(), 0.0)


def stored(factor: Tensor) -> Tensor:
    """The same tensor, computed once.

    A compiler fuses what makes a slope into every product with it, and so computes it anew for each covector.
    Reading it as a strided view makes inductor write it to memory first. What gradients go through is stored anyway.
    """
    compiling = torch.compiler.is_compiling() and not torch.compiler.is_exporting()
    if compiling and factor.is_contiguous() and not factor.requires_grad:
        return factor.as_strided(factor.shape, factor.stride())
    return factor


def flat(v: Tensor) -> Tensor:
    """(F, batch, *event) to (F, batch, n)."""
    return v.unsqueeze(-1) if v.ndim == 2 else v.flatten(2)


def diagonal_columns(scale: Tensor) -> Tensor:
    """diag(scale) as explicit columns: (batch, *event) to (n, batch, *event)."""
    rows = flat(scale.unsqueeze(0)).squeeze(0)  # (batch, n)
    n = rows.shape[1]
    eye = torch.eye(n, dtype=scale.dtype, device=scale.device)
    return (eye.unsqueeze(1) * rows).reshape(n, *scale.shape)
