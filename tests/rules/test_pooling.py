"""Max and LP pooling against Clark's formulas, order statistics, all masks of a dropout, and sampling.

Average pooling is among the linear cases.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from calls import close, dense
from cases import F64, randn
from hypothesis import given
from hypothesis import strategies as st
from networks_vision import compiles_whole
from scipy import integrate, stats
from scipy.special import gammaln
from torch import Tensor, nn

import favour
from favour.rules import RULES
from favour.rules.maxima import dropped_max_pool
from favour.rules.windows import Windows
from favour.scalar.moments.positive import positive_power
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value

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


@pytest.mark.parametrize(
    "kernel, tolerance", [([4], 0.002), ([2, 2], 0.002), ([2, 2, 2], 0.01), ([3, 3], 0.01), ([7, 7], 0.05)]
)
def test_window_of_equals_is_close_to_order_statistics(kernel, tolerance):
    """The largest of n independent N(0, 1): the partial maxima are skewed, which is kept to first order."""
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
    assert (weights - 1 / n).abs().max() <= 0.02 / n, "each as often"
    assert y.mean.item() == pytest.approx(moments[0], rel=0.001)
    variance = weights.square().sum() + y.noises[0].diag().squeeze()
    assert variance.item() == pytest.approx(moments[1] - moments[0] ** 2, rel=tolerance)


OVERLAPPING = {"stride": [1, 1], "padding": [1, 1]}


def pooled_covariance(x: Value, mode: str, options: dict[str, list[int]]) -> tuple[Tensor, Tensor]:
    """Mean and covariance of 2 × 2 windows of a (1, 1, 6, 6) value."""
    y = pooled(x, [2, 2], mode, **options)
    ((_, G),) = y.maps
    columns = G.apply(x.diag.sqrt().flatten().diag().reshape(36, *x.shape))
    columns = columns if x.factor is None else torch.cat([columns, G.apply(x.factor)])
    got = columns.flatten(1).T @ columns.flatten(1)
    for noise in y.noises:
        got = got + noise.diag().flatten().diag()
    return y.mean.flatten(), got


@pytest.mark.parametrize("size", [0.05, 0.25, 1.0])
@pytest.mark.parametrize("options", [{}, OVERLAPPING], ids=["apart", "overlapping"])
def test_pooling_against_sampling(options, size):
    """A Gaussian of any size, part of it drawn for all entries alike, against 50,000 draws.

    Draws that all windows share bend them alike, which G leaves out: half of the error of the covariance, the more
    the larger they are. The marginals do not suffer.
    """
    mean, diag, factor = randn(1, 1, 6, 6), size * torch.rand(1, 1, 6, 6, dtype=F64), size**0.5 * randn(3, 1, 1, 6, 6)
    n = 50_000
    independent = mean + diag.sqrt() * randn(n, 1, 6, 6)
    shared = independent + torch.einsum("nk,kbcij->nbcij", randn(n, 3), 0.9 * factor)[:, 0]
    for draws, blocks, bound in (independent, {}, 0.05), (shared, {"a": 0.9 * factor}, 0.15 + 0.35 * size**0.5):
        drawn = F.max_pool2d(draws, 2, **options).flatten(1)
        expected = drawn.T.cov()
        errors = {}
        for mode in ("price", "taylor"):
            got_mean, got = pooled_covariance(Value(mean, diag, blocks), mode, options)
            assert ((got_mean - drawn.mean(0)) / drawn.std(0)).abs().mean() <= 0.03
            errors[mode] = ((got - expected).norm() / expected.norm()).item()
            if mode == "price":
                assert ((got.diag() / expected.diag()).log().abs().mean()) <= 0.05
        limit = bound if not (options and not blocks) else 0.12
        assert errors["price"] <= min(limit, 0.6 * errors["taylor"]), errors


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


# ------------------------------------------------------------ behind dropout


def enumerated(function, x: Tensor, p: Tensor | float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of function(dropout(x)) over all masks, for one input x."""
    n = x.numel()
    rates = torch.as_tensor(p, dtype=F64).expand(x.shape).flatten()
    masks = torch.tensor([[(i >> j) & 1 for j in range(n)] for i in range(2**n)], dtype=F64)
    chances = torch.where(masks > 0, 1 - rates, rates).prod(1)
    y = torch.cat([function((m / (1 - rates) * x.flatten()).reshape(x.shape)).flatten(1) for m in masks])
    mean = chances @ y
    return mean, (y - mean).T @ (chances[:, None] * (y - mean))


def matches(model: nn.Module, x: Tensor, p: Tensor | float, rest: nn.Module, **tolerance: float) -> None:
    """favour on the model, for certain x, against all masks."""
    for method in ("adjoint", "full"):
        with torch.no_grad():
            got = favour.compile(model, x, method=method)(x)
        for i in range(len(x)):
            mean, covariance = enumerated(rest, x[i : i + 1], p)
            torch.testing.assert_close(got.mean[i].flatten(), mean, **tolerance)
            torch.testing.assert_close(got.covariance_matrix[i], covariance, **tolerance)


POOLINGS = {
    "1d": (nn.MaxPool1d(3), (1, 6)),
    "2d": (nn.MaxPool2d(2), (1, 2, 5)),
    "3d": (nn.MaxPool3d(2), (1, 2, 2, 2)),
    "adaptive": (nn.AdaptiveMaxPool2d(1), (2, 2, 3)),
    "ceil": (nn.MaxPool2d(2, ceil_mode=True), (1, 3, 3)),
    "padding": (nn.MaxPool1d(2, padding=1), (2, 4)),
}


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("name", POOLINGS)
def test_pooling_behind_dropout_is_exact_for_certain_input(name, signed, p):
    """Every entry is there or not: the largest that is, or 0, wins."""
    pool, shape = POOLINGS[name]
    x = randn(3, *shape) if signed else torch.rand(3, *shape, dtype=F64)
    rest = nn.Sequential(pool, nn.Flatten())
    matches(nn.Sequential(nn.Dropout(p), rest), x, p, rest, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("order", ["relu drop pool", "drop relu pool", "drop pool relu"])
def test_a_relu_around_dropout_and_pooling_may_stand_anywhere(order):
    parts = {"relu": nn.ReLU(), "drop": nn.Dropout(0.3), "pool": nn.MaxPool2d(2)}
    x = randn(3, 1, 4, 2)
    rest = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    model = nn.Sequential(*(parts[name] for name in order.split()), nn.Flatten())
    matches(model, x, 0.3, rest, rtol=1e-9, atol=1e-12)


def test_pooling_behind_dropout_with_a_rate_per_neuron():
    rates = 0.05 + 0.6 * torch.rand(1, 2, 4, dtype=F64)
    pool = nn.Sequential(nn.MaxPool2d(2), nn.Flatten())
    x = torch.rand(2, 1, 2, 4, dtype=F64)
    matches(nn.Sequential(favour.nn.Dropout(rates), pool), x, rates, pool, rtol=1e-9, atol=1e-12)


def test_overlapping_windows_share_their_draws():
    """What the draws of single entries explain is correlated; what takes two of them together is not."""
    pool = nn.Sequential(nn.MaxPool1d(3, stride=1), nn.Flatten())
    x = torch.rand(6, 1, 8, dtype=F64)
    model = nn.Sequential(nn.Dropout(0.2), pool)
    with torch.no_grad():
        got = favour.compile(model, x, method="adjoint")(x)
    wrong, left_out = [], []
    for i in range(len(x)):
        mean, covariance = enumerated(pool, x[i : i + 1], 0.2)
        torch.testing.assert_close(got.mean[i], mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(got.variance[i], covariance.diag(), rtol=1e-9, atol=1e-12)
        wrong.append((got.covariance_matrix[i] - covariance).norm())
        left_out.append((covariance.diag().diag() - covariance).norm())
    assert torch.stack(wrong).norm() <= 0.25 * torch.stack(left_out).norm()


@pytest.mark.parametrize("scale", [0.1, 0.5])
@pytest.mark.parametrize("window", [2, 3])
def test_pooling_behind_dropout_of_gaussians(window, scale):
    """Noise before the dropout as well, against 40,000 draws."""
    torch.manual_seed(0)
    mean, p, n = randn(1, 2, 6, 6), 0.2, 40_000
    variance = scale**2 * (0.5 + torch.rand(1, 2, 6, 6, dtype=F64))
    model = nn.Sequential(nn.ReLU(), nn.Dropout(p), nn.MaxPool2d(window), nn.Flatten())
    with torch.no_grad():
        got = favour.compile(model, mean)(favour.Belief(mean, variance))
    draws = torch.relu(mean + variance.sqrt() * randn(n, 2, 6, 6)) * (torch.rand(n, 2, 6, 6) > p) / (1 - p)
    drawn = F.max_pool2d(draws, window).flatten(1)
    seen = drawn.std(0) > 0.01  # elsewhere nothing is above zero
    assert ((got.mean[0] - drawn.mean(0)) / drawn.std(0))[seen].abs().max() <= 0.04
    assert (got.variance[0] / drawn.var(0))[seen].log().abs().max() <= 0.08


@pytest.mark.parametrize("mode", ["matched", "taylor"])
def test_other_modes_follow_the_winner_behind_dropout(mode):
    """Mean as in `"price"`; the covariance that of the winner alone."""
    pool = nn.MaxPool2d(2)
    x = torch.rand(3, 1, 2, 4, dtype=F64)
    model = nn.Sequential(nn.Dropout(0.2), pool, nn.Flatten())
    with torch.no_grad():
        price = favour.compile(model, x, method="adjoint")(x)
        got = favour.compile(model, x, method="adjoint", activation=mode)(x)
    close(got.mean, price.mean)
    close(got.variance, pool(x).flatten(1).square() * 0.25)


def test_dropout_that_another_branch_reads_keeps_its_draws():
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.2)
            return torch.cat([F.max_pool1d(x, 2).flatten(1), x.flatten(1)], 1)

    x = 1 + torch.rand(2, 1, 4, dtype=F64)
    with torch.no_grad():
        got = favour.compile(Model(), x, method="adjoint")(x).covariance_matrix
    for i in range(2):
        expected = enumerated(lambda d: torch.cat([F.max_pool1d(d, 2).flatten(1), d.flatten(1)], 1), x[i : i + 1], 0.2)
        # As one draw for both branches, but the maximum is that of Gaussians.
        assert (got[i] - expected[1]).norm() <= 0.5 * expected[1].norm()
        assert (got[i, :2, 2:] > 0.02).sum() >= 2, "the branches covary"


@pytest.mark.parametrize("p", [0.05, 0.5])
@pytest.mark.parametrize("method", ["adjoint", "full"])
@pytest.mark.parametrize("relu", [False, True])
def test_entries_of_a_dropped_channel_fall_together(method, p, relu):
    """max(D·x) = D·max(x): channel dropout moves behind the maximum, where it is exact, for x of any sign."""
    parts = [nn.Dropout2d(p), nn.ReLU(), nn.MaxPool2d(2)] if relu else [nn.Dropout2d(p), nn.MaxPool2d(2)]
    x = randn(3, 2, 4, 4)
    best = F.max_pool2d(x.relu() if relu else x, 2).flatten(1)
    with torch.no_grad():
        got = favour.compile(nn.Sequential(*parts, nn.Flatten()), x, method=method)(x)
    close(got.mean, best)
    together = torch.block_diag(torch.ones(4, 4), torch.ones(4, 4)).to(F64)
    close(got.covariance_matrix, best.unsqueeze(2) * best.unsqueeze(1) * together * p / (1 - p))


def test_entries_of_an_alpha_dropped_channel_fall_together():
    model = nn.Sequential(nn.FeatureAlphaDropout(0.2), nn.MaxPool2d(2), nn.Flatten())
    x = randn(3, 2, 4, 4)
    behind = nn.Sequential(nn.FeatureAlphaDropout(0.2), nn.Flatten())
    with torch.no_grad():
        got = favour.compile(model, x, method="adjoint")(x)
        expected = favour.compile(behind, F.max_pool2d(x, 2), method="adjoint")(F.max_pool2d(x, 2))
    close(got.mean, expected.mean)
    close(got.covariance_matrix, expected.covariance_matrix)


@pytest.mark.parametrize("function", [nn.Tanh(), nn.GELU(), nn.Sigmoid(), nn.LeakyReLU(0.2), nn.ELU(), nn.Softplus()])
@pytest.mark.parametrize("drop", [nn.Dropout(0.3), nn.Dropout1d(0.3)])
def test_function_behind_dropout_meets_two_values(function, drop):
    """f(D x) is f(0) or f(x/q): exact for certain x."""
    x = randn(3, 2, 4)
    with torch.no_grad():
        got = favour.compile(nn.Sequential(drop, function), x, method="full")(x)
        there, gone = function(x / 0.7), function(torch.zeros(1, dtype=F64))
    close(got.mean, 0.7 * there + 0.3 * gone)
    close(got.variance, 0.21 * (there - gone).square())


# -------------------------------------------------------------------- windows


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


@pytest.mark.parametrize("kind", ["pooling", "adaptive", "maximum"])
def test_reading_where_the_maxima_were_is_refused(kind):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2, return_indices=True)

        def forward(self, x: Tensor) -> Tensor:
            x = F.dropout(x, 0.2)
            if kind == "pooling":
                y, where = self.pool(x)
            elif kind == "adaptive":
                y, where = F.adaptive_max_pool2d(x, 2, return_indices=True)
            else:
                y, where = x.max(2)
            return y.flatten(1) + where.flatten(1)

    place = "`pool`" if kind == "pooling" else "own forward"
    with pytest.raises(favour.FavourError, match=rf"indices of `aten\.[a-z0-9_.]*max.*{place}.*maxima only"):
        favour.compile(Model(), torch.rand(2, 1, 4, 4))


def test_maximum_over_dimensions_is_a_window():
    x = torch.rand(3, 2, 4, dtype=F64)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            x = x + F.dropout(x, 0.2)
            return x.amax(2), x.max(dim=-1).values, F.max_pool1d(x, 4).squeeze(2)

    with torch.no_grad():
        first, second, third = favour.compile(Model(), x, method="adjoint")(x)
    for other in (second, third):
        close(first.mean, other.mean)
        close(first.covariance_matrix, other.covariance_matrix)


@pytest.mark.parametrize("batch_dim", [0, -2])
def test_maximum_over_the_batch_is_refused(batch_dim):
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - F.dropout(x, 0.2).amax(batch_dim, keepdim=True)

    x = torch.rand(3, 4)
    with pytest.raises(favour.FavourError, match=r"batch"):
        favour.compile(Model(), x)(x)


@pytest.mark.parametrize("norm, relu", [(2, False), (3, True), (4, False)])
@pytest.mark.parametrize("p", [0.1, 0.5])
def test_lp_pooling_behind_dropout_is_exact_for_three_terms(norm, relu, p):
    x = randn(3, 1, 6).relu() if relu else randn(3, 1, 6)
    before = [nn.ReLU()] if relu else []
    rest = nn.Sequential(*before, nn.LPPool1d(norm, 3), nn.Flatten())
    matches(nn.Sequential(*before, nn.Dropout(p), nn.LPPool1d(norm, 3), nn.Flatten()), x, p, rest, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("window", [2, 3])
@pytest.mark.parametrize("stage", ["behind dropout", "Gaussian"])
def test_lp_pooling_against_sampling(window, stage):
    torch.manual_seed(0)
    x, n = randn(1, 2, 6, 6), 20_000
    variance = 0.3 * torch.rand(1, 2, 6, 6, dtype=F64)
    drop = [nn.Dropout(0.2)] if stage == "behind dropout" else []
    model = nn.Sequential(*drop, nn.LPPool2d(2, window), nn.Flatten())
    with torch.no_grad():
        belief = favour.compile(model, x, method="adjoint")(favour.Belief(x, variance))
        draws = model.train()(x + variance.sqrt() * randn(n, 2, 6, 6))
    assert ((belief.mean - draws.mean(0)) / draws.std(0)).abs().max() < 0.05
    assert (belief.variance / draws.var(0)).log().abs().max() < 0.1


def test_root_of_a_positive_sum_by_the_gamma_law():
    """√ of an exponential variable has mean √π/2 and variance 1 − π/4; a certain one is a plain root."""
    m = positive_power(torch.tensor([1.0, 4.0], dtype=F64), torch.tensor([1.0, 0.0], dtype=F64), 0.5)
    close(m.mean, torch.tensor([np.pi**0.5 / 2, 2.0], dtype=F64))
    close(m.variance(torch.tensor([1.0, 0.0], dtype=F64)), torch.tensor([1 - np.pi / 4, 0.0], dtype=F64))


@given(st.floats(0.01, 1e5), st.sampled_from([0.5, 1 / 3, 0.25]))
def test_root_of_a_positive_sum_equals_scipy(shape, r):
    law = stats.gamma(shape)
    moments = [np.exp(gammaln(shape + k * r) - gammaln(shape)) for k in (1, 2)]
    mean, variance = torch.tensor([law.mean()], dtype=F64), torch.tensor([law.var()], dtype=F64)
    m = positive_power(mean, variance, r)
    assert m.mean.item() == pytest.approx(moments[0], rel=1e-6)
    assert m.variance(variance).item() == pytest.approx(moments[1] - moments[0] ** 2, rel=1e-4, abs=1e-9 * moments[1])


def test_network_with_dropout_around_pooling_compiles_whole():
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(2), nn.Conv2d(2, 2, 2), nn.Dropout(0.2),
        nn.LPPool2d(2, 2), nn.Flatten(), nn.Linear(2, 2),
    )  # fmt: skip
    x = torch.randn(3, 1, 8, 8)
    compiles_whole(model, x)


def test_pooling_behind_dropout_has_gradients():
    model = nn.Sequential(nn.Dropout(0.2), nn.MaxPool1d(3), nn.Flatten()).double()
    predict = favour.compile(model, torch.rand(2, 1, 6, dtype=F64), method="adjoint")

    def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
        belief = predict(x)
        return belief.mean, belief.variance

    assert torch.autograd.gradcheck(moments_of, torch.rand(2, 1, 6, dtype=F64, requires_grad=True))


@pytest.mark.parametrize("activation", ["price", "matched", "taylor"])
def test_windows_that_lack_entries_behind_dropout_in_float32(activation):
    """An entry that is not there has a mean whose square float32 does not hold."""
    model, x = nn.Sequential(nn.Dropout(0.5), nn.MaxPool1d(3, 2, 1)), torch.randn(4, 2, 7)
    belief = favour.compile(model, x, activation=activation)(x)
    assert belief.mean.isfinite().all() and belief.variance.isfinite().all()
    assert belief.variance.max() <= 4 * x.abs().max() ** 2


def test_equal_entries_behind_dropout_keep_their_places_whatever_rounding_says():
    """One token twice: a batch rounds them apart another way than a single input does."""

    def slopes(apart: float) -> Tensor:
        mean = torch.tensor([[[1.0, 1.0 + apart, 0.9, 0.8]]], dtype=F64)
        x = Value(mean, torch.full_like(mean, 0.2))
        y = dropped_max_pool(Context(), x, 0.5, False, "", aten.max_pool1d.default, ([4],), {})
        ((_, G),) = y.maps
        return G.transpose(torch.ones(1, 1, 1, 1, dtype=F64))

    close(slopes(4e-16), slopes(-4e-16))
    assert (slopes(1e-9) - slopes(-1e-9)).abs().max() > 1e-3  # where the order is known it matters
