"""Element-wise functions: value, derivative and Gaussian moments of each, in one record.

A `ScalarFunction` is all that a rule for an activation needs. The factories cover the element-wise
activations of `torch.nn` (values as in eval mode) and the usual arithmetic. How the moments are found:

- piecewise linear functions, steps, exp, sin, cos and integer powers: closed forms;
- smooth functions, and those with kinks that are not linear in between: quadrature;
- log, sqrt, reciprocal and others whose domain a Gaussian leaves: the delta method, declared `"linearised"`.
"""

from favour.scalar.between import remainder_between
from favour.scalar.function import Exactness, ScalarFunction, surrogate_slope
from favour.scalar.piecewise import (
    abs,
    affine,
    celu,
    clamp,
    elu,
    hardshrink,
    hardsigmoid,
    hardswish,
    hardtanh,
    heaviside,
    leaky_relu,
    prelu,
    relu,
    relu6,
    rrelu,
    selu,
    sign,
    softshrink,
    softsign,
    threshold,
)
from favour.scalar.singular import log, log1p, pow, reciprocal, rsqrt, sqrt, tan
from favour.scalar.smooth import (
    atan,
    cos,
    erf,
    erfc,
    exp,
    expm1,
    gelu,
    logsigmoid,
    mish,
    sigmoid,
    silu,
    sin,
    softplus,
    square,
    tanh,
    tanhshrink,
)

__all__ = [
    "Exactness",
    "ScalarFunction",
    "abs",
    "affine",
    "atan",
    "celu",
    "clamp",
    "cos",
    "elu",
    "erf",
    "erfc",
    "exp",
    "expm1",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "heaviside",
    "leaky_relu",
    "log",
    "log1p",
    "logsigmoid",
    "mish",
    "pow",
    "prelu",
    "reciprocal",
    "relu",
    "relu6",
    "remainder_between",
    "rrelu",
    "rsqrt",
    "selu",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softplus",
    "softshrink",
    "softsign",
    "sqrt",
    "square",
    "surrogate_slope",
    "tan",
    "tanh",
    "tanhshrink",
    "threshold",
]
