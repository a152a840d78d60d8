"""Element-wise functions: value, derivative and Gaussian moments of each, in one record.

A `ScalarFunction` is all that a rule for an activation needs. The factories cover the element-wise
activations of `torch.nn` (values as in eval mode) and the usual arithmetic. How the moments are found:

- piecewise linear functions, steps, exp, sin, cos and integer powers: closed forms;
- smooth functions, and those with kinks that are not linear in between: quadrature;
- log, sqrt, reciprocal and others whose domain a Gaussian leaves: the delta method, declared `"linearised"`.

Saturating functions: in float32, tanh at μ = 6 has no digits left for its deviations, which drown in the 1.
If f(x) + f(−x) is constant, then E[f] − f(μ) is odd in μ, slope and residual are even. So sigmoid, tanh and
erf are integrated at −|μ|, less their limit at −∞, as functions that vanish there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from favour import moments as gauss
from favour.errors import InvalidValue
from favour.moments import Function, Kinks, Moments, Number

Exactness = Literal["exact", "moment-matched", "linearised"]


@dataclass(frozen=True, eq=False)
class ScalarFunction:
    """An element-wise function with its Gaussian moments.

    Attributes:
        name: what to call it in messages and tables.
        value: f.
        derivative: f′.
        moments: (mean, variance) of x to `Moments` of f(x), tensors of one shape.
        exactness: `"exact"` (affine), `"moment-matched"` or `"linearised"`.

    Example:
        >>> f = tanh()
        >>> m = f.moments(torch.tensor([0.5]), torch.tensor([0.04]))
        >>> round(m.mean.item(), 4), round(m.slope.item(), 4)
        (0.4483, 0.7747)
    """

    name: str
    value: Function
    derivative: Function
    moments: Callable[[Tensor, Tensor], Moments]
    exactness: Exactness = "moment-matched"


def surrogate_slope(fn: ScalarFunction, mean: Tensor, variance: Tensor, mode: str = "price") -> Moments:
    """Mean, slope and residual noise by which f(x) ≈ mean + slope·(x − μ) + noise, in one of three ways.

    | mode | mean | slope | residual |
    |---|---|---|---|
    | `"price"` | E[f] | E[f′] | Var f − E[f′]²σ² |
    | `"matched"` | E[f] | sd(f)/σ ≥ 0, and 0 where σ = 0 | 0 |
    | `"taylor"` | E[f] | f′(μ) | 0 |

    Args:
        fn: the function.
        mean: μ, any shape.
        variance: σ² ≥ 0, the same shape.
        mode: which of the three.

    Example:
        >>> m = surrogate_slope(relu(), torch.zeros(1), torch.ones(1), "matched")
        >>> round(m.slope.item(), 4), m.residual.item()
        (0.5838, 0.0)
    """
    if mode not in ("price", "matched", "taylor"):
        raise InvalidValue(f'the activation mode is {mode!r}; it must be "price", "matched" or "taylor".')
    mean, variance, out = gauss.widen(mean, variance)
    exact = fn.moments(mean, variance)
    if mode == "price":
        return exact.to(out)
    nothing = torch.zeros_like(exact.residual)
    if mode == "taylor":
        return Moments(exact.mean, fn.derivative(mean), nothing).to(out)
    spread = variance > 0
    square = exact.slope.square() + exact.residual / torch.where(spread, variance, 1.0)  # Var f / σ²
    spread = spread & (square > 0)  # √ has no gradient at 0
    ratio = torch.where(spread, torch.sqrt(torch.where(spread, square, 1.0)), 0.0)
    return Moments(exact.mean, ratio, nothing).to(out)


# Families


def _piecewise(
    name: str, value: Function, *, offset: Number = 0.0, slope: Number = 0.0, kinks: Kinks = ()
) -> ScalarFunction:
    """Continuous, offset + slope·x + Σ c·relu(x − t)."""
    kinks = tuple(kinks)
    return ScalarFunction(
        name,
        value,
        partial(gauss.piecewise_slope, slope=slope, kinks=kinks),
        partial(gauss.piecewise_linear, offset=offset, slope=slope, kinks=kinks),
    )


def _integrated(
    name: str,
    value: Function,
    derivative: Function,
    kinks: Sequence[float] = (),
    stable: Function | None = None,
) -> ScalarFunction:
    """By quadrature; `stable` equals `value` with fewer rounding errors or at less cost."""
    moments = partial(gauss.quadrature, stable or value, derivative=derivative, kinks=tuple(kinks))
    return ScalarFunction(name, value, derivative, moments)


def _saturating(name: str, value: Function, derivative: Function, vanishing: Function) -> ScalarFunction:
    """Odd up to a constant; `vanishing` is f less its limit at −∞, relatively accurate for x < 0."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        right = mean > 0
        left = torch.where(right, -mean, mean)
        shift, tilt, residual = gauss.deviations(vanishing, left, variance, derivative=derivative)
        shift = torch.where(right, -shift, shift)
        return Moments(value(mean) + shift, derivative(mean) + tilt, residual).to(out)

    return ScalarFunction(name, value, derivative, moments)


def _delta(name: str, value: Function, derivative: Function, second: Function) -> ScalarFunction:
    """By the delta method."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        return gauss.second_order(value(mean), derivative(mean), second(mean), variance).to(out)

    return ScalarFunction(name, value, derivative, moments, "linearised")


def _rescaled(inner: ScalarFunction, name: str, value: Function, beta: float, gain: float) -> ScalarFunction:
    """f(x) = gain·g(βx), for g of unit scale."""

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        m = inner.moments(beta * mean, beta**2 * variance)
        return Moments(gain * m.mean, (gain * beta) * m.slope, gain**2 * m.residual).to(out)

    return ScalarFunction(
        name, value, lambda x: (gain * beta) * inner.derivative(beta * x), moments, inner.exactness
    )


# Piecewise linear and constant


def affine(scale: Number = 1.0, shift: Number = 0.0) -> ScalarFunction:
    """scale·x + shift."""
    return ScalarFunction(
        "affine",
        lambda x: scale * x + shift,
        lambda x: scale * torch.ones_like(x),
        partial(gauss.affine, scale=scale, shift=shift),
        "exact",
    )


def relu() -> ScalarFunction:
    """max(x, 0)."""
    derivative = partial(gauss.piecewise_slope, slope=0.0, kinks=((0.0, 1.0),))
    return ScalarFunction("relu", F.relu, derivative, gauss.relu)


def relu6() -> ScalarFunction:
    """min(max(x, 0), 6)."""
    return _piecewise("relu6", F.relu6, kinks=[(0.0, 1.0), (6.0, -1.0)])


def leaky_relu(negative_slope: float = 0.01) -> ScalarFunction:
    """x for x > 0, negative_slope·x otherwise."""
    value = partial(F.leaky_relu, negative_slope=negative_slope)
    return _piecewise("leaky_relu", value, slope=negative_slope, kinks=[(0.0, 1.0 - negative_slope)])


def prelu(weight: Tensor) -> ScalarFunction:
    """x for x > 0, weight·x otherwise; `weight` broadcasts against x, e.g. (channels, 1, 1) for images."""
    return _piecewise(
        "prelu", lambda x: torch.where(x > 0, x, weight * x), slope=weight, kinks=[(0.0, 1.0 - weight)]
    )


def rrelu(lower: float = 1.0 / 8, upper: float = 1.0 / 3) -> ScalarFunction:
    """In eval mode: leaky ReLU with the mean slope (lower + upper)/2."""
    slope = 0.5 * (lower + upper)
    value = partial(F.rrelu, lower=lower, upper=upper, training=False)
    return _piecewise("rrelu", value, slope=slope, kinks=[(0.0, 1.0 - slope)])


def abs() -> ScalarFunction:
    """|x|."""
    return _piecewise("abs", torch.abs, slope=-1.0, kinks=[(0.0, 2.0)])


def clamp(min: float | None = None, max: float | None = None) -> ScalarFunction:
    """min(max(x, lower), upper), either bound optional."""
    if min is None and max is None:
        return affine()
    if min is not None and max is not None and min > max:
        raise InvalidValue(f"clamp was given min={min} > max={max}; exchange them.")
    value = partial(torch.clamp, min=min, max=max)
    if min is None:
        return _piecewise("clamp", value, slope=1.0, kinks=[(float(max), -1.0)])  # type: ignore[arg-type]
    kinks = [(float(min), 1.0)] + ([] if max is None else [(float(max), -1.0)])
    return _piecewise("clamp", value, offset=float(min), kinks=kinks)


def hardtanh(min_val: float = -1.0, max_val: float = 1.0) -> ScalarFunction:
    """x kept between min_val and max_val."""
    value = partial(F.hardtanh, min_val=min_val, max_val=max_val)
    return _piecewise("hardtanh", value, offset=min_val, kinks=[(min_val, 1.0), (max_val, -1.0)])


def hardsigmoid() -> ScalarFunction:
    """(x + 3)/6 kept between 0 and 1."""
    return _piecewise("hardsigmoid", F.hardsigmoid, kinks=[(-3.0, 1 / 6), (3.0, -1 / 6)])


def softshrink(lambd: float = 0.5) -> ScalarFunction:
    """x moved towards 0 by λ, and 0 for |x| ≤ λ."""
    kinks = [(-lambd, -1.0), (lambd, 1.0)]
    return _piecewise("softshrink", partial(F.softshrink, lambd=lambd), offset=lambd, slope=1.0, kinks=kinks)


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

    return ScalarFunction(name, value, torch.zeros_like, moments)


# By quadrature on pieces


def hardshrink(lambd: float = 0.5) -> ScalarFunction:
    """x where |x| > λ, else 0."""
    value = partial(F.hardshrink, lambd=lambd)
    return _integrated("hardshrink", value, lambda x: (x.abs() > lambd).to(x.dtype), (-lambd, lambd))


def threshold(threshold: float, value: float) -> ScalarFunction:
    """x where x > threshold, else value."""
    function = partial(F.threshold, threshold=threshold, value=value)
    return _integrated("threshold", function, lambda x: (x > threshold).to(x.dtype), (threshold,))


def hardswish() -> ScalarFunction:
    """x·hardsigmoid(x)."""

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x < -3, 0.0, torch.where(x > 3, 1.0, x / 3 + 0.5))

    return _integrated("hardswish", F.hardswish, derivative, (-3.0, 3.0))


def elu(alpha: float = 1.0) -> ScalarFunction:
    """x for x > 0, α(eˣ − 1) otherwise."""
    value = partial(F.elu, alpha=alpha)

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x > 0, 1.0, alpha * torch.exp(x.clamp(max=0)))

    def moments(mean: Tensor, variance: Tensor) -> Moments:
        mean, variance, out = gauss.widen(mean, variance)
        far = mean < -1  # there integrate f + α, which vanishes on the left

        def local(x: Tensor) -> Tensor:
            left = x.clamp(max=0)
            rise = torch.where(far, torch.exp(left), torch.expm1(left))
            return alpha * rise + torch.relu(x)

        shift, tilt, residual = gauss.deviations(local, mean, variance, derivative=derivative, kinks=(0.0,))
        return Moments(value(mean) + shift, derivative(mean) + tilt, residual).to(out)

    return ScalarFunction("elu", value, derivative, moments)


def selu() -> ScalarFunction:
    """1.0507·elu(x, 1.6733)."""
    return _rescaled(elu(1.6732632423543772), "selu", F.selu, 1.0, 1.0507009873554805)


def celu(alpha: float = 1.0) -> ScalarFunction:
    """α·elu(x/α)."""
    return _rescaled(elu(), "celu", partial(F.celu, alpha=alpha), 1.0 / alpha, alpha)


def softsign() -> ScalarFunction:
    """x/(1 + |x|)."""
    return _integrated("softsign", F.softsign, lambda x: (1 + x.abs()).square().reciprocal(), (0.0,))


# Smooth


def sigmoid() -> ScalarFunction:
    """1/(1 + e^{−x})."""
    derivative = lambda x: torch.sigmoid(x) * torch.sigmoid(-x)  # noqa: E731
    return _saturating("sigmoid", torch.sigmoid, derivative, torch.sigmoid)


def tanh() -> ScalarFunction:
    """tanh x."""

    def derivative(x: Tensor) -> Tensor:  # 1 − tanh² = 4σ(2x)σ(−2x)
        return 4 * torch.sigmoid(2 * x) * torch.sigmoid(-2 * x)

    return _saturating("tanh", torch.tanh, derivative, lambda x: 2 * torch.sigmoid(2 * x))


def erf() -> ScalarFunction:
    """erf x."""
    return _saturating("erf", torch.erf, _erf_slope, lambda x: torch.special.erfc(-x))


def erfc() -> ScalarFunction:
    """1 − erf x."""
    value = torch.special.erfc
    return _saturating("erfc", value, lambda x: -_erf_slope(x), lambda x: -torch.special.erfc(-x))


def _erf_slope(x: Tensor) -> Tensor:
    return (2 / math.sqrt(math.pi)) * torch.exp(-x * x)


def atan() -> ScalarFunction:
    """arctan x."""
    return _integrated("atan", torch.atan, lambda x: 1 / (1 + x * x))


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

        def stable(x: Tensor) -> Tensor:  # xΦ(x) = max(x, 0) − |x|Q(|x|)
            a = torch.where(x < 0, -x, x)
            return torch.where(x < 0, 0.0, x) - a * gauss.normal_tail(a)

        def derivative(x: Tensor) -> Tensor:
            gate = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
            return gate + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)

        return _integrated("gelu", value, derivative, stable=stable)
    root, cubic = 2 * math.sqrt(2 / math.pi), 0.044715  # ½(1 + tanh u) = σ(2u), u = √(2/π)(x + 0.044715x³)

    def smooth(x: Tensor) -> Tensor:
        return x * torch.sigmoid(root * x * (1 + cubic * x * x))

    def slope(x: Tensor) -> Tensor:
        u = root * x * (1 + cubic * x * x)
        return torch.sigmoid(u) * (1 + x * torch.sigmoid(-u) * root * (1 + 3 * cubic * x * x))

    return _integrated("gelu", value, slope, stable=smooth)


def silu() -> ScalarFunction:
    """x·σ(x)."""

    def derivative(x: Tensor) -> Tensor:
        gate = torch.sigmoid(x)
        return gate * (1 + x * torch.sigmoid(-x))

    return _integrated("silu", F.silu, derivative)


def mish() -> ScalarFunction:
    """x·tanh(softplus(x)) = x·n/(n + 2), n = eˣ(eˣ + 2)."""

    def gate(x: Tensor) -> Tensor:
        e = torch.exp(x.clamp(max=20))
        n = e * (e + 2)
        return n / (n + 2)

    def derivative(x: Tensor) -> Tensor:  # gate′ = σ(x)(1 − gate²)
        g = gate(x)
        return g + x * torch.sigmoid(x) * (1 - g) * (1 + g)

    return _integrated("mish", F.mish, derivative, stable=lambda x: x * gate(x))


def softplus(beta: float = 1.0, threshold: float = 20.0) -> ScalarFunction:
    """log(1 + e^{βx})/β, and x where βx > threshold."""
    sharp = threshold < 15  # there the switch to x is a visible jump

    def derivative(x: Tensor) -> Tensor:
        return torch.where(x > threshold, 1.0, torch.sigmoid(x))

    unit = _integrated(
        "softplus", partial(F.softplus, threshold=threshold), derivative, (threshold,) if sharp else ()
    )
    return _rescaled(unit, "softplus", partial(F.softplus, beta=beta, threshold=threshold), beta, 1.0 / beta)


def logsigmoid() -> ScalarFunction:
    """log σ(x) = −softplus(−x)."""
    unit = _integrated("logsigmoid", lambda x: -F.logsigmoid(-x), torch.sigmoid)
    return _rescaled(unit, "logsigmoid", F.logsigmoid, -1.0, -1.0)


# Arithmetic


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


def tan() -> ScalarFunction:
    """tan x, by the delta method: it has poles."""
    second = lambda x: 2 * torch.tan(x) * (1 + torch.tan(x) ** 2)  # noqa: E731
    return _delta("tan", torch.tan, lambda x: 1 + torch.tan(x) ** 2, second)


def log() -> ScalarFunction:
    """log x, by the delta method."""
    return _delta("log", torch.log, torch.reciprocal, lambda x: -x.square().reciprocal())


def log1p() -> ScalarFunction:
    """log(1 + x), by the delta method."""
    return _delta(
        "log1p", torch.log1p, lambda x: (1 + x).reciprocal(), lambda x: -(1 + x).square().reciprocal()
    )


def sqrt() -> ScalarFunction:
    """√x, by the delta method."""
    return _power("sqrt", torch.sqrt, 0.5)


def rsqrt() -> ScalarFunction:
    """1/√x, by the delta method."""
    return _power("rsqrt", torch.rsqrt, -0.5)


def reciprocal() -> ScalarFunction:
    """1/x, by the delta method."""
    return _power("reciprocal", torch.reciprocal, -1.0)


def square() -> ScalarFunction:
    """x²."""
    return ScalarFunction("square", torch.square, lambda x: 2 * x, gauss.square)


def pow(exponent: float) -> ScalarFunction:
    """x to a fixed power: exact moments for an integer ≥ 0, else the delta method."""
    n = int(exponent)
    if n != exponent or n < 0:
        return _power("pow", lambda x: torch.pow(x, exponent), float(exponent))
    return ScalarFunction(
        "pow",
        lambda x: torch.pow(x, n),
        lambda x: n * torch.pow(x, n - 1) if n else torch.zeros_like(x),
        partial(gauss.power, exponent=n),
        "exact" if n < 2 else "moment-matched",
    )


def _power(name: str, value: Function, p: float) -> ScalarFunction:
    return _delta(name, value, lambda x: p * torch.pow(x, p - 1), lambda x: p * (p - 1) * torch.pow(x, p - 2))
