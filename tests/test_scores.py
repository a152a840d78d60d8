"""Scores against loops, tensor-product quadrature and sampling; higher is more unusual."""

import functools
import math

import numpy as np
import pytest
import torch

import favour
from favour import scores
from favour.belief import Belief
from favour.belief.covariance import Directional
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

C = 6
F64 = torch.float64


def dplr(seed=0, batch=4, scale=1.0, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(batch, C, generator=g, dtype=F64)
    diag = scale * torch.rand(batch, C, generator=g, dtype=F64)
    factor = math.sqrt(scale) * torch.randn(2, batch, C, generator=g, dtype=F64)
    return Belief(mean.to(dtype), diag.to(dtype), factor.to(dtype))


def dense(**options):
    belief = dplr(**options)
    return Belief(belief.mean, covariance=belief.covariance_matrix)


def directional(seed=0, batch=4, scale=1.0, dtype=F64):
    g = torch.Generator().manual_seed(seed)
    mean = 2 * torch.randn(batch, C, generator=g, dtype=F64)
    q = torch.linalg.qr(torch.randn(batch, C, 2, generator=g, dtype=F64))[0].permute(2, 0, 1)
    root = torch.randn(batch, 2, 2, generator=g, dtype=F64)
    diag, core = scale * torch.rand(batch, C, generator=g, dtype=F64), scale * root @ root.mT
    return Belief(mean.to(dtype), covariance=Directional(diag.to(dtype), q.to(dtype).contiguous(), core.to(dtype)))


BELIEFS = [dplr, dense, directional]


def lemma_by_loop(mean, sigma):
    p = np.exp(mean - mean.max())
    p /= p.sum()
    return 0.5 * np.trace((np.diag(p) - np.outer(p, p)) @ sigma)


def entropy_of(p):
    return -sum(x * math.log(x) for x in p if x > 0)


def quadrature(mean, sigma, nodes=40):
    """Points (N, C) and weights for N(mean, sigma), a tensor product of Gauss–Hermite rules."""
    x, w = np.polynomial.hermite_e.hermegauss(nodes)
    grid = np.stack(np.meshgrid(*[x] * len(mean), indexing="ij"), -1).reshape(-1, len(mean))
    weights = np.prod(np.stack(np.meshgrid(*[w] * len(mean), indexing="ij"), -1).reshape(-1, len(mean)), axis=1)
    return mean + grid @ np.linalg.cholesky(sigma).T, weights / weights.sum()


def exact_jsd(mean, sigma):
    z, w = quadrature(mean, sigma)
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    return entropy_of(w @ p) + w @ (p * np.log(p)).sum(1)


lemma = functools.partial(scores.jsd, estimator="lemma")


@pytest.mark.parametrize("make", BELIEFS)
def test_jsd_equals_trace_formula(make):
    belief = make(scale=0.1)
    expected = [lemma_by_loop(m.numpy(), s.numpy()) for m, s in zip(belief.mean, belief.covariance_matrix, strict=True)]
    torch.testing.assert_close(lemma(belief), torch.tensor(expected, dtype=F64), rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(lemma(belief, n=10), 0.9 * torch.tensor(expected, dtype=F64))


def test_jsd_of_all_directions_ignores_the_rest():
    belief = dense(scale=0.1)
    q = torch.eye(C, dtype=F64)[:, None].expand(C, 4, C)
    same = Belief(belief.mean, covariance=Directional(torch.ones(4, C, dtype=F64), q, belief.covariance_matrix))
    torch.testing.assert_close(lemma(same), lemma(belief))
    torch.testing.assert_close(scores.jsd(same), scores.jsd(belief), rtol=0.1, atol=0)  # other nodes


def test_jsd_differs_from_the_misprinted_formula():
    belief = dplr(scale=0.1)
    p = belief.mean.softmax(-1)
    printed = 0.5 * ((p * belief.diag).sum(-1) - torch.einsum("bi,bij,bj->b", p, belief.covariance_matrix, p))
    assert ((lemma(belief) - printed).abs() > 0.002).all()
    # The difference is the diagonal of UUᵀ that was dropped.
    dropped = 0.5 * (p * belief.factor.square().sum(0)).sum(-1)
    torch.testing.assert_close(lemma(belief) - printed, dropped)


@pytest.mark.parametrize("seed", range(3))
def test_jsd_error_falls_with_the_fourth_power_of_the_scale(seed):
    g = np.random.default_rng(seed)
    mean, root = g.normal(size=3), g.normal(size=(3, 3)) / 2
    errors = []
    for scale in (0.4, 0.2, 0.1):
        sigma = scale**2 * root @ root.T
        belief = Belief(torch.tensor(mean)[None], covariance=torch.tensor(sigma)[None])
        errors.append(abs(lemma(belief).item() - exact_jsd(mean, sigma)))
    assert errors[0] > 8 * errors[1] > 64 * errors[2]
    assert errors[1] / errors[2] == pytest.approx(16, rel=0.15)


def test_jsd_equals_the_mean_over_small_samples():
    # n = 5 draws give (1 − 1/5) of the limit in expectation; 20,000 repeats, error of the lemma below 1%.
    belief = dense(batch=1, scale=0.002)
    n, repeats = 5, 20_000
    draws = belief.sample((n, repeats), torch.Generator().manual_seed(0)).reshape(n, repeats, C)
    values = scores.jsd(draws)
    expected = lemma(belief, n=n).item()
    assert abs(values.mean().item() - expected) < 4 * values.std().item() / math.sqrt(repeats) + 0.01 * expected
    assert abs(values.mean().item() - lemma(belief).item()) > 0.1 * expected


@pytest.mark.parametrize("make", BELIEFS)
def test_jsd_of_confident_inputs_survives_float32(make):
    belief = make(scale=0.02)
    mean = belief.mean.clone()
    mean[:, 0] += torch.tensor([10.0, 20.0, 30.0, 40.0])
    wide = Belief(mean, covariance=belief.covariance, validate=False)
    for jsd in (scores.jsd, lemma):
        narrow = jsd(wide.to(torch.float32))
        assert narrow.dtype == torch.float32
        torch.testing.assert_close(narrow.double(), jsd(wide), rtol=2e-3, atol=0)


def test_jsd_by_nodes_equals_quadrature():
    g = np.random.default_rng(5)
    mean, root = g.normal(size=3), g.normal(size=(3, 3)) / 2
    belief = Belief(torch.tensor(mean)[None], covariance=torch.tensor(root @ root.T)[None])
    value = scores.jsd(belief, estimator="nodes", nodes=4096).item()
    assert value == pytest.approx(exact_jsd(mean, root @ root.T), rel=0.01)


def test_scores_of_draws_equal_loops():
    draws = 2 * torch.randn(7, 3, 4, dtype=F64)
    p = draws.softmax(-1)
    for b in range(3):
        mean = p[:, b].mean(0).tolist()
        each = [entropy_of(row.tolist()) for row in p[:, b]]
        split = scores.entropy_split(draws)
        assert scores.entropy(draws)[b].item() == pytest.approx(entropy_of(mean), abs=1e-12)
        assert split.aleatoric[b].item() == pytest.approx(np.mean(each), abs=1e-12)
        assert split.epistemic[b].item() == pytest.approx(entropy_of(mean) - np.mean(each), abs=1e-12)
        assert scores.jsd(draws)[b].item() == split.epistemic[b].item()
        divergence = np.mean(
            [sum(m * math.log(m / q) for m, q in zip(mean, row.tolist(), strict=True)) for row in p[:, b]]
        )
        assert scores.kl(draws)[b].item() == pytest.approx(divergence, abs=1e-12)
        assert scores.least_confidence(draws)[b].item() == pytest.approx(1 - max(mean), abs=1e-12)


@pytest.mark.parametrize("score", [scores.jsd, scores.kl, scores.entropy, scores.least_confidence])
def test_scores_by_blocks_equal_the_whole(monkeypatch, score):
    draws = torch.randn(6, 5, 4, dtype=F64)
    whole = score(draws)
    monkeypatch.setattr("favour.classify.scores._HELD", 2 * 6 * 4)
    assert torch.equal(score(draws), whole)
    assert torch.equal(score(draws.permute(1, 2, 0).contiguous().permute(2, 0, 1)), whole)
    assert score(draws[:, :0]).shape == (0,)
    draws[3, 4, 1] = math.inf
    with pytest.raises(InvalidValue, match=r"inf at index \(3, 4, 1\)"):
        score(draws)


def test_scores_of_draws_that_rule_a_class_out():
    """Probabilities below the smallest float32 count as nothing."""
    draws = torch.tensor([[[0.0, -300.0, 1.0]], [[1.0, -500.0, 0.0]]])
    for score in (scores.jsd, scores.entropy, scores.least_confidence):
        torch.testing.assert_close(score(draws), score(draws[..., [0, 2]]))
    # E[KL(p̄ ‖ p)] with p̄₂ = 0: the class adds nothing
    torch.testing.assert_close(scores.kl(draws), scores.kl(draws[..., [0, 2]]))


@pytest.mark.parametrize("make", BELIEFS)
@pytest.mark.parametrize("score", [scores.entropy, scores.kl, scores.least_confidence])
def test_scores_of_a_belief_agree_with_its_samples(make, score):
    belief = make(scale=0.3)
    chunks = torch.stack([score(belief.sample((4000,), torch.Generator().manual_seed(i))) for i in range(5)])
    spread = chunks.std(0) / math.sqrt(5)
    torch.testing.assert_close(score(belief, nodes=2048), chunks.mean(0), rtol=0.04, atol=6 * spread.max().item())


def test_entropy_split_of_certain_logits_is_all_aleatoric():
    z = torch.randn(5, 3, dtype=F64)
    split = scores.entropy_split(Belief.point(z))
    expected = torch.distributions.Categorical(logits=z).entropy()
    torch.testing.assert_close(split.total, expected)
    torch.testing.assert_close(split.aleatoric, expected)
    assert split.epistemic.max() < 1e-14


def test_higher_is_more_unusual():
    # The same logits, ever more uncertain: every score of disagreement grows.
    mean = torch.tensor([[3.0, 0.0, 0.0]], dtype=F64).expand(4, 3)
    belief = Belief(mean, diag=torch.tensor([0.1, 0.5, 2.0, 8.0], dtype=F64)[:, None].expand(4, 3))
    for score in (scores.jsd, scores.kl, scores.entropy, scores.least_confidence):
        assert (score(belief).diff() > 0).all()


def test_jsd_has_gradients():
    def run(mean, diag, factor):
        return scores.jsd(Belief(mean, diag, factor, validate=False))

    b = dplr(batch=2)
    assert torch.autograd.gradcheck(run, [t.clone().requires_grad_() for t in (b.mean, b.diag, b.factor)])


@pytest.mark.parametrize("make", BELIEFS)
def test_scores_export_and_compile(make):
    class Scored(torch.nn.Module):
        def forward(self, belief):
            return scores.jsd(belief), scores.entropy(belief)

    belief = make(dtype=torch.float32)
    exported = torch.export.export(Scored(), (belief,), strict=False).module()
    for got, expected in zip(
        exported(make(seed=1, dtype=torch.float32)), Scored()(make(seed=1, dtype=torch.float32)), strict=True
    ):
        torch.testing.assert_close(got, expected)


# ---- Mahalanobis


def reference_mahalanobis(x, y, points, own=None, shrinkage=0.0):
    classes = sorted(set(y.tolist()))
    means = [x[y == c].mean(0) for c in classes]
    s = sum((x[i] - means[y[i]])[:, None] * (x[i] - means[y[i]]) for i in range(len(x))) / (len(x) - len(classes))
    s = s + shrinkage * np.trace(s) / len(s) * np.eye(len(s))
    out = []
    for i, point in enumerate(points):
        inverse = np.linalg.inv(s + (0 if own is None else own[i]))
        out.append(min(math.sqrt((point - m) @ inverse @ (point - m)) for m in means))
    return torch.tensor(out, dtype=F64)


@pytest.mark.parametrize("shrinkage", [0.0, 0.1])
def test_mahalanobis_equals_loop(shrinkage):
    x, y = torch.randn(40, 3, dtype=F64), torch.arange(40) % 4
    x = x + y[:, None]
    rate = scores.Mahalanobis(shrinkage).fit(x, y)
    points = 3 * torch.randn(6, 3, dtype=F64)
    args = (x.numpy(), y.numpy(), points.numpy())
    torch.testing.assert_close(rate.score(points), reference_mahalanobis(*args, shrinkage=shrinkage))
    root = torch.randn(6, 3, 3, dtype=F64)
    belief = Belief(points, covariance=root @ root.mT)
    own = belief.covariance_matrix.numpy()
    torch.testing.assert_close(rate.score(belief), reference_mahalanobis(*args, own, shrinkage))
    assert (rate.score(belief) < rate.score(points)).all()
    draws = torch.randn(50, 6, 3, dtype=F64) + points
    own = np.stack([np.cov(draws[:, i].numpy().T) for i in range(6)])
    expected = reference_mahalanobis(x.numpy(), y.numpy(), draws.mean(0).numpy(), own, shrinkage)
    torch.testing.assert_close(rate.score(draws), expected)


def test_mahalanobis_fits_beliefs_by_their_means():
    belief = dplr(batch=20)
    labels = torch.arange(20) % 3
    a, b = scores.Mahalanobis().fit(belief, labels), scores.Mahalanobis().fit(belief.mean, labels)
    torch.testing.assert_close(a.score(belief.mean), b.score(belief.mean))


def test_mahalanobis_refuses_bad_input():
    x = torch.randn(6, 2)
    fit = scores.Mahalanobis().fit
    with pytest.raises(InvalidValue, match=r"no input of class \[1\]"):
        fit(x, torch.tensor([0, 0, 0, 2, 2, 2]))
    with pytest.raises(InvalidValue, match="-1"):
        fit(x, torch.tensor([-1, 0, 0, 1, 1, 1]))
    with pytest.raises(ShapeMismatch, match=r"\(5,\)"):
        fit(x, torch.zeros(5, dtype=torch.long))
    with pytest.raises(InvalidType, match="float32"):
        fit(x, torch.zeros(6))
    with pytest.raises(InvalidValue, match="no spread"):
        fit(x[:3], torch.arange(3))
    with pytest.raises(InvalidValue, match="nan"):
        fit(torch.full((6, 2), math.nan), torch.tensor([0, 0, 0, 1, 1, 1]))
    with pytest.raises(InvalidValue, match="before `fit`"):
        scores.Mahalanobis().score(x)
    with pytest.raises(ShapeMismatch, match="3 numbers"):
        fit(x, torch.tensor([0, 0, 0, 1, 1, 1])).score(torch.randn(2, 3))
    with pytest.raises(InvalidValue, match="shrinkage"):
        scores.Mahalanobis(-1.0)


@pytest.mark.parametrize("score", [scores.jsd, scores.kl, scores.entropy, scores.least_confidence])
def test_scores_refuse_bad_input(score):
    with pytest.raises(ShapeMismatch, match=r"C ≥ 2"):
        score(Belief.point(torch.zeros(2, 1)))
    with pytest.raises(ShapeMismatch, match=r"\(n, B, C\)"):
        score(torch.zeros(3, 4))
    with pytest.raises(InvalidType, match="list"):
        score([0.0])
    with pytest.raises(InvalidValue, match="nan"):
        score(torch.full((2, 2, 2), math.nan))


def test_jsd_refuses_bad_options():
    with pytest.raises(InvalidValue, match="estimator"):
        scores.jsd(dplr(), estimator="exact")
    with pytest.raises(InvalidValue, match="at least one"):
        scores.jsd(dplr(), n=0)
    with pytest.raises(InvalidValue, match="belongs to a belief"):
        scores.jsd(torch.zeros(3, 2, 2), n=3)


def test_scores_are_exported():
    assert favour.scores is scores


def test_divergence_of_draws_that_nearly_agree_keeps_its_digits_in_single_precision():
    generator = torch.Generator().manual_seed(0)
    z = 3 * torch.randn(1, 40, 10, generator=generator) + 0.01 * torch.randn(200, 40, 10, generator=generator)
    torch.testing.assert_close(scores.jsd(z), scores.jsd(z.double()).float(), rtol=1e-3, atol=0)
