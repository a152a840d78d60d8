"""Fits that find what was put in, and conformal coverage against its exact distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import favour
from favour.belief import Belief
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

F64 = torch.float64


class Table(nn.Module):
    """Believes what a table says about inputs 0, 1, …; `shares` splits its covariance, (n, C, C) each."""

    def __init__(self, belief, shares=None):
        super().__init__()
        self.belief, self.shares = belief, shares

    def forward(self, x):
        return self.belief[x.long().flatten()]

    def attribute(self, x):
        rows = x.long().flatten()
        return favour.Attribution.of(self.belief.mean[rows], {k: v[rows] for k, v in self.shares.items()})


def rows(n):
    return torch.arange(n)[:, None]


def test_calibrate_finds_scale_and_noise_of_a_regression():
    g = torch.Generator().manual_seed(0)
    n, scale, noise = 4000, 2.5, 0.4
    variance = 4 * torch.rand(n, 1, generator=g, dtype=F64) ** 2
    mean = torch.randn(n, 1, generator=g, dtype=F64)
    y = mean + (scale * variance + noise).sqrt() * torch.randn(n, 1, generator=g, dtype=F64)
    fitted = favour.calibrate(Table(Belief(mean, variance)), (rows(n), y))
    assert fitted.scale.item() == pytest.approx(scale, rel=0.15)
    assert fitted.noise.item() == pytest.approx(noise, rel=0.15)
    assert fitted.after < fitted.before
    belief = fitted(rows(n))
    torch.testing.assert_close(belief.variance, fitted.scale * variance + fitted.noise)
    assert favour.metrics.gaussian_nll(belief.mean, belief.stddev, y) == pytest.approx(fitted.after, abs=1e-9)
    assert "noise" in repr(fitted)


def test_calibrate_finds_scale_and_temperature_of_classes():
    g = torch.Generator().manual_seed(0)
    n, scale, temperature = 6000, 3.0, 2.0
    mean = 4 * torch.randn(n, 3, generator=g, dtype=F64)
    belief = Belief(mean, diag=3 * torch.rand(n, 3, generator=g, dtype=F64))
    true = Belief(mean, covariance=belief.covariance.scale(scale))
    z = true.sample((), g) / temperature
    y = torch.multinomial(z.softmax(-1), 1, generator=g).squeeze(1)
    loader = [(rows(n)[i : i + 1000], y[i : i + 1000]) for i in range(0, n, 1000)]
    fitted = favour.calibrate(Table(belief), loader)
    assert fitted.temperature.item() == pytest.approx(temperature, rel=0.15)
    assert fitted.scale.item() == pytest.approx(scale, rel=0.4)
    p = fitted.probabilities(rows(n))
    assert favour.metrics.nll(p, y) < favour.metrics.nll(favour.probabilities(belief), y) - 0.02
    assert favour.metrics.ece(p, y) < 0.03
    alone = favour.calibrate(Table(belief), loader, temperature=False)
    assert alone.temperature == 1
    assert alone.after >= fitted.after - 1e-9


def test_calibrate_finds_a_scale_for_each_source():
    g = torch.Generator().manual_seed(0)
    n = 6000
    shares = {name: torch.rand(n, 1, generator=g, dtype=F64) ** 3 for name in ("first", "second")}
    mean = torch.zeros(n, 1, dtype=F64)
    total = 0.5 * shares["first"] + 4.0 * shares["second"] + 0.01
    y = total.sqrt() * torch.randn(n, 1, generator=g, dtype=F64)
    predict = Table(Belief(mean, shares["first"] + shares["second"]), {k: v[..., None] for k, v in shares.items()})
    fitted = favour.calibrate(predict, (rows(n), y), sources=True)
    found = {name: fitted.scale.item() * c for name, c in fitted.source_scales.items()}
    assert found["first"] == pytest.approx(0.5, rel=0.25)
    assert found["second"] == pytest.approx(4.0, rel=0.25)
    expected = found["first"] * shares["first"] + found["second"] * shares["second"] + fitted.noise
    torch.testing.assert_close(fitted(rows(n)).variance, expected)
    assert fitted.after < favour.calibrate(predict, (rows(n), y)).after


def test_calibrate_a_network_with_sources():
    model = nn.Sequential(
        nn.Linear(2, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 20), nn.Dropout(0.1), nn.Linear(20, 3)
    )
    predict = favour.compile(model, torch.randn(4, 2))
    x, y = torch.randn(60, 2), torch.randint(3, (60,))
    fitted = favour.calibrate(predict, (x, y), sources=True)
    assert set(fitted.source_scales) <= set(predict.attribute(x).sources)
    assert fitted.after <= fitted.before
    torch.testing.assert_close(fitted.probabilities(x).sum(1), torch.ones(60))


def test_calibrate_weighs_the_covariances_of_sources():
    # Two sources with the same variances and opposite correlations: marginals cannot tell them apart.
    g = torch.Generator().manual_seed(0)
    n = 4000
    up = torch.tensor([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 0.5]], dtype=F64)
    down = torch.tensor([[1.0, -0.9, 0.0], [-0.9, 1.0, 0.0], [0.0, 0.0, 0.5]], dtype=F64)
    parts = {"up": up.expand(n, 3, 3), "down": down.expand(n, 3, 3)}
    mean = torch.randn(n, 3, generator=g, dtype=F64)
    truth = Belief(mean, covariance=0.2 * parts["up"] + 6.0 * parts["down"])
    y = torch.multinomial(truth.sample((), g).softmax(-1), 1, generator=g).squeeze(1)
    predict = Table(Belief(mean, covariance=parts["up"] + parts["down"]), parts)
    fitted = favour.calibrate(predict, (rows(n), y), sources=True, temperature=False)
    assert fitted.source_scales["down"] > 3 * fitted.source_scales["up"]
    expected = sum(c * fitted.scale * parts[k] for k, c in fitted.source_scales.items())
    torch.testing.assert_close(fitted(rows(n)).covariance_matrix, expected)
    assert fitted.after < favour.calibrate(predict, (rows(n), y), temperature=False).after


def test_calibrate_refuses_bad_input():
    classes, numbers = Table(Belief.point(torch.zeros(4, 3))), Table(Belief.point(torch.zeros(4, 1)))
    with pytest.raises(InvalidValue, match="no data"):
        favour.calibrate(classes, [])
    with pytest.raises(InvalidValue, match="classes 0 to 2"):
        favour.calibrate(classes, (rows(4), torch.tensor([0, 1, 2, 3])))
    with pytest.raises(ShapeMismatch, match="give floating-point targets"):
        favour.calibrate(numbers, (rows(4), torch.tensor([0, 1, 2, 3])))
    with pytest.raises(ShapeMismatch, match=r"\(4,\)"):
        favour.calibrate(numbers, (rows(4), torch.zeros(4)))
    with pytest.raises(InvalidValue, match="nan"):
        favour.calibrate(numbers, (rows(4), torch.full((4, 1), math.nan)))
    with pytest.raises(InvalidType, match="pairs"):
        favour.calibrate(numbers, [torch.zeros(3)])


# ---- conformal prediction


@pytest.mark.parametrize("level", [0.5, 0.9])
@pytest.mark.parametrize("n", [19, 200])
def test_conformal_intervals_cover(n, level):
    # The belief is wrong on purpose (heavy tails, a bias): the guarantee does not mind. Given the held-out data the
    # coverage is Beta(k, n + 1 − k), k = ⌈(n + 1) level⌉, so its mean over repeats is k/(n + 1) ≥ level.
    g = torch.Generator().manual_seed(n)
    repeats, new = 300, 400
    covered = []
    for _ in range(repeats):
        sigma = 0.1 + torch.rand(n + new, 1, generator=g, dtype=F64)
        noise = torch.randn(n + new, 1, generator=g, dtype=F64)
        y = 0.3 + sigma * noise**3
        belief = Belief(torch.zeros(n + new, 1, dtype=F64), diag=sigma.square())
        conformal = favour.ConformalInterval(belief[:n], y[:n], level)
        low, high = conformal(belief[n:])
        covered.append(favour.metrics.coverage(low, high, y[n:]))
    k = math.ceil((n + 1) * level)
    exact = stats.beta(k, n + 1 - k)
    spread = math.sqrt((exact.var() + exact.mean() * (1 - exact.mean()) / new) / repeats)
    assert exact.mean() >= level
    assert abs(np.mean(covered) - exact.mean()) < 4 * spread


def test_conformal_sets_cover():
    g = torch.Generator().manual_seed(0)
    n, new, level, repeats = 150, 400, 0.9, 200
    covered, sizes = [], []
    for _ in range(repeats):
        z = 2 * torch.randn(n + new, 4, generator=g, dtype=F64)
        y = torch.multinomial(z.softmax(1), 1, generator=g).squeeze(1)
        p = (3 * z).softmax(1)  # overconfident
        sets = favour.ConformalSet(p[:n], y[:n], level)(p[n:])
        covered.append(sets.gather(1, y[n:, None]).double().mean().item())
        sizes.append(sets.sum(1).double().mean().item())
    k = math.ceil((n + 1) * level)
    exact = stats.beta(k, n + 1 - k)
    spread = math.sqrt((exact.var() + exact.mean() * (1 - exact.mean()) / new) / repeats)
    assert abs(np.mean(covered) - exact.mean()) < 4 * spread
    assert np.mean(sizes) < 3


def test_conformal_intervals_follow_the_belief():
    belief = Belief(torch.zeros(99, 2), diag=torch.rand(99, 2) + 0.1)
    conformal = favour.ConformalInterval(belief, torch.randn(99, 2), 0.9)
    low, high = conformal(belief)
    torch.testing.assert_close((high - low) / belief.stddev, (2 * conformal.factor).expand(99, 2))


def test_conformal_refuses_bad_input():
    belief = Belief(torch.zeros(5, 1), diag=torch.ones(5, 1))
    with pytest.raises(InvalidValue, match="at least 9 are required"):
        favour.ConformalInterval(belief, torch.zeros(5, 1), 0.9)
    with pytest.raises(InvalidValue, match="with_noise"):
        favour.ConformalInterval(Belief.point(torch.zeros(5, 1)), torch.zeros(5, 1), 0.5)
    with pytest.raises(ShapeMismatch, match=r"\(5,\)"):
        favour.ConformalInterval(belief, torch.zeros(5), 0.5)
    with pytest.raises(InvalidValue, match="level"):
        favour.ConformalInterval(belief, torch.zeros(5, 1), 1.0)
    with pytest.raises(InvalidValue, match="classes 0 to 1"):
        favour.ConformalSet(torch.full((5, 2), 0.5), torch.full((5,), 2), 0.5)
