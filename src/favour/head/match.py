"""Draws with the moments of a belief: z_k = μ + L L_d⁻¹ (d_k − d̄), LLᵀ = Σ and L_d L_dᵀ the covariance of d."""

from __future__ import annotations

import torch
from torch import Tensor

from favour.belief import Belief
from favour.covariance.precision import shrunk_cholesky, symmetric_root, widen


def matched(d: Tensor, belief: Belief) -> Tensor:
    """The draws (B, C, n), shifted and mapped linearly to have the belief's mean and covariance."""
    d = d - d.mean(2, keepdim=True)
    batch, c, n = d.shape
    mean = belief.mean.unsqueeze(-1)
    if n <= 2 * c:  # too few draws for a covariance: variances only
        own = d.square().mean(2)
        scale = belief.stddev / torch.where(own <= 0, 1, own).sqrt()
        return mean + d * scale.unsqueeze(-1)
    covariance = belief.covariance_matrix
    own = torch.baddbmm(covariance.to(d.dtype), d, d.mT, beta=0, alpha=1 / n)
    shrink = c * torch.finfo(d.dtype).eps
    # Both at once. Where d never varies L_d has a large pivot, and d = 0 adds nothing.
    tril, flat, info = shrunk_cholesky(torch.cat([covariance, own]), shrink)
    target, source = tril[:batch], tril[batch:]
    if not torch.compiler.is_compiling() and info.any():
        indefinite, rounded = (part.nonzero().flatten() for part in (info[:batch], info[batch:]))
        target = target.index_copy(0, indefinite, symmetric_root(widen(covariance[indefinite])))
        # n products in a sum are off by up to n·eps, which no eigenvalue exceeds c times.
        source = source.index_copy(0, rounded, shrunk_cholesky(own[rounded], n * shrink)[0])
    # L L_d⁻¹ in the working dtype: it is small, the draws are many.
    turn = torch.linalg.solve_triangular(source, target, upper=False, left=False)
    turn = turn.masked_fill(flat[:batch].unsqueeze(-1), 0)
    return torch.baddbmm(mean.to(d.dtype), turn.to(d.dtype), d)
