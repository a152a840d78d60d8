"""Linear layers with every kind of weight posterior, against the paper's equation (1) in loops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import reference
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.testing import assert_close

import favour
from favour import Diagonal, Full, Kronecker, Posterior, Rows
from favour.errors import UnsupportedOperation
from favour.posterior import Gaussian
from favour.rules.linear import kept, linear
from favour.surrogate import Noise, Surrogate
from favour.surrogate.matrices import Matrix
from favour.surrogate.value import Context, Value, Weight

F64 = torch.float64
KINDS = ("diagonal", "rows", "kronecker", "full")
INPUTS = ("certain", "diagonal", "factor", "diagonal and factor", "two factors")
BATCH, M, N = 2, 3, 4


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def close(actual: Any, expected: Any, message: str) -> None:
    """To 1e-10 of the largest entry."""
    actual, expected = torch.as_tensor(actual, dtype=F64), torch.as_tensor(expected, dtype=F64)
    scale = expected.abs().max().item() if expected.numel() else 1.0
    assert_close(actual, expected, atol=1e-10 * scale, rtol=1e-10, msg=lambda m: f"{message}: {m}")


@dataclass
class Random:
    """A weight's posterior as favour gets it, and its dense covariance from the definition."""

    gaussian: Gaussian
    covariance: np.ndarray


def posterior(kind: str, m: int, n: int, scale: float = 0.3) -> Random:
    diag = scale * torch.rand(m, n, dtype=F64)
    tensors = {"diag": diag}
    if kind == "diagonal":
        gaussian: Gaussian = Diagonal(diag)
    elif kind == "rows":
        tensors["factor"] = scale * randn(2, m, n)
        gaussian = Rows(diag, tensors["factor"])
    elif kind == "kronecker":
        a, b = randn(n, n), randn(m, m)
        tensors = {"inputs": scale * a @ a.T / n, "outputs": b @ b.T / m}
        gaussian = Kronecker(**tensors)
    else:
        root = randn(m * n, m * n)
        tensors["matrix"] = scale * root @ root.T / (m * n)
        gaussian = Full(tensors["matrix"], (m, n))
    return Random(gaussian, reference.weight_covariance(kind, {k: v.numpy() for k, v in tensors.items()}))


def value(kind: str, *event: int) -> tuple[Any, Tensor, np.ndarray]:
    """An input: what the rule gets, its mean, and its dense covariance (batch, n, n), event flattened."""
    shape = (BATCH, *event)
    mean = randn(*shape)
    n = mean[0].numel()
    if kind == "certain":
        return mean, mean, np.zeros((BATCH, n, n))
    diag = torch.rand(shape, dtype=F64) if "diagonal" in kind else None
    names = {"factor": "a", "diagonal and factor": "a", "two factors": "ab"}.get(kind, "")
    blocks = {name: 0.7 * randn(2, *shape) for name in names}
    dense = torch.zeros(BATCH, n, n, dtype=F64)
    if diag is not None:
        dense += diag.reshape(BATCH, n).diag_embed()
    for block in blocks.values():
        columns = block.reshape(2, BATCH, n)
        dense += torch.einsum("kbi,kbj->bij", columns, columns)
    return Value(mean, diag, dict(blocks)), mean, dense.numpy()


def columns_of(noise: Noise, shape: torch.Size) -> Tensor:
    """A noise's columns, (k, batch, n), after a check that its other methods tell of the same covariance."""
    n = shape[1:].numel()
    columns = noise.columns().expand(-1, *shape).reshape(-1, shape[0], n)
    N = torch.einsum("kbi,kbj->bij", columns, columns)
    close(noise.diag().reshape(shape[0], n), N.diagonal(dim1=1, dim2=2), "diag of a noise")
    g = randn(2, *shape)
    flat = g.reshape(2, shape[0], n)
    close(noise.matmul(g).reshape(2, shape[0], n), torch.einsum("bij,fbj->fbi", N, flat), "matmul of a noise")
    close(noise.gram(g), torch.einsum("fbi,bij,gbj->bfg", flat, N, flat), "gram of a noise")
    return columns


def covariance(surrogate: Surrogate, given: np.ndarray) -> Tensor:
    """G Σ Gᵀ + Σ_s N_s, (batch, n, n); draws with one key are one draw."""
    shape = surrogate.mean.shape
    n = shape[1:].numel()
    total = torch.zeros(shape[0], n, n, dtype=F64)
    for x, G in surrogate.maps:
        size = x.shape[1:].numel()
        eye = torch.eye(size, dtype=F64).reshape(size, 1, *x.shape[1:]).expand(size, *x.shape)
        J = G.apply(eye).reshape(size, shape[0], n).permute(1, 2, 0)
        total = total + J @ torch.from_numpy(given) @ J.mT
    shared: dict[Any, Tensor] = {}
    for i, noise in enumerate(surrogate.noises):
        key = i if noise.key is None else noise.key
        shared[key] = shared.get(key, 0) + columns_of(noise, shape)
    for columns in shared.values():
        total = total + torch.einsum("kbi,kbj->bij", columns, columns)
    return total


def check(surrogate: Surrogate, mean: Tensor, given: np.ndarray, *args: Any, **kwargs: Any) -> None:
    """A surrogate against the reference, row by row."""
    got = covariance(surrogate, given)
    for row in range(BATCH):
        expected = reference.linear(mean[row].numpy(), given[row], *args, **kwargs)
        close(surrogate.mean[row], expected[0], f"mean of row {row}")
        close(got[row], expected[1], f"covariance of row {row}")


# ------------------------------------------------------------------- the rule


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("bias", [None, "certain", "diagonal", "full"])
@pytest.mark.parametrize("kind", [None, *KINDS])
def test_linear_with_a_weight_posterior(kind, bias, given_as):
    x, mean, given = value(given_as, N)
    W, b = randn(M, N), randn(M)
    drawn = posterior(kind, M, N) if kind else None
    weight = Weight("weight", W, drawn.gaussian) if drawn else W
    root = randn(M, M)
    spread = {"diagonal": torch.rand(M, dtype=F64).diag(), "full": root @ root.T}.get(bias or "")
    shift: Any = None if bias is None else b
    if spread is not None:
        shift = Weight("bias", b, Diagonal(spread.diagonal()) if bias == "diagonal" else Full(spread, (M,)))
    check(
        linear(Context(), x, weight, shift),
        mean,
        given,
        W.numpy(),
        None if bias is None else b.numpy(),
        drawn.covariance if drawn else None,
        spread.numpy() if spread is not None else None,
    )


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_linear_with_a_joint_posterior_of_weight_and_bias(kind, given_as):
    x, mean, given = value(given_as, N)
    W, b = randn(M, N), randn(M)
    drawn = posterior(kind, M, N + 1)
    weight = Weight("weight", W, drawn.gaussian, partner="bias")
    bias = Weight("bias", b, drawn.gaussian, partner="weight")
    surrogate = linear(Context(), x, weight, bias)
    check(surrogate, mean, given, W.numpy(), b.numpy(), drawn.covariance, joint=True)


def test_linear_with_a_joint_posterior_needs_its_own_bias():
    drawn = posterior("diagonal", M, N + 1).gaussian
    weight = Weight("weight", randn(M, N), drawn, partner="bias")
    with pytest.raises(UnsupportedOperation, match=r"`weight` shares one Gaussian with `bias`.*head"):
        linear(Context(place="head"), randn(BATCH, N), weight, randn(M))


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_at_positions_uses_one_draw_for_all(kind, joint, given_as):
    """Rows (batch, T, n): the weight and the bias are drawn once, so positions are correlated."""
    x, mean, given = value(given_as, 3, N)
    W, b = randn(M, N), randn(M)
    drawn = posterior(kind, M, N + joint)
    spread = torch.rand(M, dtype=F64)
    weight = Weight("weight", W, drawn.gaussian, partner="bias" if joint else None)
    bias = Weight("bias", b, drawn.gaussian if joint else Diagonal(spread), partner="weight" if joint else None)
    check(
        linear(Context(), x, weight, bias),
        mean,
        given,
        W.numpy(),
        b.numpy(),
        drawn.covariance,
        None if joint else spread.diag().numpy(),
        joint=joint,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_linear_used_at_positions_and_on_a_vector_is_one_draw(kind):
    """Positions 0 and 1 in one use, position 2 in another: the same as three positions of one use."""
    mean, W = randn(BATCH, 3, N), randn(M, N)
    drawn = posterior(kind, M, N)
    weight = Weight("weight", W, drawn.gaussian, uses=2, mixed=True)
    ctx = Context()
    parts = [linear(ctx, x, weight).noises for x in (mean[:, :2], mean[:, 2])]
    (first,), (second,) = parts
    assert first.key == second.key is not None
    columns = torch.cat([first.columns().flatten(2), second.columns().flatten(2)], 2)
    got = torch.einsum("kbi,kbj->bij", columns, columns)
    for row in range(BATCH):
        expected = reference.linear(mean[row].numpy(), np.zeros((3 * N, 3 * N)), 0 * W.numpy(), None, drawn.covariance)
        close(got[row], expected[1], f"noise of row {row}")
    close(first.diag().flatten(1), got.diagonal(dim1=1, dim2=2)[:, : 2 * M], "diag of the first use")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given_as", INPUTS)
def test_linear_used_thrice_is_one_draw(kind, given_as):
    """Three uses of a weight are three positions of one use."""
    if given_as != "certain" and kind in ("kronecker", "full"):
        pytest.skip("first order in the uncertainty of the input")
    whole, mean, given = value(given_as, 3, N)
    W = randn(M, N)
    drawn = posterior(kind, M, N)
    weight = Weight("weight", W, drawn.gaussian, uses=3)
    ctx = Context()
    shared: dict[Any, Tensor] = {}
    for t in range(3):
        x: Any = mean[:, t]
        if isinstance(whole, Value):
            diag = None if whole.diag is None else whole.diag[:, t]
            x = Value(mean[:, t], diag, {name: block[:, :, t] for name, block in whole.blocks.items()})
        use = linear(ctx, x, weight)
        weight = weight.read(use.readings)
        for noise in use.noises:
            own = columns_of(noise, use.mean.shape)
            columns = torch.zeros(len(own), BATCH, 3 * M, dtype=F64)
            columns[..., t * M : (t + 1) * M] = own
            key = object() if noise.key is None else noise.key
            shared[key] = shared.get(key, 0) + columns
    got = sum(torch.einsum("kbi,kbj->bij", columns, columns) for columns in shared.values())
    for row in range(BATCH):
        known = np.zeros((M, N))  # without the part that x itself brings along
        expected = reference.linear(mean[row].numpy(), given[row], known, None, drawn.covariance)[1]
        close(got[row], expected, f"noise of row {row}")


@pytest.mark.parametrize("covers", ["weight", "bias", "both"])
def test_linear_with_latents_and_a_certain_input_is_exact(covers):
    """W = W̄ + Σ_k ε_k P_k and b = b̄ + Σ_k ε_k p_k: y − ȳ = Σ_k ε_k (P_k x + p_k)."""
    x, W, b = randn(BATCH, N), randn(M, N), randn(M)
    P, p = 0.5 * randn(2, M, N), 0.5 * randn(2, M)
    own = posterior("diagonal", M, N)
    weight = Weight("weight", W, own.gaussian, latents=P if covers != "bias" else None)
    bias = Weight("bias", b, latents=p) if covers != "weight" else b
    surrogate = linear(Context(), x, weight, bias)
    got = covariance(surrogate, np.zeros((BATCH, N, N)))
    for row in range(BATCH):
        _, expected = reference.linear(x[row].numpy(), np.zeros((N, N)), W.numpy(), b.numpy(), own.covariance)
        for k in range(2):
            moved = np.zeros(M)
            if covers != "bias":
                moved += P[k].numpy() @ x[row].numpy()
            if covers != "weight":
                moved += p[k].numpy()
            expected = expected + np.outer(moved, moved)
        close(got[row], expected, f"covariance of row {row}")
        # One key, one noise: what looks at variances alone sees the right ones too.
        close(sum(n.diag()[row] for n in surrogate.noises), np.diag(expected).copy(), f"variances of row {row}")


@pytest.mark.parametrize("method", ["full", "dplr", "adjoint"])
def test_latents_move_all_layers_together(method):
    """Two layers: columns W₂(P₁x + p₁) + P₂μ₁; the second order in ε is a diagonal at the second layer."""
    model = nn.Sequential(nn.Linear(N, 5), nn.Linear(5, M)).double()
    x = randn(BATCH, N)
    latents = {
        "0.weight": 0.3 * randn(2, 5, N),
        "0.bias": 0.3 * randn(2, 5),
        "1.weight": 0.3 * randn(2, M, 5),
    }
    predict = favour.compile(model, x, method=method, rank=8, posterior=Posterior({}, latents=latents))
    got = predict(x)
    W2, hidden = model[1].weight.detach(), model[0](x).detach()
    first = torch.einsum("bn,kmn->kbm", x, latents["0.weight"]) + latents["0.bias"].unsqueeze(1)
    second = first @ W2.T + torch.einsum("bn,kmn->kbm", hidden, latents["1.weight"])
    rest = first.square().sum(0) @ latents["1.weight"].square().sum(0).T
    close(got.mean, model(x).detach(), "mean")
    expected = torch.einsum("kbi,kbj->bij", second, second) + rest.diag_embed()
    close(got.covariance_matrix.detach(), expected, "covariance")


@given(st.integers(0, 2), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.sampled_from(KINDS))
def test_linear_of_degenerate_shapes(batch, m, n, rank, kind):
    """An empty batch, one input, one output, no columns: shapes hold and nothing is negative."""
    torch.manual_seed(0)
    x = Value(randn(batch, n), torch.zeros(batch, n, dtype=F64), {"a": randn(rank, batch, n)})
    surrogate = linear(Context(), x, Weight("weight", randn(m, n), posterior(kind, m, n).gaussian))
    assert surrogate.mean.shape == (batch, m)
    for noise in surrogate.noises:
        assert noise.diag().shape == (batch, m) and bool((noise.diag() >= 0).all())
        assert noise.gram(randn(2, batch, m)).shape == (batch, 2, 2)


def test_matrix_of_low_rank():
    W = randn(5, 4)
    left, values, right = np.linalg.svd(W.numpy(), full_matrices=False)
    G = Matrix(kept(Context(), W))
    for q in (1, 2, 3):
        H = G.low_rank(q)
        expected = torch.from_numpy((left[:, :q] * values[:q]) @ right[:q])
        close(H.apply(torch.eye(4, dtype=F64)), expected.T, f"rank {q}")
        close(H.transpose(torch.eye(5, dtype=F64)), expected, f"rank {q}, transposed")
        v = torch.rand(2, 4, dtype=F64)
        close(H.square(v), v @ W.square().T, "marginals take the weight itself")
    assert G.low_rank(4) is G
