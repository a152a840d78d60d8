"""What a nonlinearity leaves over, between two inputs.

The pre-activations x_a, x_b of two inputs that meet the same weights are taken for jointly Gaussian with correlation ρ.
With z the standardised x and He_k the Hermite polynomials, f(x_a) = Σ_k α_k(a) He_k(z_a)/√k!, and by Mehler's formula

    Cov(f(x_a), f(x_b)) = Σ_{k ≥ 1} ρ^k α_k(a) α_k(b),     α_k = E[f(x) He_k(z)]/√k!.

k = 1 is the straight line of the surrogate, since α₁ = σE[f′]. The rest is its noise: N_a = Σ_{k ≥ 2} α_k(a)² for one
input, and between two

    N_ab ≈ Σ_{k = 2}^K ρ^k α_k(a) α_k(b) + ρ^(K+1) √(r_a r_b),     r = N − Σ_{k = 2}^K α_k² ≥ 0.

The sum is exact; the last term gives all higher orders the power of the first of them, so that the error is at most
2|ρ|^(K+1)√(r_a r_b). K is odd. N_aa = N_a whatever the α are, and N_ab is positive semi-definite, for the powers of a
correlation matrix are.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from favour.graph.tracing import constant
from favour.scalar.function import ScalarFunction
from favour.scalar.moments.piecewise import piecewise_linear
from favour.scalar.moments.record import Number, widen
from favour.scalar.moments.relu import relu
from favour.scalar.table import table
from favour.surrogate import partners


def safe_root(v: Tensor) -> Tensor:
    """√v with gradient 0 where v is 0 or below."""
    positive = v > torch.finfo(v.dtype).tiny
    return torch.where(positive, torch.where(positive, v, 1.0).sqrt(), 0.0)


def correlation(c: Tensor, variance: Tensor) -> Tensor:
    """ρ_ab = C_ab/√(v_a v_b), (q, batch, *event), and 0 where a variance is."""
    root = safe_root(variance)
    inverse = torch.where(root > 0, 1 / torch.where(root > 0, root, 1.0), 0.0)
    return (c * inverse * partners(inverse, c.shape[0])).clamp(-1, 1)


ORDER = 5  # K
NODES = 20


@constant
def hermite_nodes() -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Gauss–Hermite nodes z, and by node the weights w He_k(z)/√k! for k = 2 … K."""
    z, w = np.polynomial.hermite_e.hermegauss(NODES)
    orders = range(2, ORDER + 1)
    rows = [
        w / w.sum() * np.polynomial.hermite_e.hermeval(z, np.eye(k + 1)[k]) / math.factorial(k) ** 0.5 for k in orders
    ]
    return tuple(z.tolist()), tuple(map(tuple, np.stack(rows, 1).tolist()))


def _slope(f: ScalarFunction, like: Tensor, at: Number) -> Tensor:
    return f.derivative(torch.zeros_like(like) + at)


def _straight(f: ScalarFunction) -> bool:
    """Made of straight lines, as its moments tell."""
    return getattr(f.moments, "func", f.moments) in (relu, piecewise_linear)


def _smooth(f: ScalarFunction, mean: Tensor, sigma: Tensor, ramps: list[tuple[Number, Tensor]]) -> list[Tensor]:
    """α₂ … α_K of f less its ramps."""
    if _straight(f):
        return [torch.zeros_like(mean) for _ in range(2, ORDER + 1)]
    z, weights = (table(numbers, mean) for numbers in hermite_nodes())
    x = mean.unsqueeze(-1) + sigma.unsqueeze(-1) * z
    smooth, level, slope = f.value(x.movedim(-1, 0)).movedim(0, -1), f.value(mean), f.derivative(mean)
    for t, jump in ramps:
        smooth = smooth - jump.unsqueeze(-1) * (x - t).clamp(min=0)
        level, slope = level - jump * (mean - t).clamp(min=0), slope - jump * (mean > t)
    # A line has no part in these orders, and less its tangent f loses no digits where σ is small.
    value = smooth - level.unsqueeze(-1) - (slope * sigma).unsqueeze(-1) * z
    return list((value @ weights).unbind(-1))


def hermite(f: ScalarFunction, mean: Tensor, variance: Tensor) -> list[Tensor]:
    """α₂ … α_K of f at x ~ N(mean, variance).

    What is linearised has a domain that quadrature leaves, and its remainder is its second order,
    α₂ = σ²f″(μ)/√2.

    f less a ramp J(x − t)⁺ for every kink t, where its slope jumps by J, is smooth enough for Gauss–Hermite quadrature;
    the ramps have α_k = J σ φ(h) He_(k−2)(h)/√k! with h = (t − μ)/σ.
    """
    mean, variance, out = widen(mean, variance)
    sigma = torch.sqrt(variance.clamp_min(torch.finfo(mean.dtype).eps ** 2))
    if f.exactness == "linearised":
        curvature = torch.zeros_like(mean) if f.curvature is None else f.curvature(mean, variance)
        second = torch.where(variance > 0, variance * curvature / math.sqrt(2), 0.0).to(out)
        return [second, *[torch.zeros_like(second)] * (ORDER - 2)]
    step = torch.finfo(mean.dtype).eps ** 0.5
    ramps = [(t, _slope(f, mean, t + step) - _slope(f, mean, t - step)) for t in f.kinks]
    alphas = _smooth(f, mean, sigma, ramps)
    for t, jump in ramps:
        h = (t - mean) / sigma
        before, polynomial = torch.zeros_like(h), torch.ones_like(h)  # He₋₁, He₀
        peak = jump * sigma * torch.exp(-0.5 * h * h) / math.sqrt(2 * math.pi)
        for k in range(2, ORDER + 1):
            alphas[k - 2] = alphas[k - 2] + peak * polynomial / math.factorial(k) ** 0.5
            before, polynomial = polynomial, h * polynomial - (k - 2) * before
    return [alpha.to(out) for alpha in alphas]


def remainder_between(f: ScalarFunction, mean: Tensor, variance: Tensor, residual: Tensor, c: Tensor) -> Tensor:
    """N_ab of f(x) less its line, (q, batch, *event).

    Args:
        f: The function.
        mean, variance: Of x, (batch, *event).
        residual: N, (batch, *event).
        c: C_ab = Cov(x_a, x_b), (q, batch, *event).
    """
    q, rho = c.shape[0], correlation(c, variance)
    alphas = hermite(f, mean, variance)
    power = torch.stack(alphas).square().sum(0)
    over = power > residual  # quadrature may find more than there is
    shrink = torch.where(over, safe_root(residual) / safe_root(torch.where(over, power, 1.0)).clamp_min(1e-30), 1.0)
    rest = safe_root(residual - power * shrink.square())
    total = rho * partners(rest, q) * rest
    for alpha in reversed([alpha * shrink for alpha in alphas]):  # Horner
        total = rho * (total + partners(alpha, q) * alpha)
    return rho * total
