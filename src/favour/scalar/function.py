"""The record of an element-wise function, and the three ways to make a line with noise out of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from favour.errors import InvalidValue
from favour.scalar.moments import Function, Moments, Number, widen

Line = tuple[Any, Any]
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
        kinks: where f or a low derivative of it jumps, ascending; places to cut an integral at.
        curvature: (mean, variance > 0) of x to E[f″(x)], where there is a closed form.
        lines: slope and offset of the straight lines it consists of, where it is piecewise linear.

    Example:
        >>> from favour.scalar import tanh
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
    kinks: tuple[Number, ...] = ()
    curvature: Callable[[Tensor, Tensor], Tensor] | None = None
    lines: tuple[Line, ...] | None = None


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
        >>> from favour.scalar import relu
        >>> m = surrogate_slope(relu(), torch.zeros(1), torch.ones(1), "matched")
        >>> round(m.slope.item(), 4), m.residual.item()
        (0.5838, 0.0)
    """
    if mode not in ("price", "matched", "taylor"):
        raise InvalidValue(f'the activation mode is {mode!r}; it must be "price", "matched" or "taylor".')
    mean, variance, out = widen(mean, variance)
    exact = fn.moments(mean, variance)
    if mode == "price":
        return exact.to(out)
    nothing = torch.zeros_like(exact.residual)
    if mode == "taylor":
        slope = fn.derivative(mean)
        slope = torch.where((variance <= 0) & ~slope.isfinite(), 0.0, slope)  # √ at 0, where nothing varies
        return Moments(exact.mean, slope, nothing).to(out)
    spread = variance > 0
    square = exact.slope.square() + exact.residual / torch.where(spread, variance, 1.0)  # Var f / σ²
    spread = spread & (square > 0)  # √ has no gradient at 0
    ratio = torch.where(spread, torch.sqrt(torch.where(spread, square, 1.0)), 0.0)
    return Moments(exact.mean, ratio, nothing).to(out)
