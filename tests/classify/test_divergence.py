"""The Jensen–Shannon divergence far from the data, against quadrature and samples that do not import favour."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import nn

import favour
from favour import Belief, scores
from favour.belief.covariance import Directional
from favour.classify.head import find_head
from favour.errors import DeprecatedName, InvalidValue, OutOfRange, UnsupportedOperation

F64 = torch.float64


def information(mean, deviation):
    """H(E σ(d)) − E H(σ(d)) for d ~ N(mean, deviation²), a fine rule over 40 standard deviations."""
    x, h = np.linspace(-40, 40, 400_001, retstep=True)
    w = np.exp(-0.5 * x**2) * h / math.sqrt(2 * math.pi)
    d = mean + deviation * x
    log_p, log_q = -np.logaddexp(0, -d), -np.logaddexp(0, d)
    p = np.exp(log_p)
    average = (w * p).sum()
    rare = p * (log_p - math.log(average)) - p + average
    often = np.exp(log_q) * (log_q - math.log1p(-average)) + p - average
    return (w * (rare + often)).sum()


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    ("mean", "deviation"),
    [(0, 0.1), (0, 1), (0, 5), (-1, 1), (-3, 10), (-5, 1), (-20, 3), (-50, 1), (-50, 5), (-0.5, 60), (-60, 100)],
)
def test_two_classes_equal_quadrature(mean, deviation, dtype):
    for m in (mean, -mean):
        belief = Belief(torch.tensor([[0.0, m]], dtype=dtype), diag=torch.tensor([[0.0, deviation**2]], dtype=dtype))
        found = scores.jsd(belief).item()
        assert found == pytest.approx(information(mean, deviation), rel=0.03 if deviation > 20 else 2e-3)


def test_what_nodes_cannot_see():
    """Class 0 loses against each other one in 1 of 10⁶ to 10²⁰ draws, so that the parts add up."""
    mean = torch.tensor([[0.0, -50.0, -60.0], [0.0, -100.0, -140.0], [0.0, -90.0, -90.0]], dtype=F64)
    belief = Belief(mean, diag=torch.full((3, 3), 100.0, dtype=F64) / 2)
    wanted = [sum(information(m, 10.0) for m in row[1:].tolist()) for row in mean]
    np.testing.assert_allclose(scores.jsd(belief), wanted, rtol=0.02)
    narrow = scores.jsd(belief.to(torch.float32))
    np.testing.assert_allclose(narrow, wanted, rtol=0.02)
    assert (narrow > 0).all()


@pytest.mark.parametrize("scale", [0.01, 1.0, 10.0, 100.0])
def test_equals_many_draws_and_stays_below_log_c(scale):
    g = torch.Generator().manual_seed(0)
    mean = scale * torch.randn(12, 5, generator=g, dtype=F64)
    root = scale * torch.randn(12, 5, 5, generator=g, dtype=F64)
    belief = Belief(mean, covariance=root @ root.mT)
    found = scores.jsd(belief)
    z = belief.sample((20_000,), g)
    log_p = z.log_softmax(-1)
    p = log_p.exp()
    truth = (p * log_p).sum(-1).mean(0) - torch.special.xlogy(p.mean(0), p.mean(0)).sum(-1)
    torch.testing.assert_close(found, truth, rtol=0.1, atol=0.01 * min(1, scale**2))
    assert (found <= math.log(5)).all() and (found >= 0).all()
    torch.testing.assert_close(scores.jsd(belief[3:4]), found[3:4])  # one input alone
    torch.testing.assert_close(scores.jsd(belief.to(torch.float32)).double(), found, rtol=1e-3, atol=1e-6)


def test_no_variance_no_disagreement():
    z = torch.tensor([[0.0, 0.0, 0.0], [30.0, 0.0, 1.0]], requires_grad=True)
    diag = torch.zeros(2, 3, requires_grad=True)
    found = scores.jsd(Belief(z, diag=diag))
    assert (found < 1e-13).all()
    found.sum().backward()
    assert z.grad.isfinite().all() and diag.grad.isfinite().all()


@pytest.mark.parametrize("scale", [0.3, 3.0, 30.0])
def test_gradients(scale):
    g = torch.Generator().manual_seed(1)
    mean = scale * torch.randn(3, 4, generator=g, dtype=F64)
    root = scale * torch.randn(3, 4, 4, generator=g, dtype=F64)

    def run(mean, root):
        return scores.jsd(Belief(mean, covariance=root @ root.mT, validate=False))

    assert torch.autograd.gradcheck(run, [mean.requires_grad_(), root.requires_grad_()])


def test_every_covariance_says_the_same():
    g = torch.Generator().manual_seed(2)
    mean, diag = torch.randn(4, 6, generator=g, dtype=F64), torch.rand(4, 6, generator=g, dtype=F64)
    factor = torch.randn(2, 4, 6, generator=g, dtype=F64)
    belief = Belief(mean, diag=diag, factor=factor)
    basis = torch.eye(6, dtype=F64)[:, None].expand(6, 4, 6)
    sigma = belief.covariance_matrix
    for same in (Belief(mean, covariance=sigma), Belief(mean, covariance=Directional(diag, basis, sigma))):
        torch.testing.assert_close(scores.jsd(same, nodes=4096), scores.jsd(belief, nodes=4096), rtol=0.03, atol=0)


def test_lemma_warns_outside_its_range():
    mean = torch.tensor([[3.0, 0.0, 0.0]])
    small, large = (Belief(mean, diag=torch.full((1, 3), v)) for v in (0.2, 400.0))
    torch.testing.assert_close(scores.jsd(small, estimator="lemma"), scores.jsd(small), rtol=0.15, atol=0)
    with pytest.warns(OutOfRange, match=r"up to 2[0-9.]+, above 1: values reach .* is above 1\.1"):
        assert scores.jsd(large, estimator="lemma") > math.log(3)
    assert scores.jsd(large) < math.log(3)


def test_old_name_of_least_confidence():
    z = torch.randn(4, 3, 5)
    with pytest.warns(DeprecatedName, match="least_confidence"):
        old = scores.max_probability(z)
    assert torch.equal(old, scores.least_confidence(z))


# ---- through a predictor


def noisy_digits(n):
    """Digits, and noise of three times and ten times their scale."""
    data = load_digits()
    x = torch.tensor(data.data / 16, dtype=torch.float32)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], torch.tensor(data.target)[order]
    noise = torch.randn(2 * n, 64, generator=torch.Generator().manual_seed(1))
    return x[n:], y[n:], torch.cat([x[:n], 3 * noise[:n], 10 * noise[n:]])


def sampled(weights, hidden, p, n, seed):
    """The divergence of n samples of the last layer behind dropout, H(p̄) − mean H(p) in float64."""
    g = torch.Generator().manual_seed(seed)
    weight, bias = (w.double() for w in weights)
    total, own = 0.0, 0.0
    for _ in range(0, n, 50):
        mask = (torch.rand(50, *hidden.shape, generator=g) >= p).double() / (1 - p)
        log_p = ((hidden.double() * mask) @ weight.T + bias).log_softmax(-1)
        total, own = total + log_p.exp().sum(0), own + (log_p.exp() * log_p).sum((0, 2))
    mean = total / n
    return (own / n - torch.special.xlogy(mean, mean).sum(-1)).clamp(min=0).numpy()


@pytest.fixture(scope="module", params=[0.1, 0.5])
def digits(request):
    torch.manual_seed(0)
    n, p = 100, request.param
    train_x, train_y, x = noisy_digits(n)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 10))
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(30):
        for rows in torch.randperm(len(train_x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(train_x[rows]), train_y[rows]).backward()
            optimiser.step()
    model.eval().requires_grad_(False)
    hidden = model[:2](x)
    truth, few = (sampled((model[3].weight, model[3].bias), hidden, p, k, s) for k, s in ((4000, 1), (100, 2)))
    return favour.compile(model, x[:2]), x, truth, few, n


@pytest.mark.parametrize("form", ["belief", "predictor", "exported"])
def test_ranks_as_many_samples_do(digits, form, tmp_path):
    predict, x, truth, few, n = digits
    if form == "exported":
        found = favour.load_exported(favour.export(predict, tmp_path / "a.pt2"))(x.numpy())["jsd"]
    else:
        found = (scores.jsd(predict(x)) if form == "belief" else predict.jsd(x)).numpy()
    assert found.max() <= math.log(10) and found.min() >= 0
    assert spearmanr(found, truth)[0] >= 0.98
    strange = np.arange(2 * n) >= n
    for i in range(3):
        assert spearmanr(found[i * n : (i + 1) * n], truth[i * n : (i + 1) * n])[0] >= 0.95
        rows = np.r_[:n, i * n : (i + 1) * n]
        if i:
            assert roc_auc_score(strange, found[rows]) >= roc_auc_score(strange, few[rows]) - 0.005


def test_one_input_alone_and_compiled(digits):
    predict, x, *_ = digits
    whole = predict.jsd(x)
    torch.testing.assert_close(predict.jsd(x[:1]), whole[:1], rtol=1e-3, atol=1e-6)
    assert torch.equal(predict.jsd(x), whole)
    head = find_head(predict)
    assert head.for_scores >= 160
    torch.testing.assert_close(scores.jsd(predict.draws(x, n=head.for_scores)), whole)
    torch.testing.assert_close(predict.jsd(x, estimator="nodes"), scores.jsd(predict(x), estimator="nodes"))
    compiled = torch.compile(lambda x: predict.jsd(x), backend="eager")(x[:7])
    torch.testing.assert_close(compiled, whole[:7], rtol=1e-3, atol=1e-6)


def test_a_belief_knows_the_call_it_came_from():
    """And asks the network for what a Gaussian has lost, rows of it too, until the weights change."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 4))
    x = torch.randn(50, 8)
    predict = favour.compile(model, x[:2])
    with torch.no_grad():
        belief, whole = predict(x), predict.jsd(x)
        nodes = scores.jsd(belief, estimator="nodes")
        assert (nodes - whole).abs().max() > 1e-4
        assert torch.equal(scores.jsd(belief), whole)
        assert torch.equal(scores.jsd(belief[3:9][[1, 4]]), whole[[4, 7]])
        for other in (pickle.loads(pickle.dumps(belief)), favour.Belief.cat([belief[:10], belief[10:]])):
            torch.testing.assert_close(scores.jsd(other), nodes)
        torch.testing.assert_close(scores.jsd(belief.scale(2.0)), scores.jsd(belief.scale(2.0), estimator="nodes"))
        model[0].weight.mul_(1.5)
        assert torch.equal(scores.jsd(belief), nodes)
        belief, whole = predict(x), predict.jsd(x)
        x.add_(1)
        assert torch.equal(scores.jsd(belief), whole)


def test_buffers_that_are_filled_anew_leave_scores_as_they_were():
    """numpy's writes are not counted by torch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.4), nn.Linear(24, 4))
    buffer = np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32)
    predict = favour.compile(model, torch.zeros(2, 6), check=False)
    for x in (buffer, torch.from_numpy(buffer)):
        with torch.no_grad():
            belief = predict(x)
        before = scores.jsd(belief)
        assert (before - scores.jsd(belief, estimator="nodes")).abs().max() > 1e-4
        buffer *= 7
        torch.testing.assert_close(scores.jsd(belief), before)
    belief.mean.mul_(3)
    torch.testing.assert_close(scores.jsd(belief), scores.jsd(belief, estimator="nodes"))


def test_binary_and_refusals():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
    predict = favour.compile(model, torch.randn(2, 4), check=False)
    x = torch.randn(5, 4)
    with torch.no_grad():
        belief = predict(x)
        found = predict.jsd(x, kind="binary", estimator="nodes")
    wanted = [information(m, s) for m, s in zip(belief.mean[:, 0].tolist(), belief.stddev[:, 0].tolist(), strict=True)]
    np.testing.assert_allclose(found, wanted, rtol=2e-3, atol=1e-7)
    np.testing.assert_allclose(predict.jsd(x, kind="binary", draws=6000).detach(), wanted, rtol=0.2, atol=1e-3)
    three = favour.compile(nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3)), x, check=False)
    with pytest.raises(InvalidValue, match="several questions"):
        three.jsd(x, kind="multilabel")
    with pytest.raises(InvalidValue, match="belongs to the head"):
        three.jsd(x, estimator="nodes", draws=100)
    with pytest.raises(UnsupportedOperation, match="itself a Belief"):
        three.jsd(Belief.point(x), draws=100)
    assert three.jsd(Belief(x, diag=torch.ones(5, 4))).shape == (5,)
