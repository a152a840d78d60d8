"""Functions with kinks or jumps: piecewise linear and constant ones in closed form, others by quadrature."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import InvalidValue
from favour.scalar import moments as gauss
from favour.scalar.families import integrated, piecewise, rescaled
from favour.scalar.function import ScalarFunction
from favour.scalar.moments import Function, Moments, Number


def affine(scale: Number = 1.0, shift: Number = 0.0) -> ScalarFunction:
    """scale·x + shift."""
    return ScalarFunction(
        "affine",
        lambda x: scale * x + shift,
        lambda x: scale * torch.ones_like(x),
        partial(gauss.affine, scale=scale, shift=shift),
        "exact",
        lines=((scale, shift),),
    )


def relu() -> ScalarFunction:
    """max(x, 0)."""
    kinks = ((0.0, 1.0),)
    derivative = partial(gauss.piecewise_slope, slope=0.0, kinks=kinks)
    curvature = partial(gauss.piecewise_curvature, kinks=kinks)
    lines = ((0.0, 0.0), (1.0, 0.0))
    return ScalarFunction("relu", F.relu, derivative, gauss.relu, kinks=(0.0,), curvature=curvature, lines=lines)


def relu6() -> ScalarFunction:
    """min(max(x, 0), 6)."""
    return piecewise("relu6", F.relu6, kinks=[(0.0, 1.0), (6.0, -1.0)])


def leaky_relu(negative_slope: float = 0.01) -> ScalarFunction:
    """x for x > 0, negative_slope·x otherwise."""
    value = partial(F.leaky_relu, negative_slope=negative_slope)
    return piecewise("leaky_relu", value, slope=negative_slope, kinks=[(0.0, 1.0 - negative_slope)])


def prelu(weight: Tensor) -> ScalarFunction:
    """x for x > 0, weight·x otherwise; `weight` broadcasts against x, e.g. (channels, 1, 1) for images."""
    return piecewise("prelu", lambda x: torch.where(x > 0, x, weight * x), slope=weight, kinks=[(0.0, 1.0 - weight)])


def rrelu(lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> ScalarFunction:
    """In eval mode: leaky ReLU with the mean slope (lower + upper)/2."""
    slope = 0.5 * (lower + upper)
    value = partial(F.rrelu, lower=lower, upper=upper, training=False)
    return piecewise("rrelu", value, slope=slope, kinks=[(0.0, 1.0 - slope)])


def abs() -> ScalarFunction:
    """|x|."""
    return piecewise("abs", torch.abs, slope=-1.0, kinks=[(0.0, 2.0)])


def clamp(min: float | None = None, max: float | None = None) -> ScalarFunction:
    """min(max(x, lower), upper), either bound optional."""
    if min is None and max is None:
        return affine()
    if min is not None and max is not None and min > max:
        raise InvalidValue(f"clamp was given min={min} > max={max}; exchange them.")
    value = partial(torch.clamp, min=min, max=max)
    if min is None:
        return piecewise("clamp", value, slope=1.0, kinks=[(float(max), -1.0)])  # type: ignore[arg-type]
    kinks = [(float(min), 1.0)] + ([] if max is None else [(float(max), -1.0)])
    return piecewise("clamp", value, offset=float(min), kinks=kinks)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> ScalarFunction:
    """x kept between min_val and max_val."""
    value = partial(F.hardtanh, min_val=min_val, max_val=max_val)
    return piecewise("hardtanh", value, offset=min_val, kinks=[(min_val, 1.0), (max_val, -1.0)])


def hardsigmoid() -> ScalarFunction:
    """(x + 3)/6 kept between 0 and 1."""
    return piecewise("hardsigmoid", F.hardsigmoid, kinks=[(-3.0, 1 / 6), (3.0, -1 / 6)])


def softshrink(lambd: float = 0.5) -> ScalarFunction:
    """x moved towards 0 by λ, and 0 for |x| ≤ λ."""
    kinks = [(-lambd, -1.0), (lambd, 1.0)]
    return piecewise("softshrink", partial(F.softshrink, lambd=lambd), offset=lambd, slope=1.0, kinks=kinks)


def heaviside(value_at_zero: float = 0.0) -> ScalarFunction:
    """0 for x < 0, 1 for x > 0."""

    def value(x: Tensor) -> Tensor:  # torch has no gradient for it
        return torch.heaviside(x.detach(), torch.full_like(x, value_at_zero))

    return _step("heaviside", value, low=0.0)


def sign() -> ScalarFunction:
    """−1, 0 or 1."""
    return _step("sign", torch.sign, low=-1.0)


def _step(name: str, value: Function, low: float) -> ScalarFunction:
    def moments(mean: Tensor, variance: Tensor) -> Moments:
        m = gauss.step(mean, variance, low=low, high=1.0)
        return m._replace(mean=torch.where(variance > 0, m.mean, value(mean)))

    return ScalarFunction(name, value, torch.zeros_like, moments, kinks=(0.0,))


# By quadrature on pieces


def hardshrink(lambd: float = 0.5) -> ScalarFunction:
    """x where |x| > λ, else 0."""
    value = partial(F.hardshrink, lambd=lambd)

    def derivative(x: Tensor) -> Tensor:
        return (x.abs() > lambd).to(x.dtype)

    return integrated("hardshrink", value, derivative, (-lambd, lambd), ends=((0.0, 1.0), (0.0, 1.0)))


def threshold(threshold: float, value: float) -> ScalarFunction:
    """x where x > threshold, else value."""
    function = partial(F.threshold, threshold=threshold, value=value)

    def derivative(x: Tensor) -> Tensor:
        return (x > threshold).to(x.dtype)

    return integrated("threshold", function, derivative, (threshold,), ends=((value, 0.0), (0.0, 1.0)))


def hardswish() -> ScalarFunction:
    """x·hardsigmoid(x)."""

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, x / 3 + 0.5))

    return integrated("hardswish", F.hardswish, derivative, (-3.0, 3.0), ends=((0.0, 0.0), (0.0, 1.0)))


def elu(alpha: float = 1.0) -> ScalarFunction:
    """x for x > 0, α(eˣ − 1) otherwise."""
    value = partial(F.elu, alpha=alpha)

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x > 0, 1.0, alpha * torch.exp(x.clamp(max=0)))

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        base = mean.detach().clamp(-60, 0)  # eˣ − e^b = e^b(e^{x − b} − 1) keeps its digits on the left
        scale = alpha * torch.exp(base)

        def local(x: Tensor) -> Tensor:  # f(x) − f(b)
            return torch.addcmul(torch.relu(x), scale, torch.expm1(x.clamp(max=0) - base))

        line = (-alpha * torch.expm1(base), 1.0)
        shift, tilt, residual = gauss.deviations(
            local, mean, variance, derivative=derivative, kinks=(0.0,), ends=(None, line)
        )
        return Moments(value(mean) + shift, derivative(mean) + tilt, residual).to(out)

    return ScalarFunction("elu", value, derivative, moments, kinks=(0.0,))


def selu() -> ScalarFunction:
    """1.0507·elu(x, 1.6733)."""
    return rescaled(elu(1.6732632423543772), "selu", F.selu, 1.0, 1.0507009873554805)


def celu(alpha: float = 1.0) -> ScalarFunction:
    """α·elu(x/α)."""
    return rescaled(elu(), "celu", partial(F.celu, alpha=alpha), 1.0 / alpha, alpha)


def softsign() -> ScalarFunction:
    """x/(1 + |x|)."""
    return integrated("softsign", F.softsign, lambda x: (1 + x.abs()).square().reciprocal(), (0.0,))
