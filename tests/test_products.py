"""Products of two uncertain tensors against Gaussian integrals, loops over a dense covariance, and whole models."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from calls import close, covariance
from networks import moments, relative_error
from numpy.polynomial.hermite_e import hermegauss
from torch import nn

import favour
from favour.errors import UnsupportedOperation
from favour.rules import RULES
from favour.surrogate.value import Context, Value

F64 = torch.float64
aten = torch.ops.aten
CTX = Context(module="layer", place="layer (model.py:1)")


def pair(shape_a, shape_b, rank=2, *, diag=True, seed=0):
    """Two values that share the columns "z"."""
    torch.manual_seed(seed)
    values = []
    for shape in (shape_a, shape_b):
        own = torch.rand(shape, dtype=F64) if diag else None
        columns = {"z": 0.5 * torch.randn(rank, *shape, dtype=F64), f"own {len(values)}": torch.randn(1, *shape)}
        values.append(Value(torch.randn(shape, dtype=F64), own, {k: v.to(F64) for k, v in columns.items()}))
    return values


def total_variance(surrogate):
    """Marginal variances of a surrogate of two values that share columns."""
    blocks: dict = {}
    variance = sum(noise.diag() for noise in surrogate.noises)
    for x, G in surrogate.maps:
        if x.diag is not None:
            variance = variance + G.square(x.diag)
        for name, columns in x.blocks.items():
            blocks[name] = blocks.get(name, 0) + G.apply(columns)
    return variance + sum(columns.square().sum(0) for columns in blocks.values())


def gaussian_pair(f, mean, covariance):
    """E[f(a, b)] and Var f(a, b) for two correlated Gaussians, by quadrature."""
    nodes, weights = hermegauss(60)
    weights = np.outer(weights, weights) / weights.sum() ** 2
    root = np.linalg.cholesky(covariance)
    a = mean[0] + root[0, 0] * nodes[:, None] + 0 * nodes
    b = mean[1] + root[1, 0] * nodes[:, None] + root[1, 1] * nodes
    values = f(a, b)
    first = (weights * values).sum()
    return first, (weights * (values - first) ** 2).sum()


def entries(a, b):
    """Mean and covariance of each pair of entries that are multiplied, as arrays."""
    cross = (a.blocks["z"] * b.blocks["z"]).sum(0)
    for i in np.ndindex(*a.shape):
        matrix = np.array([[a.variance[i], cross[i]], [cross[i], b.variance[i]]])
        yield i, np.array([a.mean[i], b.mean[i]]), matrix


def test_mul_has_exact_mean_and_variance():
    a, b = pair((3, 4), (3, 4))
    surrogate = RULES[aten.mul.Tensor].function(CTX, a, b)
    variance = total_variance(surrogate)
    for i, mean, matrix in entries(a, b):
        expected = gaussian_pair(lambda s, t: s * t, mean, matrix)
        close(surrogate.mean[i], expected[0])
        close(variance[i], expected[1])


def widened(x, out):
    """All columns of x after broadcasting to `out`, its independent part among them: (k, batch, n)."""
    batch = out[0]
    n = int(np.prod(out[1:]))
    size = int(np.prod(x.shape[1:]))
    eye = torch.eye(size, dtype=F64).reshape(size, 1, *x.shape[1:]).expand(size, *x.shape)
    own = torch.zeros(size, *out) if x.diag is None else (eye * x.diag.sqrt()).expand(size, *x.shape)
    return {
        "diag": own.broadcast_to(size, *out).reshape(size, batch, n).to(F64),
        **{k: u.broadcast_to(u.shape[0], *out).reshape(-1, batch, n) for k, u in x.blocks.items()},
    }


def dense_noise(surrogate):
    return sum(covariance(noise, surrogate.mean.shape) for noise in surrogate.noises)


@pytest.mark.parametrize("diag", [True, False])
@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 3, 4)), ((2, 3, 4), (2, 3, 1)), ((2, 1, 4), (2, 3, 1))])
def test_mul_noise_is_that_of_a_product_of_gaussians(shapes, diag):
    """Cov[δ_a∘δ_b] = Σ_a∘Σ_b + C∘Cᵀ (Isserlis), where an operand that is broadcast draws once for many entries."""
    a, b = pair(*shapes, diag=diag)
    surrogate = RULES[aten.mul.Tensor].function(CTX, a, b)
    left, right = widened(a, surrogate.mean.shape), widened(b, surrogate.mean.shape)

    def product(p, q):
        return torch.einsum("kbi,kbj->bij", p, q)

    own = [sum(product(u, u) for u in side.values()) for side in (left, right)]
    cross = product(left["z"], right["z"])
    close(dense_noise(surrogate), own[0] * own[1] + cross * cross.mT)


def test_matmul_noise_of_shared_columns_is_that_of_gaussians():
    a, b = pair((2, 3, 4), (2, 4, 2), diag=False)
    surrogate = RULES[aten.matmul.default].function(CTX, a, b)
    names = ["z", "own 0", "own 1"]
    U = torch.cat([a.blocks.get(k, torch.zeros(1, 2, 3, 4, dtype=F64)) for k in names])
    W = torch.cat([b.blocks.get(k, torch.zeros(1, 2, 4, 2, dtype=F64)) for k in names])
    # y − E[y] = Σ_kl M_kl (z_k z_l − δ_kl): Cov = Σ_kl M_kl (M_kl + M_lk)ᵀ
    M = torch.einsum("kbij,lbjo->klbio", U, W).flatten(3)
    expected = torch.einsum("klbx,klby->bxy", M, M) + torch.einsum("klbx,lkby->bxy", M, M)
    close(dense_noise(surrogate), expected)


def test_many_columns_fall_back_to_exact_marginals():
    a, b = pair((2, 3), (2, 3), rank=40)
    surrogate = RULES[aten.mul.Tensor].function(CTX, a, b)
    cross = (a.blocks["z"] * b.blocks["z"]).sum(0)
    close(sum(n.diag() for n in surrogate.noises), a.variance * b.variance + cross.square())


def test_mul_of_a_tensor_with_itself_is_its_square():
    (a, _) = pair((3, 4), (3, 4))
    surrogate = RULES[aten.mul.Tensor].function(CTX, a, a)
    variance = total_variance(surrogate)
    close(surrogate.mean, a.mean.square() + a.variance)
    close(variance, 4 * a.mean.square() * a.variance + 2 * a.variance.square())


def test_div_is_second_order():
    """The error of mean and variance falls with the fourth power of the spread."""
    errors = []
    for size in (0.1, 0.05):
        a, b = pair((2, 3), (2, 3))
        for value in (a, b):
            value.replace(value.diag * size**2, {k: v * size for k, v in value.blocks.items()})
        b.mean = 2 + b.mean.abs()
        surrogate = RULES[aten.div.Tensor].function(CTX, a, b)
        means = [gaussian_pair(lambda s, t: s / t, m, c)[0] for _, m, c in entries(a, b)]
        errors.append((surrogate.mean.flatten() - torch.tensor(means)).abs().max().item())
    assert errors[1] < errors[0] / 12, errors


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 4, 2)), ((2, 5, 3, 4), (2, 1, 4, 2))])
def test_matmul_mean_holds_the_shared_covariance(shapes):
    a, b = pair(*shapes)
    surrogate = RULES[aten.matmul.default].function(CTX, a, b)
    expected = a.mean @ b.mean
    for p, q in zip(a.blocks["z"], b.blocks["z"], strict=True):
        expected = expected + p @ q
    close(surrogate.mean, expected)


def test_matmul_of_independent_matrices_has_exact_variances():
    a, b = pair((2, 3, 4), (2, 4, 2))
    a.replace(a.diag, {})
    b.replace(b.diag, {})
    surrogate = RULES[aten.matmul.default].function(CTX, a, b)
    got = total_variance(surrogate) if surrogate.maps else None
    expected = a.diag @ b.mean.square() + a.mean.square() @ b.diag + a.diag @ b.diag
    close(got, expected)


def test_einsum_equals_matmul():
    a, b = pair((2, 3, 4), (2, 5, 4))
    left = RULES[aten.einsum.default].function(CTX, "bid,bjd->bij", [a, b])
    turned = Value(b.mean.mT, b.diag.mT, {k: v.mT for k, v in b.blocks.items()})
    right = RULES[aten.matmul.default].function(CTX, a, turned)
    close(left.mean, right.mean)
    close(total_variance(left), total_variance(right))


def test_a_product_over_the_batch_says_so():
    a, b = pair((3, 3), (3, 3))
    with pytest.raises(UnsupportedOperation, match=r"layer \(model\.py:1\).*first dimension.*batch"):
        RULES[aten.matmul.default].function(CTX, a, b)


class Gated(nn.Module):
    """A gated unit, a product of matrices and a quotient, all of correlated tensors."""

    def __init__(self):
        super().__init__()
        self.into, self.gate, self.value = nn.Linear(6, 16), nn.Linear(16, 12), nn.Linear(16, 12)
        self.other, self.out = nn.Linear(16, 16), nn.Linear(12, 3)

    def forward(self, x):
        h = torch.relu(self.into(x))
        y = (torch.sigmoid(self.gate(h)) * self.value(h)).unflatten(1, (3, 4))
        z = self.other(h).unflatten(1, (4, 4))
        return self.out((y @ z).flatten(1) / (1 + h.square().mean(1, keepdim=True)))


def test_products_in_a_network_against_sampling():
    """With a rank of all entries the tensors share columns, and the mean of a product holds their covariance."""
    torch.manual_seed(0)
    model, x = Gated().double().requires_grad_(False), 2 * torch.randn(4, 6, dtype=F64)
    posterior = {"into.weight": torch.full((16, 6), 0.05**2)}
    off = {}
    for rank in (0, 16):
        predict = favour.compile(model, x, method="adjoint", rank=rank, posterior=posterior)
        draws = predict.sample(x, n=20_000, generator=torch.Generator().manual_seed(1))
        mean, matrix = moments(draws)
        belief = predict(x)
        off[rank] = ((belief.mean - mean) / draws.std(0)).square().mean().sqrt()
        assert relative_error(belief.covariance_matrix, matrix) < 0.05
    assert off[0] < 0.15 and off[16] < 0.02, off


class Unit(nn.Module):
    """Two tensors made from one, multiplied, and read by a linear layer."""

    def __init__(self, combine, p=0.0):
        super().__init__()
        self.into, self.gate, self.value = nn.Linear(6, 32), nn.Linear(32, 24), nn.Linear(32, 24)
        self.out, self.drop, self.combine = nn.Linear(24, 3), nn.Dropout(p), combine

    def forward(self, x):
        h = self.drop(torch.relu(self.into(x)))
        return self.out(self.combine(self.gate(h), self.value(h)))


def interaction(a, b):
    """Dot products of all pairs among 8 vectors, as recommenders use them."""
    z = torch.cat([a, b], 1).unflatten(1, (8, 6))
    i, j = torch.triu_indices(8, 8, 1)
    return (z @ z.mT)[:, i, j][:, :24]


UNITS = {
    "product": lambda a, b: a * b,
    "gate": lambda a, b: torch.sigmoid(3 * a) * b,
    "glu": lambda a, b: nn.functional.glu(torch.cat([b, 3 * a], -1)),
    "swiglu": lambda a, b: nn.functional.silu(3 * a) * b,
    "matrices": lambda a, b: (a.unflatten(1, (4, 6)) @ b.unflatten(1, (6, 4))).flatten(1).repeat(1, 2)[:, :24],
    "dot products": interaction,
}


def compared(model, x, **settings):
    predict = favour.compile(model, x, method="adjoint", **settings)
    draws = predict.sample(x, n=6000, generator=torch.Generator().manual_seed(1))
    mean, matrix = moments(draws)
    belief = predict(x)
    off = ((belief.mean - mean).abs() / draws.std(0)).mean().item()
    return off, relative_error(belief.covariance_matrix, matrix)


@pytest.mark.parametrize("name", UNITS)
def test_gated_units_with_two_uncertain_factors(name):
    """Weights as uncertain as they are large: both factors vary by more than their means."""
    torch.manual_seed(0)
    model, x = Unit(UNITS[name]).double().requires_grad_(False), 2 * torch.randn(8, 6, dtype=F64)
    off, relative = compared(model, x, posterior={"into.weight": torch.full((32, 6), 0.3**2, dtype=F64)})
    print(f"{name}: mean {off:.3f} standard deviations, covariance {relative:.3f}")
    assert off < 0.15 and relative < 0.14


@pytest.mark.parametrize("name", UNITS)
def test_gated_units_behind_dropout(name):
    """Dropout at 0.2 on 32 units is skewed, and a square of something skewed correlates with it: the known limit."""
    torch.manual_seed(0)
    model, x = Unit(UNITS[name], 0.2).double().requires_grad_(False), 2 * torch.randn(8, 6, dtype=F64)
    off, relative = compared(model, x)
    print(f"{name}: mean {off:.3f} standard deviations, covariance {relative:.3f}")
    assert off < 0.2 and relative < 0.45


class SqueezeExcite(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.down, self.up = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 4), nn.Linear(4, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        h = torch.tanh(self.conv(x))
        gate = torch.sigmoid(5 * self.up(torch.relu(self.down(h.mean((2, 3))))))
        return self.out((h * gate[:, :, None, None]).mean((2, 3)))


def test_squeeze_and_excite():
    torch.manual_seed(0)
    model, x = SqueezeExcite().double().requires_grad_(False), torch.randn(8, 1, 6, 6, dtype=F64)
    for rank in (0, 4):
        off, relative = compared(
            model, x, posterior={"conv.weight": torch.full((8, 1, 3, 3), 0.1**2, dtype=F64)}, rank=rank
        )
        print(f"rank {rank}: mean {off:.3f} standard deviations, covariance {relative:.3f}")
        assert off < 0.15 and relative < 0.12
