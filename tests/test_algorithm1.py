"""Algorithm 1 against planted covariances and against alternating exact eigendecompositions."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from networks import digits, trained
from torch import Tensor

import favour
from favour.methods.algorithm1 import decompose, gram_schmidt

F64 = torch.float64


def products(matrix: Tensor):
    return lambda v: torch.einsum("bij,rbj->rbi", matrix, v)


def dense(diag: Tensor, factor: Tensor) -> Tensor:
    return torch.diag_embed(diag) + torch.einsum("rbi,rbj->bij", factor, factor)


def planted(m: int, r: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    diag = torch.rand(m, generator=g, dtype=F64) + 0.5
    q = torch.linalg.qr(torch.randn(m, r, generator=g, dtype=F64)).Q
    spectrum = torch.tensor([m * 2.0**-k for k in range(r)], dtype=F64)
    return torch.diag(diag) + (q * spectrum) @ q.T


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_decompose_recovers_planted(r: int) -> None:
    for seed in range(5):
        M = planted(200, r, seed)[None]
        start = torch.randn(r, 1, 200, generator=torch.Generator().manual_seed(100 + seed), dtype=F64)
        error = (dense(*decompose(products(M), M.diagonal(dim1=1, dim2=2), start, 30)) - M).norm() / M.norm()
        assert error <= (1e-4 if r <= 4 else 1e-3)


def alternating(M: Tensor, r: int, iterations: int = 40) -> Tensor:
    """Error norm √ρ of alternating exact half-steps."""
    diag = torch.zeros_like(M[:, 0])
    for _ in range(iterations):
        values, vectors = torch.linalg.eigh(M - torch.diag_embed(diag))
        factor = vectors[:, :, -r:] * values[:, None, -r:].clamp_min(0).sqrt()
        diag = (M.diagonal(dim1=1, dim2=2) - factor.square().sum(-1)).clamp_min(0)
    return (M - torch.diag_embed(diag) - factor @ factor.mT).norm(dim=(1, 2))


def excess(rank: int, K: int, start: str, seeds: int = 1) -> float:
    """√ρ of the second linear layer's covariance in a trained network, over that of alternating exact half-steps."""
    x = digits()[2][:12].double()
    model = trained("dropout")
    total = 0.0
    with torch.no_grad():
        M = favour.compile(model, x[:2], method="full", at="second")(x).covariance_matrix
        best = alternating(M, rank)
        for seed in range(seeds):
            settings = {"rank": rank, "iterations": K, "start": start, "seed": seed}
            predict = favour.compile(model, x[:2], method="dplr", at="second", **settings)
            total += ((predict(x).covariance_matrix - M).norm(dim=(1, 2)) / best).mean().item()
    return total / seeds


@pytest.mark.parametrize("r", [1, 2])
def test_random_start_is_there_by_four(r: int) -> None:
    # At r = 4 the mean over seeds is 1.15 itself (ten seeds: 1.151 here, 1.149 and 1.146 in results/algorithm1.json).
    assert excess(r, 4, "random", seeds=8) <= 1.15


@pytest.mark.parametrize("r", [1, 2, 4])
def test_warm_start_is_there_by_two(r: int) -> None:
    warm = excess(r, 2, "warm")
    assert warm <= 1.15
    assert excess(r, 4, "warm") <= 1.15
    assert warm < excess(r, 2, "random", seeds=4)


def test_random_start_follows_the_paper_line_by_line() -> None:
    """One iteration written out with explicit matrices, in the paper's notation."""
    m, r = 7, 2
    g = torch.Generator().manual_seed(0)
    A = torch.randn(m, m, generator=g, dtype=F64)
    M = A @ A.T
    V = torch.randn(m, r, generator=g, dtype=F64)
    start = V.T[:, None].clone()
    for _ in range(3):
        S = torch.diag(V.norm(dim=0))
        L = torch.diag((M - V @ S.inverse() @ V.T).diagonal().clamp_min(0))
        V = (M - L) @ (V @ S.inverse())
        for k in range(r):
            for j in range(k):
                V[:, k] -= V[:, j] * (V[:, j] @ V[:, k]) / (V[:, j] @ V[:, j])
    S = torch.diag(V.norm(dim=0))
    L = torch.diag((M - V @ S.inverse() @ V.T).diagonal().clamp_min(0))
    U = V @ S.inverse().sqrt()
    diag, factor = decompose(products(M[None]), M.diagonal()[None], start, 3)
    torch.testing.assert_close(torch.diag(diag[0]), L)
    torch.testing.assert_close(factor[:, 0].T, U)


@given(n=st.integers(1, 6), r=st.integers(1, 8), K=st.integers(0, 3), scale=st.sampled_from([1e-12, 1.0, 1e12]))
@settings(max_examples=60, deadline=None)
def test_decompose_degenerate_shapes_stay_psd(n: int, r: int, K: int, scale: float) -> None:
    g = torch.Generator().manual_seed(n * 100 + r)
    A = torch.randn(3, n, n, generator=g, dtype=F64)
    A[1] = 0  # no covariance at all
    A[2, :, 1:] = 0  # rank one
    M = A @ A.mT * scale
    start = torch.randn(r, 1, n, generator=g, dtype=F64)
    diag, factor = decompose(products(M), M.diagonal(dim1=1, dim2=2), start, K)
    assert bool((diag >= 0).all()) and bool(factor.isfinite().all())
    assert factor.shape == (r, 3, n)
    result = dense(diag, factor)
    assert torch.linalg.eigvalsh(result).min() >= -1e-9 * result.abs().max()


def test_gram_schmidt_keeps_first_column_and_is_orthogonal() -> None:
    V = torch.randn(4, 3, 9, dtype=F64)
    W = gram_schmidt(V)
    torch.testing.assert_close(W[0], V[0])
    gram = torch.einsum("rbn,sbn->brs", W, W)
    off = gram - torch.diag_embed(gram.diagonal(dim1=1, dim2=2))
    assert off.abs().max() < 1e-12


def test_a_column_that_others_span_is_zero():
    """Rounding is no direction: what it would point at depends on the order in which sums were taken."""
    V = torch.randn(3, 2, 20, generator=torch.Generator().manual_seed(0), dtype=F64)
    V[2] = 0.3 * V[0] - 2 * V[1]
    V[:, 1] *= torch.tensor([1.0, 1e-14, 1.0], dtype=F64)[:, None]
    made = gram_schmidt(V)
    assert (made[2, 0] == 0).all() and (made[1, 1] == 0).all()
    assert (made[:2, 0].norm(dim=-1) > 0).all()


@pytest.mark.parametrize("rank", [3, 6])
def test_a_covariance_of_lower_rank_gives_a_batch_of_one_what_its_row_has(rank: int) -> None:
    g = torch.Generator().manual_seed(1)
    columns = torch.randn(2, 5, 30, generator=g, dtype=F64)
    M = torch.diag_embed(1e-3 + torch.zeros(5, 30, dtype=F64)) + torch.einsum("kbi,kbj->bij", columns, columns)
    mix = torch.randn(rank, 2, generator=g, dtype=F64)
    start = torch.einsum("rk,kbn->rbn", mix, columns)  # spans two directions
    whole = dense(*decompose(products(M), M.diagonal(dim1=1, dim2=2), start, 3))
    for i in range(5):
        part = M[i : i + 1]
        alone = dense(*decompose(products(part), part.diagonal(dim1=1, dim2=2), start[:, i : i + 1], 3))
        torch.testing.assert_close(alone[0], whole[i], rtol=0, atol=1e-9)


def test_what_the_start_does_not_see_is_found() -> None:
    """A start of one direction, for a covariance of rank three."""
    M = planted(60, 3, 0)[None]
    start = torch.ones(3, 1, 60, dtype=F64)
    error = (dense(*decompose(products(M), M.diagonal(dim1=1, dim2=2), start, 30)) - M).norm() / M.norm()
    assert error < 1e-3
