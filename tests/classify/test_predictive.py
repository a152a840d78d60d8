"""Class probabilities, quantiles and noise against quadrature and scipy."""

import math

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, stats
from test_scores import directional, dplr, quadrature
from torch import nn

import favour
from favour.belief import Belief
from favour.classify import predictive
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

F64 = torch.float64


def softmax_mean(mean, sigma):
    z, w = quadrature(mean, sigma)
    p = np.exp(z - z.max(1, keepdims=True))
    return w @ (p / p.sum(1, keepdims=True))


def sigmoid_mean(m, s):
    value, _ = integrate.quad(
        lambda x: stats.norm.pdf(x) / (1 + math.exp(-(m + s * x))), -12, 12, epsabs=1e-12, limit=200
    )
    return value


def random_gaussian(seed, scale=1.0):
    g = np.random.default_rng(seed)
    root = scale * g.normal(size=(3, 3))
    return g.normal(size=3), root @ root.T


def belief_of(mean, sigma):
    return Belief(torch.tensor(mean)[None], covariance=torch.tensor(sigma)[None])


@pytest.mark.parametrize("seed", range(4))
def test_probabilities_equal_quadrature(seed):
    mean, sigma = random_gaussian(seed, 0.7)
    expected = softmax_mean(mean, sigma)
    np.testing.assert_allclose(favour.probabilities(belief_of(mean, sigma), nodes=8192)[0], expected, atol=1e-3)
    np.testing.assert_allclose(favour.probabilities(belief_of(mean, sigma))[0], expected, atol=0.012)


@pytest.mark.parametrize("seed", range(4))
def test_probit_equals_its_formula(seed):
    mean, sigma = random_gaussian(seed, 0.7)

    def term(i, j):
        s = sigma[i, i] + sigma[j, j] - 2 * sigma[i, j]
        return math.exp(-(mean[i] - mean[j]) / math.sqrt(1 + math.pi * s / 8))

    p = np.array([1 / sum(term(i, j) for j in range(3)) for i in range(3)])
    got = favour.probabilities(belief_of(mean, sigma), estimator="probit")[0]
    np.testing.assert_allclose(got, p / p.sum(), atol=1e-12)
    np.testing.assert_allclose(got, softmax_mean(mean, sigma), atol=0.08)


def test_probabilities_error_falls_with_the_fourth_power_of_the_scale():
    mean, sigma = random_gaussian(0, 1.0)
    errors = []
    for scale in (0.2, 0.1):
        p = favour.probabilities(belief_of(mean, scale**2 * sigma))[0].numpy()
        errors.append(np.abs(p - softmax_mean(mean, scale**2 * sigma)).sum())
    assert errors[0] > 12 * errors[1] > 0


@pytest.mark.parametrize("structure", [dplr, directional])
def test_probabilities_depend_on_the_covariance_only(structure):
    belief = structure()
    dense = Belief(belief.mean, covariance=belief.covariance_matrix)
    torch.testing.assert_close(
        favour.probabilities(belief, nodes=4096), favour.probabilities(dense, nodes=4096), atol=0.02, rtol=0
    )


@pytest.mark.parametrize("s", [0.0, 0.3, 2.0, 6.0])
@pytest.mark.parametrize("m", [-3.0, 0.0, 1.5])
def test_binary_probabilities_equal_quadrature(m, s):
    expected = sigmoid_mean(m, s)
    single = Belief(torch.tensor([m], dtype=F64), diag=torch.tensor([s * s], dtype=F64))
    p = favour.probabilities(single, kind="binary")
    torch.testing.assert_close(p, torch.tensor([[1 - expected, expected]], dtype=F64), atol=1e-6, rtol=0)
    pair = Belief(torch.tensor([[1.0, 1.0 + m]], dtype=F64), diag=torch.tensor([[s * s / 3, s * s * 2 / 3]], dtype=F64))
    torch.testing.assert_close(favour.probabilities(pair), p, atol=1e-6, rtol=0)
    labels = Belief(torch.full((1, 2, 2), m, dtype=F64), diag=torch.full((1, 2, 2), s * s, dtype=F64))
    many = favour.probabilities(labels, kind="multilabel")
    torch.testing.assert_close(many, torch.full((1, 2, 2), expected, dtype=F64), atol=1e-6, rtol=0)
    probit = favour.probabilities(single, kind="binary", estimator="probit")
    assert probit[0, 1].item() == pytest.approx(1 / (1 + math.exp(-m / math.sqrt(1 + math.pi * s * s / 8))), abs=1e-12)
    assert probit[0, 1].item() == pytest.approx(expected, abs=0.02)


def test_ordinal_probabilities_equal_quadrature():
    # One score with thresholds: z_k = f − b_k, all sharing the same noise.
    f, s, b = 0.4, 1.3, [-1.0, 0.0, 2.0]
    above = [sigmoid_mean(f - t, s) for t in b]
    expected = [1 - above[0], above[0] - above[1], above[1] - above[2], above[2]]
    mean = torch.tensor([[f - t for t in b]], dtype=F64)
    belief = Belief(mean, factor=torch.full((1, 1, 3), s, dtype=F64))
    np.testing.assert_allclose(favour.probabilities(belief, kind="ordinal", nodes=4096)[0], expected, atol=2e-3)
    probit = favour.probabilities(belief, kind="ordinal", estimator="probit")[0]
    np.testing.assert_allclose(probit, expected, atol=0.02)


def test_ordinal_probabilities_are_a_distribution_whatever_the_logits():
    belief = Belief(torch.randn(20, 4), diag=torch.rand(20, 4))
    p = favour.probabilities(belief, kind="ordinal")
    assert (p >= 0).all()
    torch.testing.assert_close(p.sum(1), torch.ones(20))


@pytest.mark.parametrize("estimator", ["nodes", "probit"])
def test_certain_logits_give_their_softmax(estimator):
    z = 3 * torch.randn(7, 5, dtype=F64)
    torch.testing.assert_close(favour.probabilities(Belief.point(z), estimator=estimator), z.softmax(-1))


def test_bridge_equals_its_formula_and_uncertainty_flattens():
    mean, sigma = random_gaussian(3, 1.0)
    # A covariance that already has no spread along (1, 1, 1), and a mean that sums to zero.
    centre = np.eye(3) - 1 / 3
    mean, sigma = mean - mean.mean(), centre @ sigma @ centre
    c = np.trace(sigma) / 3 / math.sqrt(1.5)
    m, v = mean / math.sqrt(c), np.diag(sigma) / c
    alpha = (1 - 2 / 3 + np.exp(m) * np.exp(-m).sum() / 9) / v
    p = favour.probabilities(belief_of(mean, sigma), estimator="bridge")[0]
    np.testing.assert_allclose(p, alpha / alpha.sum(), atol=1e-8)
    far = favour.probabilities(belief_of(mean, 100 * (sigma + np.eye(3))), estimator="bridge")[0]
    assert far.max() < p.max()
    shifted = favour.probabilities(belief_of(mean + 5, sigma + 0.7), estimator="bridge")[0]
    np.testing.assert_allclose(shifted, p, atol=1e-8)


@pytest.mark.parametrize(("count", "dim"), [(128, 1), (128, 10), (128, 64), (128, 300)])
def test_nodes_have_the_moments_of_a_normal(count, dim):
    x = predictive.normal_nodes(count, dim)
    assert x.shape == (count, dim)
    torch.testing.assert_close(x.mean(0), torch.zeros(dim, dtype=F64))
    covariance = x.T @ x / count
    if dim <= count // 2:
        torch.testing.assert_close(covariance, torch.eye(dim, dtype=F64))
    torch.testing.assert_close(covariance.diagonal(), torch.ones(dim, dtype=F64))
    torch.testing.assert_close(x[: count // 2], -x[count // 2 :])


@pytest.mark.parametrize("kind", [None, "multilabel", "ordinal"])
@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_probabilities_keep_the_dtype(kind, dtype):
    p = favour.probabilities(dplr(dtype=dtype), kind=kind)
    assert p.dtype == dtype
    assert p.isfinite().all()


def test_large_batches_go_in_slices(monkeypatch):
    belief = dplr(batch=7)
    whole = favour.probabilities(belief)
    monkeypatch.setattr(predictive, "_ROWS", 2 * 128 * 8)
    torch.testing.assert_close(favour.probabilities(belief), whole)


def test_probabilities_have_gradients():
    def run(mean, diag, factor):
        return favour.probabilities(Belief(mean, diag, factor, validate=False), nodes=16)

    b = dplr(batch=2)
    assert torch.autograd.gradcheck(run, [t.clone().requires_grad_() for t in (b.mean, b.diag, b.factor)])


class Probable(nn.Module):
    def __init__(self, predict):
        super().__init__()
        self.predict = predict

    def forward(self, x):
        return self.predict.probabilities(x)


@pytest.fixture(scope="module")
def predict():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
    return favour.compile(model, torch.randn(4, 5))


def test_predictor_probabilities_export(predict):
    x = torch.randn(6, 5)
    expected = predict.probabilities(x)
    torch.testing.assert_close(expected, favour.probabilities(predict(x)))
    batch = torch.export.Dim("batch")
    exported = torch.export.export(Probable(predict), (x,), dynamic_shapes=({0: batch},), strict=False)
    torch.testing.assert_close(exported.module()(x[:3]), expected[:3])


def test_predictor_probabilities_compile(predict):
    x = torch.randn(6, 5)
    compiled = torch.compile(Probable(predict), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), predict.probabilities(x))


def test_probabilities_refuse_bad_input(predict):
    with pytest.raises(ShapeMismatch, match="regression has no class probabilities"):
        favour.probabilities(Belief.point(torch.zeros(3, 1)))
    with pytest.raises(ShapeMismatch, match="kind='binary'"):
        favour.probabilities(Belief.point(torch.zeros(3)))
    with pytest.raises(ShapeMismatch, match=r"\(3, 4\)"):
        favour.probabilities(Belief.point(torch.zeros(2, 3, 4)))
    with pytest.raises(ShapeMismatch, match="binary"):
        favour.probabilities(Belief.point(torch.zeros(2, 3)), kind="binary")
    with pytest.raises(InvalidValue, match="`kind` is 'classes'"):
        favour.probabilities(Belief.point(torch.zeros(2, 3)), kind="classes")
    with pytest.raises(InvalidValue, match="`estimator` is 'exact'"):
        favour.probabilities(Belief.point(torch.zeros(2, 3)), estimator="exact")
    with pytest.raises(InvalidValue, match="bridge"):
        favour.probabilities(Belief.point(torch.zeros(2, 3)), kind="ordinal", estimator="bridge")
    with pytest.raises(InvalidValue, match="even number"):
        favour.probabilities(Belief.point(torch.zeros(2, 3)), nodes=7)
    with pytest.raises(InvalidType, match="Belief over logits, got Tensor"):
        favour.probabilities(torch.zeros(2, 3))


# ---- regression


def test_quantiles_and_intervals_equal_scipy():
    belief = Belief(torch.tensor([[1.0], [2.0]], dtype=F64), diag=torch.tensor([[4.0], [1.0]], dtype=F64))
    for q in (0.01, 0.3, 0.9):
        expected = stats.norm.ppf(q, [1, 2], np.sqrt([4.5, 1.5]))
        np.testing.assert_allclose(predictive.quantile(belief, q, noise=0.5).flatten(), expected, rtol=1e-9)
    low, high = predictive.interval(belief, 0.9, noise=torch.tensor([0.5], dtype=F64))
    expected = stats.norm.interval(0.9, [1, 2], np.sqrt([4.5, 1.5]))
    np.testing.assert_allclose(torch.cat([low, high], 1).T, expected, rtol=1e-9)
    with pytest.raises(InvalidValue, match="level"):
        predictive.quantile(belief, 1.0)


def test_heteroscedastic_has_the_moments_of_its_samples():
    matrix = torch.tensor([[[0.5, 0.1], [0.1, 0.4]]], dtype=F64)
    belief = Belief(torch.tensor([[1.0, -0.5]], dtype=F64), covariance=matrix)
    n = 400_000
    m, h = belief.sample((n,), torch.Generator().manual_seed(0)).squeeze(1).unbind(1)
    y = m + torch.exp(0.5 * h) * torch.randn(n, dtype=F64, generator=torch.Generator().manual_seed(1))
    got = predictive.heteroscedastic(belief)
    assert got.mean.item() == pytest.approx(y.mean().item(), abs=5 * y.std().item() / math.sqrt(n))
    error = ((y - y.mean()).square().std() / math.sqrt(n)).item()
    assert got.variance.item() == pytest.approx(y.var().item(), abs=5 * error)
    with pytest.raises(ShapeMismatch, match=r"\(2, 3\)"):
        predictive.heteroscedastic(Belief.point(torch.zeros(2, 3)))


def test_fit_noise_equals_scipy():
    g = torch.Generator().manual_seed(0)
    variance = torch.rand(200, 2, generator=g, dtype=F64)
    y = torch.randn(200, 2, generator=g, dtype=F64) * (variance + torch.tensor([0.3, 2.0], dtype=F64)).sqrt()
    got = predictive.fit_noise(Belief(torch.zeros(200, 2, dtype=F64), variance), y)
    for k in range(2):
        v, r = variance[:, k].numpy(), y[:, k].numpy() ** 2
        best = optimize.minimize_scalar(
            lambda s, v=v, r=r: np.sum(np.log(v + s) + r / (v + s)),
            bounds=(0, 10),
            method="bounded",
            options={"xatol": 1e-9},
        )
        assert got[k].item() == pytest.approx(best.x, rel=1e-4)


def test_fit_noise_is_zero_where_the_belief_is_too_wide():
    assert predictive.fit_noise(Belief(torch.zeros(9, 1), torch.ones(9, 1)), torch.full((9, 1), 0.1)) == 0


def test_fit_noise_refuses_bad_input():
    with pytest.raises(ShapeMismatch, match=r"\(4,\)"):
        predictive.fit_noise(Belief.point(torch.zeros(3, 1)), torch.zeros(4))
    with pytest.raises(ShapeMismatch, match="no observations"):
        predictive.fit_noise(Belief.point(torch.zeros(0, 1)), torch.zeros(0, 1))
    with pytest.raises(InvalidValue, match="nan"):
        predictive.fit_noise(Belief.point(torch.zeros(1, 1)), torch.full((1, 1), math.nan))
