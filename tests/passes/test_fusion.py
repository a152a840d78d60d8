"""Element-wise code on one tensor: mean, variance and slope of the fused function against a dense grid."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.special import ndtr
from torch import Tensor, nn

import favour
from favour import Belief
from favour.passes.normalise.fusion import FusedNode
from favour.passes.plan.steps import make_plan

float64 = torch.float64
# Steps that resolve kinks to 1e-8: there the trapezoidal rule's error is step²/12.
GRID = np.linspace(-8.5, 8.5, 170_001)
WEIGHTS = np.exp(-0.5 * GRID**2)
WEIGHTS /= WEIGHTS.sum()


def reference(f: Callable[[np.ndarray], np.ndarray], mean: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """E f, Var f and E f′ = Cov(f, x)/σ² of an element-wise f, entry by entry."""
    results = []
    for i, (m, v) in enumerate(zip(mean.flatten().tolist(), variance.flatten().tolist(), strict=True)):
        y = f(torch.from_numpy(m + v**0.5 * GRID), i % mean.shape[-1])
        y = y.numpy()
        first = (WEIGHTS * y).sum()
        results.append((first, (WEIGHTS * (y - first) ** 2).sum(), (WEIGHTS * (y - first) * GRID).sum() / v**0.5))
    return tuple(torch.tensor(column, dtype=float64).reshape(mean.shape) for column in zip(*results, strict=True))


class Code(nn.Module):
    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(x)


def spread(batch: int = 4, n: int = 5) -> tuple[Belief, Tensor]:
    """Means and deviations over a wide range, with correlation."""
    mean = torch.linspace(-3, 3, batch * n, dtype=float64).reshape(batch, n)
    root = torch.randn(batch, n, n, dtype=float64)
    covariance = root @ root.mT
    scale = torch.logspace(-1.5, 0.5, batch * n, dtype=float64).reshape(n, batch).T
    deviation = covariance.diagonal(dim1=1, dim2=2).sqrt()
    covariance = covariance * (scale / deviation).unsqueeze(1) * (scale / deviation).unsqueeze(2)
    return Belief(mean, covariance=covariance), covariance


def gelu_erf(x):
    return 0.5 * x * (1 + torch.erf(x / 2**0.5))


def gelu_tanh(x):
    return 0.5 * x * (1 + torch.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))


def swish(x):
    return x * torch.sigmoid(x)


def square(x):
    return x * x


def cubic(x):
    return x * x * x - 2 * x * x + 1


def softplus(x):
    return torch.log(1 + torch.exp(x))


def logistic(x):
    return 1 / (1 + torch.exp(-x))


def logistic_with_tensor(x):
    return torch.tensor(2.0, dtype=float64) / (1 + torch.exp(-x))


def mish(x):
    return x * torch.tanh(F.softplus(x))


def doubled(x):
    return x + x


def sine_residual(x):
    return x + torch.sin(x)


def chain(x):
    return torch.sigmoid(torch.tanh(torch.atan(x)))


def tanh_by_hand(x):
    return (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x))


def softsign_by_hand(x):
    return x / (1 + x * x).sqrt()


def inplace_swish(x):
    y = torch.sigmoid(x)
    y *= x
    return y


def used_inside_and_outside(x):
    h = torch.sigmoid(x)
    return h * x + h


SMOOTH = [
    gelu_erf,
    gelu_tanh,
    swish,
    square,
    cubic,
    softplus,
    logistic,
    logistic_with_tensor,
    mish,
    doubled,
    sine_residual,
    chain,
    tanh_by_hand,
    softsign_by_hand,
    inplace_swish,
    used_inside_and_outside,
]


def absolute(x):
    return torch.relu(x) + torch.relu(-x)


def squared_relu(x):
    return torch.relu(x) ** 2


def squared_relu_by_product(x):
    return torch.relu(x) * torch.relu(x)


def leaky_by_where(x):
    return torch.where(x > 0, x, 0.1 * x)


def zeroed_by_where(x):
    return torch.where(x > 0, x, 0.0)


def zeroed_by_zeros_like(x):
    return torch.where(x <= 0.5, torch.zeros_like(x), x)


def step_by_where(x):
    return torch.where(x < -0.5, -torch.ones_like(x), 2.0)


def leaky_by_maximum(x):
    return torch.maximum(x, 0.2 * x)


def clipped_by_minimum(x):
    return torch.minimum(torch.maximum(x, torch.tensor(-1.0)), torch.ones_like(x))


def residual_relu(x):
    return x + torch.relu(x)


def masked(x):
    return (x > 0) * x


def masked_as_float(x):
    return (x > 0.3).to(x.dtype) * x


def masked_as_float32(x):
    return (x > 0.3).float() * x


def banded(x):
    return ((x > -1) & (x < 1)) * x + (~(x > 0)) * 0.5


def filled(x):
    return x.masked_fill(x < 0.2, -1.0)


def nested_relus(x):
    return torch.relu(1 - torch.relu(x)) + 2 * torch.relu(torch.relu(x + 1) - 3)


def tent(x):
    return torch.relu(1 - torch.abs(x))


def unsorted_kinks(x):
    return torch.relu(x - 1) + torch.relu(x + 1) - torch.relu(x) + torch.abs(x - 0.5)


def hard_swish(x):
    return x * F.relu6(x + 3) / 6


def clamped_product(x):
    return x * x.clamp(-1, 2)


def gated_relu(x):
    return torch.relu(x) * torch.sigmoid(x)


def hardtanh_of_leaky(x):
    return F.hardtanh(F.leaky_relu(x, 0.5))


def shifted_relu(x):
    return torch.relu(x - torch.linspace(-1, 1, 5, dtype=float64)) + torch.relu(x)


KINKED = [
    absolute,
    squared_relu,
    squared_relu_by_product,
    leaky_by_where,
    zeroed_by_where,
    leaky_by_maximum,
    clipped_by_minimum,
    residual_relu,
    masked,
    nested_relus,
    tent,
    unsorted_kinks,
    hard_swish,
    clamped_product,
    gated_relu,
    hardtanh_of_leaky,
]


# These jump, which the grid resolves only to its step.
JUMPING = [zeroed_by_zeros_like, step_by_where, masked_as_float, masked_as_float32, banded, filled]


# The kinks of these are where something curved crosses a threshold: their places are not known in advance.
def relu_of_tanh(x):
    return torch.relu(torch.tanh(x) - 0.25)


def relu_of_parabola(x):
    return torch.relu(x * x - 1) + x


HIDDEN = [relu_of_tanh, relu_of_parabola]

CASES = (
    [(f, 1e-6) for f in SMOOTH]
    + [(f, 1e-6) for f in KINKED]
    + [(f, 1e-4) for f in JUMPING]
    + [(f, 2e-4) for f in HIDDEN]
)


@pytest.mark.parametrize(("code", "tolerance"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_fused_moments_equal_the_grid(code: Callable[[Tensor], Tensor], tolerance: float) -> None:
    belief, covariance = spread()
    mean, variance, slope = reference(lambda t, i: code(t), belief.mean, belief.variance)
    model = Code(code)
    for method in ("adjoint", "full"):
        result = favour.compile(model, belief.mean, method=method)(belief)
        torch.testing.assert_close(result.mean, mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(result.variance, variance, rtol=tolerance, atol=tolerance)
        # Price: between entries Cov = E[f′]E[f′]Σ
        between = covariance * slope.unsqueeze(1) * slope.unsqueeze(2)
        between = between - torch.diag_embed(between.diagonal(dim1=1, dim2=2)) + torch.diag_embed(variance)
        torch.testing.assert_close(result.covariance_matrix, between, rtol=5 * tolerance, atol=5 * tolerance)


@pytest.mark.parametrize("code", [gelu_erf, swish, absolute, residual_relu, leaky_by_where], ids=lambda f: f.__name__)
def test_fused_modes(code: Callable[[Tensor], Tensor]) -> None:
    """All modes share the mean; `matched` has the marginal variance, `taylor` the slope at the mean."""
    belief, _ = spread()
    mean, variance, _ = reference(lambda t, i: code(t), belief.mean, belief.variance)
    point = belief.mean.clone().requires_grad_()
    (tangent,) = torch.autograd.grad(code(point).sum(), point)
    for mode in ("price", "matched", "taylor"):
        result = favour.compile(Code(code), belief.mean, activation=mode, method="full")(belief)
        torch.testing.assert_close(result.mean, mean, rtol=1e-6, atol=1e-6)
        want = tangent.square() * belief.variance if mode == "taylor" else variance
        torch.testing.assert_close(result.variance, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("code", [f for f, _ in CASES], ids=lambda f: f.__name__)
def test_fused_code_is_one_step(code: Callable[[Tensor], Tensor]) -> None:
    """One nonlinear step (affine ones may stand around it), so one noise; at σ = 0 the function itself."""
    x = torch.randn(3, 4, dtype=float64)
    predict = favour.compile(Code(code), x)
    result = predict(Belief.point(x))
    torch.testing.assert_close(result.mean, code(x), rtol=1e-14, atol=1e-14)
    assert result.variance.max() == 0
    plan = make_plan(predict.graph, {"x"}, favour.Posterior({}))
    fused = [step for step in plan.steps if isinstance(step.node, FusedNode)]
    assert len(fused) == 1
    others = {str(s.node.target) for s in plan.steps if s.rule is not None and s is not fused[0]}
    assert others <= {
        "aten.mul.Tensor",
        "aten.div.Tensor",
        "aten.add.Tensor",
        "aten.rsub.Scalar",
        "aten.neg.default",
    }


def test_fused_per_feature_constants() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 0.0, -1.0], dtype=float64))
            self.register_buffer("shift", torch.linspace(-1, 1, 5, dtype=float64))

        def code(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return torch.relu(scale * x - shift) + x * torch.sigmoid(x + shift) + torch.maximum(x, shift)

        def forward(self, x: Tensor) -> Tensor:
            return self.code(x, self.scale, self.shift)

    model = Scaled()
    belief, _ = spread()
    with torch.no_grad():
        mean, variance, _ = reference(
            lambda t, i: model.code(t, model.scale[i], model.shift[i]), belief.mean, belief.variance
        )
        result = favour.compile(model, belief.mean)(belief)
    torch.testing.assert_close(result.mean, mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(result.variance, variance, rtol=1e-6, atol=1e-6)


def test_fused_constant_for_each_input() -> None:
    """A known tensor with a batch dimension inside the fused code."""

    class Gate(nn.Module):
        def forward(self, x: Tensor, gate: Tensor) -> Tensor:
            return torch.relu(x - gate) + x * torch.tanh(x)

    belief, _ = spread()
    gate = torch.randn(4, 5, dtype=float64)
    result = favour.compile(Gate(), (belief.mean, gate))(belief, gate)
    for b in range(4):
        mean, variance, _ = reference(
            lambda t, i, b=b: torch.relu(t - gate[b, i]) + t * torch.tanh(t),
            belief.mean[b : b + 1],
            belief.variance[b : b + 1],
        )
        torch.testing.assert_close(result.mean[b : b + 1], mean, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(result.variance[b : b + 1], variance, rtol=1e-6, atol=1e-6)


def test_affine_chain_is_not_fused_and_exact() -> None:
    def code(x: Tensor) -> Tensor:
        return (3 - 2 * (x + 1) / 4) * 5 - 1

    belief, covariance = spread()
    predict = favour.compile(Code(code), belief.mean, method="full")
    result = predict(belief)
    assert not any(isinstance(s.node, FusedNode) for plan, _ in predict.program.plans.values() for s in plan.steps)
    torch.testing.assert_close(result.mean, code(belief.mean), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(result.covariance_matrix, 6.25 * covariance, rtol=1e-13, atol=1e-13)


def test_single_activation_is_not_fused() -> None:
    predict = favour.compile(Code(lambda x: 2 * torch.relu(x + 1)), torch.randn(2, 3))
    predict(Belief(torch.zeros(2, 3), diag=torch.ones(2, 3)))
    assert not any(isinstance(s.node, FusedNode) for plan, _ in predict.program.plans.values() for s in plan.steps)


def test_affine_code_before_the_fused_function_keeps_its_scale() -> None:
    """Only what bends is integrated: a steep affine map in front does not blur the quadrature."""

    def code(x: Tensor) -> Tensor:
        u = 300 * (x - 0.1) / 3 + 7
        return gelu_erf(u)

    belief = Belief(torch.full((1, 3), 0.05, dtype=float64), diag=torch.full((1, 3), 0.04, dtype=float64))
    mean, variance, _ = reference(lambda t, i: code(t), belief.mean, belief.variance)
    result = favour.compile(Code(code), belief.mean)(belief)
    torch.testing.assert_close(result.mean, mean, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(result.variance, variance, rtol=1e-5, atol=1e-6)


def test_broadcast_inside_element_wise_code() -> None:
    """The code starts with one column and ends with five: what widens it stays outside."""

    def code(x: Tensor) -> Tensor:
        y = x[:, :1] + torch.linspace(-1, 1, 5, dtype=float64)
        return y * torch.sigmoid(y) + x[:, :1]

    belief, _ = spread()
    result = favour.compile(Code(code), belief.mean, method="full")(belief)
    draws = Code(code)(belief.sample((100_000,), generator=torch.Generator().manual_seed(0)).flatten(0, 1))
    draws = draws.reshape(100_000, 4, 5)
    assert ((draws.mean(0) - result.mean).abs() < 5 * draws.std(0) / 100_000**0.5).all()


def test_different_tensors_are_not_fused() -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return torch.relu(x) + torch.sigmoid(y)

    x, y = torch.randn(3, 4, dtype=float64), torch.randn(3, 4, dtype=float64)
    v = torch.full((3, 4), 0.5, dtype=float64)
    both = favour.compile(Two(), (x, y), method="full")(Belief(x, diag=v), Belief(y, diag=v))
    first = favour.compile(Code(torch.relu), x, method="full")(Belief(x, diag=v))
    second = favour.compile(Code(torch.sigmoid), y, method="full")(Belief(y, diag=v))
    torch.testing.assert_close(both.mean, first.mean + second.mean)
    torch.testing.assert_close(both.variance, first.variance + second.variance)


def test_result_of_fused_code_used_again() -> None:
    """h is read inside a fused function and outside of it; the parts still add up to a covariance."""

    class Reusing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 5, dtype=float64)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(x)
            return torch.cat([h, torch.tanh(2 * h) + h, self.layer(h)], 1)

    model = Reusing()
    belief, _ = spread()
    result = favour.compile(model, belief.mean, method="full")(belief)
    draws = model(belief.sample((50_000,), generator=torch.Generator().manual_seed(0)).flatten(0, 1)).reshape(
        50_000, 4, 15
    )
    standard = draws.std(0) / 50_000**0.5
    assert ((draws.mean(0) - result.mean).abs() < 5 * standard + 1e-9).all()
    assert torch.linalg.eigvalsh(result.covariance_matrix).min() > -1e-10
    marginal = result.variance[:, :10]  # exact for functions of one Gaussian
    fourth = (draws - draws.mean(0)).pow(4).mean(0)[:, :10]
    assert ((draws.var(0)[:, :10] - marginal).abs() < 5 * (fourth / 50_000).sqrt() + 1e-9).all()


def test_fused_code_outside_its_domain_is_linearised() -> None:
    """A Gaussian leaves the domain of the logarithm: the tangent at the mean is what can be said."""
    mean = torch.tensor([[1.0, 2.0]], dtype=float64)
    result = favour.compile(Code(lambda x: x * torch.log(x)), mean)(Belief(mean, diag=torch.ones(1, 2, dtype=float64)))
    torch.testing.assert_close(result.mean, mean * mean.log())
    torch.testing.assert_close(result.variance, (mean.log() + 1).square())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_lower_precision(dtype: torch.dtype) -> None:
    belief, _ = spread()
    low = Belief(belief.mean.to(dtype), diag=belief.variance.to(dtype))
    high = Belief(low.mean.double(), diag=low.diag.double())
    for code in (gelu_erf, absolute, leaky_by_where, squared_relu, swish):
        got, want = (favour.compile(Code(code), b.mean)(b) for b in (low, high))
        assert got.mean.dtype == dtype
        tolerance = 2e-4 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got.mean.double(), want.mean, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(got.variance.double(), want.variance, rtol=2 * tolerance, atol=tolerance)


def test_fused_gradients() -> None:
    x = torch.randn(2, 3, dtype=float64, requires_grad=True)
    v = torch.rand(2, 3, dtype=float64).add(0.1).requires_grad_()
    for code in (gelu_erf, absolute, leaky_by_where):
        predict = favour.compile(Code(code), x.detach(), method="diag")

        def f(x: Tensor, v: Tensor, predict=predict) -> tuple[Tensor, Tensor]:
            belief = predict(Belief(x, diag=v))
            return belief.mean, belief.variance

        assert torch.autograd.gradcheck(f, (x, v), atol=1e-5, rtol=1e-4)


def test_relu_residual_in_closed_form() -> None:
    """x + relu(x) at μ = 0: mean σ/√(2π), variance σ²(1 + 1 + ½ − 1/(2π)): not σ² + σ²(½ − 1/(2π))."""
    belief = Belief(torch.zeros(1, 1, dtype=float64), diag=torch.full((1, 1), 4.0, dtype=float64))
    result = favour.compile(Code(residual_relu), belief.mean)(belief)
    assert abs(result.mean.item() - 2 / (2 * np.pi) ** 0.5) < 1e-9
    assert abs(result.variance.item() - 4 * (2.5 - 1 / (2 * np.pi))) < 1e-8


def test_reference_agrees_with_relu_in_closed_form() -> None:
    mean, variance = torch.tensor([[0.7]], dtype=float64), torch.tensor([[2.0]], dtype=float64)
    got, _, slope = reference(lambda t, i: torch.relu(t), mean, variance)
    s = 0.7 / 2**0.5
    assert abs(slope.item() - ndtr(s)) < 1e-8
    assert abs(got.item() - (0.7 * ndtr(s) + 2**0.5 * np.exp(-(s**2) / 2) / (2 * np.pi) ** 0.5)) < 1e-8


@pytest.mark.parametrize("options", [{}, {"pairs": 16}, {"rank": 4}, {"method": "dplr"}], ids=str)
@pytest.mark.parametrize("name", ["sqrt", "root", "log"])
def test_functions_that_end_at_zero_behind_a_relu(name, options) -> None:
    """√relu has an infinite slope times a slope of 0 below 0, and nothing varies where a unit is dead."""
    functions = {"sqrt": torch.sqrt, "root": lambda t: t**0.5, "log": lambda t: torch.log(t + 1e-3)}

    class Ended(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layer = nn.Dropout(0.3), nn.Linear(30, 3)

        def forward(self, x: Tensor) -> Tensor:
            return functions[name](torch.relu(self.layer(self.drop(x))))

    model, x = Ended(), torch.rand(4, 30)
    x[0] = 0
    with torch.no_grad():
        model.layer.weight[0] = 0  # a dead unit
        model.layer.bias.zero_()
        model.layer.weight[1] *= torch.where(x[1] > 0, -1.0, 1.0) * 3
    belief = favour.compile(model, x, **options)(x)
    drawn = favour.sample(model, x, 4000).detach()
    assert belief.mean.isfinite().all() and belief.variance.isfinite().all()
    assert ((belief.mean - drawn.mean(0)).abs() <= 0.3 * drawn.std(0) + 1e-5).all()
    assert belief.variance[0].max() == 0 and belief.variance[:, 0].max() == 0


@pytest.mark.parametrize("variance", [1.0, 1e4, 1e8])
def test_wide_gaussians_keep_bounded_functions_bounded_in_float32(variance) -> None:
    """The tangent at μ rises by σ, far more than the function does: what is taken off may not drown the rest."""
    functions = {
        "cos": lambda x: torch.cos(torch.relu(x)),
        "sine": lambda x: torch.sin(torch.relu(x)),
        "gate": lambda x: torch.sigmoid(torch.relu(x) - 1),
    }
    mean = torch.linspace(-3, 3, 12).reshape(3, 4)
    for name, function in functions.items():
        belief = favour.compile(Code(function), mean)(Belief(mean, diag=torch.full_like(mean, variance)))
        assert belief.mean.abs().max() <= 1.01 and belief.variance.max() <= 1.01, name
