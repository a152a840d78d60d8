"""Gaussian moments of element-wise functions: E[f(x)], E[f′(x)] and what a line cannot explain of f(x).

For x ~ N(μ, σ²), element by element, every function here returns three tensors (`Moments`):

    mean     = E[f(x)]
    slope    = E[f′(x)] = Cov(f(x), x) / σ²                (Stein)
    residual = Var f(x) − slope² σ²  ≥ 0                   (Cauchy–Schwarz)

so f(x) ≈ mean + slope·(x − μ) + noise of variance `residual`, uncorrelated with x. Adding an affine function
to f changes mean and slope and leaves the residual alone: the formulas use that to avoid cancellation. At
σ = 0 the answer is f(μ), f′(μ), 0, with finite gradients. Half precision is widened to float32 inside.

| file | functions |
|---|---|
| `piecewise` | piecewise linear and constant: closed forms from the tails of the Gaussian (`tails`) |
| `relu` | max(x, 0), with its gradient |
| `closed` | exp, sin, cos, integer powers; the delta method |
| `gated` | GELU: closed but for one smooth integral |
| `integration` | everything else, by quadrature |
"""

from favour.scalar.moments.closed import cos, exp, power, second_order, sin, square
from favour.scalar.moments.gated import gelu, gelu_curvature
from favour.scalar.moments.integration import Line, deviations, quadrature
from favour.scalar.moments.piecewise import (
    affine,
    piecewise_curvature,
    piecewise_linear,
    piecewise_slope,
    step,
)
from favour.scalar.moments.record import Function, Kinks, Moments, Number, widen
from favour.scalar.moments.relu import relu
from favour.scalar.moments.tails import normal_tail

__all__ = [
    "Function",
    "Kinks",
    "Line",
    "Moments",
    "Number",
    "affine",
    "cos",
    "deviations",
    "exp",
    "gelu",
    "gelu_curvature",
    "normal_tail",
    "piecewise_curvature",
    "piecewise_linear",
    "piecewise_slope",
    "power",
    "quadrature",
    "relu",
    "second_order",
    "sin",
    "square",
    "step",
    "widen",
]
