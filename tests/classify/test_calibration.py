"""Fits that find what was put in, and conformal coverage against its exact distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.datasets import load_diabetes
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
    with pytest.raises(ShapeMismatch, match=r"\(3,\)"):
        favour.calibrate(numbers, (rows(4), torch.zeros(3)))
    with pytest.raises(ShapeMismatch, match=r"\(4, 2\)"):
        favour.calibrate(numbers, (rows(4), torch.zeros(4, 2)))
    with pytest.raises(InvalidValue, match="no data"):
        favour.calibrate(numbers, (rows(0), torch.zeros(0, 1)))
    with pytest.raises(InvalidValue, match="nan"):
        favour.calibrate(Table(Belief(torch.full((4, 1), math.nan), validate=False)), (rows(4), torch.zeros(4, 1)))
    with pytest.raises(InvalidType, match="no sources"):
        favour.calibrate(nn.Sequential(numbers), (rows(4), torch.zeros(4, 1)), sources=True)
    with pytest.raises(InvalidType, match="calibrated already"):
        favour.calibrate(favour.calibrate(numbers, (rows(4), torch.ones(4, 1))), (rows(4), torch.ones(4, 1)))
    with pytest.raises(InvalidValue, match="outputs are probabilities"):
        favour.calibrate(Table(Belief.point(torch.full((4, 2), 0.5))), (rows(4), torch.tensor([0, 1, 1, 0])))
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
    with pytest.raises(ShapeMismatch, match=r"\(6,\)"):
        favour.ConformalInterval(belief, torch.zeros(6), 0.5)
    with pytest.raises(InvalidValue, match="level"):
        favour.ConformalInterval(belief, torch.zeros(5, 1), 1.0)
    with pytest.raises(InvalidValue, match="classes 0 to 1"):
        favour.ConformalSet(torch.full((5, 2), 0.5), torch.full((5,), 2), 0.5)


# ---- shapes, estimators


@pytest.mark.parametrize("event", [(), (1,), (3,), (2, 2)])
def test_calibrate_takes_every_event(event):
    g = torch.Generator().manual_seed(0)
    mean, variance = torch.randn(600, *event, generator=g, dtype=F64), torch.rand(600, *event, generator=g, dtype=F64)
    y = mean + (2 * variance + 0.5).sqrt() * torch.randn(600, *event, generator=g, dtype=F64)
    fitted = favour.calibrate(Table(Belief(mean, variance)), (rows(600), y))
    assert fitted.noise.shape == event
    assert fitted.after < fitted.before
    torch.testing.assert_close(fitted(rows(600)).variance, fitted.scale * variance + fitted.noise)
    low, _ = fitted.interval(rows(600), 0.9)
    assert low.shape == (600, *event)


def classifier(p=0.5, end=None):
    torch.manual_seed(1)
    layers = [nn.Linear(2, 40), nn.ReLU(), nn.Dropout(p), nn.Linear(40, 40), nn.ReLU(), nn.Dropout(p), nn.Linear(40, 3)]
    model = nn.Sequential(*layers, *([] if end is None else [end]))
    with torch.no_grad():
        model[6].weight.mul_(4)
    return model


def unit(predict, **options):
    one = torch.ones((), dtype=F64)
    return favour.Calibrated(predict, one, one, 0 * one, classes=True, **options)


@pytest.mark.parametrize("estimator", ["auto", "nodes", "head", "probit"])
@pytest.mark.parametrize("end", [None, nn.Softmax(-1)])
def test_a_scale_of_one_changes_no_probability(estimator, end):
    x = torch.randn(30, 2)
    predict = favour.compile(classifier(end=end), x[:2])
    want = predict.probabilities(x, estimator=estimator)
    torch.testing.assert_close(unit(predict).probabilities(x, estimator=estimator), want)
    sources = {name: 1.0 for name in favour.compile(classifier(), x[:2]).attribute(x).sources}
    torch.testing.assert_close(
        unit(predict, source_scales=sources).probabilities(x, estimator=estimator), want, atol=1e-3, rtol=1e-2
    )


@pytest.mark.parametrize("estimator", ["auto", "nodes", "head"])
@pytest.mark.parametrize("end", [None, nn.Softmax(-1)])
def test_a_scale_of_one_changes_no_divergence(estimator, end):
    x = 3 * torch.randn(30, 2)
    predict = favour.compile(classifier(end=end), x[:2])
    want = predict.jsd(x, estimator=estimator)
    torch.testing.assert_close(unit(predict).jsd(x, estimator=estimator), want)
    sources = {name: 1.0 for name in favour.compile(classifier(), x[:2]).attribute(x).sources}
    fitted = unit(predict, source_scales=sources).jsd(x, estimator=estimator)
    torch.testing.assert_close(fitted, want, atol=1e-3, rtol=1e-2)


def test_calibrated_divergence_is_that_of_the_scaled_law():
    """c = 4, T = 2: draws z of the network as z̄ + 2(z − z̄), over 2."""
    x = 3 * torch.randn(20, 2)
    model = classifier(0.3)
    predict = favour.compile(model, x[:2])
    fitted = favour.Calibrated(predict, *(torch.tensor(v, dtype=F64) for v in (4.0, 2.0, 0.0)), classes=True)
    z = favour.sample(model, x, 20_000, generator=torch.Generator().manual_seed(3))
    want = favour.scores.jsd(z.mean(0) / 2 + (z - z.mean(0)))
    got = fitted.jsd(x)
    assert ((got - want).norm() / want.norm()) < 0.05  # the head's 2,560 fixed draws


def test_a_calibrated_ensemble_keeps_its_estimator():
    x = torch.randn(30, 2)
    predict = favour.adapters.Ensemble(
        [favour.compile(classifier(p), x[:2]) for p in (0.2, 0.5)] + [classifier(0.3).eval()]
    )
    torch.testing.assert_close(unit(predict).probabilities(x), predict.probabilities(x))
    y = torch.randint(3, (30,))
    fitted = favour.calibrate(predict, (x, y))
    assert favour.metrics.nll(fitted.probabilities(x), y) < favour.metrics.nll(predict.probabilities(x), y)


@pytest.mark.parametrize("end", [None, nn.Softmax(-1), nn.LogSoftmax(-1)])
def test_calibrated_probabilities_are_those_of_the_scaled_law(end):
    # The reference: samples of the network, spread by √c and cooled by T.
    x = torch.randn(20, 2)
    predict = favour.compile(classifier(0.3, end), x[:2])
    c, T = torch.tensor(0.5, dtype=F64), torch.tensor(2.0, dtype=F64)
    fitted = favour.Calibrated(predict, c, T, 0 * c, classes=True)
    z = favour.sample(classifier(0.3), x, 8000, generator=torch.Generator().manual_seed(0))
    want = ((z.mean(0) + c.sqrt() * (z - z.mean(0))) / T).softmax(-1).mean(0)
    assert (fitted.probabilities(x) - want).abs().max() < 0.03
    fitted = favour.calibrate(predict, (x, torch.randint(3, (20,))))
    assert fitted.after <= fitted.before
    torch.testing.assert_close(fitted(x).mean, predict.logits(x).mean / fitted.temperature.float())


# ---- intervals for observations


def test_a_bare_predictor_has_no_interval():
    x = torch.randn(5, 2)
    predict = favour.compile(nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.2), nn.Linear(8, 1)), x)
    with pytest.raises(favour.errors.NotCalibrated, match=r"favour\.calibrate"):
        predict.interval(x, 0.9)
    noisy = predict.with_noise(2.0)
    low, high = noisy.interval(x, 0.9)
    want = favour.classify.predictive.interval(predict(x), 0.9, 2.0)
    torch.testing.assert_close((low, high), want)
    torch.testing.assert_close(noisy.interval(x), predict(x).with_noise(2.0).confidence_interval(0.95))
    torch.testing.assert_close(noisy.interval(x, level=0.9), want)
    with pytest.raises(InvalidValue, match="twice"):
        noisy.interval(x, 0.9, level=0.8)
    with pytest.raises(InvalidValue, match="level"):
        noisy.interval(x, 1.5)
    with pytest.raises(InvalidValue, match="variance"):
        predict.with_noise(-1.0)
    assert "nll" not in repr(noisy)


def test_a_calibrated_classifier_has_no_interval():
    x = torch.randn(30, 2)
    fitted = favour.calibrate(favour.compile(classifier(), x[:2]), (x, torch.randint(3, (30,))))
    with pytest.raises(favour.errors.NotCalibrated, match="ConformalSet"):
        fitted.interval(x, 0.9)


def trained(x, y, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(model.parameters(), lr=5e-3, weight_decay=1e-2)
    for _ in range(200):
        optimiser.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimiser.step()
    return model


def diabetes():
    data = load_diabetes()
    x, y = torch.tensor(data.data, dtype=torch.float32), torch.tensor(data.target, dtype=torch.float32)[:, None]
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return (x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std(), 160, 300


def made_up():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1600, 4, generator=g)
    y = (x[:, :1] * 2).sin() + x[:, 1:2] + 0.3 * torch.randn(1600, 1, generator=g)
    return x, y, 400, 800


@pytest.mark.parametrize("data", [diabetes, made_up])
@pytest.mark.parametrize("level", [0.8, 0.95])
def test_calibrated_intervals_cover_held_out_data(data, level):
    # Given the fit, the number covered is binomial. The fit itself has the error of its m held-out observations: for a
    # variance √(2/m) of itself, which moves the coverage by φ(z)z√(2/m); both count, three standard errors each way.
    x, y, first, second = data()
    train, held, test = slice(0, first), slice(first, second), slice(second, None)
    predict = favour.compile(trained(x[train], y[train], 0), x[:2])
    with torch.no_grad():
        n, m = len(y[test]), second - first
        z = stats.norm.ppf(0.5 + level / 2)
        error = math.hypot(math.sqrt(level * (1 - level) / n), 2 * stats.norm.pdf(z) * z / math.sqrt(2 * m))
        conformal = favour.ConformalInterval.fit(predict, (x[held], y[held]), 0.9)
        answers = {
            "calibrated": favour.calibrate(predict, (x[held], y[held])).interval(x[test], level),
            "noise": predict.with_noise(favour.fit_noise(predict(x[held]), y[held])).interval(x[test], level),
            "conformal": conformal.interval(x[test], level),
        }
        for name, (low, high) in answers.items():
            assert abs(favour.metrics.coverage(low, high, y[test]) - level) < 3 * error + 0.01, name
        bare = predict(x[test]).confidence_interval(level)
        assert favour.metrics.coverage(*bare, y[test]) < level - 5 * error


def test_a_conformal_interval_takes_inputs_or_beliefs_and_any_level():
    g = torch.Generator().manual_seed(0)
    table = Table(Belief(torch.zeros(300, 1, dtype=F64), torch.rand(300, 1, generator=g, dtype=F64)))
    y = torch.randn(300, 1, generator=g, dtype=F64)
    by_belief = favour.ConformalInterval(table(rows(300)), y, 0.9)
    fitted = favour.ConformalInterval.fit(table, [(rows(300)[:100], y[:100]), (rows(300)[100:], y[100:])], 0.9)
    torch.testing.assert_close(fitted.interval(rows(5)), by_belief(table(rows(5))))
    torch.testing.assert_close(by_belief.interval(table(rows(5))), by_belief(table(rows(5))))
    wide = favour.ConformalInterval(table(rows(300)), y, 0.99)(table(rows(5)))
    torch.testing.assert_close(fitted.interval(rows(5), 0.99), wide)
    torch.testing.assert_close(by_belief.interval(table(rows(5)), level=0.99), wide)
    with pytest.raises(favour.errors.NotCalibrated, match=r"ConformalInterval\.fit"):
        by_belief.interval(rows(5))
    with pytest.raises(InvalidValue, match="held-out inputs"):
        fitted.interval(rows(5), 0.999)
    with pytest.raises(InvalidValue, match="no data"):
        favour.ConformalInterval.fit(table, [])
    with pytest.raises(ShapeMismatch, match="events"):
        fitted(Belief(torch.zeros(2, 3, dtype=F64), torch.ones(2, 3, dtype=F64)))


def test_conformal_sets_refuse_what_are_no_probabilities_of_those_classes():
    p = torch.softmax(torch.randn(50, 3), 1)
    sets = favour.ConformalSet(p, torch.randint(3, (50,)), 0.8)
    with pytest.raises(ShapeMismatch, match=r"\(B, 3\)"):
        sets(torch.full((2, 4), 0.25))
    with pytest.raises(InvalidValue, match="sum to one"):
        sets(torch.full((2, 3), 0.9))
    with pytest.raises(InvalidValue, match="nan"):
        sets(torch.full((2, 3), math.nan))
    assert sets(torch.zeros(0, 3)).shape == (0, 3)
