"""Element-wise rules in all three modes against Gaussian integrals, and gradients of surrogates."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import cases
import numpy as np
import pytest
import reference
import torch
from calls import MODES, Call, close, every
from cases import CASES, F64, Case
from torch import Tensor

from favour.surrogate import Surrogate
from favour.surrogate.value import Value

SMOOTHED = [
    *(f"aten.{name}.default" for name in ("relu", "gelu", "tanh", "exp", "elu", "hardtanh", "square", "log")),
    "aten.batch_norm.default",
    "aten.linear.default",
    "aten.dropout.default [rates]",
]


def entries(case: Case) -> list[tuple[float, float, Any]]:
    """(mean, variance, f) of each entry of the case's tensor; f may differ between entries."""
    torch.manual_seed(0)
    given, *rest = case.build()
    mean, variance = given.mean, given.variance
    found = []
    for index in np.ndindex(*mean.shape):

        def f(t: Tensor, index: tuple[int, ...] = index) -> Tensor:
            whole = mean.expand(*t.shape, *mean.shape).clone()
            whole[(..., *index)] = t
            if case.overload.startswith("aten.prelu") and rest[0].numel() > 1:  # channels are dimension 1
                y = case.on_means(whole.reshape(-1, mean.shape[-1]), *rest).reshape(whole.shape)
            else:
                y = case.on_means(whole, *rest)
            return y[(..., *index)]

        found.append((mean[index].item(), variance[index].item(), f))
    return found


@cache
def integrals(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """E[f], Var f and E[f′] by quadrature, of the tensor's shape."""
    rows = [
        reference.gaussian_moments(lambda t, f=f: f(torch.from_numpy(t)).numpy(), m, v, case.kinks)
        for m, v, f in entries(case)
    ]
    return tuple(torch.tensor(part, dtype=F64).reshape(cases.BATCH, -1) for part in zip(*rows, strict=True))


@cache
def derivatives(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """f, f′ and f″ at the mean.

    By autograd, or for functions with kinks, where torch keeps some constants in float32, by a stencil.
    """
    parts = []
    for m, _, f in entries(case):
        if case.kind == "scalar":
            h = 1e-3
            y, a, b, c, d = f(torch.tensor([m, m - 2 * h, m - h, m + h, m + 2 * h], dtype=F64)).tolist()
            parts.append((y, (a - 8 * b + 8 * c - d) / (12 * h), math.nan))
            continue
        t = torch.tensor(m, dtype=F64, requires_grad=True)
        y = f(t)
        (first,) = torch.autograd.grad(y, t, create_graph=True)
        (second,) = torch.autograd.grad(first, t)
        parts.append((y.item(), first.item(), second.item()))
    return tuple(torch.tensor(part, dtype=F64).reshape(cases.BATCH, -1) for part in zip(*parts, strict=True))


def slope(surrogate: Surrogate) -> Tensor:
    ((_, G),) = surrogate.maps
    return G.apply(torch.ones_like(surrogate.mean).unsqueeze(0)).squeeze(0)


def total(surrogate: Surrogate) -> Tensor:
    """Marginal variances of the surrogate."""
    ((x, G),) = surrogate.maps
    return G.square(x.variance) + sum(noise.diag() for noise in surrogate.noises)


@every("scalar")
def test_price_mode_has_the_moments_of_the_function(case):
    mean, variance, tilt = integrals(case)
    (surrogate,) = Call(case, mode="price").surrogates()
    close(surrogate.mean, mean, "E[f]")
    close(total(surrogate), variance, "Var f")
    close(slope(surrogate), tilt, "E[f′]")


@every("scalar")
def test_matched_mode_has_the_variance_in_its_slope(case):
    mean, variance, _ = integrals(case)
    call = Call(case, mode="matched")
    (surrogate,) = call.surrogates()
    ((x, _),) = surrogate.maps
    assert surrogate.noises == []
    close(surrogate.mean, mean, "E[f]")
    close(slope(surrogate), (variance / x.variance).sqrt(), "slope", 1e-8)
    close(total(surrogate), variance, "Var f")


@every("scalar")
def test_taylor_mode_has_the_slope_at_the_mean(case):
    mean, _, _ = integrals(case)
    _, first, _ = derivatives(case)
    (surrogate,) = Call(case, mode="taylor").surrogates()
    assert surrogate.noises == []
    close(surrogate.mean, mean, "E[f]")
    smooth = torch.ones_like(mean, dtype=torch.bool)
    ((x, _),) = surrogate.maps
    for kink in case.kinks:  # any slope between the two sides will do there
        smooth &= x.mean != kink
    close(slope(surrogate)[smooth], first[smooth], "f′(μ)", 1e-9)


@every("delta")
@pytest.mark.parametrize("mode", MODES)
def test_delta_method_is_second_order(case, mode):
    value, first, second = derivatives(case)
    (surrogate,) = Call(case, mode=mode).surrogates()
    ((x, _),) = surrogate.maps
    v = x.variance
    close(surrogate.mean, value + second * v / 2, "E[f]")
    spread = first.square() * v + (second * v).square() / 2  # Var of f + f′d + ½f″d² for Gaussian d
    if mode == "taylor":
        close(slope(surrogate), first, "f′(μ)")
    else:
        close(total(surrogate), spread, "Var f")


@pytest.mark.parametrize("name", SMOOTHED)
@pytest.mark.parametrize("mode", ["price", "matched"])
def test_gradients_in_the_input_mean_and_variance(name, mode):
    (case,) = [c for c in CASES if c.name == name]
    if mode == "matched" and case.kind not in ("scalar", "delta"):
        pytest.skip("no activation")
    call = Call(case)
    (key,) = call.values
    start = call.values[key]

    def moments(mean: Tensor, diag: Tensor) -> tuple[Tensor, Tensor]:
        call.values[key] = Value(mean, diag, dict(start.blocks))
        call.ctx = replace(call.ctx, activation=mode)
        (surrogate,) = call.surrogates()
        noise = sum((n.diag() for n in surrogate.noises), torch.zeros_like(surrogate.mean))
        ((x, G),) = surrogate.maps
        return surrogate.mean, G.square(x.variance) + noise

    # Away from the kinks' own lines of symmetry, where one-sided differences would be compared.
    point = start.mean.clone() + 0.013
    assert torch.autograd.gradcheck(moments, (point.requires_grad_(), start.diag.clone().requires_grad_()))
