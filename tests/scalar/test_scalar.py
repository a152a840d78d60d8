"""Every element-wise function against torch's own value, autograd's derivative and dense quadrature."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_moments import dense
from torch import Tensor, nn

import favour
from favour import Belief, scalar
from favour.errors import InvalidValue

WEIGHT = torch.tensor([0.3])

# name -> (function, the reference that torch has, places where it is not smooth)
CASES = {
    "affine": (scalar.affine(2.0, -1.0), lambda x: 2 * x - 1, ()),
    "relu": (scalar.relu(), nn.ReLU(), (0,)),
    "relu6": (scalar.relu6(), nn.ReLU6(), (0, 6)),
    "leaky_relu": (scalar.leaky_relu(0.1), nn.LeakyReLU(0.1), (0,)),
    "prelu": (scalar.prelu(WEIGHT), lambda x: F.prelu(x, WEIGHT.to(x.dtype)), (0,)),
    "rrelu": (scalar.rrelu(), nn.RReLU().eval(), (0,)),
    "elu": (scalar.elu(0.7), nn.ELU(0.7), (0,)),
    "selu": (scalar.selu(), nn.SELU(), (0,)),
    "celu": (scalar.celu(2.0), nn.CELU(2.0), (0,)),
    "gelu": (scalar.gelu(), nn.GELU(), ()),
    "gelu_tanh": (scalar.gelu("tanh"), nn.GELU("tanh"), ()),
    "silu": (scalar.silu(), nn.SiLU(), ()),
    "mish": (scalar.mish(), nn.Mish(), ()),
    "sigmoid": (scalar.sigmoid(), nn.Sigmoid(), ()),
    "logsigmoid": (scalar.logsigmoid(), nn.LogSigmoid(), ()),
    "tanh": (scalar.tanh(), nn.Tanh(), ()),
    "softplus": (scalar.softplus(), nn.Softplus(), ()),
    "softplus_sharp": (scalar.softplus(2.0, 3.0), nn.Softplus(2.0, 3.0), (1.5,)),
    "softsign": (scalar.softsign(), nn.Softsign(), (0,)),
    "hardtanh": (scalar.hardtanh(-0.5, 2.0), nn.Hardtanh(-0.5, 2.0), (-0.5, 2)),
    "hardsigmoid": (scalar.hardsigmoid(), nn.Hardsigmoid(), (-3, 3)),
    "hardswish": (scalar.hardswish(), nn.Hardswish(), (-3, 3)),
    "hardshrink": (scalar.hardshrink(0.4), nn.Hardshrink(0.4), (-0.4, 0.4)),
    "softshrink": (scalar.softshrink(0.4), nn.Softshrink(0.4), (-0.4, 0.4)),
    "tanhshrink": (scalar.tanhshrink(), nn.Tanhshrink(), ()),
    "threshold": (scalar.threshold(0.3, -1.0), nn.Threshold(0.3, -1.0), (0.3,)),
    "abs": (scalar.abs(), torch.abs, (0,)),
    "clamp": (scalar.clamp(-0.2, 0.1), lambda x: x.clamp(-0.2, 0.1), (-0.2, 0.1)),
    "clamp_min": (scalar.clamp(min=-0.2), lambda x: x.clamp(min=-0.2), (-0.2,)),
    "clamp_max": (scalar.clamp(max=0.1), lambda x: x.clamp(max=0.1), (0.1,)),
    "sign": (scalar.sign(), torch.sign, (0,)),
    "heaviside": (scalar.heaviside(0.5), lambda x: 0.5 + 0.5 * torch.sign(x), (0,)),
    "exp": (scalar.exp(), torch.exp, ()),
    "expm1": (scalar.expm1(), torch.expm1, ()),
    "square": (scalar.square(), torch.square, ()),
    "pow3": (scalar.pow(3), lambda x: x**3, ()),
    "sin": (scalar.sin(), torch.sin, ()),
    "cos": (scalar.cos(), torch.cos, ()),
    "atan": (scalar.atan(), torch.atan, ()),
    "erf": (scalar.erf(), torch.erf, ()),
    "erfc": (scalar.erfc(), torch.erfc, ()),
}
LINEARISED = {
    "log": (scalar.log(), torch.log),
    "log1p": (scalar.log1p(), torch.log1p),
    "sqrt": (scalar.sqrt(), torch.sqrt),
    "rsqrt": (scalar.rsqrt(), torch.rsqrt),
    "reciprocal": (scalar.reciprocal(), torch.reciprocal),
    "pow1.5": (scalar.pow(1.5), lambda x: x**1.5),
    "pow-2": (scalar.pow(-2), lambda x: x**-2.0),
    "tan": (scalar.tan(), torch.tan),
}
MEANS = torch.linspace(-6, 6, 13, dtype=torch.float64)
SIGMAS = (1e-3, 0.03, 0.3, 1.0, 5.0)
# In saturated tails the variance is far below what any of this resolves: compare with this many σ added.
TINY = 1e-5


def truth(name: str, means: Tensor, sigma: float) -> list[Tensor]:
    _, f, kinks = CASES[name]
    rows = [dense(f, m, sigma, kinks) for m in means.tolist()]
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*rows, strict=True)]


def compare(name: str, sigma: float, dtype: torch.dtype, tolerance: float) -> None:
    fn = CASES[name][0]
    means = MEANS.to(dtype)
    variance = torch.full_like(means, sigma**2)
    value, gain, residual, total = truth(name, means.double(), math.sqrt(variance[0].item()))
    got = fn.moments(means, variance)
    sd = total.sqrt() + TINY * sigma
    assert ((got.mean - value).abs() <= tolerance * (value.abs() + sd)).all()
    assert ((got.slope - gain).abs() * sigma <= tolerance * sd).all()
    assert ((got.residual - residual).abs() <= 3 * tolerance * sd**2).all()
    assert ((got.variance(variance) - total).abs() <= 3 * tolerance * sd**2).all()


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", CASES)
def test_moments_float64(name, sigma):
    if name in ("exp", "expm1") and sigma > 1:
        pytest.skip("the second moment lies 10 σ out, beyond the reference; tests/scalar/test_moments.py has it")
    # quadrature truncates the Gaussian, and meets poles (atan) or steep bends (erf) at σ = 5
    compare(name, sigma, torch.float64, 2e-6 if name in ("atan", "gelu_tanh") else 2e-7)


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"exp", "expm1", "tanhshrink", "hardswish"}))
def test_moments_float32(name, sigma):
    """1e-4 for σ ≤ 1 and 1e-2 at σ = 5, as promised by the number of nodes; mostly far better."""
    compare(name, sigma, torch.float32, 1e-4 if sigma <= 1 else 1e-3)


@pytest.mark.parametrize("name", ["tanh", "sigmoid", "erf", "gelu", "softplus", "silu", "mish", "elu"])
def test_saturated_float32(name):
    """Slope and variance relative to themselves in the tail, where f is 1 − 1e-5 or the like."""
    fn, f, _ = CASES[name]
    for mean in (-6.0, 6.0) if name != "erf" else (-3.0, 3.0):
        for sigma in (1e-3, 0.05, 0.5):
            variance = torch.tensor([sigma**2])
            accurate = {"gelu": lambda x: x * 0.5 * torch.special.erfc(-x / math.sqrt(2))}.get(name, f)
            _, gain, _, total = dense(accurate, mean, math.sqrt(variance.item()))
            got = fn.moments(torch.tensor([mean]), variance)
            assert got.slope.item() == pytest.approx(gain, rel=1e-4)
            assert got.variance(variance).item() == pytest.approx(total, rel=2e-4)


@pytest.mark.parametrize("name", [*CASES, *LINEARISED])
def test_kinks(name):
    fn = (CASES.get(name) or LINEARISED[name])[0]
    assert fn.kinks == pytest.approx(CASES[name][2] if name in CASES else ())


class Fold(nn.Module):
    """|2x − 1|, written as two ReLUs."""

    def forward(self, x):
        return torch.relu(2 * x - 1) + torch.relu(1 - 2 * x)


class Shrink(nn.Module):
    """2x − 1 kept within ±½, written as what `softshrink` takes away."""

    def forward(self, x):
        return (2 * x - 1) - F.softshrink(2 * x - 1, 0.5)


@pytest.mark.parametrize(("module", "kinks"), [(Fold(), (0.5,)), (Shrink(), (0.25, 0.75))])
def test_kinks_of_fused_code(module, kinks):
    """The quadrature has to split where the inner function has its kinks, divided by 2 and shifted."""
    mean = torch.linspace(-1, 2, 13, dtype=torch.float64).view(1, -1)
    variance = torch.logspace(-3, 1, 13, dtype=torch.float64).view(1, -1)
    belief = favour.compile(module, mean, method="diag")(Belief(mean, diag=variance))
    entries = zip(mean[0].tolist(), variance[0].sqrt().tolist(), strict=True)
    value, _, _, total = zip(*(dense(module, m, s, kinks) for m, s in entries), strict=True)
    torch.testing.assert_close(belief.mean[0], torch.tensor(value, dtype=torch.float64), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(belief.variance[0], torch.tensor(total, dtype=torch.float64), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_value_is_torch(name):
    fn, f, _ = CASES[name]
    for dtype in (torch.float32, torch.float64):
        x = MEANS.to(dtype)
        torch.testing.assert_close(fn.value(x).to(dtype), f(x), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [*CASES, *LINEARISED])
def test_derivative_is_autograd(name):
    fn, f = (CASES.get(name) or LINEARISED[name])[:2]
    x = MEANS + 0.0371 if name in CASES else torch.linspace(0.2, 1.3, 7, dtype=torch.float64)
    x.requires_grad_()  # away from the kinks, where torch's own derivative is a convention
    y = f(x).sum()
    want = torch.autograd.grad(y, x)[0] if y.requires_grad else torch.zeros_like(x)
    rtol = 1e-7 if name == "hardsigmoid" else 1e-9  # torch differentiates hardsigmoid with a float32 sixth
    torch.testing.assert_close(fn.derivative(x.detach()), want, rtol=rtol, atol=1e-12)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_certain(name, dtype):
    """σ = 0: f(μ), f′(μ), 0, and finite gradients, on the kinks too."""
    fn, f, kinks = CASES[name]
    mean = torch.tensor([-5.3, -0.77, 0.05, 1.21, 7.9, *kinks], dtype=dtype, requires_grad=True)
    variance = torch.zeros_like(mean, requires_grad=True)
    got = fn.moments(mean, variance)
    want = f(mean.detach())
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-11, "atol": 1e-11}
    torch.testing.assert_close(got.mean.detach(), want, **tolerance)
    smooth = slice(0, 5)
    torch.testing.assert_close(got.slope.detach()[smooth], fn.derivative(mean.detach())[smooth], **tolerance)
    assert (got.residual == 0).all()
    for part in got:
        if part.requires_grad:
            grads = torch.autograd.grad(part.sum(), (mean, variance), retain_graph=True, allow_unused=True)
            assert all(g is None or torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("name", ["gelu", "tanh", "elu", "softplus_sharp", "hardswish", "tanhshrink", "mish"])
def test_gradcheck(name):
    mean = torch.tensor([-1.1, 0.3, 1.7], dtype=torch.float64, requires_grad=True)
    variance = torch.tensor([0.4, 1.2, 0.09], dtype=torch.float64, requires_grad=True)
    fn = CASES[name][0]
    assert torch.autograd.gradcheck(lambda m, v: tuple(fn.moments(m, v)), (mean, variance), atol=1e-6)


@pytest.mark.parametrize("name", LINEARISED)
def test_delta_method(name):
    """f + ½f″v, f′, ½f″²v² with the derivatives by autograd."""
    fn, f = LINEARISED[name]
    x = torch.linspace(0.2, 1.3, 7, dtype=torch.float64, requires_grad=True)
    variance = torch.linspace(0, 0.3, 7, dtype=torch.float64)
    y = f(x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    got = fn.moments(x.detach(), variance)
    want = y + 0.5 * second * variance, first, 0.5 * (second * variance) ** 2
    torch.testing.assert_close(tuple(got), tuple(part.detach() for part in want), rtol=1e-10, atol=1e-12)
    assert fn.exactness == "linearised"
    torch.testing.assert_close(fn.value(x.detach()), f(x.detach()))


def test_exactness():
    assert scalar.affine().exactness == scalar.clamp().exactness == scalar.pow(1).exactness == "exact"
    assert all(fn.exactness == "moment-matched" for name, (fn, _, _) in CASES.items() if name != "affine")


def test_prelu_per_channel():
    weight = torch.tensor([0.1, 0.5, -0.2], dtype=torch.float64)
    mean, variance = torch.randn(2, 3, 4, dtype=torch.float64), torch.rand(2, 3, 4, dtype=torch.float64)
    fn = scalar.prelu(weight.view(3, 1))
    torch.testing.assert_close(fn.value(mean), F.prelu(mean, weight))
    got = fn.moments(mean, variance)
    for channel in range(3):
        one = scalar.leaky_relu(weight[channel].item()).moments(mean[:, channel], variance[:, channel])
        torch.testing.assert_close([part[:, channel] for part in got], list(one))


MODES = ("price", "matched", "taylor")


@pytest.mark.parametrize("name", ["relu", "gelu", "abs", "sign"])
def test_surrogate_slope(name):
    fn = CASES[name][0]
    mean = torch.tensor([-1.0, 0.4, 2.0, 1.0], dtype=torch.float64)
    variance = torch.tensor([0.5, 2.0, 0.1, 0.0], dtype=torch.float64)
    price, matched, taylor = (scalar.surrogate_slope(fn, mean, variance, mode) for mode in MODES)
    want = fn.moments(mean, variance)
    torch.testing.assert_close(tuple(price), tuple(want))
    for other in (matched, taylor):
        torch.testing.assert_close(other.mean, want.mean)
        assert (other.residual == 0).all()
    torch.testing.assert_close(matched.slope.square() * variance, want.variance(variance))
    assert (matched.slope >= 0).all() and matched.slope[-1] == 0
    torch.testing.assert_close(taylor.slope, fn.derivative(mean))


def test_surrogate_slope_matched_gradient():
    """√ at 0 (σ = 0, or ReLU far below 0) does not poison the gradient."""
    mean = torch.tensor([-100.0, 1.0], requires_grad=True)
    variance = torch.tensor([1.0, 0.0], requires_grad=True)
    got = scalar.surrogate_slope(scalar.relu(), mean, variance, "matched")
    grads = torch.autograd.grad(got.slope.sum() + got.mean.sum(), (mean, variance))
    assert all(torch.isfinite(g).all() for g in grads)


def test_errors():
    with pytest.raises(InvalidValue, match="'ratio'"):
        scalar.surrogate_slope(scalar.relu(), torch.zeros(1), torch.ones(1), "ratio")
    with pytest.raises(InvalidValue, match="approximate='erf'"):
        scalar.gelu("erf")
    with pytest.raises(InvalidValue, match=r"min=2\.0"):
        scalar.clamp(2.0, 1.0)


@pytest.mark.parametrize("name", ["sigmoid", "elu", "hardtanh", "softplus", "gelu"])
def test_compiles_and_exports(name):
    """Without graph breaks; and through torch.export, the batch dynamic."""
    fn = CASES[name][0]

    class Module(nn.Module):
        def forward(self, mean, variance):
            return tuple(fn.moments(mean, variance))

    mean, variance = torch.linspace(-3, 3, 12).view(6, 2), torch.linspace(0, 2, 12).view(6, 2)
    want = Module()(mean, variance)
    torch._dynamo.reset()
    compiled = torch.compile(Module(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(mean, variance), want)
    batch = torch.export.Dim("batch")
    program = torch.export.export(Module(), (mean, variance), dynamic_shapes=({0: batch}, {0: batch}))
    torch.testing.assert_close(program.module()(mean[:3], variance[:3]), tuple(part[:3] for part in want))


@settings(deadline=None, max_examples=150)
@given(
    name=st.sampled_from(sorted(CASES.keys() - {"exp", "expm1", "square", "pow3"})),
    mean=st.floats(-1e5, 1e5, width=32),
    sigma=st.one_of(st.just(0.0), st.floats(1e-15, 1e8)),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_residual_nonnegative(name, mean, sigma, dtype):
    got = CASES[name][0].moments(torch.tensor([mean], dtype=dtype), torch.tensor([sigma], dtype=dtype) ** 2)
    assert all(torch.isfinite(part).all() and part.dtype == dtype for part in got)
    assert got.residual.item() >= 0
