"""The Jensen–Shannon divergence H(E p) − E H(p) of softmax probabilities p = p(z) under a Gaussian, z ~ N(μ, Σ).

**Nodes, mended pair by pair** (`by_nodes`). As a mean of terms none of which is negative, with u = log p_c − log p̄_c,

    JSD = E Σ_c p_c g(u_c)        g(u) = u − 1 + e^(−u),  Σ_c (p̄_c − p_c) = 0

so that an error in p̄ is of second order. The expectation over N fixed nodes z_k is J. Nodes
see nothing that is rarer than 1/N, and far from the data a confident network disagrees with itself that rarely: the
likeliest class t loses against class j where d_j = z_j − z_t > 0. But each d_j ~ N(m_j, s_j²) is one number, and the
information I_j between it and a choice of probability σ(d_j) is an integral over a line, exact also where it is 10⁻³⁰.
So with I = Σ_j I_j by quadrature and Î the same by the nodes,

    JSD ≈ J · (I/Î)^β        β = the slope of J's terms by node against Î's, each over its mean, in [0, 1]

a control variate in ratios. Where other classes win rarely, J and Î are sums of the same few terms: β = 1 and the
answer is I, right to the last digit that matters. Where many classes compete J is good, and β takes what noise the two
share. Two classes are the pair alone: the answer is I. At most log C, never negative, differentiable.

The quadrature is a trapezoidal rule with spacing h = .2 over 13 standard deviations, placed where σ(d)φ(x) has its
mass: around x = min(s, −m/s). For s > 4 the logistic function is a step beside h; then d = 0 lies amid two nodes.

**Lemma** (`lemma`, the paper's, section 4.3; the last formula printed there drops diag(UUᵀ)). With p = softmax(μ) and
A = diag(p) − ppᵀ

    JSD ≈ ½ tr(AΣ) = ½ [Σ_i p_i Σ_ii − pᵀΣp]
        = ½ [Σ_i p_i(1 − p_i)λ_i + Σ_k (Σ_i p_i u_ik² − (p·u_k)²)]         Σ = Λ + UUᵀ, O(C r)
        = ¼ Σ_ij p_i p_j Var(z_i − z_j)                                   any Σ, O(C²)

with an error of O(ε⁴) in the scale ε of the standard deviations (O(ε³) were z not symmetric). It has no upper bound.
The variance that matters is v = 2 JSD/(1 − max p), that of z_j − z_t averaged over the other classes: the lemma holds
for v well below 1 (`spread`).

Confident inputs have p_max = 1 − δ with δ far below rounding, and jsd ∝ δ. So 1 − p_max is the sum of the other
probabilities, and u is measured from its entry at the most probable class: every term is then of the order of δ.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from favour.belief import Belief
from favour.belief.covariance import DiagonalPlusFactor, Directional, square_root
from favour.classify.predictive import node_outputs, pair_variances
from favour.graph.tracing import traced

_HELD = 2**17  # numbers at the nodes at once, on a CPU
_STEP, _HALF = 0.2, 32  # of the quadrature: spacing, and nodes on either side
_SHARP = 4.0  # standard deviations above which the logistic function is a step beside the spacing


def by_nodes(belief: Belief, nodes: int) -> Tensor:
    """The divergence, (B,), from that many nodes and from pairs of classes."""
    if belief.mean.shape[1] == 2:
        return _by_pairs(belief, _likeliest(belief))[:, 0]
    if not traced() and belief.mean.device.type == "cpu":
        rows = max(1, _HELD // (nodes * belief.mean.shape[1]))
        if belief.batch_size > rows:
            parts = range(0, belief.batch_size, rows)
            return torch.cat([_by_nodes(belief[i : i + rows], nodes) for i in parts])
    return _by_nodes(belief, nodes)


def _by_nodes(belief: Belief, nodes: int) -> Tensor:
    z = node_outputs(belief, nodes).permute(1, 2, 0).contiguous()  # (B, C, N)
    top = _likeliest(belief)
    log_p = z.log_softmax(1)
    p = log_p.exp()
    every = _terms(p, log_p, p.mean(-1, keepdim=True)).sum(1)
    gap = z - z.gather(1, top.unsqueeze(-1).expand(-1, 1, nodes))
    p, q, log_p, log_q = _sigmoids(gap)
    paired = _terms(p, log_p, p.mean(-1, keepdim=True)) + _terms(q, log_q, q.mean(-1, keepdim=True))
    others = torch.ones_like(belief.mean).scatter(1, top, 0)
    paired = (paired * others.unsqueeze(-1)).sum(1)
    exact = _by_pairs(belief, top).sum(1)

    limits = torch.finfo(z.dtype)
    least = limits.tiny / limits.eps  # what is smaller than this counts as in proportion
    value, seen = every.mean(-1) + least, paired.mean(-1) + least
    # Nodes come in mirrored pairs, whose errors of odd order cancel.
    a = every.unflatten(-1, (2, -1)).mean(1) / value.unsqueeze(-1) - 1
    b = paired.unflatten(-1, (2, -1)).mean(1) / seen.unsqueeze(-1) - 1
    slope = ((a * b).mean(-1) / (b.square().mean(-1) + limits.eps)).clamp(0, 1)
    mended = value * torch.exp(slope * torch.log((exact + least) / seen)) - least
    return mended.clamp(0.0, math.log(z.shape[1]))


def _likeliest(belief: Belief) -> Tensor:
    return belief.mean.argmax(-1, keepdim=True)


def _by_pairs(belief: Belief, top: Tensor) -> Tensor:
    """I_j for every class, and 0 for the likeliest, (B, C); of two classes the same in both columns."""
    mean, variance = belief.mean, belief.variance
    chosen = torch.zeros_like(mean).scatter(1, top, 1)
    shared = belief.covariance.matmul(chosen.unsqueeze(0)).squeeze(0)  # Cov(z_j, z_t)
    spread = variance + variance.gather(1, top) - 2 * shared
    if mean.shape[1] == 2:
        spread, mean = spread.sum(1, keepdim=True), mean[:, 1:] - mean[:, :1]
        return _information(-mean.abs(), square_root(spread))
    spread = spread * (1 - chosen)
    return _information(mean - mean.gather(1, top), square_root(spread)) * (1 - chosen)


def _information(mean: Tensor, deviation: Tensor) -> Tensor:
    """I between d ~ N(m, s²), m ≤ 0, and a choice of probability σ(d), element by element."""
    safe = torch.where(deviation > 0, deviation, 1)
    step = -mean / safe  # where d = 0
    centre = torch.minimum(deviation, torch.where(deviation > 0, step, 0)).detach()
    k = torch.arange(-_HALF, _HALF + 1, device=mean.device, dtype=mean.dtype) * _STEP
    sharp = deviation > _SHARP
    start = torch.where(sharp, step, 0)
    aligned = start + _STEP * (torch.floor((centre - start.detach()) / _STEP) + 0.5)
    x = torch.where(sharp, aligned, centre).unsqueeze(-1) + k
    weight = torch.exp(-0.5 * x.square()) * (_STEP / math.sqrt(2 * math.pi))
    p, q, log_p, log_q = _sigmoids(mean.unsqueeze(-1) + deviation.unsqueeze(-1) * x)
    average = (p * weight).sum(-1, keepdim=True)
    terms = _terms(p, log_p, average) + _terms(q, log_q, 1 - average)
    # Where rare events are sought the nodes miss the bulk of the normal. There p = 0, as at the first node.
    missed = 0.5 * (1 + torch.erf((centre - (_HALF + 0.5) * _STEP) * math.sqrt(0.5)))
    return (terms * weight).sum(-1) + terms[..., 0] * missed


def _sigmoids(d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """σ(d), σ(−d) and their logarithms, each to the dtype's relative precision."""
    return d.sigmoid(), (-d).sigmoid(), logsigmoid(d), logsigmoid(-d)


def _terms(p: Tensor, log_p: Tensor, mean: Tensor) -> Tensor:
    """p g(u) = p u − p̄ (e^u − 1) at every node, p̄ the mean over nodes; p̄ where p = 0. Its error is eps·p·u."""
    log_mean = mean.clamp(min=torch.finfo(p.dtype).tiny).log()
    u = log_p - log_mean
    return torch.addcmul(p * u, mean, torch.expm1(u), value=-1)


# ---- the lemma


def lemma(belief: Belief) -> Tensor:
    """½ tr(AΣ), (B,)."""
    p = belief.mean.softmax(-1)  # (B, C)
    covariance = belief.covariance
    if isinstance(covariance, DiagonalPlusFactor):
        diagonal = (p * _complement(p) * covariance.diag).sum(-1)
        return 0.5 * (diagonal + _p_covariance(p, covariance.factor).diagonal(dim1=-2, dim2=-1).sum(-1))
    if isinstance(covariance, Directional):
        # tr(A QCQᵀ) + Σ_i d_i (PAP)_ii, with P = I − QQᵀ: PAP = A − AQQᵀ − QQᵀA + Q(QᵀAQ)Qᵀ
        q = covariance.basis.permute(1, 2, 0)  # (B, C, k)
        inner = _p_covariance(p, covariance.basis)  # QᵀAQ
        shifted = _shifted(p, covariance.basis).permute(1, 2, 0)
        aq = p.unsqueeze(-1) * (shifted - (p.unsqueeze(-2) @ shifted))
        rest = p * _complement(p) - 2 * (aq * q).sum(-1) + ((q @ inner) * q).sum(-1)
        if covariance.rank == p.shape[-1]:
            rest = torch.zeros_like(rest)
        return 0.5 * ((inner * covariance.core).sum((-2, -1)) + (covariance.diag * rest.clamp(min=0)).sum(-1))
    spread = pair_variances(belief.covariance_matrix)
    return 0.25 * ((p.unsqueeze(-2) @ spread).squeeze(-2) * p).sum(-1)


def spread(belief: Belief, value: Tensor) -> Tensor:
    """v, (B,), of which the lemma's `value` is an expansion."""
    p = belief.mean.softmax(-1)
    others = p.scatter(-1, p.argmax(-1, keepdim=True), 0).sum(-1)
    return 2 * value / others.clamp(min=torch.finfo(p.dtype).tiny)


def _complement(p: Tensor) -> Tensor:
    """1 − p, the largest p's as the sum of the others."""
    top = p.argmax(-1, keepdim=True)
    others = p.scatter(-1, top, 0).sum(-1, keepdim=True)
    return (1 - p).scatter(-1, top, others)


def _shifted(p: Tensor, columns: Tensor) -> Tensor:
    """Columns (k, B, C) less their entry at the most probable class."""
    top = p.argmax(-1, keepdim=True).expand(columns.shape[0], -1, 1)
    return columns - columns.gather(-1, top)


def _p_covariance(p: Tensor, columns: Tensor) -> Tensor:
    """UᵀAU, the covariance of the columns' entries under p, (B, k, k)."""
    v = _shifted(p, columns).permute(1, 0, 2)  # (B, k, C)
    mean = (v * p.unsqueeze(-2)).sum(-1)  # (B, k)
    return (v * p.unsqueeze(-2)) @ v.mT - mean.unsqueeze(-1) * mean.unsqueeze(-2)
