"""Functions of one kind, each from the little that tells them apart.

Saturating functions: in float32, tanh at μ = 6 has no digits left for its deviations, which drown in the 1.
If f(x) + f(−x) is constant, then E[f] − f(μ) is odd in μ, slope and residual are even. So sigmoid, tanh and
erf are integrated at −|μ|, less their limit at −∞, as functions that vanish there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from favour.scalar import moments as gauss
from favour.scalar.function import ScalarFunction
from favour.scalar.moments import Function, Kinks, Line, Moments, Number


def piecewise(
    name: str, value: Function, *, offset: Number = 0.0, slope: Number = 0.0, kinks: Kinks = ()
) -> ScalarFunction:
    """Continuous, offset + slope·x + Σ c·relu(x − t)."""
    kinks = tuple(kinks)
    lines = [(slope, offset)]
    for t, c in kinks:
        lines.append((lines[-1][0] + c, lines[-1][1] - c * t))
    return ScalarFunction(
        name,
        value,
        partial(gauss.piecewise_slope, slope=slope, kinks=kinks),
        partial(gauss.piecewise_linear, offset=offset, slope=slope, kinks=kinks),
        kinks=tuple(t for t, _ in kinks),
        curvature=partial(gauss.piecewise_curvature, kinks=kinks),
        lines=tuple(lines),
    )


def integrated(
    name: str,
    value: Function,
    derivative: Function,
    kinks: Sequence[float] = (),
    stable: Function | None = None,
    ends: tuple[Line | None, Line | None] = (None, None),
) -> ScalarFunction:
    """By quadrature; `stable` equals `value` with fewer rounding errors or at less cost."""
    kinks = tuple(kinks)
    moments = partial(gauss.quadrature, stable or value, derivative=derivative, kinks=kinks, ends=ends)
    return ScalarFunction(name, value, derivative, moments, kinks=kinks)


def saturating(name: str, value: Function, derivative: Function, vanishing: Function) -> ScalarFunction:
    """Odd up to a constant; `vanishing` is f less its limit at −∞, relatively accurate for x < 0."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        right = mean > 0
        left = torch.where(right, -mean, mean)
        shift, tilt, residual = gauss.deviations(vanishing, left, variance, derivative=derivative)
        shift = torch.where(right, -shift, shift)
        return Moments(value(mean) + shift, derivative(mean) + tilt, residual).to(out)

    return ScalarFunction(name, value, derivative, moments)


def delta(name: str, value: Function, derivative: Function, second: Function) -> ScalarFunction:
    """By the delta method."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        return gauss.second_order(value(mean), derivative(mean), second(mean), variance).to(out)

    def curvature(mean: Tensor, variance: Tensor) -> Tensor:
        return second(mean)

    return ScalarFunction(name, value, derivative, moments, "linearised", curvature=curvature)


def rescaled(inner: ScalarFunction, name: str, value: Function, beta: float, gain: float) -> ScalarFunction:
    """f(x) = gain·g(βx), for g of unit scale."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        m = inner.moments(beta * mean, beta**2 * variance)
        return Moments(gain * m.mean, (gain * beta) * m.slope, gain**2 * m.residual).to(out)

    def derivative(x: Tensor) -> Tensor:
        return (gain * beta) * inner.derivative(beta * x)

    kinks = tuple(t / beta for t in inner.kinks)
    return ScalarFunction(name, value, derivative, moments, inner.exactness, kinks[:: 1 if beta > 0 else -1])
