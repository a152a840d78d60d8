"""Algorithm 1 of the paper: a diagonal-plus-low-rank approximation of a covariance known by its products.

    minimise ρ(Λ, V) = ‖M − (Λ + VVᵀ)‖²_F   over diagonal Λ ≥ 0 and V of rank r

by interleaving the two exact half-steps, Λ ← max(diag(M − VVᵀ), 0) and V ← the leading eigenvectors of M − Λ, the
second one replaced by a single step of subspace iteration. M is never formed: a pass needs diag(M) once and r
products with M per iteration. Between iterations V holds unit eigenvector estimates times their eigenvalue estimates,
so the current low-rank part is V S⁻¹ Vᵀ with S the diagonal matrix of column norms; the result is V S^(−1/2).

The paper uses one symbol for the input's diagonal and the iterate's; here the iterate is `diag`.

| symbol | here | shape |
|---|---|---|
| M | `matmul`, `diagonal` | acts on (r, batch, *event); (batch, *event) |
| V | `V` | (r, batch, n), columns in front |
| S | `norms` | (r, batch, 1) |
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from favour.surrogate import flat


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
    for _ in range(iterations):
        norms = _norms(V)
        unit = V / norms
        diag = (target - (V * unit).sum(0)).clamp_min(0)
        V = matmul(unit.reshape(shape)).reshape(V.shape) - diag * unit
        V = gram_schmidt(V)
    norms = _norms(V)
    factor = V / norms.sqrt()
    diag = (target - factor.square().sum(0)).clamp_min(0)
    return diag.reshape(diagonal.shape), factor.reshape(shape)


def _norms(V: Tensor) -> Tensor:
    """Column norms, with 1 for a column of zeros, which then stays zero."""
    squared = V.square().sum(-1, keepdim=True)
    return torch.where(squared > 0, squared, 1.0).sqrt()


def gram_schmidt(V: Tensor) -> Tensor:
    """Orthogonalise the columns, in order, without normalising them. O(n r²).

    Written in the modified form (each column is removed from all later ones at once), which is stable; a column that
    depends on earlier ones comes out as zero up to rounding.
    """
    columns = list(V.unbind(0))
    for k in range(len(columns) - 1):
        v = columns[k]  # (batch, n)
        squared = v.square().sum(-1, keepdim=True)
        unit = v / torch.where(squared > 0, squared, 1.0)
        rest = torch.stack(columns[k + 1 :])
        rest = rest - (rest * v).sum(-1, keepdim=True) * unit
        columns[k + 1 :] = list(rest.unbind(0))
    return torch.stack(columns) if columns else V
