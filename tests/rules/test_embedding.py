"""Embeddings with uncertain tables, added parameters, and indexing, against dense covariances and sampling."""

from __future__ import annotations

import pytest
import torch
from calls import close, covariance
from networks import moments, relative_error, sampling_error
from torch import nn

import favour
from favour.posterior import Diagonal, Full, Kronecker, Rows
from favour.rules import RULES
from favour.rules.embedding import added_noises
from favour.surrogate.value import Context, Weight

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
    (noise,) = added_noises(
        CTX, Weight("p", torch.zeros(shape, dtype=F64), Diagonal(variance)), torch.zeros(out, dtype=F64), -2.0
    )
    basis = torch.eye(variance.numel(), dtype=F64).reshape(-1, *shape)
    B = torch.stack([(-2 * variance.sqrt() * z).expand(out)[0].reshape(-1) for z in basis], 1)
    close(covariance(noise, out), (B @ B.T).expand(2, 12, 12))
    close(noise.diag(), (4 * variance).expand(out))


@pytest.mark.parametrize("kind", ["diagonal", "mixed", "rows", "kronecker", "full"])
def test_lookups_in_one_table_share_its_rows(kind):
    """Three lookups: the dense covariance of the rows they read, whatever the posterior of the table."""
    torch.manual_seed(0)
    mean, root = torch.randn(4, 3, dtype=F64), torch.randn(12, 12, dtype=F64)
    A, B = root[:3, :3], root[:4, :4]
    gaussian = {
        "diagonal": Diagonal(torch.rand(4, 3, dtype=F64)),
        "mixed": Diagonal(torch.rand(4, 3, dtype=F64)),
        "rows": Rows(torch.rand(4, 3, dtype=F64), torch.randn(2, 4, 3, dtype=F64)),
        "kronecker": Kronecker(A @ A.T, B @ B.T),
        "full": Full(root @ root.T, (4, 3)),
    }[kind]
    weight = Weight("table", mean, gaussian, uses=3, mixed=kind == "mixed")
    lookups = [torch.tensor(t) for t in ([[1, 2, 1], [0, 0, 3]], [[2], [3]], [[[0, 1], [2, 3]], [[3, 3], [0, 1]]])]
    ctx = Context(place="layer")
    keyed: dict = {}
    sizes = [3 * i[0].numel() for i in lookups]
    for n, indices in enumerate(lookups):
        made = RULES[aten.embedding.default].function(ctx, weight, indices)
        weight = weight.read(made.readings)
        close(made.mean, mean[indices])
        for noise in made.noises:
            columns = torch.zeros(noise.columns().shape[0], 2, sum(sizes), dtype=F64)
            own = noise.columns().flatten(2)
            columns[..., sum(sizes[:n]) : sum(sizes[: n + 1])] = own
            close(noise.diag().flatten(1), own.square().sum(0), "diag")
            assert noise.key is not None
            keyed[noise.key] = keyed.get(noise.key, 0) + columns
    got = sum(torch.einsum("kbi,kbj->bij", c, c) for c in keyed.values())
    flat = torch.cat([i.reshape(2, -1) for i in lookups], 1)
    for row in range(2):
        entries = (3 * flat[row][:, None] + torch.arange(3)).flatten()
        close(got[row], gaussian.covariance()[entries][:, entries], f"row {row}")


@pytest.mark.parametrize("kind", ["diagonal", "rows", "full"])
def test_a_table_that_is_also_added_shares_its_draws(kind):
    """x[i] + table[j] by a lookup and an addition: Cov of the two from the dense covariance of the table."""
    torch.manual_seed(0)
    root = torch.randn(12, 12, dtype=F64)
    gaussian = {
        "diagonal": Diagonal(torch.rand(4, 3, dtype=F64)),
        "rows": Rows(torch.rand(4, 3, dtype=F64), torch.randn(2, 4, 3, dtype=F64)),
        "full": Full(root @ root.T, (4, 3)),
    }[kind]
    weight = Weight("table", torch.zeros(4, 3, dtype=F64), gaussian, uses=2, mixed=True)
    (looked,) = RULES[aten.embedding.default].function(CTX, weight, torch.tensor([[1, 3], [0, 0]])).noises
    (added,) = added_noises(CTX, weight, torch.zeros(2, 4, 3, dtype=F64), -2.0)
    assert looked.key == added.key is not None
    got = torch.einsum("kbi,kbj->bij", looked.columns().flatten(2), added.columns().flatten(2))
    dense = gaussian.covariance().reshape(4, 3, 12)
    close(got, -2 * dense[torch.tensor([[1, 3], [0, 0]])].flatten(1, 2))


class Language(nn.Module):
    """A table of words that is also the output layer, in one of three spellings."""

    def __init__(self, style="module", last=True):
        super().__init__()
        self.words, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        self.head.weight = self.words.weight
        self.style, self.last = style, last

    def forward(self, tokens):
        h = self.mix(self.words(tokens))
        h = h[:, -1] if self.last else h
        if self.style == "module":
            return self.head(h).flatten(1)
        if self.style == "functional":
            return nn.functional.linear(h, self.words.weight).flatten(1)
        return (h @ self.words.weight.T).flatten(1)


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("style", ["module", "functional", "product"])
def test_output_layer_tied_with_the_embedding(style, last):
    """To first order the covariance is J Σ Jᵀ, J the derivative through both uses of the table."""
    torch.manual_seed(0)
    model = Language(style, last).double()
    tokens = torch.randint(0, 7, (3, 4))
    tokens[0] = 2
    W = model.words.weight.detach()
    for gaussian in (
        Diagonal(1e-8 * torch.rand_like(W)),
        Kronecker(torch.eye(4, dtype=F64), 1e-8 * (torch.eye(7, dtype=F64) + 1)),
    ):
        if style == "product" and not isinstance(gaussian, Diagonal):
            continue
        for method, rank in (("adjoint", None), ("dplr", 30), ("full", None)):
            with torch.no_grad():
                predict = favour.compile(model, tokens, posterior={"words.weight": gaussian}, method=method, rank=rank)
                got = predict(tokens)
            for row in range(3):

                def run(table, row=row):
                    h = (table[tokens[row]] @ model.mix.weight.T + model.mix.bias) @ table.T
                    return (h[-1] if last else h).flatten()

                J = torch.autograd.functional.jacobian(run, W).reshape(-1, W.numel()).detach()
                expected = J @ gaussian.covariance() @ J.T
                assert (got.covariance_matrix[row] - expected).norm() < 1e-6 * expected.norm(), (method, row)


def test_tied_output_layer_against_sampling():
    """At a spread of a tenth of the weights; untied draws would be off by a third."""
    torch.manual_seed(0)
    model = Language().double()
    tokens = torch.randint(0, 7, (3, 4))
    variance = (0.1 * model.words.weight.detach()).square()
    predict = favour.compile(model, tokens, posterior={"words.weight": variance}, method="adjoint")
    n = 20_000
    mean, matrix = moments(predict.sample(tokens, n=n, generator=torch.Generator().manual_seed(0)))
    belief = predict(tokens)
    # Products of two draws are left out of the covariance: of relative size (spread/weight)², 0.01, twice.
    assert relative_error(belief.covariance_matrix, matrix) < 3 * sampling_error(matrix, n) + 0.02
    spread = matrix.diagonal(dim1=1, dim2=2).sqrt()
    assert ((belief.mean - mean) / spread).abs().mean() < 0.15


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
