"""Metrics against plain loops and scikit-learn, which know nothing of favour."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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


@given(
    n=st.integers(1, 30), classes=st.integers(1, 5), bins=st.integers(1, 20), seed=st.integers(0, 2**32 - 1)
)
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
