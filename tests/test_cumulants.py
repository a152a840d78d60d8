"""Curvatures, cumulants of dropout and the effective draw before an activation, against integrals and enumeration."""

from __future__ import annotations

import itertools

import mpmath
import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

import favour
from favour import scalar
from favour.rules.dropout import dropped
from favour.rules.registry import curvature
from favour.scalar import moments
from favour.scalar.effective import effective_draw, effective_moments
from favour.surrogate.value import Value

F64 = torch.float64


KINKED = {
    "relu": (scalar.relu(), [(0.0, 1.0)]),
    "leaky_relu": (scalar.leaky_relu(0.1), [(0.0, 0.9)]),
    "hardtanh": (scalar.hardtanh(), [(-1.0, 1.0), (1.0, -1.0)]),
    "relu6": (scalar.relu6(), [(0.0, 1.0), (6.0, -1.0)]),
}
POINTS = [(-2.0, 0.5), (-0.3, 1.0), (0.0, 0.01), (0.7, 4.0), (5.5, 2.0)]


@pytest.mark.parametrize("name", KINKED)
def test_piecewise_curvature(name: str) -> None:
    f, kinks = KINKED[name]
    mean, variance = (torch.tensor(t, dtype=F64) for t in zip(*POINTS, strict=True))
    expected = sum(c * scipy.stats.norm.pdf(t, mean, variance.sqrt()) for t, c in kinks)
    torch.testing.assert_close(curvature(f, mean, variance), torch.as_tensor(expected), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(moments.piecewise_curvature(mean, variance, kinks=kinks), torch.as_tensor(expected))


def test_curvature_of_certain_entries_is_zero() -> None:
    mean, variance = torch.tensor([0.0, 1.0], dtype=F64), torch.zeros(2, dtype=F64, requires_grad=True)
    for f in (scalar.relu(), scalar.tanh()):
        found = curvature(f, mean, variance)
        assert bool((found == 0).all())
        (gradient,) = torch.autograd.grad(found.sum(), variance)
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("name", ["tanh", "gelu"])
def test_smooth_curvature(name: str) -> None:
    """E[f″] = E[f(x)(z² − 1)]/σ², z = (x − μ)/σ, by quadrature; slopes to either side give it to a thousandth."""
    value = {"tanh": mpmath.tanh, "gelu": lambda x: x * mpmath.ncdf(x)}[name]
    for mean, variance in [(-1.0, 0.5), (0.4, 1.0), (1.5, 2.0)]:
        s = mpmath.sqrt(variance)
        exact = mpmath.quad(
            lambda z, m=mean, s=s: value(m + s * z) * (z * z - 1) * mpmath.npdf(z), np.linspace(-12, 12, 13)
        ) / (s * s)
        found = curvature(getattr(scalar, name)(), torch.tensor([mean], dtype=F64), torch.tensor([variance], dtype=F64))
        assert float(found) == pytest.approx(float(exact), rel=2e-3)


@pytest.mark.parametrize("skew", [-1.1, 0.0, 0.3])
@pytest.mark.parametrize("excess", [-0.9, -0.1, 0.0, 0.6])
def test_effective_draw_has_the_cumulants_asked_for(skew: float, excess: float) -> None:
    v = 1.7
    third, fourth = skew * v**1.5, excess * v**2
    given = [torch.tensor([t], dtype=torch.float64) for t in (third, fourth, v)]
    u, up, down = (t.item() for t in effective_draw(*given))
    if skew == 0 and excess >= 0:
        assert (u, up, down) == (0, 0, 0)  # nothing of two values has that; a Gaussian
        return
    assert 0 < u <= v
    weight = down / (up + down)
    raw = [weight * up**n + (1 - weight) * (-down) ** n for n in range(5)]
    assert raw[1] == pytest.approx(0, abs=1e-12)
    assert raw[2] == pytest.approx(u, rel=1e-10)
    if u < v:
        assert raw[3] == pytest.approx(third, rel=1e-8, abs=1e-12)
        assert raw[4] - 3 * raw[2] ** 2 == pytest.approx(fourth, rel=1e-8, abs=1e-12)


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "square"])
def test_moments_with_an_effective_draw(name: str) -> None:
    """Against integrals over the mixture of two Gaussians."""
    f = getattr(scalar, name)()
    mean, v, third, fourth = (torch.tensor([t], dtype=torch.float64) for t in (0.3, 1.2, -0.5, -0.4))
    u, up, down = effective_draw(third, fourth, v)
    nodes, weights = np.polynomial.hermite_e.hermegauss(180)
    z, w = torch.from_numpy(nodes), torch.from_numpy(weights / np.sqrt(2 * np.pi))
    share = down / (up + down)
    x = torch.stack([mean + up + (v - u).sqrt() * z, mean - down + (v - u).sqrt() * z])
    density = torch.stack([share * w, (1 - share) * w])
    y = f.value(x)
    first = (density * y).sum()
    bend = curvature(f, mean, v)
    slope = (density * y * (x - mean)).sum() / v - 0.5 * bend * third / v
    found, _ = effective_moments(f, mean, v, third, fourth, lambda: bend)
    tolerance = {"rtol": 2e-3 if name == "relu" else 1e-7, "atol": 1e-9}  # Hermite nodes meet the kink
    torch.testing.assert_close(found.mean, first.reshape(1), **tolerance)
    torch.testing.assert_close(found.slope, slope, **tolerance)
    torch.testing.assert_close(found.variance(v), (density * (y - first).square()).sum().reshape(1), **tolerance)


def test_one_dropped_unit_is_its_own_effective_draw() -> None:
    x, p = 2.0, 0.3
    q = 1 - p
    third, fourth = p * (2 * p - 1) / q**2 * x**3, (p * (1 - 6 * p * q) / q**3) * x**4
    given = [torch.tensor([t], dtype=torch.float64) for t in (third, fourth, x * x * p / q)]
    u, up, down = (t.item() for t in effective_draw(*given))
    assert (u, up, down) == pytest.approx((x * x * p / q, x * p / q, x), rel=1e-9)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("certain", [True, False])
def test_cumulants_of_dropout(p: float, certain: bool) -> None:
    """κ₃ and κ₄ of x(D − 1) from its raw moments, x known or normal."""
    mu, v = 0.8, 0.0 if certain else 0.3
    x = torch.tensor([[mu]], dtype=torch.float64)
    noise = dropped(x if certain else Value(x, torch.full_like(x, v)), p, "")
    q = 1 - p
    raw = [1, mu, mu**2 + v, mu**3 + 3 * mu * v, mu**4 + 6 * mu**2 * v + 3 * v**2]
    moment = [p * (-1) ** n * raw[n] + q * (p / q) ** n * raw[n] for n in range(5)]
    third, fourth = noise.noises[0].cumulants()
    assert third.item() == pytest.approx(moment[3], rel=1e-12, abs=1e-15)
    assert fourth.item() == pytest.approx(moment[4] - 3 * moment[2] ** 2, rel=1e-12)


def test_pairs_bring_means_nearer() -> None:
    """A ReLU network with few unequal units, against all its masks."""
    torch.manual_seed(0)
    n, p = 10, 0.2
    model = nn.Sequential(nn.Linear(3, n), nn.ReLU(), nn.Dropout(p), nn.Linear(n, 20), nn.ReLU(), nn.Linear(20, 3))
    model = model.double().requires_grad_(False)
    x = torch.randn(6, 3, dtype=torch.float64)
    hidden = model[1](model[0](x))
    masks = torch.tensor(list(itertools.product([0.0, 1.0], repeat=n)), dtype=torch.float64)
    weight = torch.where(masks > 0, 1 - p, p).prod(1)
    outputs = model[5](model[4](model[3](hidden * masks[:, None] / (1 - p))))
    exact = (weight[:, None, None] * outputs).sum(0)
    spread = (weight[:, None, None] * (outputs - exact).square()).sum(0).sqrt()

    def error(**settings: object) -> float:
        mean = favour.compile(model, x, method="adjoint", **settings)(x).mean
        return ((mean - exact) / spread).square().mean().sqrt().item()

    assert error(pairs=10) < 0.8 * error()
