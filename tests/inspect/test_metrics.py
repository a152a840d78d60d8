"""Metrics against plain loops and scikit-learn, which know nothing of favour."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss

from favour import metrics
from favour.errors import FavourError, InvalidType, InvalidValue, ShapeMismatch

ALL = [metrics.accuracy, metrics.nll, metrics.brier, metrics.ece]


def random_case(n: int, classes: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(2 * torch.randn(n, classes, dtype=torch.float64, generator=g), 1)
    return p, torch.randint(classes, (n,), generator=g)


def ece_by_loop(p: list[list[float]], y: list[int], bins: int) -> float:
    total = 0.0
    for b in range(bins):
        members = []
        for row, label in zip(p, y, strict=True):
            confidence = max(row)
            last = b == bins - 1
            if b / bins <= confidence and (last or confidence < (b + 1) / bins):
                members.append((row.index(confidence) == label, confidence))
        if members:
            hits = sum(hit for hit, _ in members) / len(members)
            mean = sum(confidence for _, confidence in members) / len(members)
            total += len(members) / len(y) * abs(hits - mean)
    return total


@given(n=st.integers(1, 30), classes=st.integers(1, 5), bins=st.integers(1, 20), seed=st.integers(0, 2**32 - 1))
def test_ece_equals_loop(n, classes, bins, seed):
    p, y = random_case(n, classes, seed)
    assert metrics.ece(p, y, bins) == pytest.approx(ece_by_loop(p.tolist(), y.tolist(), bins), abs=1e-12)


def test_ece_puts_certainty_into_the_last_bin():
    # One bin holds .95 (right) and 1 (wrong): |1/2 − .975|. A bin of its own for 1 would give .525.
    p = torch.tensor([[0.95, 0.05], [1.0, 0.0]], dtype=torch.float64)
    assert metrics.ece(p, torch.tensor([0, 1]), bins=10) == pytest.approx(0.475, abs=1e-12)


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_metrics_equal_scikit_learn(classes):
    p, y = random_case(200, classes)
    names = list(range(classes))
    assert metrics.accuracy(p, y) == pytest.approx(accuracy_score(y, p.argmax(1)), abs=1e-12)
    assert metrics.nll(p, y) == pytest.approx(log_loss(y.numpy(), p.numpy(), labels=names), abs=1e-10)
    expected = brier_score_loss(y.numpy(), p.numpy(), labels=names, scale_by_half=False)
    assert metrics.brier(p, y) == pytest.approx(expected, abs=1e-10)


def test_metrics_of_perfect_and_worst_predictions():
    p, right, wrong = torch.eye(3), torch.arange(3), torch.tensor([1, 2, 0])
    assert [m(p, right) for m in ALL] == [1, 0, 0, 0]
    assert [m(p, wrong) for m in ALL] == [0, math.inf, 2, 1]


@pytest.mark.parametrize("metric", ALL)
def test_metrics_accept_numpy_and_other_dtypes(metric):
    p, y = random_case(50, 4)
    assert metric(p.numpy(), y.numpy().astype(np.uint8)) == metric(p, y)
    assert metric(p.bfloat16(), y.int()) == pytest.approx(metric(p, y), abs=0.1)
    assert isinstance(metric(p.requires_grad_(), y), float)


@pytest.mark.parametrize("metric", ALL)
@pytest.mark.parametrize(
    ("p", "y", "error", "says"),
    [
        ([[0.5, 0.5]], [2], InvalidValue, "classes 0 to 1"),
        ([[0.5, 0.5]], [-1], InvalidValue, "from -1 to -1"),
        ([[math.nan, 0.5]], [0], InvalidValue, "NaN"),
        ([[math.inf, 0.5]], [0], InvalidValue, "NaN or infinite"),
        ([[3.0, -2.0]], [0], InvalidValue, "softmax"),
        ([[0.5, 0.4]], [0], InvalidValue, "row sums from 0.9"),
        ([[0.5, 0.5]], [0, 1], ShapeMismatch, r"\(2,\).*\(1, 2\)"),
        ([[0.5, 0.5]], [[0, 1]], ShapeMismatch, "one-hot"),
        ([0.5, 0.5], [0, 1], ShapeMismatch, r"\(2,\)"),
        ([[0, 1]], [0], InvalidType, "int64"),
        ([[0.5, 0.5]], [0.0], InvalidType, "float32"),
        ([[0.5, 0.5]], [True], InvalidType, "bool"),
    ],
)
def test_metrics_refuse_bad_input(metric, p, y, error, says):
    with pytest.raises(error, match=says):
        metric(torch.tensor(p), torch.tensor(y))


def test_metrics_refuse_empty_input_and_bins():
    with pytest.raises(ShapeMismatch, match="N ≥ 1"):
        metrics.accuracy(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(FavourError, match="`bins` is 0"):
        metrics.ece(torch.eye(2), torch.arange(2), bins=0)


# ---- calibration in bins of equal size, and accuracy versus uncertainty


@given(n=st.integers(1, 30), bins=st.integers(1, 40), seed=st.integers(0, 2**32 - 1))
def test_adaptive_ece_equals_loop(n, bins, seed):
    p, y = random_case(n, 4, seed)
    ranked = sorted((max(row), row.index(max(row)) == label) for row, label in zip(p.tolist(), y.tolist(), strict=True))
    parts = np.array_split(np.arange(n), min(bins, n))
    total = sum(abs(sum(ranked[i][1] - ranked[i][0] for i in part)) for part in parts)
    assert metrics.adaptive_ece(p, y, bins) == pytest.approx(total / n, abs=1e-12)


def test_pavpu_counts_right_and_certain_and_wrong_and_uncertain():
    p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.9, 0.1], [0.9, 0.1]])
    y, u = torch.tensor([0, 0, 1, 1]), torch.tensor([0.1, 0.6, 0.2, 0.9])
    assert metrics.pavpu(p, y, u, threshold=0.5) == 0.5
    assert metrics.pavpu(p, y, u, threshold=1.0) == 0.5
    assert metrics.pavpu(p, y, torch.tensor([0.1, 0.2, 0.8, 0.9])) == 1.0
    with pytest.raises(InvalidValue, match="nan"):
        metrics.pavpu(p, y, torch.full((4,), math.nan))


# ---- detection


def detection_case(seed=0):
    g = torch.Generator().manual_seed(seed)
    unusual = torch.rand(60, generator=g) < 0.4
    scores = (torch.randn(60, generator=g) + unusual).mul(3).round() / 3  # with ties
    return scores, unusual


@pytest.mark.parametrize("seed", range(3))
def test_detection_metrics_equal_loops(seed):
    scores, unusual = detection_case(seed)
    inside, outside = scores[~unusual].tolist(), scores[unusual].tolist()
    wins = sum((o > i) + 0.5 * (o == i) for o in outside for i in inside) / (len(inside) * len(outside))
    assert metrics.auroc(scores, unusual) == pytest.approx(wins, abs=1e-12)
    thresholds = sorted(set(scores.tolist()), reverse=True)
    precision_area, recall = 0.0, 0.0
    for t in thresholds:
        hits = sum(o >= t for o in outside)
        precision_area += (hits / len(outside) - recall) * hits / (hits + sum(i >= t for i in inside))
        recall = hits / len(outside)
    assert metrics.aupr(scores, unusual) == pytest.approx(precision_area, abs=1e-12)
    t = next(t for t in thresholds if sum(o >= t for o in outside) >= 0.95 * len(outside))
    expected = sum(i >= t for i in inside) / len(inside)
    assert metrics.fpr95(scores, unusual) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("metric", [metrics.auroc, metrics.aupr, metrics.fpr95])
def test_detection_refuses_bad_input(metric):
    good = torch.rand(4)
    with pytest.raises(InvalidValue, match="is 1 for all 4 inputs"):
        metric(good, torch.ones(4))
    with pytest.raises(InvalidValue, match="nan"):
        metric(torch.tensor([0.0, math.nan]), torch.tensor([0, 1]))
    with pytest.raises(InvalidValue, match="other values"):
        metric(good, torch.tensor([0, 1, 2, 1]))
    with pytest.raises(ShapeMismatch, match=r"\(3,\).*\(4,\)"):
        metric(good, torch.zeros(3))
    with pytest.raises(ShapeMismatch, match="N ≥ 1"):
        metric(torch.zeros(0), torch.zeros(0))


# ---- selection


def test_risk_coverage_equals_loop():
    u, loss = torch.rand(20), torch.rand(20)
    order = sorted(range(20), key=lambda i: u[i])
    covered, risk = metrics.risk_coverage(u, loss)
    for k in range(1, 21):
        assert covered[k - 1].item() == pytest.approx(k / 20)
        assert risk[k - 1].item() == pytest.approx(sum(loss[i].item() for i in order[:k]) / k, abs=1e-6)
    assert metrics.aurc(u, loss) == pytest.approx(risk.mean().item())


def test_risk_coverage_averages_over_ties():
    _, risk = metrics.risk_coverage(torch.zeros(4), torch.tensor([1.0, 0.0, 0.0, 0.0]))
    torch.testing.assert_close(risk, torch.full((4,), 0.25, dtype=torch.float64))


def test_coverage_at_risk():
    u, wrong = torch.arange(10), torch.tensor([0, 0, 0, 0, 1, 0, 0, 0, 0, 0])
    assert metrics.coverage_at_risk(u, wrong, 0.0) == 0.4
    assert metrics.coverage_at_risk(u, wrong, 0.125) == 1.0  # risk falls again after the one mistake
    assert metrics.coverage_at_risk(torch.arange(2), torch.ones(2), 0.5) == 0.0


# ---- regression


def regression_case():
    g = torch.Generator().manual_seed(0)
    return (torch.randn(30, generator=g), torch.rand(30, generator=g) + 0.2, 2 * torch.randn(30, generator=g))


def test_regression_metrics_equal_scipy():
    mean, sigma, y = (t.double().numpy() for t in regression_case())
    assert metrics.gaussian_nll(mean, sigma, y) == pytest.approx(-stats.norm.logpdf(y, mean, sigma).mean(), abs=1e-10)
    expected = []
    for m, s, t in zip(mean, sigma, y, strict=True):
        below, _ = integrate.quad(lambda v, m=m, s=s: stats.norm.cdf(v, m, s) ** 2, -30, t, points=[m])
        above, _ = integrate.quad(lambda v, m=m, s=s: stats.norm.sf(v, m, s) ** 2, t, 30, points=[m])
        expected.append(below + above)
    assert metrics.crps(mean, sigma, y) == pytest.approx(np.mean(expected), abs=1e-6)
    levels = [0.1, 0.5, 0.8]
    gaps = [abs(np.mean(y <= stats.norm.ppf(q, mean, sigma)) - q) for q in levels]
    assert metrics.regression_calibration_error(mean, sigma, y, levels) == pytest.approx(np.mean(gaps), abs=1e-12)


def test_regression_calibration_error_vanishes_for_the_truth():
    y = torch.randn(20_000)
    zero, one = torch.zeros_like(y), torch.ones_like(y)
    assert metrics.regression_calibration_error(zero, one, y) < 0.01
    assert metrics.regression_calibration_error(zero, 3 * one, y) > 0.1


def test_coverage_counts_the_bounds_as_inside():
    low, high = torch.zeros(4), torch.ones(4)
    assert metrics.coverage(low, high, torch.tensor([0.0, 1.0, -0.1, 1.1])) == 0.5


def test_regression_metrics_refuse_bad_input():
    one = torch.ones(3)
    for metric in (metrics.gaussian_nll, metrics.crps, metrics.regression_calibration_error):
        with pytest.raises(InvalidValue, match="with_noise"):
            metric(one, 0 * one, one)
        with pytest.raises(ShapeMismatch, match=r"\(3, 2\)"):
            metric(one, one, one[:, None].expand(3, 2))
        with pytest.raises(InvalidValue, match="nan"):
            metric(one, one, one * math.nan)
    with pytest.raises(ShapeMismatch, match="at least one"):
        metrics.coverage(one[:0], one[:0], one[:0])
