"""Moments of the spread V = cᵀc/n of a group of n entries, c = Cx: what norms and variances are made of.

With κ = CΣc at the mean,

    E[V] = V(μ) + tr(CΣC)/n,    Cov[c_i, V] = 2κ_i/n,    Var[V] = 4cᵀκ/n² + q,    q = 2‖CΣC‖²/n²

for Gaussians. Entries that dropout leaves or takes have third and fourth cumulants T and K, which for independent
entries add

    C(C_kk T_k)/n to Cov[c, V],    4/n²·Σ_k c_k C_kk T_k to Var[V]'s first part,    Σ_k C_kk² K_k/n² to q.

Secants (`favour.methods.reverse`) explain Σ_k C_kk² T_k²/(v_k n²) of q; for draws of two values, K = T²/v − 2v², what
is left is that of pairs of entries, 2Σ_{k≠l} C_kl² v_k v_l/n².
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from favour.surrogate import Cumulants
from favour.surrogate.value import Value


def spread_of(x: Value, grouped: Sequence[int], c: Tensor, centred: bool) -> tuple[Tensor, Tensor]:
    """tr(CΣC)/n, one for each group, and κ = CΣc."""
    n = grouped[-1]
    v = x.variance.reshape(grouped)
    extra = v.mean(-1, keepdim=True)
    kappa = torch.zeros_like(c)
    total = torch.zeros_like(extra)  # 1ᵀΣ1
    if x.diag is not None:
        diag = x.diag.reshape(grouped)
        kappa = diag * c
        total = diag.sum(-1, keepdim=True)
    for block in x.blocks.values():
        u = block.reshape(block.shape[0], *grouped)
        kappa = kappa + (u * (u * c).sum(-1, keepdim=True)).sum(0)
        total = total + u.sum(-1, keepdim=True).square().sum(0)
    if not centred:
        return extra, kappa
    return extra - total / n**2, kappa - kappa.mean(-1, keepdim=True)


def second_order_of(x: Value, centred: bool) -> Tensor:
    """q = 2‖CΣC‖²/n², the variance of V's second-order part.

    With u centred, ‖C(Λ + UUᵀ)C‖² = ‖CΛC‖² + 2Σ_k λᵀu_k² + Σ_kl (u_kᵀu_l)², and ‖CΛC‖² = Σλ²(1 − 2/n) + (Σλ)²/n² ≥ 0,
    which is 0 for the one entry of a group that is always its own mean. It is summed as Σ(λ − λ̄)²(1 − 2/n) + (n − 1)λ̄²
    for n > 1.
    """
    n = x.mean.shape[-1]
    total = torch.zeros_like(x.mean[..., :1])
    lam = x.diag
    if lam is not None and not centred:
        total = total + lam.square().sum(-1, keepdim=True)
    elif lam is not None and n > 1:
        level = lam.mean(-1, keepdim=True)
        apart = (lam - level).square().sum(-1, keepdim=True)
        total = total + (1 - 2 / n) * apart + (n - 1) * level.square()
    if x.factor is not None:
        u = x.factor - x.factor.mean(-1, keepdim=True) if centred else x.factor
        if lam is not None:
            total = total + 2 * (lam * u.square().sum(0)).sum(-1, keepdim=True)
        gram = torch.einsum("k...i,l...i->kl...", u, u)
        total = total + gram.square().sum((0, 1)).unsqueeze(-1)
    return 2 * total / n**2


@dataclass(frozen=True, eq=False)
class Skewed:
    """What third and fourth cumulants of the entries add to these moments, with the entries of a group last.

    Attributes:
        shared: C(C_kk T_k)/n.
        fourth: Σ_k C_kk² K_k/n².
        explained: Σ_k C_kk² T_k²/(v_k n²).
    """

    shared: Tensor
    fourth: Tensor
    explained: Tensor


def skewed_of(x: Value, grouped: Sequence[int], centred: bool, axis: int = -1) -> Skewed | None:
    """None where no cumulants are known; `axis` of x comes last in the shape `grouped`."""
    known = x.known(Cumulants)
    if known is None:
        return None
    n = grouped[-1]
    third, fourth, v = (t.movedim(axis, -1).reshape(grouped) for t in (known.third, known.fourth, x.variance))
    one = 1 - 1 / n if centred else 1.0  # C_kk
    shared = one / n * (third - third.mean(-1, keepdim=True) if centred else third)
    some = v > 0
    ratio = torch.where(some, third.square() / torch.where(some, v, 1.0), 0.0)
    scale = (one / n) ** 2
    return Skewed(shared, scale * fourth.sum(-1, keepdim=True), scale * ratio.sum(-1, keepdim=True))
