"""Draws d_k of the logits, and what a belief with mean μ and covariance Σ knows of them.

    z_k = m + L L_d⁻¹ (d_k − d̄)           L_d L_dᵀ = S, the covariance of d, and LLᵀ = wΣ + (1 − w)S

The belief has no sampling noise, but the error of its rules; draws of the network itself have none of that. So their
covariance is weighed with the belief's. A of them leave a relative error of √(2/A) in a variance, the rules one of b,
and squared errors weigh inversely: w = 1/(1 + ½Ab²). More draws tend to the network's own distribution. Their mean
stays, m = d̄, since masks are balanced. Draws from a belief inside the network miss correlations, and take all of it,
m = μ and w = 1; so do those of one linear layer, of which the belief's moments are exact. Draws too few for a
covariance of their own have their variances weighed instead.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from favour.belief import Belief
from favour.graph.tracing import traced

WORTH = 96.0  # draws whose covariance is as good as the belief's: 2/b² for b = .144 (benchmarks/decisions.py)


def weight_of(outer: int) -> float:
    """w, for A draws that differ from their first layer on."""
    return WORTH / (WORTH + outer)


def weighed(d: Tensor, bias: Tensor | None, belief: Belief, w: float) -> Tensor:
    """The draws (B, C, n), which lack the bias (C,), with moments weighed with the belief's; its own where w = 1."""
    d = d.to(torch.promote_types(d.dtype, torch.float32))  # no factorisations in less
    limits, (_, c, n) = torch.finfo(d.dtype), d.shape
    centre = d.mean(2, keepdim=True)
    d = d - centre
    if w == 1:
        centre = belief.mean.to(d.dtype).unsqueeze(-1)
    elif bias is not None:
        centre = centre + bias.unsqueeze(-1)
    least = limits.tiny / limits.eps  # for logits that no draw moves: what is divided by it is then multiplied by 0
    if n <= 2 * c:
        total = torch.linalg.vector_norm(d, dim=2, keepdim=True).square().clamp(min=least)
        ratio = belief.variance.to(d.dtype).unsqueeze(-1) / total
        return torch.addcmul(centre, d, torch.add(1 - w, ratio, alpha=w * n).sqrt())
    sigma = belief.covariance_matrix.to(d.dtype)
    sampled = torch.baddbmm(sigma, d, d.mT, beta=0, alpha=1 / n)
    both = torch.stack([torch.lerp(sampled, sigma, w), sampled])
    tril, _ = torch.linalg.cholesky_ex(ridged(both))
    turn = torch.linalg.solve_triangular(tril[1], tril[0], upper=False, left=False)
    return torch.baddbmm(centre, turn, d)


def ridged(matrix: Tensor) -> Tensor:
    """Covariances with slightly larger variances, so that singular ones have factors too.

    √eps of the variances is far above rounding, n·eps, and far below what a covariance of draws is good for.
    """
    made = _ridge if traced() else _kept_ridge
    least, factor = made(matrix.shape[-1], matrix.dtype, matrix.device)
    return torch.addcmul(least, matrix, factor)


def _ridge(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    limits, eye = torch.finfo(dtype), torch.eye(n, dtype=dtype, device=device)
    return eye * (limits.tiny / limits.eps), 1 + math.sqrt(limits.eps) * eye


@functools.lru_cache(16)
def _kept_ridge(n: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _ridge(n, dtype, device)
