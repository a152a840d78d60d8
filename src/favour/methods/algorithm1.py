"""Algorithm 1 of the paper: a diagonal-plus-low-rank approximation of a covariance known by its products.

    minimise ρ(Λ, V) = ‖M − (Λ + VVᵀ)‖²_F   over diagonal Λ ≥ 0 and V of rank r

by interleaving the two exact half-steps, Λ ← max(diag(M − VVᵀ), 0) and V ← the leading eigenvectors of M − Λ, the
second one replaced by a single step of subspace iteration. M is never formed: a pass needs diag(M) once and r
products with M per iteration. Between iterations V holds unit eigenvector estimates times their eigenvalue estimates,
so the current low-rank part is V S⁻¹ Vᵀ with S the diagonal matrix of column norms; the result is V S^(−1/2).

A column that the others span is rounding after orthogonalisation, and its direction an accident of the order in which
sums were taken: of the batch, say. It is made zero, and a zero column goes on from a direction that is the same for
every input, so that what the start did not see can still be found.

The paper uses one symbol for the input's diagonal and the iterate's; here the iterate is `diag`.

| symbol | here | shape |
|---|---|---|
| M | `matmul`, `diagonal` | acts on (r, batch, *event); (batch, *event) |
| V | `V` | (r, batch, n), columns in front |
| S | `norms` | (r, batch, 1) |
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from favour.surrogate import flat

# A number this much smaller than those it is the difference of is rounding: a power of the dtype's precision.
NOTHING = 0.6


def decompose(
    matmul: Callable[[Tensor], Tensor],
    diagonal: Tensor,
    start: Tensor,
    iterations: int,
) -> tuple[Tensor, Tensor]:
    """Approximate M by diag(λ) + Σ_k v_k v_kᵀ.

    Args:
        matmul: Products with M, (r, batch, *event) to the same shape.
        diagonal: diag(M), (batch, *event).
        start: First V, (r, batch, *event) or broadcastable over the batch.
        iterations: K ≥ 0.

    Returns:
        λ of shape (batch, *event) and the factor of shape (r, batch, *event). Always positive semidefinite.
    """
    r = start.shape[0]
    shape = (r, *diagonal.shape)
    target = flat(diagonal.unsqueeze(0)).squeeze(0)  # (batch, n)
    V = start.expand(shape).reshape(r, *target.shape)
    waves = _waves(r, V)
    for _ in range(iterations):
        squared = V.square()
        sums = squared.sum(-1, keepdim=True)
        norms = _norms(sums)
        diag = (target - (squared / norms).sum(0)).clamp_min(0)
        unit = torch.addcmul(V / norms, waves, (sums <= 0).to(V.dtype))
        product = matmul(unit.reshape(shape)).reshape(V.shape)
        V = gram_schmidt(torch.addcmul(product, diag, unit, value=-1), product)
    squared = V.square()
    norms = _norms(squared.sum(-1, keepdim=True))
    factor = V / norms.sqrt()
    diag = (target - (squared / norms).sum(0)).clamp_min(0)
    return diag.reshape(diagonal.shape), factor.reshape(shape)


def _norms(squared: Tensor) -> Tensor:
    """Column norms from their squares, with 1 for a column of zeros, which then stays zero."""
    return torch.where(squared > 0, squared, 1.0).sqrt()


def _waves(count: int, like: Tensor) -> Tensor:
    """Unit directions to go on from, orthogonal while count ≤ n: √(2/n) cos(π(k + 1)(i + ½)/n), (count, 1, n)."""
    n = like.shape[-1]
    places = torch.arange(n, device=like.device, dtype=like.dtype) + 0.5
    counts = torch.arange(1, count + 1, device=like.device, dtype=like.dtype)
    return (math.sqrt(2 / n) * torch.cos(math.pi / n * counts[:, None] * places)).unsqueeze(1)


def nothing(dtype: torch.dtype) -> float:
    """What is rounding, relative to the numbers it is the difference of."""
    return float(torch.finfo(dtype).eps ** NOTHING)


def gram_schmidt(V: Tensor, parts: Tensor | None = None) -> Tensor:
    """Orthogonalise the columns, in order, without normalising them. O(n r²).

    Written in the modified form (each column is removed from all later ones at once), which is stable; a column that
    depends on earlier ones comes out as zero.

    Args:
        V: (r, batch, n).
        parts: Columns that V's are differences of, where they are larger than V's.
    """
    if not V.shape[0]:
        return V
    largest = (V if parts is None else parts).square().sum(-1, keepdim=True).amax(0)
    least = largest * nothing(V.dtype) ** 2  # (batch, 1)
    columns, rest = [], V
    while True:
        v = rest[0]  # (batch, n)
        squared = v.square().sum(-1, keepdim=True)
        kept = squared > least
        v = v * kept.to(v.dtype)
        columns.append(v)
        rest = rest[1:]
        if not rest.shape[0]:
            return torch.stack(columns)
        along = (rest * v).sum(-1, keepdim=True) / torch.where(kept, squared, 1.0)
        rest = torch.addcmul(rest, along, v, value=-1)
