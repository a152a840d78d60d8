"""Max pooling against Clark's formulas, order statistics and sampling; average pooling is among the linear cases."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import close, dense
from cases import F64, randn
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats
from torch import Tensor, nn

import favour
from favour.rules import RULES
from favour.rules.pooling import Windows
from favour.surrogate import Surrogate
from favour.value import Context, Value

aten = torch.ops.aten


def pooled(x: Value, kernel: list[int], mode: str = "price", **options: list[int]) -> Surrogate:
    op = {1: aten.max_pool1d, 2: aten.max_pool2d, 3: aten.max_pool3d}[len(kernel)].default
    return RULES[op].function(Context(activation=mode), x, kernel, **options)


def clark(means: np.ndarray, covariance: np.ndarray) -> tuple[float, float, np.ndarray]:
    """Mean and variance of the larger of two Gaussians, and the probabilities of either (Clark 1961)."""
    a = np.sqrt(covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1])
    alpha = (means[0] - means[1]) / a
    p, density = stats.norm.cdf(alpha), stats.norm.pdf(alpha)
    first = means[0] * p + means[1] * (1 - p) + a * density
    second = (means[0] ** 2 + covariance[0, 0]) * p + (means[1] ** 2 + covariance[1, 1]) * (1 - p)
    second += (means[0] + means[1]) * a * density
    return first, second - first**2, np.array([p, 1 - p])


@given(st.floats(-2, 2), st.floats(0.05, 2), st.floats(0.05, 2), st.floats(-1, 1), st.floats(-1, 1))
def test_pair_equals_clark(gap, v, w, u, t):
    """A window of two, correlated through a factor: mean, variance, map and covariances with the entries."""
    diag, factor = torch.tensor([v, w], dtype=F64), torch.tensor([u, t], dtype=F64)
    x = Value(torch.tensor([[[gap + 0.5, 0.5]]], dtype=F64), diag.reshape(1, 1, 2), {"a": factor.reshape(1, 1, 1, 2)})
    y = pooled(x, [2])
    spread = (diag.diag() + torch.outer(factor, factor)).numpy()
    mean, variance, p = clark(np.array([gap + 0.5, 0.5]), spread)
    close(y.mean.item(), mean)
    ((_, G),) = y.maps
    g = dense(G, x.shape, F64).numpy()
    close(g[0], p)
    close(g[0] @ spread @ g[0] + y.noises[0].diag().item(), variance)


@pytest.mark.parametrize("kernel", [[4], [2, 2], [3, 3], [2, 2, 2]])
def test_window_of_equals_is_close_to_order_statistics(kernel):
    """The largest of n independent N(0, 1). Pairs take their result for Gaussian, which costs variance."""
    n = int(np.prod(kernel))
    x = Value(torch.zeros(1, 1, *kernel, dtype=F64), torch.ones(1, 1, *kernel, dtype=F64))
    y = pooled(x, kernel)
    moments = [
        integrate.quad(lambda t, k=k: t**k * n * stats.norm.pdf(t) * stats.norm.cdf(t) ** (n - 1), -9, 9)[0]
        for k in (1, 2)
    ]
    ((_, G),) = y.maps
    weights = dense(G, x.shape, F64)
    close(weights.sum(), 1.0, "one of them is the largest")
    assert (weights - 1 / n).abs().max() <= 0.25 / n, "each about as often"
    assert y.mean.item() == pytest.approx(moments[0], rel=0.02)
    variance = weights.square().sum() + y.noises[0].diag().squeeze()
    assert variance.item() == pytest.approx(moments[1] - moments[0] ** 2, rel=0.2)


@pytest.mark.parametrize("options", [{}, {"stride": [1, 1], "padding": [1, 1]}], ids=["apart", "overlapping"])
def test_pooling_against_sampling(options):
    """A correlated Gaussian, against 50,000 draws: means to .03 sd, covariances to .15, following the winner to .5.

    Windows that overlap share draws, which the rule leaves out.
    """
    mean, diag, factor = randn(1, 1, 6, 6), 0.05 * torch.rand(1, 1, 6, 6, dtype=F64), 0.2 * randn(3, 1, 1, 6, 6)
    x = Value(mean, diag, {"a": factor})
    n = 50_000
    draws = mean + diag.sqrt() * randn(n, 1, 6, 6) + torch.einsum("nk,kbcij->nbcij", randn(n, 3), factor)[:, 0]
    drawn = F.max_pool2d(draws, 2, **options).flatten(1)
    expected = drawn.T.cov()
    errors = {}
    for mode in ("price", "taylor"):
        y = pooled(x, [2, 2], mode, **options)
        assert ((y.mean.flatten() - drawn.mean(0)) / drawn.std(0)).abs().mean() <= 0.03
        ((_, G),) = y.maps
        columns = torch.cat([G.apply(factor), G.apply(diag.sqrt().flatten().diag().reshape(36, 1, 1, 6, 6))])
        got = columns.flatten(1).T @ columns.flatten(1)
        for noise in y.noises:
            got = got + noise.diag().flatten().diag()
        errors[mode] = ((got - expected).norm() / expected.norm()).item()
    assert errors["price"] <= 0.15 and errors["taylor"] > 0.5, errors


@pytest.mark.parametrize("mode", ["matched", "taylor"])
def test_other_modes_follow_the_winner(mode):
    x = Value(randn(2, 3, 4, 4), torch.rand(2, 3, 4, 4, dtype=F64))
    price, y = pooled(x, [2, 2]), pooled(x, [2, 2], mode)
    close(y.mean, price.mean)
    assert not y.noises
    ((_, G),) = y.maps
    d = randn(2, 2, 3, 4, 4)
    where = F.max_pool2d(x.mean, 2, return_indices=True)[1].flatten(2)
    expected = torch.stack([e.flatten(2).gather(2, where) for e in d]).reshape(2, 2, 3, 2, 2)
    close(G.apply(d), expected)


@pytest.mark.parametrize("p", [0.05, 0.2])
@pytest.mark.parametrize("method", ["adjoint", "full"])
def test_entries_of_a_dropped_channel_fall_together(method, p):
    """max(D·x) = D·max(x) for x ≥ 0: the neighbours' draws are one draw, also where a sweep keeps only variances."""
    model = nn.Sequential(nn.Dropout2d(p), nn.MaxPool2d(2), nn.Flatten())
    x = torch.rand(3, 2, 4, 4, dtype=F64)
    best = F.max_pool2d(x, 2).flatten(1)
    with torch.no_grad():
        got = favour.compile(model, x, method=method)(x)
    torch.testing.assert_close(got.mean, best, rtol=0.02, atol=0)
    torch.testing.assert_close(got.variance, best.square() * p / (1 - p), rtol=0.08, atol=0)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.integers(1, 3), st.booleans())
def test_windows_are_torchs_windows(size, window, stride, padding, dilation, ceil):
    """The same number of windows over the same entries, and `gather` the adjoint of `entries`."""
    padding = min(padding, window // 2)
    if size + 2 * padding < dilation * (window - 1) + 1:
        return
    x = randn(2, 1, size)
    expected = F.max_pool1d(x, window, stride, padding, dilation, ceil)
    windows = Windows.regular(-1, size, window, stride, padding, dilation, ceil)
    parts = windows.entries(x, float("-inf"))
    assert torch.equal(torch.stack(parts).amax(0), expected)
    g = [randn(*expected.shape) for _ in parts]
    inner = sum((a * b).sum() for a, b in zip(g, windows.entries(x, 0.0), strict=True))
    close((windows.gather(g) * x).sum(), inner)


@given(st.integers(1, 9), st.integers(1, 9))
def test_adaptive_windows_are_torchs_windows(size, count):
    x = randn(2, 1, size)
    windows = Windows.adaptive(-1, size, count)
    parts = windows.entries(x, float("-inf"))
    assert torch.equal(torch.stack(parts).amax(0), F.adaptive_max_pool1d(x, count))
    g = [randn(2, 1, count) for _ in parts]
    inner = sum((a * b).sum() for a, b in zip(g, windows.entries(x, 0.0), strict=True))
    close((windows.gather(g) * x).sum(), inner)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pooling_in_short_dtypes_stays_finite(dtype):
    mean = (10 * torch.randn(2, 1, 5, 5)).to(dtype)
    y = pooled(Value(mean, torch.full_like(mean, 0.25)), [3, 3], stride=[2, 2], padding=[1, 1])
    ((_, G),) = y.maps
    for part in (y.mean, y.noises[0].diag(), G.apply(mean.unsqueeze(0)), G.transpose(y.mean.unsqueeze(0))):
        assert part.dtype == dtype and bool(part.isfinite().all())
    assert bool((y.noises[0].diag() >= 0).all()) and bool((y.mean >= F.max_pool2d(mean, 3, 2, 1) - 0.1).all())


def test_maxima_whose_indices_nobody_reads():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.adaptive_max_pool2d(F.dropout(x, 0.2), 2, return_indices=True)[0].flatten(1)

    x = torch.rand(2, 1, 5, 5, dtype=F64)
    got = favour.compile(Model(), x)(x)
    assert got.mean.shape == (2, 4) and bool((got.variance > 0).all())


def test_lp_pooling_is_finite_and_its_mean_near_samples() -> None:
    """Its root is taken of sums of squares, near which a Gaussian has mass below zero."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.Dropout(0.1), torch.nn.LPPool2d(2, 2)).double()
    x = torch.randn(3, 1, 8, 8, dtype=torch.float64)
    with torch.no_grad():
        belief = favour.compile(model, x, method="adjoint")(x)
        draws = favour.sample(model, x, 4000, generator=torch.Generator().manual_seed(1))
    assert bool(belief.mean.isfinite().all()) and bool(belief.variance.isfinite().all())
    # A rough rule where the sums are near zero: the variance comes out up to twice too large there.
    assert ((belief.mean - draws.mean(0)) / draws.std(0)).abs().mean() < 0.3
