"""Functions whose domain a Gaussian leaves, so that the moments do not exist: the delta method."""

from __future__ import annotations

from functools import partial

import torch

from favour.scalar import moments as gauss
from favour.scalar.families import delta
from favour.scalar.function import ScalarFunction
from favour.scalar.moments import Function


def tan() -> ScalarFunction:
    """tan x, by the delta method: it has poles."""
    second = lambda x: 2 * torch.tan(x) * (1 + torch.tan(x) ** 2)  # noqa: E731
    return delta("tan", torch.tan, lambda x: 1 + torch.tan(x) ** 2, second)


def log() -> ScalarFunction:
    """log x, by the delta method."""
    return delta("log", torch.log, torch.reciprocal, lambda x: -x.square().reciprocal())


def log1p() -> ScalarFunction:
    """log(1 + x), by the delta method."""
    return delta("log1p", torch.log1p, lambda x: (1 + x).reciprocal(), lambda x: -(1 + x).square().reciprocal())


def sqrt() -> ScalarFunction:
    """√x, by the delta method."""
    return _power("sqrt", torch.sqrt, 0.5)


def rsqrt() -> ScalarFunction:
    """1/√x, by the delta method."""
    return _power("rsqrt", torch.rsqrt, -0.5)


def reciprocal() -> ScalarFunction:
    """1/x, by the delta method."""
    return _power("reciprocal", torch.reciprocal, -1.0)


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
    return delta(name, value, lambda x: p * torch.pow(x, p - 1), lambda x: p * (p - 1) * torch.pow(x, p - 2))
