"""Columns within tokens, against dense covariances of one token after the other."""

from __future__ import annotations

import pytest
import torch
from cases import F64, rand, randn

from favour.rules import RULES
from favour.surrogate import Surrogate, identity, scaling
from favour.surrogate.attending import scores_of
from favour.surrogate.carried import find
from favour.surrogate.matrices import Matrix, passing
from favour.surrogate.siblings import Siblings, meeting
from favour.surrogate.tokens import TokenColumns, attended, leading, shared_variance
from favour.surrogate.value import Value

aten = torch.ops.aten
B, T, D = 2, 3, 6


def tokens(rank=2):
    """A value with columns, that several operations read, and Σ of every token."""
    rest, columns = rand(B, T, D), randn(rank, B, T, D)
    z = Value(randn(B, T, D), rest + columns.square().sum(0), carried=(TokenColumns({"z": columns}),))
    Siblings.origin(z)
    return z, torch.diag_embed(rest) + torch.einsum("kbti,kbtj->btij", columns, columns)


def made(x, *maps):
    """What maps make of a value, without noise."""
    for G in maps:
        mean = G.apply(x.mean.unsqueeze(0)).squeeze(0)
        y = Surrogate(mean, [(x, G)])
        kinds = [kind.after(y) for kind in (TokenColumns, Siblings)]
        x = Value(mean, x.through(G), carried=tuple(kind for kind in kinds if kind is not None))
    return x


def moved(op, x, *args):
    """The map of an operation that moves entries."""
    return RULES[op].function(None, x, *args).maps[0][1]


def test_combinations_hold_no_more_than_there_is_and_the_most_of_it():
    torch.manual_seed(0)
    columns = randn(4, B, T, D)
    columns[0] *= 30
    whole = torch.einsum("kbti,kbtj->btij", columns, columns)
    for rank in (1, 2, 4, 6):
        U = leading(columns, rank)
        kept = torch.einsum("kbti,kbtj->btij", U, U)
        assert torch.linalg.eigvalsh(whole - kept).min() > -1e-8
        best = torch.linalg.eigvalsh(whole)[..., -min(rank, 4) :].sum(-1)
        assert (kept.diagonal(dim1=2, dim2=3).sum(-1) > 0.9 * best).all()
    torch.testing.assert_close(kept, whole)
    assert not leading(torch.zeros_like(columns), 2).any()


def test_variances_behind_maps_are_those_of_each_token():
    torch.manual_seed(0)
    z, S = tokens()
    W, slope = randn(8, D), randn(B, T, 8)
    y = made(z, Matrix(passing(W)), scaling(slope))
    expected = slope.square() * torch.einsum("mi,btij,mj->btm", W, S, W)
    torch.testing.assert_close(y.variance, expected)
    # what a linear layer makes of λ is no more than there is, in its leading directions
    more = [block for name, block in find(y.carried, TokenColumns).blocks.items() if name != "z"]
    assert len(more) == 1
    made_of_rest = torch.diag_embed(z.known(TokenColumns).rest(z.variance))
    there = torch.einsum("btm,mi,btij,nj,btn->bt", slope, W, made_of_rest, W, slope)
    assert (more[0].sum(-1).square().sum(0) < 2 * there).all()


def test_of_one_token_twice_the_covariance_is_exact():
    torch.manual_seed(0)
    z, S = tokens()
    W = randn(D, D)
    x, y = z, made(z, Matrix(passing(W)))
    shared = shared_variance(*meeting(x, y, identity(), identity()), (x, identity()), (y, identity()))
    torch.testing.assert_close(shared, torch.einsum("mi,btim->btm", W, S))


@pytest.mark.parametrize("rank", [0, 2])
def test_scores_vary_as_their_tokens_do(rank):
    """Var(q_i·k_j) to first order, and what the scores of a row share, with one head after the other."""
    torch.manual_seed(0)
    z, S = tokens(max(rank, 1))
    if not rank:
        z = Value(z.mean, z.variance)
        Siblings.origin(z)
        S = torch.diag_embed(z.variance)
    H, e = 2, 5
    Q, K = randn(H * e, D), randn(H * e, D)

    def heads(W):
        x = made(z, Matrix(passing(W)))
        y = made(x, moved(aten.unflatten.int, x, -1, [H, e]))
        return made(y, moved(aten.transpose.int, y, 1, 2))

    q, k = heads(Q), heads(K)
    variance, (scores,) = scores_of(q, made(k, moved(aten.transpose.int, k, -2, -1)))
    for h in range(H):
        Qh, Kh = Q.reshape(H, e, D)[h], K.reshape(H, e, D)[h]
        level = Qh.T @ k.mean[:, h].mean(1).unsqueeze(-1)  # (batch, width, 1)
        for i in range(T):
            shift = (level.mT @ S[:, i] @ level).squeeze(-1)
            for j in range(T):
                along, across = Kh.T @ q.mean[:, h, i].unsqueeze(-1), Qh.T @ k.mean[:, h, j].unsqueeze(-1)
                expected = along.mT @ S[:, j] @ along + across.mT @ S[:, i] @ across
                torch.testing.assert_close(variance[:, h, i, j], expected.flatten())
                column = (across.mT @ S[:, i] @ level).squeeze(-1) / shift.sqrt()
                torch.testing.assert_close(scores.common[:, h, i, j], column.flatten())


def test_weights_move_a_head_along_its_values():
    torch.manual_seed(0)
    H, e = 2, 4
    weights, v = Value(rand(B, H, T, T), rand(B, H, T, T)), Value(randn(B, H, T, e))
    carried = attended(weights, v)
    M = torch.einsum("bhij,bhjd,bhjf->bhidf", weights.variance, v.mean, v.mean)
    u = carried.columns[0]
    left = M - torch.einsum("bhid,bhif->bhidf", u, u)
    assert torch.linalg.eigvalsh(left).min() > -1e-10
    y = Value(weights.mean @ v.mean, M.diagonal(dim1=-2, dim2=-1), carried=(carried,))
    x = made(y, moved(aten.transpose.int, y, 1, 2))
    x = made(x, moved(aten.flatten.using_ints, x, 2))
    W = randn(3, H * e)
    each = torch.einsum("bhif,mhf->bhim", u, W.reshape(3, H, e)).square().sum(1)
    rest = y.variance - u.square()
    rest = torch.einsum("bhif,mhf->bim", rest, W.reshape(3, H, e).square())
    torch.testing.assert_close(x.through(Matrix(passing(W))), each + rest)
    assert x.known(TokenColumns).heads == H and u.dtype == F64
