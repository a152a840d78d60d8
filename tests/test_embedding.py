"""Embeddings with uncertain tables, added parameters, and indexing, against dense covariances and sampling."""

from __future__ import annotations

import pytest
import torch
from calls import close, covariance
from networks import moments, relative_error, sampling_error
from torch import nn

import favour
from favour.errors import UnsupportedOperation
from favour.posterior import Diagonal, Rows
from favour.rules import RULES
from favour.rules.embedding import added_noises
from favour.value import Context, Weight

F64 = torch.float64
aten = torch.ops.aten
CTX = Context(module="layer", place="layer (model.py:1)")


def table(rows=6, width=3, **more):
    torch.manual_seed(0)
    variance = torch.rand(rows, width, dtype=F64)
    return Weight("table", torch.randn(rows, width, dtype=F64), Diagonal(variance), **more), variance


@pytest.mark.parametrize("tokens", [[[1, 4, 1, 1], [0, 5, 2, 5]], [[[3, 3], [0, 3]], [[1, 2], [2, 1]]], [[2], [2]]])
def test_embedding_repeats_the_row_it_drew(tokens):
    weight, variance = table()
    tokens = torch.tensor(tokens)
    surrogate = RULES[aten.embedding.default].function(CTX, weight, tokens)
    close(surrogate.mean, weight.mean[tokens])
    (noise,) = surrogate.noises
    flat = tokens.reshape(2, -1)
    T = flat.shape[1]
    expected = torch.zeros(2, T, 3, T, 3, dtype=F64)
    for b in range(2):
        for s in range(T):
            for t in range(T):
                if flat[b, s] == flat[b, t]:
                    expected[b, s, range(3), t, range(3)] = variance[flat[b, s]]
    close(covariance(noise, surrogate.mean.shape), expected.reshape(2, 3 * T, 3 * T))
    close(noise.diag(), variance[tokens])
    columns = noise.columns().reshape(-1, 2, 3 * T)
    close(torch.einsum("kbi,kbj->bij", columns, columns), expected.reshape(2, 3 * T, 3 * T))


@pytest.mark.parametrize("shape", [(4, 3), (1, 4, 3), (3,), (4, 1), (1, 1, 3)])
def test_added_parameter_is_one_draw_for_all_places(shape):
    torch.manual_seed(0)
    variance = torch.rand(shape, dtype=F64)
    out = torch.Size([2, 4, 3])
    (noise,) = added_noises(CTX, Weight("p", torch.zeros(shape, dtype=F64), Diagonal(variance)), out, -2.0)
    basis = torch.eye(variance.numel(), dtype=F64).reshape(-1, *shape)
    B = torch.stack([(-2 * variance.sqrt() * z).expand(out)[0].reshape(-1) for z in basis], 1)
    close(covariance(noise, out), (B @ B.T).expand(2, 12, 12))
    close(noise.diag(), (4 * variance).expand(out))


def test_a_table_read_twice_or_correlated_is_refused():
    weight, _ = table(uses=2)
    with pytest.raises(UnsupportedOperation, match=r"`table`.*2 operations.*Untie"):
        RULES[aten.embedding.default].function(CTX, weight, torch.tensor([[1]]))
    rows = Weight("table", weight.mean, Rows(torch.ones(6, 3), torch.ones(1, 6, 3)))
    with pytest.raises(UnsupportedOperation, match="mean-field"):
        RULES[aten.embedding.default].function(CTX, rows, torch.tensor([[1]]))


class Tokens(nn.Module):
    """Words, positions in one of three styles, and a linear head: everything is linear in the draws."""

    def __init__(self, positions="table", bag=False):
        super().__init__()
        self.words = nn.EmbeddingBag(8, 4, mode="mean") if bag else nn.Embedding(8, 4)
        self.table = nn.Embedding(5, 4)
        self.added = nn.Parameter(torch.randn(5, 4))
        self.positions, self.head = positions, nn.Linear(4 if bag else 20, 3)

    def forward(self, tokens):
        x = self.words(tokens)
        if self.positions == "table":
            x = x + self.table(torch.arange(5))
        elif self.positions == "row":
            x = x + self.table(torch.arange(5).unsqueeze(0))
        elif self.positions == "parameter":
            x = x + self.added
        return self.head(x.flatten(1))


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"positions": "table"}, ["words.weight", "table.weight"]),
        ({"positions": "row"}, ["table.weight"]),
        ({"positions": "parameter"}, ["added", "words.weight"]),
        ({"positions": "none", "bag": True}, ["words.weight"]),
    ],
    ids=lambda value: str(value),
)
def test_uncertain_tables_against_sampling(options, names):
    torch.manual_seed(0)
    model = Tokens(**options).double()
    tokens = torch.randint(0, 8, (3, 5))
    posterior = {n: 0.1 + torch.rand_like(p) for n, p in model.named_parameters() if n in names}
    n = 20_000
    for method, rank in (("adjoint", None), ("dplr", 20), ("full", None)):
        predict = favour.compile(model, tokens, posterior=posterior, method=method, rank=rank)
        belief = predict(tokens)
        _, matrix = moments(predict.sample(tokens, n=n, generator=torch.Generator().manual_seed(0)))
        close(belief.mean, model(tokens))
        assert relative_error(belief.covariance_matrix, matrix) < 3 * sampling_error(matrix, n), method


def test_indexing_in_a_network():
    """The last token of each sequence, picked the way language models do it."""

    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.mix = nn.Dropout(0.3), nn.Linear(4, 4)

        def forward(self, x, lengths):
            y = self.mix(self.drop(x))
            last = y[torch.arange(y.shape[0]), lengths - 1]
            return last + y.gather(1, (lengths - 1).reshape(-1, 1, 1).expand(-1, 1, 4)).squeeze(1)

    torch.manual_seed(0)
    x, lengths = torch.randn(3, 5, 4, dtype=F64), torch.tensor([2, 5, 1])
    model = Last().double()
    predict = favour.compile(model, (x, lengths), method="adjoint")
    W = model.mix.weight.detach()
    rows = x[torch.arange(3), lengths - 1]
    close(predict(x, lengths).covariance_matrix, 4 * W @ torch.diag_embed(rows.square() * 3 / 7) @ W.T)
