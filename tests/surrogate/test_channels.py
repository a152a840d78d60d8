"""Covariances within channels: against dense matrices, and what pooling makes of them against sampling."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import reference
import torch
import torch.nn.functional as F
from calls import close
from cases import F64, randn
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import favour
from favour import Diagonal, Full, Kronecker, Rows
from favour.methods.forward import DiagonalOnly, Sweep
from favour.rules import RULES
from favour.scalar.moments.maxima import Law, largest
from favour.surrogate.channels import ChannelCovariance, inside, shifted
from favour.surrogate.value import Context, Value, Weight

aten = torch.ops.aten
BATCH = 2

# name: (overload, input event, kernel shape, arguments behind the bias)
CALLS: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "1d": (aten.conv1d.default, (2, 6), (3, 2, 3), ([1], [1])),
    "2d": (aten.conv2d.default, (2, 4, 5), (2, 2, 3, 2), ([1, 1], [1, 1])),
    "2d, strided": (aten.conv2d.default, (2, 6, 5), (2, 2, 3, 4), ([2, 1], [1, 2])),
    "2d, dilated": (aten.conv2d.default, (1, 6, 5), (2, 1, 2, 2), ([1, 1], [0, 1], [2, 1])),
    "2d, strided and dilated": (aten.conv2d.default, (1, 8, 5), (1, 1, 3, 2), ([3, 2], [2, 1], [2, 2])),
    "2d, groups": (aten.conv2d.default, (4, 4, 3), (2, 2, 2, 2), ([1, 1], [1, 0], [1, 1], 2)),
    "2d, same": (aten.conv2d.padding, (2, 4, 3), (2, 2, 2, 3), ([1, 1], "same")),
}


def value_of(surrogate: Any) -> Value:
    return DiagonalOnly(ChannelCovariance).absorb(surrogate, None, Sweep({}))  # type: ignore[arg-type]


def check_lags(near: ChannelCovariance | None, dense: Tensor, space: tuple[int, ...]) -> None:
    """All lags of every channel against Cov, (batch, channels, T, T), T the positions of `space`."""
    assert near is not None
    places = list(itertools.product(*map(range, space)))
    for lag in itertools.product(*[range(1 - n, n) for n in space]):
        if not any(lag):
            continue
        got = near.at(lag).flatten(2)
        expected = torch.zeros_like(got)
        for t, place in enumerate(places):
            there = tuple(a + d for a, d in zip(place, lag, strict=True))
            if there in places:
                expected[..., t] = dense[..., t, places.index(there)]
        close(got, expected, f"lag {lag}")


def convolution(name: str, certain: bool, kind: str = "mean-field") -> tuple[Value, Tensor]:
    """A convolution with a Gaussian kernel and bias as the sweep sees it, and its dense covariance within channels."""
    overload, event, shape, rest = CALLS[name]
    torch.manual_seed(0)
    mean, variance = randn(BATCH, *event), torch.rand(BATCH, *event, dtype=F64)
    w, b = randn(shape), randn(shape[0])
    m, n = shape[0], torch.Size(shape[1:]).numel()
    spread = torch.rand(m, dtype=F64)
    gaussian: Any = Diagonal(torch.rand(shape, dtype=F64))
    entries = gaussian.diag.flatten().diag()
    if kind == "rows":
        gaussian = Rows(torch.rand(m, n, dtype=F64), randn(2, m, n))
        entries = torch.block_diag(
            *[gaussian.diag[i].diag() + gaussian.factor[:, i].T @ gaussian.factor[:, i] for i in range(m)]
        )
    elif kind == "kronecker":
        A, B = randn(n, n), randn(m, m)
        gaussian, entries = Kronecker(A @ A.T, B @ B.T), torch.kron(B @ B.T, A @ A.T)
    elif kind == "full":
        root = randn(m * n, m * n)
        gaussian, entries = Full(root @ root.T, (m, n)), root @ root.T
    x = mean if certain else Value(mean, variance)
    y = RULES[overload].function(Context(), x, Weight("w", w, gaussian), Weight("b", b, Diagonal(spread)), *rest)
    covariance = torch.zeros(BATCH, mean[0].numel(), mean[0].numel(), dtype=F64)
    covariance = covariance if certain else variance.flatten(1).diag_embed()
    hots = torch.eye(m * n, dtype=F64).reshape(m * n, *shape)
    A = torch.stack([reference.dense_matrix(lambda t, h=h: overload(t, h, None, *rest), mean[:1]) for h in hots])
    second = covariance + torch.einsum("bi,bj->bij", mean.flatten(1), mean.flatten(1))
    G = torch.einsum("k,koi->oi", w.flatten(), A)
    dense = G @ covariance @ G.T + torch.einsum("kl,koi,bij,lpj->bop", entries, A, second, A)
    T = y.mean[0, 0].numel()
    dense = dense.reshape(BATCH, m, T, m, T).diagonal(dim1=1, dim2=3).movedim(-1, 1)
    return value_of(y), dense + spread.reshape(-1, 1, 1)


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_covariances_of_a_mean_field_convolution(name, certain):
    value, dense = convolution(name, certain)
    close(value.variance.flatten(2), dense.diagonal(dim1=-2, dim2=-1), "variance")
    check_lags(value.known(ChannelCovariance), dense, tuple(value.mean.shape[2:]))


@pytest.mark.parametrize("kind", ["rows", "kronecker", "full"])
@pytest.mark.parametrize("name", ["1d", "2d, strided", "2d, groups"])
def test_covariances_of_a_correlated_kernel(name, kind):
    value, dense = convolution(name, True, kind)
    check_lags(value.known(ChannelCovariance), dense, tuple(value.mean.shape[2:]))


@pytest.mark.parametrize("name", CALLS)
def test_covariances_of_a_known_kernel(name):
    overload, event, shape, rest = CALLS[name]
    x, w = Value(randn(BATCH, *event), torch.rand(BATCH, *event, dtype=F64)), randn(shape)
    value = value_of(RULES[overload].function(Context(), x, w, None, *rest))
    G = reference.dense_matrix(lambda t: overload(t, w, None, *rest), x.mean[:1])
    T = value.mean[0, 0].numel()
    dense = (G @ x.variance.flatten(1).diag_embed() @ G.T).reshape(BATCH, shape[0], T, shape[0], T)
    check_lags(
        value.known(ChannelCovariance), dense.diagonal(dim1=1, dim2=3).movedim(-1, 1), tuple(value.mean.shape[2:])
    )


@pytest.mark.parametrize("kind", ["mean-field", "rows"])
@pytest.mark.parametrize("certain", [True, False])
def test_column_leaves_a_positive_semidefinite_rest(kind, certain):
    value, dense = convolution("2d", certain, kind)
    assert value.known(ChannelCovariance) is not None
    (u,) = value.known(ChannelCovariance).columns().flatten(3)
    rest = dense - u.unsqueeze(-1) * u.unsqueeze(-2)
    assert torch.linalg.eigvalsh(rest).min() > -1e-10
    share = u.square().sum() / dense.diagonal(dim1=-2, dim2=-1).sum()
    assert share > (0.15 if certain else 0.05)


def test_column_of_nothing_is_nothing():
    weight = Weight("w", randn(2, 1, 2, 2), Diagonal(torch.zeros(2, 1, 2, 2, dtype=F64)))
    value = value_of(RULES[aten.conv2d.default].function(Context(), randn(BATCH, 1, 3, 3), weight))
    assert value.known(ChannelCovariance) is not None
    assert not value.known(ChannelCovariance).columns().any()


def chain() -> tuple[Value, Tensor]:
    """Convolution, batch norm and ReLU, and the dense covariance by the slopes."""
    value, dense = convolution("2d", True)
    channels = value.mean.shape[1]
    scale, shift = randn(channels), randn(channels)
    norm = (scale, shift, torch.zeros(channels, dtype=F64), torch.ones(channels, dtype=F64), False, 0.1, 0.0, False)
    value = value_of(RULES[aten.batch_norm.default].function(Context(), value, *norm))
    dense = dense * scale.square().reshape(-1, 1, 1)
    surrogate = RULES[aten.relu.default].function(Context(), value)
    ((_, G),) = surrogate.maps
    slope = G.apply(torch.ones(1, *value.mean.shape, dtype=F64))[0].flatten(2)
    rest = surrogate.noises[0].diag().flatten(2).diag_embed()
    return value_of(surrogate), slope.unsqueeze(-1) * dense * slope.unsqueeze(-2) + rest


def test_covariances_behind_norm_and_activation():
    value, dense = chain()
    close(value.variance.flatten(2), dense.diagonal(dim1=-2, dim2=-1), "variance")
    check_lags(value.known(ChannelCovariance), dense, tuple(value.mean.shape[2:]))


@pytest.mark.parametrize(
    "op, args",
    [
        (aten.avg_pool2d.default, ([2, 2],)),
        (aten.avg_pool2d.default, ([2, 2], [2, 2], 0, False, True, 3)),
        (aten.avg_pool2d.default, ([2, 3], [1, 1])),
        (aten.adaptive_avg_pool2d.default, ([2, 3],)),
    ],
)
def test_average_of_correlated_entries(op, args):
    """Var A x for the dense matrix A of the average and the dense covariance of x."""
    value, dense = cropped(*chain())
    pooled = value_of(RULES[op].function(Context(), value, *args))
    A = reference.dense_matrix(lambda t: op(t, *args), value.mean[:1, :1])
    close(pooled.variance.flatten(2), (A @ dense @ A.T).diagonal(dim1=-2, dim2=-1), "variance")


@pytest.mark.parametrize("op", [aten.avg_pool2d.default, aten.max_pool2d.default])
def test_pooling_hands_on_columns(op):
    """The columns of the result are G u, and all it tells of its lags; they leave a positive variance."""
    value, _ = chain()
    surrogate = RULES[op].function(Context(), value, [2, 2])
    pooled = value_of(surrogate)
    assert value.known(ChannelCovariance) is not None and pooled.known(ChannelCovariance) is not None
    ((_, G),) = surrogate.maps
    u = pooled.known(ChannelCovariance).columns()
    close(u, G.apply(value.known(ChannelCovariance).columns()), "columns")
    flat = u[0].flatten(2)
    assert (flat.square() <= pooled.variance.flatten(2) + 1e-12).all()
    check_lags(pooled.known(ChannelCovariance), flat.unsqueeze(-1) * flat.unsqueeze(-2), tuple(pooled.mean.shape[2:]))


class Table(ChannelCovariance):
    """A dense covariance within channels, (batch, channels, T, T), lag by lag."""

    def __init__(self, dense: Tensor, space: tuple[int, ...]) -> None:
        super().__init__()
        self.dense, self.space = dense, space

    def _covariance(self, lag: tuple[int, ...]) -> Tensor:
        places = list(itertools.product(*map(range, self.space)))
        result = torch.zeros(*self.dense.shape[:-1], dtype=F64)
        for t, place in enumerate(places):
            there = tuple(a + d for a, d in zip(place, lag, strict=True))
            if there in places:
                result[..., t] = self.dense[..., t, places.index(there)]
        return result.unflatten(-1, self.space)

    def _make_columns(self) -> None:
        return None


def cropped(value: Value, dense: Tensor) -> tuple[Value, Tensor]:
    """The first 4 × 6 positions of the result of `chain`."""
    rows, columns = value.mean.shape[2:]
    assert rows >= 4 and columns >= 6, (rows, columns)
    keep = torch.arange(rows * columns).reshape(rows, columns)[:4, :6].flatten()
    small = dense[..., keep, :][..., keep]
    part = Value(value.mean[..., :4, :6], value.variance[..., :4, :6], carried=(Table(small, (4, 6)),))
    return part, small


def gaussian_field(channels: int, rows: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mean (1, channels, rows, columns) and a smooth covariance (1, channels, T, T)."""
    g = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(rows, dtype=F64), torch.arange(columns, dtype=F64), indexing="ij")
    apart = (y.reshape(-1, 1) - y.reshape(1, -1)).square() + (x.reshape(-1, 1) - x.reshape(1, -1)).square()
    spread = 0.5 + torch.rand(1, channels, rows * columns, dtype=F64, generator=g)
    kernel = torch.exp(-apart / (2 * torch.linspace(0.5, 2.0, channels, dtype=F64).reshape(1, -1, 1, 1) ** 2))
    mean = torch.randn(1, channels, rows, columns, dtype=F64, generator=g)
    return mean, spread.unsqueeze(-1) * kernel * spread.unsqueeze(-2)


@pytest.mark.parametrize("args", [([2, 2],), ([2, 2], [2, 2], [1, 1]), ([3, 3], [2, 2], [1, 1])])
def test_maximum_of_correlated_entries_against_sampling(args):
    """Mean and variance of the maxima; G as the covariance with the entries, Cov(y, x) = G Σ (Stein's lemma).

    The chain of Clark's formulas is approximate: 2% of a standard deviation and 3% of the variance for 2 × 2, 4% and 6%
    for 3 × 3, besides 5 standard errors. Independent entries would be off by more than 10%, which is asserted too.
    """
    n, bound = 200_000, 0.02 if args[0] == [2, 2] else 0.04
    mean, dense = gaussian_field(4, 5, 6)
    variance = dense.diagonal(dim1=-2, dim2=-1).unflatten(-1, (5, 6))
    x = Value(mean, variance, carried=(Table(dense, (5, 6)),))
    surrogate = RULES[aten.max_pool2d.default].function(Context(), x, *args)
    y = value_of(surrogate)
    root = torch.linalg.cholesky(dense + 1e-12 * torch.eye(30, dtype=F64))
    z = torch.randn(n, 4, 30, dtype=F64, generator=torch.Generator().manual_seed(1))
    draws = mean + torch.einsum("bcij,ncj->nci", root, z).unflatten(-1, (5, 6))
    largest_ones = F.max_pool2d(draws, *args)
    spread = largest_ones.std(0)
    error = (y.mean[0] - largest_ones.mean(0)).abs() / spread
    assert error.max() <= bound + 5 / n**0.5
    ratio = y.variance[0] / spread.square()
    assert (ratio - 1).abs().max() <= 1.5 * bound + 5 * 2 / n**0.5
    apart = value_of(RULES[aten.max_pool2d.default].function(Context(), Value(mean, variance), *args))
    assert ((apart.mean[0] - largest_ones.mean(0)).abs() / spread).max() > 0.1
    ((_, G),) = surrogate.maps
    line = G.apply(torch.einsum("bcij->jbci", dense).unflatten(-1, (5, 6)))[:, 0].flatten(2)  # (entry, channel, window)
    centred = (draws - draws.mean(0)).flatten(2), (largest_ones - largest_ones.mean(0)).flatten(2)
    sampled = torch.einsum("nci,nct->ict", *centred) / n
    scale = variance[0].flatten(1).T.sqrt().unsqueeze(-1) * spread.flatten(1)
    error = (line - sampled).abs() / scale
    assert error.mean() <= 0.5 * bound and error.max() <= 0.12


def test_largest_of_two_correlated_is_exact():
    """Clark's formulas need no approximation for two; scipy's quadrature over the difference."""
    from scipy.integrate import quad
    from scipy.stats import norm

    a, b, c = (0.3, 1.2), (-0.1, 0.5), 0.6
    one = [Law(torch.tensor([m], dtype=F64), torch.tensor([v], dtype=F64)) for m, v in (a, b)]
    best, weights = largest(one, {(0, 1): torch.tensor([c], dtype=F64)})
    s = (a[1] + b[1] - 2 * c) ** 0.5
    # max = b + relu(a − b), and E[b | a − b = d] is a line in d.
    slope = (c - b[1]) / s**2
    left = b[1] - slope**2 * s**2

    def moment(k: int) -> float:
        def at(d: float) -> float:
            centre = b[0] + slope * (d - (a[0] - b[0])) + max(d, 0.0)
            return (centre if k == 1 else centre**2 + left) * norm.pdf(d, a[0] - b[0], s)

        return sum(quad(at, *edges, epsabs=1e-13)[0] for edges in ((-12, 0), (0, 12)))

    close(best.mean, [moment(1)], "mean")
    close(best.variance, [moment(2) - moment(1) ** 2], "variance")
    close(weights[0], [norm.cdf((a[0] - b[0]) / s)], "weight")


@given(st.integers(0, 2**16), st.integers(1, 3), st.integers(1, 3))
def test_maximum_keeps_its_noise_positive(seed, rows, columns):
    """Any positive semi-definite covariance, singular ones included, gives finite moments and N ≥ 0."""
    g = torch.Generator().manual_seed(seed)
    T = rows * columns
    rank = int(torch.randint(0, T + 1, (), generator=g))
    root = torch.randn(1, 1, T, rank, dtype=F64, generator=g)
    dense = root @ root.mT
    variance = dense.diagonal(dim1=-2, dim2=-1).unflatten(-1, (rows, columns))
    x = Value(
        torch.randn(1, 1, rows, columns, dtype=F64, generator=g), variance, carried=(Table(dense, (rows, columns)),)
    )
    surrogate = RULES[aten.max_pool2d.default].function(Context(), x, [rows, columns])
    y = value_of(surrogate)
    assert y.mean.isfinite().all() and y.variance.isfinite().all()
    assert (y.variance >= 0).all() and (surrogate.noises[0].diag() >= 0).all()
    assert (y.mean >= x.mean.amax((2, 3), keepdim=True) - 1e-9).all()  # E max ≥ max E
    if rank == 0:
        close(y.mean, x.mean.amax((2, 3), keepdim=True), "mean")


@given(st.lists(st.integers(-4, 4), min_size=2, max_size=2))
def test_shifts(lag):
    t = torch.arange(1.0, 13).reshape(3, 4)
    a, b = lag
    moved, kept = shifted(t, (a, b)), inside(t, (a, b))
    for i in range(3):
        for j in range(4):
            there = 0 <= i + a < 3 and 0 <= j + b < 4
            assert moved[i, j] == (t[i + a, j + b] if there else 0)
            assert kept[i, j] == (t[i, j] if there else 0)


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [
        favour.nn.BayesConv2d(1, 3, 3, padding=1, initial_std=0.2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        favour.nn.BayesConv2d(3, 4, 3, padding=1, initial_std=0.2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 3),
    ]
    return nn.Sequential(*layers).double().eval().requires_grad_(False)


def pictures(n: int) -> Tensor:
    """Smooth positive ones, so that neighbours see much the same."""
    return F.avg_pool2d(torch.rand(n, 1, 12, 12, dtype=F64, generator=torch.Generator().manual_seed(3)), 5, 1)


def test_bayesian_convolutions_against_sampling():
    """The mean within 0.13 standard deviations and the covariance within 0.2, besides the error of 10,000 samples.

    Without what neighbours share they are off by 0.52 and 0.67; with exact second moments by 0.08 and 0.20.
    """
    n, model, x = 10_000, network(), pictures(4)
    draws = favour.sample(model, x, n, generator=torch.Generator().manual_seed(0))
    belief = favour.compile(model, x, method="adjoint")(x)
    error = ((belief.mean - draws.mean(0)) / draws.std(0)).abs().mean()
    assert error <= 0.13 + 1 / n**0.5
    centred = draws - draws.mean(0)
    covariance = torch.einsum("nbi,nbj->bij", centred, centred) / (n - 1)
    off = (belief.covariance_matrix - covariance).flatten(1).norm(dim=1) / covariance.flatten(1).norm(dim=1)
    assert off.mean() <= 0.2 + 3 / n**0.5


def test_average_of_one_convolution_has_exact_marginals():
    """Known input, Gaussian kernel, average: the forward variances are those of `full`."""
    torch.manual_seed(0)
    layers = (favour.nn.BayesConv2d(1, 2, 3, padding=1), nn.AvgPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    x = randn(BATCH, 1, 6, 6)
    full = favour.compile(model, x, method="full")(x)
    marginal = favour.compile(model, x, method="adjoint", at="1")(x)
    close(marginal.variance.flatten(1), full.variance, "variance")


def test_other_methods_keep_to_their_own_covariance():
    """`diag` knows what the draws of one kernel do to neighbours; columns hold all correlation and do not ask."""
    torch.manual_seed(0)
    layers = (favour.nn.BayesConv2d(1, 2, 3, padding=1), nn.AvgPool2d(2), nn.Flatten())
    model = nn.Sequential(*layers).double().eval().requires_grad_(False)
    x = randn(BATCH, 1, 6, 6)
    full = favour.compile(model, x, method="full")(x)
    close(favour.compile(model, x, method="diag")(x).variance, full.variance, "diag")
    exact = favour.compile(model, x, method="adjoint", rank=10_000)(x)
    close(exact.covariance_matrix, full.covariance_matrix, "covariance")


def test_covariances_export_and_differentiate():
    model, x = network(), pictures(2)
    predict = favour.compile(model, x, method="adjoint")

    class Moments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.predict = predict

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            belief = self.predict(x)
            return belief.mean, belief.covariance_matrix

    with torch.no_grad():
        exported = torch.export.export(Moments(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        y = pictures(5)
        again = predict(y)
        mean, covariance = exported.module()(y)
    close(mean, again.mean, "mean")
    close(covariance, again.covariance_matrix, "covariance")
    x.requires_grad_()
    predict(x).variance.sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


def test_response_of_a_convolution():
    """Var[y | z] of a mean-field kernel by finite differences in z, and its transpose and square."""
    value, _ = chain()
    w, variance = randn(2, 2, 2, 3), torch.rand(2, 2, 2, 3, dtype=F64)
    y = value_of(
        RULES[aten.conv2d.default].function(Context(), value, Weight("w", w, Diagonal(variance)), None, [2, 1])
    )
    assert y.known(ChannelCovariance) is not None
    z, spread = y.known(ChannelCovariance).response()
    assert z is value
    d, g = randn(1, *z.mean.shape), randn(1, *y.mean.shape)

    def conditional(t: Tensor) -> Tensor:
        return F.conv2d(t.square(), variance, stride=[2, 1])

    step = 1e-5
    close(
        spread.apply(d)[0],
        (conditional(z.mean + step * d[0]) - conditional(z.mean - step * d[0])) / (2 * step),
        "",
        1e-8,
    )
    close((spread.apply(d) * g).sum(), (spread.transpose(g) * d).sum(), "adjoint")
    one = z.mean[:1]
    A = reference.dense_matrix(lambda t: F.conv2d(2 * t * one, variance, stride=[2, 1]), one)
    close(spread.square(z.variance)[0].flatten(), A.square() @ z.variance[0].flatten(), "square")
    assert (
        value.known(ChannelCovariance) is not None and value.known(ChannelCovariance).response() is None
    )  # a known input has none


def test_activation_follows_the_spread_of_a_kernel():
    """relu(w_i z) = z relu(w_i) for z > 0 and independent w_i ~ N(0, σ²): Cov(y_1, y_2) = Var z·σ²/2π, though G is 0.

    ½E[f″]·∂Var/∂z = φ(0)σμ/√(μ² + v) for z ~ N(μ, v).
    """
    model = nn.Sequential(nn.Conv1d(1, 1, 1), nn.Conv1d(1, 2, 1, bias=False), nn.ReLU(), nn.Flatten())
    model = model.double().eval().requires_grad_(False)
    for name, value in {"0.weight": 1.0, "0.bias": 1.0, "1.weight": 0.0}.items():
        model.get_parameter(name).fill_(value)
    mu, v, sigma2 = 2.0, 0.05, 0.5
    posterior = {"0.weight": torch.full((1, 1, 1), v, dtype=F64), "1.weight": torch.full((2, 1, 1), sigma2, dtype=F64)}
    x = torch.ones(2, 1, 1, dtype=F64)
    belief = favour.compile(model, x, method="adjoint", posterior=posterior)(x)
    exact = v * sigma2 / (2 * torch.pi)
    close(belief.covariance_matrix[:, 0, 1], [exact * mu**2 / (mu**2 + v)] * 2, "covariance", 1e-3 * exact)
    second = sigma2 * (mu**2 + v)  # E y² is half of E(wz)²
    close(belief.mean, torch.full((2, 2), (second / (2 * torch.pi)) ** 0.5, dtype=F64), "mean")
    close(belief.variance, torch.full((2, 2), second * (0.5 - 0.5 / torch.pi), dtype=F64), "variance")
