"""Gaussian moments against 60-digit closed forms, dense quadrature in float64, and Hermite algebra."""

from __future__ import annotations

import math

import mpmath as mp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_moments import dense
from torch import Tensor

from favour.errors import InvalidValue
from favour.scalar import moments as gauss
from favour.scalar.moments import integration
from favour.scalar.moments.tails import tails

RELU = ((0.0, 1.0),)
RELU6 = ((0.0, 1.0), (6.0, -1.0))
HARDTANH = ((-1.0, 1.0), (1.0, -1.0))
BUMP = ((-1.0, 2.0), (0.5, -3.0), (2.0, 1.0))  # three kinks, flat at both ends
ZIGZAG = ((-2.0, 1.5), (0.0, -1.0), (1.0, 3.0))


def exact(mean: float, variance: float, slope: float, kinks) -> tuple[float, float, float, float]:
    """E f, E f′, residual and Var f of slope·x + Σ c relu(x − t), from raw moments in 60 digits."""
    with mp.workdps(60):
        mu, sigma, slope = mp.mpf(mean), mp.sqrt(mp.mpf(variance)), mp.mpf(slope)
        s = [(mp.mpf(t) - mu) / sigma for t, _ in kinks]
        c = [mp.mpf(weight) for _, weight in kinks]
        pdf, tail = (lambda a: mp.npdf(a)), (lambda a: mp.erfc(a / mp.sqrt(2)) / 2)
        first = [pdf(a) - a * tail(a) for a in s]
        line = [tail(a) for a in s]
        value = slope * mu + sigma * sum(w * h for w, h in zip(c, first, strict=True))
        gain = slope + sum(w * q for w, q in zip(c, line, strict=True))
        residual = mp.mpf(0)
        for i in range(len(s)):
            for j in range(len(s)):
                a, b = min(s[i], s[j]), max(s[i], s[j])
                product = (1 + a * b) * tail(b) - a * pdf(b)
                residual += c[i] * c[j] * (product - first[i] * first[j] - line[i] * line[j])
        residual *= sigma**2
        return float(value), float(gain), float(residual), float(residual + (gain * sigma) ** 2)


def column(*values: float, dtype=torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def relative(got: Tensor, want: float) -> float:
    return abs(got.item() - want) / max(abs(want), 1e-35)


POINTS = [
    (0.0, 1.0), (10.0, 1e-3), (-3.0, 1.0), (-0.03, 0.01), (3.0, 1.0), (-5.0, 1.0), (5.0, 0.7), (0.0, 1e-12),
    (1e-12, 1e-12), (10.0, 1e12), (0.3, 100.0), (-2.0, 3.9), (-2.0, 4.1), (60.0, 13.0), (-1.0, 0.2),
    (6.0, 1e-3),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float64, 1e-11)])
@pytest.mark.parametrize("kinks", [RELU, RELU6, HARDTANH, BUMP, ZIGZAG])
@pytest.mark.parametrize(("mean", "sigma"), POINTS)
def test_piecewise_linear_exact(mean, sigma, kinks, dtype, tolerance):
    mu = column(mean, dtype=dtype)
    variance = column(sigma, dtype=dtype) ** 2
    slope = 0.25 if kinks == ZIGZAG else 0.0
    value, gain, residual, total = exact(mu.item(), variance.item(), slope, kinks)
    got = gauss.piecewise_linear(mu, variance, slope=slope, kinks=kinks)
    scale = abs(value) + abs(mean) * 1e-1 + sigma * abs(gain)
    assert abs(got.mean.item() - value) <= tolerance * scale
    assert abs(got.slope.item() - gain) <= tolerance * math.sqrt(total) / sigma + 1e-35
    assert abs(got.variance(variance).item() - total) <= 5 * tolerance * total + 1e-35
    assert abs(got.residual.item() - residual) <= 5 * tolerance * total + 1e-35


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_equals_piecewise_linear(dtype):
    mean = torch.cat([torch.linspace(-9, 9, 41), torch.tensor([0.0, 0.0, 3.0, -3.0])]).to(dtype)
    variance = torch.cat([torch.linspace(0.01, 4, 41), torch.tensor([0.0, 1.0, 0.0, 0.0])]).to(dtype)
    got, want = gauss.relu(mean, variance), gauss.piecewise_linear(mean, variance, kinks=RELU)
    torch.testing.assert_close(tuple(got), tuple(want), rtol=4 * torch.finfo(dtype).eps, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_relu_without_gradient(dtype):
    """Plain evaluation and the formulas that can be differentiated at σ = 0 agree but for the last digit."""
    mean = torch.linspace(-9, 9, 61, dtype=dtype).repeat(8, 1)
    variance = column(-1e-9, 0.0, 1e-30, 1e-6, 0.01, 1.0, 400.0, 1e20, dtype=dtype)
    variance = variance.unsqueeze(1).expand_as(mean)
    got = gauss.relu(mean, variance)
    want = gauss.relu(mean.clone().requires_grad_(), variance)
    assert want.mean.requires_grad and not got.mean.requires_grad
    torch.testing.assert_close(
        tuple(got), tuple(part.detach() for part in want), rtol=8 * torch.finfo(dtype).eps, atol=0.0
    )


@pytest.mark.parametrize(("mean", "sigma"), [(10.0, 1e-3), (-3.0, 1.0), (-0.3, 0.1), (-6.0, 1.0), (-10.0, 1.0)])
def test_relu_float32_variance(mean, sigma):
    """The demand on float32: variance to 1e-5, also where E[f²] − E[f]² would have lost it."""
    mu, variance = column(mean, dtype=torch.float32), column(sigma, dtype=torch.float32) ** 2
    total = exact(mu.item(), variance.item(), 0.0, RELU)[3]
    assert relative(gauss.relu(mu, variance).variance(variance), total) < 1e-5


def test_relu_tail_float32():
    """Q, h and e themselves, relatively, to twelve standard deviations."""
    for a in np.linspace(0, 12, 61):
        a32 = torch.tensor([a], dtype=torch.float32)
        with mp.workdps(60):
            x = mp.mpf(a32.item())
            q, pdf = mp.erfc(x / mp.sqrt(2)) / 2, mp.npdf(x)
            want = q, pdf - x * q, (1 + x * x) * q - x * pdf
        for got, true in zip(tails(a32), want, strict=True):
            assert relative(got, float(true)) < 3e-7 * (1 + a * a / 2)  # the conditioning of exp(−a²/2)


@pytest.mark.parametrize("kinks", [RELU, RELU6, BUMP])
def test_piecewise_linear_certain(kinks):
    """σ = 0: f(μ), f′(μ), 0, to the left of a kink when on it; and finite gradients."""
    mean = column(-3.0, 0.0, 0.25, 6.0, 7.5).requires_grad_()
    variance = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    got = gauss.piecewise_linear(mean, variance, kinks=kinks)
    want = sum(c * F.relu(mean - t) for t, c in kinks)
    slope = sum(c * (mean > t).double() for t, c in kinks)
    torch.testing.assert_close(tuple(got), (want, slope, torch.zeros_like(mean)))
    for part in got:
        gradients = torch.autograd.grad(part.sum(), (mean, variance), retain_graph=True)
        assert all(torch.isfinite(g).all() for g in gradients)


def test_relu_certain_on_kink():
    got = gauss.relu(torch.zeros(2), torch.zeros(2))
    assert all((part == 0).all() for part in got)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised within torch by the first use of jvp
def test_relu_forward_mode_certain():
    """At σ = 0 the tangents are finite too: dE[f]/dμ = f′(μ)."""
    mean, zero = column(-1.0, 0.0, 2.0), torch.zeros(3, dtype=torch.float64)
    _, tangent = torch.func.jvp(lambda m: tuple(gauss.relu(m, zero)), (mean,), (torch.ones_like(mean),))
    torch.testing.assert_close(tangent, (column(0.0, 0.0, 1.0), zero, zero))


def test_relu_gradient_on_kink():
    """At μ = 0 < σ² everything is smooth: dE[f]/dμ = ½, dE[f′]/dμ = φ(0)/σ, d residual/dμ = 0."""
    for kinks in (None, RELU):
        mean = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        variance = torch.full((1,), 4.0, dtype=torch.float64)
        got = gauss.relu(mean, variance) if kinks is None else gauss.piecewise_linear(mean, variance, kinks=kinks)
        grads = [torch.autograd.grad(part.sum(), mean, retain_graph=True)[0].item() for part in got]
        assert grads == pytest.approx([0.5, 0.5 / math.sqrt(2 * math.pi), 0.0], abs=1e-12)


def test_piecewise_linear_tensor_parameters():
    """Slopes and places per element, against the same with floats."""
    mean, variance = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64)
    slope, place = column(0.1, -0.3, 0.7, 1.0), column(0.0, 1.0, -1.0, 0.5)
    got = gauss.piecewise_linear(mean, variance, slope=slope, kinks=[(place, 1 - slope)])
    for j in range(4):
        a, t = slope[j].item(), place[j].item()
        want = gauss.piecewise_linear(mean[:, j], variance[:, j], slope=a, kinks=[(t, 1 - a)])
        torch.testing.assert_close([part[:, j] for part in got], list(want))


def test_piecewise_linear_saturated_value():
    """relu(x) − relu(x − 6) is 8 at x = 1e8 in float32; f is 6."""
    got = gauss.piecewise_linear(torch.tensor([1e8]), torch.tensor([1.0]), kinks=RELU6)
    assert got.mean.item() == 6.0 and got.slope.item() == 0.0 and got.residual.item() == 0.0


@pytest.mark.parametrize("sigma", [1e-3, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("mean", [-4.0, -0.7, 0.0, 0.3, 2.5])
def test_step_exact(mean, sigma):
    got = gauss.step(column(mean), column(sigma**2), threshold=0.3, low=-1.0, high=2.0)
    with mp.workdps(60):
        s = (mp.mpf(0.3) - mp.mpf(mean)) / mp.sqrt(mp.mpf(sigma**2))
        q, pdf = mp.erfc(s / mp.sqrt(2)) / 2, mp.npdf(s)
        want = -1 + 3 * q, 3 * pdf / mp.sqrt(mp.mpf(sigma**2)), 9 * (q * (1 - q) - pdf**2)
    torch.testing.assert_close(torch.cat(got), column(*(float(x) for x in want)), rtol=1e-10, atol=1e-30)


SMOOTH = {
    "silu": (F.silu, lambda x: torch.sigmoid(x) * (1 + x * torch.sigmoid(-x))),
    "softplus": (F.softplus, torch.sigmoid),
    "cubic": (lambda x: x**3 - x, lambda x: 3 * x**2 - 1),
}


@pytest.mark.parametrize("with_derivative", [True, False])
@pytest.mark.parametrize("sigma", [1e-6, 1e-3, 0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", SMOOTH)
def test_quadrature_smooth(name, sigma, with_derivative):
    f, slope = SMOOTH[name]
    for mean in (-5.0, -0.4, 0.0, 1.3, 6.0):
        derivative = slope if with_derivative else None
        got = gauss.quadrature(f, column(mean), column(sigma**2), derivative=derivative)
        if sigma < 1e-3:  # the reference has no digits there; Taylor's remainder is below 1e-10
            want = f(column(mean)).item(), slope(column(mean)).item()
            tolerance = 1e-10 if with_derivative else 1e-6
            assert abs(got.mean.item() - want[0]) < 1e-10 and abs(got.slope.item() - want[1]) < tolerance
            continue
        value, gain, residual, total = dense(f, mean, sigma)
        assert abs(got.mean.item() - value) < 1e-8 * (abs(value) + math.sqrt(total))
        assert abs(got.slope.item() - gain) * sigma < 2e-7 * math.sqrt(total)
        assert abs(got.residual.item() - residual) < 2e-7 * total


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 5.0])
@pytest.mark.parametrize("tensor_kinks", [False, True])
def test_quadrature_kinks(sigma, tensor_kinks):
    """A function with a jump and a kink converges as fast as a smooth one."""
    f = lambda x: torch.where(x > 0.5, torch.sin(x), torch.where(x < -1, x * x, 0.2 * x))  # noqa: E731
    kinks = [column(-1.0), column(0.5)] if tensor_kinks else [-1.0, 0.5]
    for mean in (-2.0, -1.0, 0.0, 0.45, 3.0):
        got = gauss.quadrature(f, column(mean), column(sigma**2), kinks=kinks)
        value, gain, residual, total = dense(f, mean, sigma, kinks=(-1.0, 0.5))
        assert abs(got.mean.item() - value) < 1e-8 * (1 + abs(value))
        assert abs(got.slope.item() - gain) * sigma < 1e-8 * (1 + math.sqrt(total))
        assert abs(got.residual.item() - residual) < 1e-8 * (1 + total)


@pytest.mark.parametrize("kinks", [(), (-0.3, 0.5)])
def test_quadrature_node_by_node(kinks, monkeypatch):
    """Large tensors are integrated one node at a time, small ones on a stack of nodes."""
    mean, variance = torch.linspace(-4, 4, 9).double(), torch.logspace(-6, 2, 9).double()
    stacked = gauss.quadrature(F.silu, mean, variance, kinks=kinks)
    monkeypatch.setattr(integration, "_ONE_BY_ONE", 1)
    seen = []

    def f(x):
        seen.append(x.shape)
        return F.silu(x)

    singly = gauss.quadrature(f, mean, variance, kinks=kinks)
    assert set(seen) == {mean.shape}
    torch.testing.assert_close(tuple(singly), tuple(stacked), rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize("sigma", [0.01, 0.3, 1.0, 5.0])
def test_quadrature_straight_ends(sigma):
    """With the lines beyond the kinks given, with a jump at one of them."""
    f = lambda x: torch.where(x > 0.5, 2 - x, torch.where(x < -1, 0.3 + 2 * x, torch.sin(x)))  # noqa: E731
    for mean in (-2.0, -1.0, 0.0, 0.45, 3.0):
        got = gauss.quadrature(f, column(mean), column(sigma**2), kinks=(-1.0, 0.5), ends=((0.3, 2.0), (2.0, -1.0)))
        value, gain, residual, total = dense(f, mean, sigma, kinks=(-1.0, 0.5))
        assert abs(got.mean.item() - value) < 1e-10 * (1 + abs(value))
        assert abs(got.slope.item() - gain) * sigma < 1e-10 * (1 + math.sqrt(total))
        assert abs(got.residual.item() - residual) < 1e-10 * (1 + total)


def test_quadrature_converges():
    """More nodes, smaller error: the number of nodes is really used."""
    want = dense(torch.tanh, 0.7, 2.0)[3]
    errors = []
    for nodes in (9, 17, 33):
        got = gauss.quadrature(torch.tanh, column(0.7), column(4.0), nodes=nodes)
        errors.append(relative(got.variance(column(4.0)), want))
    assert errors[0] > 10 * errors[1] > 100 * errors[2]


def test_quadrature_gradient_at_zero_variance():
    """dE[f]/dv at v = 0 is ½f″(μ), also in float32."""
    for dtype, tolerance in ((torch.float64, 1e-6), (torch.float32, 2e-3)):
        mean = column(-1.0, 0.2, 2.0, dtype=dtype).requires_grad_()
        variance = torch.zeros(3, dtype=dtype, requires_grad=True)
        got = gauss.quadrature(F.softplus, mean, variance, derivative=torch.sigmoid)
        (by_mean, by_variance) = torch.autograd.grad(got.mean.sum(), (mean, variance))
        gate = torch.sigmoid(mean.detach())
        torch.testing.assert_close(by_variance, 0.5 * gate * (1 - gate), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(by_mean, gate, rtol=1e-6, atol=1e-6)


def test_quadrature_too_few_nodes():
    with pytest.raises(InvalidValue, match="nodes=2"):
        gauss.quadrature(torch.tanh, column(0.0), column(1.0), nodes=2)


@pytest.mark.parametrize("sigma", [1e-4, 0.05, 0.6, 0.9, 2.0])
@pytest.mark.parametrize("name", ["exp", "sin", "cos", "square"])
def test_closed_forms(name, sigma):
    """By Hermite coefficients E[f⁽ʲ⁾]σʲ/√j!, in 60 digits."""
    for mean in (-2.0, 0.0, 0.4, 3.0):
        variance = column(sigma**2)
        with mp.workdps(60):
            mu, v = mp.mpf(mean), mp.mpf(variance.item())
            if name == "exp":
                raw = [mp.exp(mu + v / 2)] * 60
            elif name == "square":
                raw = [mu**2 + v, 2 * mu, mp.mpf(2)] + [mp.mpf(0)] * 57
            else:
                turn = mp.pi / 2 if name == "cos" else 0
                raw = [mp.exp(-v / 2) * mp.sin(mu + turn + j * mp.pi / 2) for j in range(60)]
            residual = sum(raw[j] ** 2 * v**j / mp.factorial(j) for j in range(2, 60))
        want = column(float(raw[0]), float(raw[1]), float(residual))
        got = torch.cat(getattr(gauss, name)(column(mean), variance))
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-15 * (1 + want[0].abs().item()) * sigma**2)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 5])
def test_power_exact(exponent):
    """Gauss–Hermite with enough nodes is exact for polynomials."""
    node, weight = np.polynomial.hermite_e.hermegauss(12)
    weight /= weight.sum()
    for mean, sigma in ((0.0, 1.0), (-1.3, 0.4), (2.0, 3.0)):
        y = (mean + sigma * node) ** exponent
        value, gain = weight @ y, weight @ (y * node)
        residual = weight @ (y - value - gain * node) ** 2
        got = gauss.power(column(mean), column(sigma**2), exponent)
        torch.testing.assert_close(torch.cat(got), column(value, gain / sigma, residual), rtol=1e-10, atol=1e-10)


def test_exp_large_mean_no_nan():
    got = gauss.exp(torch.tensor([50.0, 60.0]), torch.tensor([0.0, 1e-12]))
    assert all(torch.isfinite(part).all() for part in got)


def test_power_negative_exponent():
    with pytest.raises(InvalidValue, match="exponent=-1"):
        gauss.power(column(1.0), column(1.0), -1)


CHECKED = {
    "relu": gauss.relu,
    "relu6": lambda m, v: gauss.piecewise_linear(m, v, kinks=RELU6),
    "narrow": lambda m, v: gauss.piecewise_linear(m, v, kinks=((0.0, 1.0), (0.1, -1.0))),
    "step": gauss.step,
    "quadrature": lambda m, v: gauss.quadrature(F.silu, m, v, derivative=SMOOTH["silu"][1]),
    "kinks": lambda m, v: gauss.quadrature(F.elu, m, v, kinks=[0.0]),
    "exp": gauss.exp,
    "sin": gauss.sin,
    "power": lambda m, v: gauss.power(m, v, 3),
}


@pytest.mark.parametrize("name", CHECKED)
def test_gradcheck(name):
    mean = column(-1.1, 0.3, 1.7).requires_grad_()
    variance = column(0.4, 1.2, 0.09).requires_grad_()
    assert torch.autograd.gradcheck(lambda m, v: tuple(CHECKED[name](m, v)), (mean, variance), atol=1e-6)


# The first forward-mode derivative of a process scripts torch's own decompositions.
@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")
def test_gradients_of_relu():
    """Written out: once more differentiable, the same through transforms, finite and 0 where they ought to be."""
    mean, variance = column(-1.1, 0.3, 1.7).requires_grad_(), column(0.4, 1.2, 0.09).requires_grad_()
    assert torch.autograd.gradgradcheck(lambda m, v: tuple(gauss.relu(m, v)), (mean, variance), atol=1e-6)
    mean, variance = mean.detach(), variance.detach()

    def residual(m):
        return gauss.relu(m, variance).residual.sum()

    forwards = torch.func.hessian(residual)(mean)
    torch.testing.assert_close(forwards, torch.func.jacrev(torch.func.jacrev(residual))(mean))
    torch.testing.assert_close(forwards.diagonal(), torch.autograd.functional.hessian(residual, mean).diagonal())
    far = torch.tensor([1e3, 10.0, -10.0, 3.0, 0.0, -3.0, 20.0], requires_grad=True)
    tiny = torch.tensor([1e-6, 1e-6, 1e-6, 0.0, 0.0, 0.0, 1.0], requires_grad=True)
    m, slope, residue = gauss.relu(far, tiny)
    by_mean, by_variance = torch.autograd.grad(m.sum(), (far, tiny), retain_graph=True)
    assert by_mean.tolist() == [1, 1, 0, 1, 0, 0, 1] and by_variance.tolist() == [0] * 7
    for part in (slope, residue):
        assert all(not g.any() for g in torch.autograd.grad(part.sum(), (far, tiny), retain_graph=True))


@pytest.mark.parametrize("name", CHECKED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name, dtype):
    """Computed in float32, returned in the dtype given."""
    mean, variance = column(-1.0, 0.5, 2.0, dtype=dtype), column(0.25, 1.0, 0.0, dtype=dtype)
    got, want = CHECKED[name](mean, variance), CHECKED[name](mean.float(), variance.float())
    for a, b in zip(got, want, strict=True):
        assert a.dtype == dtype
        torch.testing.assert_close(a, b.to(dtype))


@pytest.mark.parametrize("shape", [(), (0,), (2, 0, 3), (2, 3)])
@pytest.mark.parametrize("name", CHECKED)
def test_shapes(name, shape):
    got = CHECKED[name](torch.zeros(shape), torch.ones(shape))
    assert all(part.shape == shape for part in got)


@pytest.mark.parametrize("name", CHECKED)
def test_compiles_without_breaks(name):
    mean, variance = torch.linspace(-3, 3, 12), torch.linspace(0, 2, 12)
    torch._dynamo.reset()
    compiled = torch.compile(CHECKED[name], fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(tuple(compiled(mean, variance)), tuple(CHECKED[name](mean, variance)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised within torch when inductor is first imported
@pytest.mark.parametrize("name", ["relu", "quadrature"])
def test_inductor(name):
    mean, variance = torch.linspace(-3, 3, 64), torch.linspace(0, 2, 64)
    torch._dynamo.reset()
    compiled = torch.compile(CHECKED[name], fullgraph=True)
    torch.testing.assert_close(tuple(compiled(mean, variance)), tuple(CHECKED[name](mean, variance)))


@settings(deadline=None, max_examples=60)
@given(
    mean=st.floats(-1e6, 1e6, width=32),
    sigma=st.one_of(st.just(0.0), st.floats(1e-15, 1e12)),
    name=st.sampled_from(["relu", "relu6", "narrow", "step", "quadrature", "kinks", "sin"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_residual_nonnegative(mean, sigma, name, dtype):
    got = CHECKED[name](column(mean, dtype=dtype), column(sigma, dtype=dtype) ** 2)
    assert all(torch.isfinite(part).all() for part in got)
    assert got.residual.item() >= 0
