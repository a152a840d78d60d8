"""Expected and predictive likelihoods against quadrature, torch.distributions and samples."""

import math

import numpy as np
import pytest
import torch
import torch.distributions as td
from torch import Tensor, nn

import favour
from favour import losses
from favour.belief.covariance import Directional

F64 = torch.float64


def hermite(n: int = 160) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.hermite_e.hermegauss(n)
    return x, w / w.sum()


def mean_over(mean: float, variance: float, function) -> float:
    """E[function(f)] by a fine sum over ±10 standard deviations."""
    x = np.linspace(-10, 10, 40001)
    w = np.exp(-0.5 * x**2)
    return float((w / w.sum() * function(mean + math.sqrt(variance) * x)).sum())


def log_prob(name: str, f: np.ndarray, y: float, noise: float) -> np.ndarray:
    f = torch.from_numpy(np.asarray(f))
    y = torch.tensor(y, dtype=F64)
    made = {
        "gaussian": lambda: td.Normal(f, math.sqrt(noise)),
        "student_t": lambda: td.StudentT(4.0, f, math.sqrt(noise)),
        "bernoulli": lambda: td.Bernoulli(logits=f),
        "poisson": lambda: td.Poisson(f.exp()),
    }[name]()
    return made.log_prob(y).numpy()


SCALAR = [
    ("gaussian", 0.7),
    ("student_t", -2.0),
    ("bernoulli", 1.0),
    ("bernoulli", 0.0),
    ("poisson", 3.0),
    ("poisson", 0.0),
]


@pytest.mark.parametrize(("name", "y"), SCALAR)
@pytest.mark.parametrize(("mean", "variance"), [(0.3, 0.2), (-1.0, 1.5), (0.5, 0.0)])
def test_expected_and_predictive_equal_integrals(name: str, y: float, mean: float, variance: float) -> None:
    belief = favour.Belief(torch.full((1, 1), mean, dtype=F64), diag=torch.full((1, 1), variance, dtype=F64))
    noise = 0.5 if name in ("gaussian", "student_t") else None
    target = torch.full((1, 1), y, dtype=F64)
    expected = mean_over(mean, variance, lambda f: -log_prob(name, f, y, 0.5))
    chance = mean_over(mean, variance, lambda f: np.exp(log_prob(name, f, y, 0.5)))
    got = losses.expected_nll(belief, target, name, noise=noise)
    assert float(got) == pytest.approx(expected, rel=1e-8, abs=1e-8)
    got = losses.predictive_nll(belief, target, name, noise=noise)
    assert float(got) == pytest.approx(-math.log(chance), rel=1e-7, abs=1e-8)


def test_heteroscedastic_equals_a_double_sum() -> None:
    mean = torch.tensor([[0.4, -0.3]], dtype=F64)
    cov = torch.tensor([[[0.5, 0.2], [0.2, 0.3]]], dtype=F64)
    y = 1.1
    x, w = hermite(80)
    a, b = np.meshgrid(x, x, indexing="ij")
    weight = np.outer(w, w)
    root = np.linalg.cholesky(cov[0].numpy())
    m, h = (mean[0].numpy()[:, None, None] + np.einsum("ij,jab->iab", root, np.stack([a, b]))).tolist()
    m, h = np.array(m), np.array(h)
    log = -0.5 * (math.log(2 * math.pi) + h + (y - m) ** 2 * np.exp(-h))
    belief = favour.Belief(mean, covariance=cov)
    target = torch.tensor([[y]], dtype=F64)
    assert float(losses.expected_nll(belief, target, "heteroscedastic")) == pytest.approx(
        -(weight * log).sum(), abs=1e-9
    )
    got = losses.predictive_nll(belief, target, "heteroscedastic")
    assert float(got) == pytest.approx(-math.log((weight * np.exp(log)).sum()), abs=1e-6)


def logits(scale: float = 1.0, rows: int = 5, classes: int = 4) -> favour.Belief:
    root = scale * torch.randn(rows, classes, classes, dtype=F64) / classes**0.5
    return favour.Belief(torch.randn(rows, classes, dtype=F64), covariance=root @ root.mT)


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_categorical_against_samples(scale: float) -> None:
    belief, n = logits(scale), 40_000
    y = torch.randint(4, (5,))
    root = torch.linalg.cholesky(belief.covariance_matrix)
    z = belief.mean + torch.einsum("bij,nbj->nbi", root, torch.randn(n, 5, 4, dtype=F64))
    drawn = td.Categorical(logits=z).log_prob(y)
    for got, draws in (
        (losses.expected_nll(belief, y, "categorical", reduction="none"), -drawn),
        (losses.predictive_nll(belief, y, "categorical", reduction="none").neg().exp(), drawn.exp()),
    ):
        error = draws.std(0) / n**0.5
        assert bool(((got - draws.mean(0)).abs() < 4 * error + 0.03 * scale**2).all())


def test_categorical_of_two_classes_equals_an_integral() -> None:
    belief = favour.Belief(torch.tensor([[0.4, 0.1]], dtype=F64), diag=torch.tensor([[0.3, 0.5]], dtype=F64))
    want = mean_over(-0.3, 0.8, lambda f: np.log1p(np.exp(f)))
    kind = losses.Categorical(nodes=4096)
    assert float(losses.expected_nll(belief, torch.tensor([0]), kind)) == pytest.approx(want, abs=2e-3)


@pytest.mark.parametrize("scale", [0.1, 0.5, 1.0, 3.0])
def test_bound_is_above_and_right_to_second_order(scale: float) -> None:
    belief, n = logits(scale), 40_000
    y = torch.zeros(5, dtype=torch.long)
    z = belief.sample((n,), torch.Generator().manual_seed(0))
    drawn = -td.Categorical(logits=z).log_prob(y)
    bound = losses.expected_nll(belief, y, losses.Categorical("bound"), reduction="none")
    assert bool((bound > drawn.mean(0) - 4 * drawn.std(0) / n**0.5).all())
    p = belief.mean.softmax(-1)
    curvature = p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)
    small = 1e-3
    shrunk = favour.Belief(belief.mean, covariance=small * belief.covariance_matrix)
    rise = losses.expected_nll(shrunk, y, losses.Categorical("bound"), reduction="none")
    rise = rise - nn.functional.cross_entropy(belief.mean, y, reduction="none")
    want = 0.5 * small * (curvature * belief.covariance_matrix).sum((-1, -2))
    torch.testing.assert_close(rise, want, rtol=0.02 * max(1, scale**2), atol=0)


def test_bound_ignores_a_common_shift_and_takes_directions() -> None:
    belief, y = logits(), torch.arange(5) % 4
    shifted = favour.Belief(belief.mean, covariance=belief.covariance_matrix + 7.0)
    kind = losses.Categorical("bound")
    torch.testing.assert_close(losses.expected_nll(shifted, y, kind), losses.expected_nll(belief, y, kind))
    basis = torch.eye(4, dtype=F64).unsqueeze(1).expand(4, 5, 4)
    same = favour.Belief(belief.mean, covariance=Directional(belief.variance, basis, belief.covariance_matrix))
    torch.testing.assert_close(losses.expected_nll(same, y, kind), losses.expected_nll(belief, y, kind))


@pytest.mark.parametrize("name", ["gaussian", "categorical", "bernoulli", "heteroscedastic"])
def test_draws_average_what_beliefs_integrate(name: str) -> None:
    belief, n = logits(0.7), 40_000
    target = {
        "categorical": torch.arange(5) % 4,
        "heteroscedastic": torch.randn(5, 2, dtype=F64),
        "bernoulli": torch.rand(5, 4, dtype=F64).round(),
    }.get(name, torch.randn(5, 4, dtype=F64))
    noise = 0.5 if name == "gaussian" else None
    draws = belief.sample((n,), torch.Generator().manual_seed(1))
    each = losses.expected_nll(draws, target, name, noise=noise, reduction="none")
    got = losses.expected_nll(belief, target, name, noise=noise, reduction="none")
    single = torch.stack(
        [losses.expected_nll(d[None], target, name, noise=noise, reduction="none") for d in draws[:400]]
    )
    assert bool(((each - got).abs() < 5 * single.std(0) / n**0.5 + 0.01).all())


@pytest.mark.parametrize(
    ("kind", "noise"),
    [
        ("gaussian", 0.5),
        ("student_t", 0.5),
        ("poisson", None),
        ("bernoulli", None),
        ("heteroscedastic", None),
        ("categorical", None),
        (losses.Categorical("bound"), None),
    ],
)
@pytest.mark.parametrize("loss", [losses.expected_nll, losses.predictive_nll])
def test_gradients_equal_finite_differences(kind, noise: float | None, loss) -> None:
    belief = logits(0.8, rows=2)
    y = {"heteroscedastic": torch.randn(2, 2, dtype=F64)}.get(kind, torch.ones(2, 4, dtype=F64))
    if kind == "categorical" or isinstance(kind, losses.Categorical):
        y = torch.tensor([1, 3])
    s = None if noise is None else torch.tensor(noise, dtype=F64, requires_grad=True)

    def run(mean: Tensor, root: Tensor, *noise: Tensor) -> Tensor:
        made = favour.Belief(mean, covariance=root @ root.mT, validate=False)
        return loss(made, y, kind, noise=noise[0] if noise else None)

    inputs = [belief.mean.requires_grad_(), torch.linalg.cholesky(belief.covariance_matrix).requires_grad_()]
    assert torch.autograd.gradcheck(run, (*inputs, *([] if s is None else [s])), atol=1e-6, rtol=1e-5)


def test_dropout_kl_equals_its_formula() -> None:
    p, weight = torch.tensor([0.2, 0.5], dtype=F64), torch.randn(3, 2, dtype=F64)
    entropy = td.Bernoulli(p).entropy()
    torch.testing.assert_close(losses.dropout_kl(p), -entropy.sum())
    torch.testing.assert_close(losses.dropout_kl(p[:1], units=10), -10 * entropy[0])
    want = (weight.square().sum(0) / (2 * 4 * (1 - p)) - entropy).sum()
    torch.testing.assert_close(losses.dropout_kl(p, weight, prior_std=2.0), want)


def test_evidence_bound_prefers_the_noise_that_made_the_data() -> None:
    """For a linear model the bound is tight at the true posterior: log N(y; 0, σ²I + XXᵀ)."""
    x, noise = torch.randn(40, 3, dtype=F64), 0.25
    y = x @ torch.randn(3, 1, dtype=F64) + noise**0.5 * torch.randn(40, 1, dtype=F64)
    precision = torch.eye(3, dtype=F64) + x.mT @ x / noise
    covariance = torch.linalg.inv(precision)
    model = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_((covariance @ x.mT @ y / noise).mT)
    posterior = {"weight": favour.Full(covariance, (1, 3))}
    predict = favour.compile(model, x[:2], posterior=posterior)
    got = losses.evidence_bound(predict, (x, y), "gaussian", noise=noise, prior=1.0)
    evidence = td.MultivariateNormal(torch.zeros(40, dtype=F64), x @ x.mT + noise * torch.eye(40, dtype=F64))
    torch.testing.assert_close(got.detach(), evidence.log_prob(y.squeeze(1)))
    worse = losses.evidence_bound(predict, [(x[:20], y[:20]), (x[20:], y[20:])], "gaussian", noise=1.0, prior=1.0)
    assert bool(worse < got)


BELIEF = favour.Belief(torch.zeros(2, 3), diag=torch.ones(2, 3))


@pytest.mark.parametrize(
    ("y", "likelihood", "options", "error", "words"),
    [
        (torch.tensor([0, 3]), "categorical", {}, favour.errors.InvalidValue, "label 3.*0 to 2"),
        (torch.zeros(2), "categorical", {}, favour.errors.InvalidType, "whole numbers"),
        (torch.zeros(2, 1).long(), "categorical", {}, favour.errors.ShapeMismatch, r"\(2,\)"),
        (torch.zeros(2), "gaussian", {"noise": 1.0}, favour.errors.ShapeMismatch, r"\(2, 3\)"),
        (torch.zeros(2, 3), "gaussian", {}, favour.errors.InvalidValue, "needs `noise`"),
        (torch.zeros(2, 3), "gaussian", {"noise": 0.0}, favour.errors.InvalidValue, "above 0"),
        (torch.full((2, 3), math.nan), "gaussian", {"noise": 1.0}, favour.errors.InvalidValue, "nan"),
        (torch.full((2, 3), 2.0), "bernoulli", {}, favour.errors.InvalidValue, "from 0 to 1"),
        (torch.full((2, 3), 0.5), "poisson", {}, favour.errors.InvalidValue, "counts"),
        (torch.zeros(2, 1), "heteroscedastic", {}, favour.errors.ShapeMismatch, "2d"),
        (torch.zeros(2, 3), "gauss", {}, favour.errors.InvalidValue, "choose one of gaussian"),
        (torch.zeros(2, 3), "bernoulli", {"noise": 1.0}, favour.errors.InvalidValue, "has none"),
        (torch.zeros(2, 3), "bernoulli", {"reduction": "all"}, favour.errors.InvalidValue, "'mean'"),
    ],
)
def test_bad_input(y: Tensor, likelihood: str, options: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        losses.expected_nll(BELIEF, y, likelihood, **options)


def test_bad_settings() -> None:
    with pytest.raises(favour.errors.InvalidValue, match="estimator"):
        losses.Categorical("exact")
    with pytest.raises(favour.errors.InvalidValue, match="even"):
        losses.Categorical(nodes=3)
    with pytest.raises(favour.errors.InvalidValue, match="df"):
        losses.StudentT(0.0)
    with pytest.raises(favour.errors.InvalidType, match="Belief"):
        losses.expected_nll([1.0], torch.zeros(1), "gaussian")  # type: ignore[arg-type]
    one = favour.Belief(torch.zeros(2, 1), diag=torch.ones(2, 1))
    with pytest.raises(favour.errors.ShapeMismatch, match="bernoulli"):
        losses.expected_nll(one, torch.zeros(2).long(), "categorical")
    with pytest.raises(favour.errors.InvalidValue, match="between 0 and 1"):
        losses.dropout_kl(torch.tensor([0.0]))
    with pytest.raises(favour.errors.ShapeMismatch, match="input columns"):
        losses.dropout_kl(torch.tensor([0.1, 0.2]), torch.ones(2, 3))
