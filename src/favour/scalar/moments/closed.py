"""Moments of exp, sin, cos and integer powers in closed form, and the delta method.

With f⁽ʲ⁾ the j-th derivative, the coefficients of f(μ + σz) in the Hermite polynomials are E[f⁽ʲ⁾]σʲ/√j!
(Stein, j times). The residual is the sum of their squares from j = 2 on, so summing the series leaves no
difference of nearly equal terms.

Symbols: v = σ² variance; m_k = E[x^k].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.scalar.moments.record import Moments, widen
from favour.scalar.moments.tails import polynomial


def exp(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = eˣ:  mean = slope = e^{μ + v/2},  residual = e^{2μ + 2v}(1 − (1 + v)e^{−v})."""
    mean, variance, out = widen(mean, variance)
    value = torch.exp(mean + 0.5 * variance)
    # 1 − (1 + v)e^{−v} = e^{−v}(e^v − 1 − v), whose bracket is v²/2! + v³/3! + … for small v.
    small = variance < 0.3
    small_variance = torch.where(small, variance, 0.0)
    series = polynomial(small_variance, [1 / math.factorial(k) for k in range(13, 1, -1)]) * small_variance.square()
    decay = torch.exp(-variance)
    part = torch.where(small, decay * series, 1 - (1 + variance) * decay)
    peak = torch.exp(mean + variance)
    return Moments(value, value, peak * (peak * part)).to(out)  # peak² alone may overflow


def sin(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = sin x:  mean = e^{−v/2} sin μ,  slope = e^{−v/2} cos μ,

    residual = e^{−v}(sin²μ (cosh v − 1) + cos²μ (sinh v − v)), the Hermite series summed: every term is ≥ 0.
    """
    mean, variance, out = widen(mean, variance)
    sine, cosine, damp = torch.sin(mean), torch.cos(mean), torch.exp(-0.5 * variance)
    even, odd = _hyperbolic(variance)
    return Moments(damp * sine, damp * cosine, sine.square() * even + cosine.square() * odd).to(out)


def cos(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = cos x:  mean = e^{−v/2} cos μ,  slope = −e^{−v/2} sin μ,

    residual as for `sin` with sin and cos exchanged.
    """
    mean, variance, out = widen(mean, variance)
    sine, cosine, damp = torch.sin(mean), torch.cos(mean), torch.exp(-0.5 * variance)
    even, odd = _hyperbolic(variance)
    return Moments(damp * cosine, -damp * sine, cosine.square() * even + sine.square() * odd).to(out)


def _hyperbolic(v: Tensor) -> tuple[Tensor, Tensor]:
    """e^{−v}(cosh v − 1) = (1 − e^{−v})²/2 and e^{−v}(sinh v − v), without cancellation."""
    small = v < 0.7
    small_v = torch.where(small, v, 0.0)
    series = polynomial(small_v * small_v, [1 / math.factorial(k) for k in (15, 13, 11, 9, 7, 5, 3)]) * small_v**3
    odd = torch.where(small, torch.exp(-small_v) * series, -0.5 * torch.expm1(-2 * v) - v * torch.exp(-v))
    return 0.5 * torch.expm1(-v).square(), odd


def power(mean: Tensor, variance: Tensor, exponent: int) -> Moments:
    """f(x) = xⁿ for an integer n ≥ 0.

    With m_k = E[x^k] = μ m_{k−1} + (k − 1) v m_{k−2}, the j-th Hermite coefficient of f is E[f⁽ʲ⁾] σʲ/√j!, so
    slope = n m_{n−1} and residual = Σ_{j ≥ 2} (n!/(n − j)! · m_{n−j})² vʲ/j!, a sum of squares.
    """
    if exponent < 0:
        raise InvalidValue(f"power was given exponent={exponent}; a closed form needs an integer ≥ 0.")
    mean, variance, out = widen(mean, variance)
    raw = [torch.ones_like(mean), mean]
    for k in range(2, exponent + 1):
        raw.append(mean * raw[-1] + (k - 1) * variance * raw[-2])
    residual = torch.zeros_like(mean)
    for j in range(exponent, 1, -1):
        factor = math.perm(exponent, j) ** 2 / math.factorial(j)
        residual = residual + factor * raw[exponent - j].square() * variance**j
    slope = exponent * raw[exponent - 1] if exponent else torch.zeros_like(mean)
    return Moments(raw[exponent], slope, residual).to(out)


def square(mean: Tensor, variance: Tensor) -> Moments:
    """f(x) = x²:  mean = μ² + v,  slope = 2μ,  residual = 2v²."""
    return power(mean, variance, 2)


def second_order(value: Tensor, first: Tensor, second: Tensor, variance: Tensor) -> Moments:
    """The delta method, from f, f′ and f″ at μ:  mean = f + ½f″v,  slope = f′,  residual = ½f″²v².

    For functions such as log, which a Gaussian leaves the domain of, so that the moments do not exist. Where v = 0 the
    derivatives do not matter, and need not exist (√ at 0): those that do not are 0 there.
    """
    certain = variance <= 0
    second_term = torch.where(certain, 0.0, second) * variance
    first = torch.where(certain & ~first.isfinite(), 0.0, first)
    return Moments(value + 0.5 * second_term, first, 0.5 * second_term.square())
