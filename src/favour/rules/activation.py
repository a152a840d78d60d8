"""Element-wise functions of one uncertain tensor (paper section 3.3, and the `"price"` mode).

For y = f(x), x ~ N(μ, v) marginally, all three modes have m = E[f(x)]:

| mode      | G               | N                  |
|-----------|-----------------|--------------------|
| `price`   | E[f′(x)]        | Var f − E[f′]²v ≥ 0 |
| `matched` | √(Var f / v)    | 0                  |
| `taylor`  | f′(μ)           | 0                  |

`price` gets the marginal variance right and, by Price's theorem, the covariance between two entries to first order in
it. The functions and their moments are in `favour.scalar` and `favour.scalar.moments`; this file only says which
overload is which.

A PReLU whose slope w is uncertain, y = x⁺ − w x⁻ with x⁻ = max(−x, 0), is one with the slope w̄ less (w − w̄)x⁻: for w
independent of x that adds the map −E[x⁻] from w, and the noise Var w · Var x⁻.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from favour import scalar
from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Link, Traits
from favour.rules.registry import elementwise, pointwise_surrogate, rule
from favour.rules.shape import broadcast
from favour.scalar import composed, intervals, surrogate_slope
from favour.surrogate import DiagonalNoise, Surrogate, compose, scaling
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten

RISING = Traits(monotone=True)

elementwise(aten.relu.default, function=scalar.relu, traits=Traits(homogeneous=True, monotone=True))
elementwise(aten.relu6.default, function=scalar.relu6, traits=RISING)
elementwise(
    aten.leaky_relu.default,
    function=scalar.leaky_relu,
    traits=Traits(homogeneous=True, monotone=lambda slope=0.01: slope >= 0),
)
elementwise(aten.rrelu.default, function=lambda lower=1 / 8, upper=1 / 3, training=False: scalar.rrelu(lower, upper))
elementwise(
    aten.elu.default,
    function=lambda alpha=1.0, scale=1.0, input_scale=1.0: _elu(alpha, scale, input_scale),
    traits=Traits(monotone=lambda alpha=1.0, scale=1.0, input_scale=1.0: alpha >= 0),
)
elementwise(aten.selu.default, function=scalar.selu, traits=RISING)
elementwise(aten.celu.default, function=scalar.celu, traits=RISING)
elementwise(aten.gelu.default, function=scalar.gelu)
elementwise(aten.silu.default, function=scalar.silu)
elementwise(aten.mish.default, function=scalar.mish)
elementwise(aten.sigmoid.default, function=scalar.sigmoid, traits=replace(RISING, link=Link(joint=False)))
elementwise(
    aten.log_sigmoid.default, function=scalar.logsigmoid, traits=replace(RISING, link=Link(joint=False, log=True))
)
elementwise(aten.tanh.default, function=scalar.tanh, traits=RISING)
elementwise(aten.softplus.default, function=scalar.softplus, traits=RISING)
elementwise(aten.hardtanh.default, function=scalar.hardtanh, traits=RISING)
elementwise(aten.hardsigmoid.default, function=scalar.hardsigmoid, traits=RISING)
elementwise(aten.hardswish.default, function=scalar.hardswish)
elementwise(aten.hardshrink.default, function=scalar.hardshrink)
elementwise(aten.softshrink.default, function=scalar.softshrink)
elementwise(aten.threshold.default, function=scalar.threshold)
elementwise(aten.abs.default, function=scalar.abs, traits=Traits(homogeneous=True, bounds=intervals.absolute))
elementwise(aten.exp.default, function=scalar.exp, traits=RISING)
elementwise(aten.expm1.default, function=scalar.expm1, traits=RISING)
elementwise(aten.sin.default, function=scalar.sin)
elementwise(aten.cos.default, function=scalar.cos)
elementwise(aten.atan.default, function=scalar.atan, traits=RISING)
elementwise(aten.erf.default, function=scalar.erf, traits=RISING)
elementwise(aten.erfc.default, function=scalar.erfc)
elementwise(aten.square.default, function=scalar.square, traits=Traits(power=2, bounds=intervals.square))
elementwise(aten.sign.default, function=scalar.sign)
elementwise(aten.clamp.default, function=scalar.clamp, traits=RISING)
elementwise(aten.clamp_min.default, function=lambda least: scalar.clamp(min=least), traits=RISING)
elementwise(aten.clamp_max.default, function=lambda most: scalar.clamp(max=most), traits=RISING)
elementwise(
    aten.pow.Tensor_Scalar,
    function=scalar.pow,
    traits=Traits(power=lambda exponent: exponent, scalar=composed.power),
)
# A Gaussian puts mass outside these functions' domains, so they are expanded to second order at the mean.
elementwise(aten.log.default, function=scalar.log, exactness="linearised")
elementwise(aten.log1p.default, function=scalar.log1p, exactness="linearised")
elementwise(aten.sqrt.default, function=scalar.sqrt, exactness="linearised", traits=Traits(power=0.5))
elementwise(aten.rsqrt.default, function=scalar.rsqrt, exactness="linearised", traits=Traits(power=-0.5))
elementwise(aten.reciprocal.default, function=scalar.reciprocal, exactness="linearised", traits=Traits(power=-1))


def _elu(alpha: float, scale: float, input_scale: float) -> scalar.ScalarFunction:
    """aten's `elu` serves SELU and ELU: scale·(x⁺ + α(exp(input_scale·x) − 1)⁻)."""
    if scale == 1.0 and input_scale == 1.0:
        return scalar.elu(alpha)
    raise UnsupportedOperation(
        f"aten.elu has a rule for scale 1 and input_scale 1 only, and got {scale} and {input_scale}; "
        "use `torch.nn.SELU`, `torch.nn.CELU`, or multiply before and after `torch.nn.ELU`."
    )


@rule(aten.prelu.default, exactness="moment-matched", family="element-wise")
def prelu(ctx: Context, x: Argument, weight: Argument) -> Surrogate:
    """The slope is a number per channel, dimension 1; see the module docstring for an uncertain one."""
    if isinstance(weight, Value):
        return _uncertain_slope(ctx, x, weight)
    shape = (1, -1, *[1] * (x.mean.ndim - 2)) if x.mean.ndim > 1 and weight.numel() > 1 else (1,) * x.mean.ndim
    return pointwise_surrogate(ctx, x, scalar.prelu(weight.reshape(shape)))


def _uncertain_slope(ctx: Context, x: Argument, weight: Value) -> Surrogate:
    """The slope (batch, channels or 1, 1, …)."""
    mean = mean_of(x)
    slopes = weight.mean.expand(mean.shape)
    if isinstance(x, Value):
        made = pointwise_surrogate(ctx, x, scalar.prelu(slopes))
        below, slope, left = surrogate_slope(scalar.relu(), -mean, x.variance, "price")
        spread = slope.square() * x.variance + left
        made.noises.append(DiagonalNoise(weight.variance * spread, f"{ctx.module or 'model'} (prelu)"))
    else:
        made, below = Surrogate(torch.where(mean > 0, mean, slopes * mean)), (-mean).clamp_min(0)
    made.maps.append((weight, compose(scaling(-below), broadcast(weight.shape, mean.shape))))
    return made
