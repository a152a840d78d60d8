"""Smooth functions: activations by quadrature, GELU, exp, sin, cos and integer powers in closed form."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import InvalidValue
from favour.scalar import moments as gauss
from favour.scalar.families import integrated, rescaled, saturating
from favour.scalar.function import ScalarFunction
from favour.scalar.moments import Moments


def sigmoid() -> ScalarFunction:
    """1/(1 + e^{−x})."""
    derivative = lambda x: torch.sigmoid(x) * torch.sigmoid(-x)  # noqa: E731
    return saturating("sigmoid", torch.sigmoid, derivative, torch.sigmoid)


def tanh() -> ScalarFunction:
    """tanh x."""

    def derivative(x: Tensor) -> Tensor:  # 1 − tanh² = 4σ(2x)σ(−2x)
        return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)

    return saturating("tanh", torch.tanh, derivative, lambda x: 2 * torch.sigmoid(2 * x))


def erf() -> ScalarFunction:
    """erf x."""
    return saturating("erf", torch.erf, _erf_slope, lambda x: torch.special.erfc(-x))


def erfc() -> ScalarFunction:
    """1 − erf x."""
    value = torch.special.erfc
    return saturating("erfc", value, lambda x: -_erf_slope(x), lambda x: -torch.special.erfc(-x))


def _erf_slope(x: Tensor) -> Tensor:
    return (2 / math.sqrt(math.pi)) * torch.exp(-x * x)


def atan() -> ScalarFunction:
    """arctan x."""
    return integrated("atan", torch.atan, lambda x: 1 / (1 + x * x))


def tanhshrink() -> ScalarFunction:
    """x − tanh x."""
    inner = tanh()

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        m = inner.moments(mean, variance)
        slope = torch.tanh(mean).square() + (inner.derivative(mean) - m.slope)
        return Moments(F.tanhshrink(mean) + (torch.tanh(mean) - m.mean), slope, m.residual).to(out)

    return ScalarFunction("tanhshrink", F.tanhshrink, lambda x: torch.tanh(x).square(), moments)


def gelu(approximate: str = "none") -> ScalarFunction:
    """x·Φ(x), or its tanh approximation."""
    if approximate not in ("none", "tanh"):
        raise InvalidValue(f'gelu was given approximate={approximate!r}; it must be "none" or "tanh".')
    value = partial(F.gelu, approximate=approximate)
    if approximate == "none":

        def derivative(x: Tensor) -> Tensor:
            gate = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
            return gate + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

        return ScalarFunction("gelu", value, derivative, gauss.gelu, curvature=gauss.gelu_curvature)
    root, cubic = 2 * math.sqrt(2 / math.pi), 0.044715  # ½(1 + tanh u) = σ(2u), u = √(2/π)(x + 0.044715x³)

    def smooth(x: Tensor) -> Tensor:
        return x * torch.sigmoid(root * x * (1 + cubic * x * x))

    def slope(x: Tensor) -> Tensor:
        u = root * x * (1 + cubic * x * x)
        return torch.sigmoid(u) * (1 + x * torch.sigmoid(-u) * root * (1 + 3 * cubic * x * x))

    return integrated("gelu", value, slope, stable=smooth)


def silu() -> ScalarFunction:
    """x·σ(x)."""

    def derivative(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return gate * (1 + x * torch.sigmoid(-x))

    return integrated("silu", F.silu, derivative)


def mish() -> ScalarFunction:
    """x·tanh(softplus(x)) = x·n/(n + 2), n = eˣ(eˣ + 2)."""

    def gate(x: Tensor) -> Tensor:
        e = torch.exp(x.clamp(max=20))
        n = e * (e + 2)
        return n / (n + 2)

    def derivative(x: Tensor) -> Tensor:  # gate′ = σ(x)(1 − gate²)
        g = gate(x)
        return g + x * torch.sigmoid(x) * (1 - g) * (1 + g)

    return integrated("mish", F.mish, derivative, stable=lambda x: x * gate(x))


def softplus(beta: float = 1.0, threshold: float = 20.0) -> ScalarFunction:
    """log(1 + e^{βx})/β, and x where βx > threshold."""
    sharp = threshold < 15  # there the switch to x is a visible jump

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x > threshold, 1.0, torch.sigmoid(x))

    unit = integrated("softplus", partial(F.softplus, threshold=threshold), derivative, (threshold,) if sharp else ())
    return rescaled(unit, "softplus", partial(F.softplus, beta=beta, threshold=threshold), beta, 1.0 / beta)


def logsigmoid() -> ScalarFunction:
    """log σ(x) = −softplus(−x)."""
    unit = integrated("logsigmoid", lambda x: -F.logsigmoid(-x), torch.sigmoid)
    return rescaled(unit, "logsigmoid", F.logsigmoid, -1.0, -1.0)


def exp() -> ScalarFunction:
    """eˣ."""
    return ScalarFunction("exp", torch.exp, torch.exp, gauss.exp)


def expm1() -> ScalarFunction:
    """eˣ − 1."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        return gauss.exp(mean, variance)._replace(mean=torch.expm1(mean + 0.5 * variance)).to(out)

    return ScalarFunction("expm1", torch.expm1, torch.exp, moments)


def sin() -> ScalarFunction:
    """sin x."""
    return ScalarFunction("sin", torch.sin, torch.cos, gauss.sin)


def cos() -> ScalarFunction:
    """cos x."""
    return ScalarFunction("cos", torch.cos, lambda x: -torch.sin(x), gauss.cos)


def square() -> ScalarFunction:
    """x²."""
    return ScalarFunction("square", torch.square, lambda x: 2 * x, gauss.square)
