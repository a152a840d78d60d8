"""Draws d_k of the logits, and what a belief with mean μ and covariance Σ knows of them.

    matched     z_k = μ + L L_d⁻¹ (d_k − d̄)       LLᵀ = Σ, L_d L_dᵀ = S, the covariance of d
    weighed     z_k = d̄ + L L_d⁻¹ (d_k − d̄)       LLᵀ = wΣ + (1 − w)S

The belief has no sampling noise, but the error of its rules; draws of the network itself have none of that. So their
covariance is weighed with the belief's. A of them leave a relative error of √(2/A) in a variance, the rules one of b,
and squared errors weigh inversely: w = 1/(1 + ½Ab²). More draws tend to the network's own distribution. Their mean
stays, since masks are balanced. Draws from a belief inside the network miss correlations, and take all of μ and Σ; so
do those of one linear layer, of which the belief's moments are exact. Draws too few for a covariance of their own have
their variances weighed or matched instead.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from favour.belief import Belief
from favour.covariance.precision import shrunk_cholesky, symmetric_root, widen

WORTH = 96.0  # draws whose covariance is as good as the belief's: 2/b² for b = .144 (benchmarks/decisions.py)


def weighed(d: Tensor, bias: Tensor | None, belief: Belief, outer: int) -> Tensor:
    """The draws (B, C, n) plus the bias (C,), their covariance weighed with the belief's.

    Args:
        d, bias, belief: As above.
        outer: A, how many of the draws differ from their first layer on.
    """
    w, limits, (_, c, n) = WORTH / (WORTH + outer), torch.finfo(d.dtype), d.shape
    centre = d.mean(2, keepdim=True)
    d = d - centre
    if bias is not None:
        centre = centre + bias.unsqueeze(-1)
    least = limits.tiny / limits.eps  # for logits that no draw moves: what is divided by it is then multiplied by 0
    if n <= 2 * c:
        total = torch.linalg.vector_norm(d, dim=2, keepdim=True).square().clamp(min=least)
        ratio = belief.variance.to(d.dtype).unsqueeze(-1) / total
        return torch.addcmul(centre, d, torch.add(1 - w, ratio, alpha=w * n).sqrt())
    sigma = belief.covariance_matrix.to(d.dtype)
    own = torch.baddbmm(sigma, d, d.mT, beta=0, alpha=1 / n)
    # √eps of the variances is far above rounding, n·eps, and far below what either covariance is good for.
    own.diagonal(dim1=-2, dim2=-1).mul_(1 + math.sqrt(limits.eps)).add_(least)
    target = torch.lerp(own, sigma, w)
    both, _ = torch.linalg.cholesky_ex(torch.stack([target, own]))
    turn = torch.linalg.solve_triangular(both[1], both[0], upper=False, left=False)
    return torch.baddbmm(centre, turn, d)


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
