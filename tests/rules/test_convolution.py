"""Convolutions with Gaussian kernels against dense matrices, entry by entry of the kernel, and against sampling."""

from __future__ import annotations

from collections.abc import Callable
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
from favour import Diagonal, Full, Kronecker, Posterior, Rows
from favour.errors import UnsupportedOperation
from favour.rules.convolution import conv
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value, Weight

aten = torch.ops.aten
BATCH = 2

# name: (overload, input event, kernel shape, arguments behind the bias)
CALLS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...], tuple[Any, ...]]] = {
    "1d": (aten.conv1d.default, (2, 5), (3, 2, 2), ()),
    "2d": (aten.conv2d.default, (2, 3, 4), (3, 2, 2, 3), ()),
    "2d, strided": (aten.conv2d.default, (2, 5, 4), (2, 2, 3, 2), ([2, 3], [1, 1])),
    "2d, dilated": (aten.conv2d.default, (1, 5, 4), (2, 1, 2, 2), ([1, 1], [0, 1], [2, 3])),
    "2d, groups": (aten.conv2d.default, (4, 3, 3), (2, 2, 2, 2), ([1, 2], [1, 0], [1, 1], 2)),
    "2d, same": (aten.conv2d.padding, (2, 3, 3), (2, 2, 2, 3), ([1, 1], "same")),
    "3d": (aten.conv3d.default, (1, 2, 3, 2), (2, 1, 2, 2, 1), ()),
    "transposed": (aten.conv_transpose2d.input, (2, 2, 3), (2, 2, 2, 3), ([2, 1], [1, 0], [1, 0])),
    "transposed, groups": (aten.conv_transpose1d.default, (4, 3), (4, 1, 3), ([2], [1], [0], 2, [2])),
}
INPUTS = ("certain", "diagonal", "factor", "diagonal and factor")


def uncertain(kind: str, *event: int) -> tuple[Any, Tensor, Tensor]:
    """What the rule gets, its mean, and its dense covariance (batch, n, n)."""
    mean = randn(BATCH, *event)
    n = mean[0].numel()
    covariance = torch.zeros(BATCH, n, n, dtype=F64)
    if kind == "certain":
        return mean, mean, covariance
    diag = torch.rand(mean.shape, dtype=F64) if "diagonal" in kind else None
    blocks = {name: 0.7 * randn(2, *mean.shape) for name in ("a", "b") if "factor" in kind}
    if diag is not None:
        covariance += diag.reshape(BATCH, n).diag_embed()
    for block in blocks.values():
        covariance += torch.einsum("kbi,kbj->bij", block.flatten(2), block.flatten(2))
    return Value(mean, diag, blocks), mean, covariance


def noise_covariance(surrogate: Surrogate) -> Tensor:
    """Σ_s N_s from the columns, (batch, n, n), after a check that the other methods agree with them."""
    shape = surrogate.mean.shape
    total = torch.zeros(BATCH, shape[1:].numel(), shape[1:].numel(), dtype=F64)
    for noise in surrogate.noises:
        columns = noise.columns().flatten(2)
        N = torch.einsum("kbi,kbj->bij", columns, columns)
        close(noise.diag().flatten(1), N.diagonal(dim1=1, dim2=2), "diag of a noise")
        g = randn(2, *shape)
        close(noise.matmul(g).flatten(2), torch.einsum("bij,fbj->fbi", N, g.flatten(2)), "matmul of a noise")
        close(noise.gram(g), torch.einsum("fbi,bij,gbj->bfg", g.flatten(2), N, g.flatten(2)), "gram of a noise")
        total += N
    return total


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("name", CALLS)
def test_convolution_with_a_gaussian_kernel(name, given_as):
    """y = Σ_k w_k A_k x with A_k the operation with a one-hot kernel: N = Σ_k σ_k² A_k (Σ + μμᵀ) A_kᵀ."""
    overload, event, shape, rest = CALLS[name]
    x, mean, covariance = uncertain(given_as, *event)
    variance, w = torch.rand(shape, dtype=F64), randn(shape)
    channels = overload(mean, w, None, *rest).shape[1]
    b, spread = randn(channels), torch.rand(channels, dtype=F64)
    rule = favour.rules.RULES[overload].function
    surrogate = rule(Context(), x, Weight("w", w, Diagonal(variance)), Weight("b", b, Diagonal(spread)), *rest)
    close(surrogate.mean, overload(mean, w, b, *rest), "mean")
    out = surrogate.mean.shape
    n = out[1:].numel()
    second = covariance + torch.einsum("bi,bj->bij", mean.flatten(1), mean.flatten(1))
    shared = torch.kron(spread.diag(), torch.ones(n // channels, n // channels, dtype=F64))
    expected = shared.expand(BATCH, n, n).clone()
    for k, variance_k in enumerate(variance.flatten()):
        hot = torch.zeros(shape, dtype=F64).flatten()
        hot[k] = 1
        A = reference.dense_matrix(lambda t, h=hot: overload(t, h.reshape(shape), None, *rest), mean[:1])
        expected += variance_k * A @ second @ A.T
    close(noise_covariance(surrogate), expected, "covariance")


def test_convolution_with_a_full_bias_covariance():
    root = randn(3, 3)
    y = conv(Context(), randn(BATCH, 2, 4), randn(3, 2, 2), Weight("b", randn(3), Full(root @ root.T, (3,))))
    close(noise_covariance(y)[0], torch.kron(root @ root.T, torch.ones(3, 3, dtype=F64)), "covariance")


def correlated(kind: str, m: int, n: int) -> Any:
    """A posterior over a matrix of m rows, and its dense covariance."""
    root = 0.5 * randn(m * n, m * n)
    made: Any
    if kind == "rows":
        made = Rows(torch.rand(m, n, dtype=F64), randn(2, m, n))
        covariance = torch.block_diag(
            *[made.diag[i].diag() + made.factor[:, i].T @ made.factor[:, i] for i in range(m)]
        )
    elif kind == "kronecker":
        A, B = randn(n, n), randn(m, m)
        made = Kronecker(A @ A.T, B @ B.T)
        covariance = torch.kron(B @ B.T, A @ A.T)
    else:
        made = Full(root @ root.T, (m, n))
        covariance = root @ root.T
    return made, covariance


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", ["rows", "kronecker", "full"])
@pytest.mark.parametrize("name", ["1d", "2d, strided", "2d, groups", "2d, same"])
def test_convolution_with_a_correlated_kernel(name, kind, joint, given_as):
    """y = Σ_k w_k A_k [x, 1]: N = Σ_kl Cov(w_k, w_l) A_k E[xxᵀ] A_lᵀ, the bias a weight on a constant 1.

    Where x has an independent part, its share of N is compared in the variances only (see the rule).
    """
    overload, event, shape, rest = CALLS[name]
    x, mean, covariance = uncertain(given_as, *event)
    m, n = shape[0], torch.Size(shape[1:]).numel()
    gaussian, entries = correlated(kind, m, n + joint)
    w, b = randn(shape), randn(m)
    weight = Weight("w", w, gaussian, partner="b" if joint else None)
    bias = Weight("b", b, gaussian, partner="w") if joint else b
    surrogate = favour.rules.RULES[overload].function(Context(), x, weight, bias, *rest)
    close(surrogate.mean, overload(mean, w, b, *rest), "mean")
    maps = []
    for k in range(m * (n + joint)):
        hot, shift = torch.zeros(m, n, dtype=F64), torch.zeros(m, dtype=F64)
        row, column = divmod(k, n + joint)
        (hot[row] if column < n else shift.expand(1, m)[0])[column if column < n else row] = 1
        run = lambda t, h=hot, s=shift: overload(t, h.reshape(shape), s, *rest)  # noqa: E731
        A = reference.dense_matrix(run, mean[:1])
        maps.append(torch.cat([A, run(torch.zeros_like(mean[:1])).reshape(-1, 1)], 1))
    A = torch.stack(maps)  # (entries, outputs, inputs + 1)
    extended = F.pad(mean.flatten(1), (0, 1), value=1.0)
    second = F.pad(covariance, (0, 1, 0, 1)) + torch.einsum("bi,bj->bij", extended, extended)
    expected = torch.einsum("kl,koi,bij,lpj->bop", entries, A, second, A)
    got = noise_covariance(surrogate)
    if "diagonal" in given_as:
        got, expected = (t.diagonal(dim1=1, dim2=2) for t in (got, expected))
    close(got, expected, "covariance")


@pytest.mark.parametrize("given_as", ["certain", "factor"])
@pytest.mark.parametrize("name", ["transposed", "transposed, groups"])
def test_transposed_convolution_with_a_full_kernel_covariance(name, given_as):
    overload, event, shape, rest = CALLS[name]
    x, mean, covariance = uncertain(given_as, *event)
    count = torch.Size(shape).numel()
    root, w = randn(count, count), randn(shape)
    weight = Weight("w", w, Full(root @ root.T, shape))
    surrogate = favour.rules.RULES[overload].function(Context(), x, weight, None, *rest)
    hots = torch.eye(count, dtype=F64).reshape(count, *shape)
    A = torch.stack([reference.dense_matrix(lambda t, h=h: overload(t, h, None, *rest), mean[:1]) for h in hots])
    second = covariance + torch.einsum("bi,bj->bij", mean.flatten(1), mean.flatten(1))
    close(noise_covariance(surrogate), torch.einsum("kl,koi,bij,lpj->bop", root @ root.T, A, second, A), "covariance")


@pytest.mark.parametrize("kind", ["rows", "kronecker"])
def test_a_transposed_convolution_takes_posteriors_by_rows(kind):
    """Its kernel has inputs first, so that rows are no outputs: the same as the dense covariance."""
    torch.manual_seed(0)
    gaussian, _ = correlated(kind, 2, 6)
    x, K = randn(2, 2, 4), randn(2, 2, 3)
    rule = favour.rules.RULES[aten.conv_transpose1d.default].function
    made = [rule(Context(), x, Weight("up", K, g)) for g in (gaussian, Full(gaussian.covariance(), (2, 2, 3)))]
    close(*[noise_covariance(s) for s in made], "covariance")


def test_a_kernel_that_shares_a_gaussian_with_another_bias_is_refused():
    weight = Weight("conv.weight", randn(2, 2, 3), Full(torch.eye(14), (2, 7)), partner="conv.bias")
    with pytest.raises(UnsupportedOperation, match=r"`conv.weight`.*`conv.bias`.*another bias"):
        conv(Context(place="head"), randn(2, 2, 4), weight, None)


@pytest.mark.parametrize("kind", ["rows", "kronecker", "full"])
def test_correlated_kernels_against_sampling(kind):
    """A Gaussian over [K | b] or K alone, two layers: every entry within 5 standard errors of draws of the weights."""
    n = 20_000
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Conv2d(2, 1, 2, stride=2), nn.Flatten()).double()
    first, _ = correlated(kind, 2, 5)
    second, _ = correlated(kind, 1, 8)
    small = {k: 0.05 * v for k, v in first.tensors().items()}
    first = type(first)(**small, **({"shape": (2, 5)} if kind == "full" else {}))
    posterior = Posterior({("0.weight", "0.bias"): first, "1.weight": second})
    x = randn(BATCH, 1, 4, 5)
    with torch.no_grad():
        got = favour.compile(model, x, method="full", posterior=posterior)(x)
    draws = favour.sample(model, x, n, posterior=posterior, generator=torch.Generator().manual_seed(0))
    assert ((draws.mean(0) - got.mean).abs() <= 5 * draws.std(0) / n**0.5).all()
    products = (draws - got.mean).unsqueeze(-1) * (draws - got.mean).unsqueeze(-2)
    assert ((products.mean(0) - got.covariance_matrix).abs() <= 5 * products.std(0) / n**0.5).all()


class Autoencoder(nn.Module):
    """One kernel on the way down and, transposed, on the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(randn(3, 2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv_transpose1d(F.conv1d(x, self.kernel), self.kernel)


@pytest.mark.parametrize("full", [False, True])
def test_kernel_tied_with_its_transpose_is_one_draw(full):
    """To first order in the kernel's spread ε² the covariance is J Σ Jᵀ with J the derivative of both uses."""
    model, x = Autoencoder(), randn(BATCH, 2, 4)
    root = 1e-4 * randn(12, 12)
    variance = 1e-8 * torch.rand(3, 2, 2, dtype=F64)
    gaussian: Any = Full(root @ root.T, (3, 2, 2)) if full else Diagonal(variance)
    with torch.no_grad():
        got = favour.compile(model, x, method="adjoint", posterior={"kernel": gaussian})(x)
    for row in range(BATCH):
        run = lambda k, r=row: F.conv_transpose1d(F.conv1d(x[r : r + 1], k), k)  # noqa: E731
        J = torch.autograd.functional.jacobian(run, model.kernel.detach()).reshape(8, 12)
        expected = J @ (root @ root.T if full else variance.flatten().diag()) @ J.T
        error = (got.covariance_matrix[row] - expected).norm() / expected.norm()
        assert error < 1e-6


@pytest.mark.parametrize("name", ["1d", "2d, strided", "transposed", "2d, groups"])
def test_convolution_of_rank_q(name):
    """K ≈ AB over its first axis; a grouped kernel stays whole, and so does one whose rank is no larger than q."""
    overload, event, shape, rest = CALLS[name]
    x, _, _ = uncertain("diagonal", *event)
    w = randn(shape)
    ((_, G),) = favour.rules.RULES[overload].function(Context(), x, w, None, *rest).maps
    if "groups" in name:
        assert G.low_rank(1) is G
        return
    for q in (1, 9):
        U, S, V = torch.linalg.svd(w.flatten(1), full_matrices=False)
        kernel = (U[:, :q] * S[:q] @ V[:q]).reshape(shape)
        d, made = randn(3, *x.shape), G.low_rank(q)
        expected = overload(d.flatten(0, 1), kernel, None, *rest)
        y = made.apply(d)
        close(y.flatten(0, 1), expected, "apply")
        g = randn(*y.shape)
        close((g * y).sum(), (made.transpose(g) * d).sum(), "adjoint")
        close(made.square(x.diag), G.square(x.diag), "square")


class Twice(nn.Module):
    """One Gaussian kernel at two places in a row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(2, 2, 3, padding=1), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(x).flatten(1) + self.conv(x.flip(1)).flatten(1))


@pytest.mark.parametrize("method", ["full", "dplr", "adjoint"])
def test_kernel_used_twice_is_one_draw(method):
    """On a certain input everything is linear in the kernel: Cov = J diag(σ²) Jᵀ with J summed over the uses."""
    model, x = Twice().double(), randn(BATCH, 2, 4)
    w, b = model.conv.weight.detach(), model.conv.bias.detach()
    variance = {"conv.weight": torch.rand(w.shape, dtype=F64), "conv.bias": torch.rand(b.shape, dtype=F64)}

    def run(kernel: Tensor, bias: Tensor, row: Tensor) -> Tensor:
        h = F.conv1d(row, kernel, bias, padding=1) + F.conv1d(row.flip(1), kernel, bias, padding=1)
        return model.head(h.flatten(1)).detach()

    with torch.no_grad():
        got = favour.compile(model, x, method=method, rank=16, posterior=variance)(x)
    for row in range(BATCH):
        J = reference.dense_matrix(lambda k, r=row: run(k, b, x[r : r + 1]), w)
        H = reference.dense_matrix(lambda k, r=row: run(w, k, x[r : r + 1]), b)
        expected = J @ variance["conv.weight"].flatten().diag() @ J.T + H @ variance["conv.bias"].diag() @ H.T
        close(got.covariance_matrix[row], expected, f"row {row}")


def test_latents_move_a_kernel_and_its_bias_together():
    x, w, b = randn(BATCH, 2, 4), randn(3, 2, 2), randn(3)
    P, p = randn(2, 3, 2, 2), randn(2, 3)
    y = conv(Context(), x, Weight("w", w, latents=P), Weight("b", b, latents=p))
    columns = torch.stack([F.conv1d(x, P[k], p[k]) for k in range(2)]).flatten(2)
    close(noise_covariance(y), torch.einsum("kbi,kbj->bij", columns, columns), "covariance")


@pytest.mark.parametrize("method", ["adjoint", "full"])
def test_gaussian_kernels_against_sampling(method):
    """Two linear Bayesian convolutions: every entry within 5 standard errors of 20,000 draws of the weights."""
    n = 20_000
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.Conv2d(2, 1, 2, stride=2), nn.Flatten()).double()
    posterior = {k: 0.05 * torch.rand(w.shape, dtype=F64) for k, w in model.named_parameters()}
    x = randn(BATCH, 1, 4, 5)
    settings = {"rank": 64} if method == "adjoint" else {}
    with torch.no_grad():
        got = favour.compile(model, x, method=method, posterior=posterior, **settings)(x)
    draws = favour.sample(model, x, n, posterior=posterior, generator=torch.Generator().manual_seed(0))
    assert ((draws.mean(0) - got.mean).abs() <= 5 * draws.std(0) / n**0.5).all()
    deviation = draws - got.mean
    products = deviation.unsqueeze(-1) * deviation.unsqueeze(-2)
    assert ((products.mean(0) - got.covariance_matrix).abs() <= 5 * products.std(0) / n**0.5).all()
    independent = favour.compile(model, x, method="diag", posterior=posterior)(x).variance.detach().diag_embed()
    assert ((products.mean(0) - independent).abs() > 5 * products.std(0) / n**0.5).any(), "the test can fail"


@given(st.integers(0, 2), st.integers(1, 3), st.integers(1, 4), st.integers(0, 3), st.integers(1, 3), st.integers(0, 2))
def test_convolution_of_degenerate_shapes(batch, window, stride, padding, dilation, rank):
    """An empty batch, one output, no columns: the map keeps its shapes and stays the adjoint's adjoint."""
    size = max(1, dilation * (window - 1) + 1 - 2 * padding) + 1
    x = Value(randn(batch, 2, size), torch.zeros(batch, 2, size, dtype=F64), {"a": randn(rank, batch, 2, size)})
    kernel = Weight("w", randn(3, 2, window), Diagonal(torch.rand(3, 2, window, dtype=F64)))
    y = conv(Context(), x, kernel, None, [stride], [padding], [dilation])
    ((_, G),) = y.maps
    d, g = randn(2, *x.shape), randn(2, *y.mean.shape)
    assert G.apply(d).shape == g.shape and G.transpose(g).shape == d.shape
    close((G.apply(d) * g).flatten(1).sum(1), (d * G.transpose(g)).flatten(1).sum(1))
    for noise in y.noises:
        assert noise.diag().shape == y.mean.shape and bool((noise.diag() >= 0).all())
        assert noise.gram(g).shape == (batch, 2, 2)


def test_covectors_may_have_a_batch_of_one():
    x = Value(randn(3, 2, 5, 5), torch.ones(3, 2, 5, 5, dtype=F64))
    ((_, G),) = conv(Context(), x, randn(3, 2, 3, 3), None, [2, 2]).maps
    g = randn(4, 1, 3, 2, 2)
    assert G.thin
    close(G.transpose(g).expand(4, 3, 2, 5, 5), G.transpose(g.expand(4, 3, 3, 2, 2)))


def test_shorter_precision_leaves_the_mean_alone():
    x = Value(randn(BATCH, 2, 5), torch.ones(BATCH, 2, 5, dtype=F64))
    w = randn(3, 2, 2)
    exact, short = conv(Context(), x, w), conv(Context(short=torch.bfloat16), x, w)
    assert torch.equal(short.mean, exact.mean)
    d = randn(2, BATCH, 2, 5)
    (_, G), (_, H) = *exact.maps, *short.maps
    assert H.apply(d).dtype == F64 and not torch.equal(G.apply(d), H.apply(d))
    torch.testing.assert_close(H.apply(d), G.apply(d), rtol=0.05, atol=0.1)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2, stride=1),
        nn.ConvTranspose2d(3, 2, 2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(2, 2, 3, padding="same", padding_mode="reflect"),
        nn.AvgPool2d(2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()


@pytest.mark.parametrize("method", ["adjoint", "full"])
def test_gradients_equal_differences(method):
    model, x = network(), randn(BATCH, 1, 6, 6).requires_grad_()
    belief = favour.compile(model, x, method=method)(x)
    (belief.variance.sum() + belief.mean.sum()).backward()
    assert x.grad is not None and bool(x.grad.isfinite().all()) and bool((x.grad != 0).any())
    step = 1e-6 * torch.randn(x.shape, dtype=F64)

    def loss(at: Tensor) -> Tensor:
        got = favour.compile(model, at, method=method)(at)
        return got.variance.sum() + got.mean.sum()

    with torch.no_grad():
        change = loss(x + step) - loss(x - step)
    torch.testing.assert_close(change, 2 * (x.grad * step).sum(), rtol=1e-5, atol=1e-12)


def test_vision_network_exports():
    model, x = network(), randn(BATCH, 1, 6, 6)
    predict = favour.compile(model, x, method="adjoint")
    with torch.no_grad():
        expected = predict(x)

        class Moments(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.predict = predict

            def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
                belief = self.predict(x)
                return belief.mean, belief.covariance_matrix

        exported = torch.export.export(Moments(), (x,), dynamic_shapes=({0: torch.export.Dim("batch")},))
        y = randn(5, 1, 6, 6)
        again = predict(y)
        mean, covariance = exported.module()(y)
    assert expected.mean.shape == (BATCH, 3)
    close(mean, again.mean, "mean")
    close(covariance, again.covariance_matrix, "covariance")


def test_posterior_names_reach_kernels():
    model = nn.Sequential(nn.Conv1d(2, 2, 2), nn.Flatten())
    x = torch.randn(3, 2, 3)
    got = favour.compile(model, x, posterior=Posterior({"0.weight": Diagonal(torch.full((2, 2, 2), 0.1))}))(x)
    expected = F.conv1d(x.square(), torch.full((2, 2, 2), 0.1)).flatten(1)
    torch.testing.assert_close(got.variance, expected)
