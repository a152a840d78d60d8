"""Recommenders, trained briefly on planted data, against sampling: a DLRM-like model and two towers."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from networks import moments, relative_error, sampling_error
from torch import Tensor, nn

import favour

SAMPLES = 10_000
ROWS, WIDTH, BAG = 30, 8, 4
TASKS = 3  # click, like and buy, say: one logit each


class Dlrm(nn.Module):
    """Dense features and tables of equal width, all pairs of dot products, a network on top (Naumov et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(6, 24), nn.ReLU(), nn.Dropout(0.1), nn.Linear(24, WIDTH), nn.ReLU())
        self.user, self.item = nn.Embedding(ROWS, WIDTH), nn.Embedding(ROWS, WIDTH)
        self.history = nn.EmbeddingBag(ROWS, WIDTH, mode="mean")
        pairs = torch.tril_indices(4, 4, -1)
        self.register_buffer("rows", pairs[0])
        self.register_buffer("columns", pairs[1])
        self.top = nn.Sequential(
            nn.Linear(WIDTH + 6, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, TASKS)
        )
        for table in (self.user, self.item, self.history):
            nn.init.normal_(table.weight, std=0.5)

    def forward(self, dense: Tensor, user: Tensor, item: Tensor, history: Tensor) -> Tensor:
        x = self.bottom(dense)
        parts = torch.stack([x, self.user(user), self.item(item), self.history(history)], 1)  # (batch, 4, d)
        products = torch.bmm(parts, parts.transpose(1, 2))
        return self.top(torch.cat([x, products[:, self.rows, self.columns]], 1))


class SharedDlrm(Dlrm):
    """The item and the user's history are looked up in one table."""

    def __init__(self) -> None:
        super().__init__()
        self.history.weight = self.item.weight


class Towers(nn.Module):
    """A user and an item tower; the score is a dot product or a cosine. The history is in the item's table."""

    def __init__(self, cosine: bool = False) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(ROWS, 16), nn.Embedding(ROWS, 16)
        self.left, self.right = (
            nn.Sequential(nn.Linear(n, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 12)) for n in (32, 16)
        )
        self.cosine = cosine

    def forward(self, user: Tensor, history: Tensor, items: Tensor) -> Tensor:
        u = self.left(torch.cat([self.users(user), self.items(history).mean(1)], 1))
        v = self.right(self.items(items))  # (batch, candidates, d)
        if self.cosine:
            return 4 * F.cosine_similarity(u.unsqueeze(1), v, dim=-1)
        return torch.einsum("bd,bnd->bn", u, v) / 12**0.5


def planted(n: int, seed: int) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Inputs of the DLRM, its labels, and the truth's affinity of users for items: a planted factor model."""
    g = torch.Generator().manual_seed(0)
    users, items, taste = (torch.randn(ROWS, 4, generator=g) for _ in range(3))
    weights = torch.randn(6, TASKS, generator=g)
    mix = torch.randn(4, TASKS, generator=g)
    g = torch.Generator().manual_seed(seed)
    dense = torch.randn(n, 6, generator=g)
    user, item = (torch.randint(0, ROWS, (n,), generator=g) for _ in range(2))
    history = torch.randint(0, ROWS, (n, BAG), generator=g)
    history[: n // 4, 1] = history[: n // 4, 0]  # repeated in a bag
    history[: n // 4, 2] = item[: n // 4]
    affinity = (users[user] * items[item]) @ mix + (taste[history].mean(1) * items[item]) @ mix + dense @ weights
    labels = torch.bernoulli(torch.sigmoid(affinity), generator=g)
    return (dense, user, item, history), labels, users @ items.T


NETWORKS = {
    "DLRM": Dlrm,
    "DLRM, shared table": SharedDlrm,
    "towers, dot product": Towers,
    "towers, cosine": lambda: Towers(cosine=True),
}
# Parameters with a mean-field posterior beside the dropout: tables and, in the DLRM, the network on top.
UNCERTAIN = (
    "user.weight",
    "item.weight",
    "history.weight",
    "users.weight",
    "items.weight",
    "top.0.weight",
    "top.3.weight",
)


def inputs(name: str, n: int, seed: int) -> tuple[Tensor, ...]:
    (dense, user, item, history), _, _ = planted(n, seed)
    if "DLRM" in name:
        return dense, user, item, history
    g = torch.Generator().manual_seed(seed)
    candidates = torch.cat([item[:, None], torch.randint(0, ROWS, (n, 3), generator=g)], 1)
    return user, history, candidates


@cache
def trained(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]()
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for step in range(150):
        given = inputs(name, 128, step + 1)
        (_, user, _, _), labels, affinity = planted(128, step + 1)
        optimiser.zero_grad()
        score = model(*given)
        if "DLRM" in name:
            loss = F.binary_cross_entropy_with_logits(score, labels)
        else:  # which of the candidates the user likes best
            loss = F.cross_entropy(score, affinity[user[:, None], given[2]].argmax(1))
        loss.backward()
        optimiser.step()
    return model.eval()


def posterior(model: nn.Module, share: float = 0.2) -> dict[str, Tensor]:
    """Standard deviations of a fifth of the typical weight."""
    return {
        name: (share * p.detach().abs().mean()).square().expand(p.shape).clone()
        for name, p in model.named_parameters()
        if name in UNCERTAIN
    }


def compared(name: str, **settings: object) -> tuple[float, float, Tensor, Tensor]:
    """Error of the covariance and of the mean (standard deviations), the draws and their covariance."""
    model, x = trained(name), inputs(name, 16, 1000)
    with torch.no_grad():
        predict = favour.compile(model, x, posterior=posterior(model), **{"method": "adjoint", **settings})
        belief = predict(*x)
        draws = predict.sample(*x, n=SAMPLES, generator=torch.Generator().manual_seed(1))
    mean, matrix = moments(draws)
    off = ((belief.mean - mean) / draws.std(0)).abs().mean().item()
    return relative_error(belief.covariance_matrix, matrix), off, draws, matrix


# A trained cosine sits near ±1, where it is flat to first order: what remains is curvature, hardly Gaussian.
BOUNDS = {"towers, cosine": 0.3}


@pytest.mark.parametrize("name", NETWORKS)
def test_recommender_against_sampling(name):
    error, off, _, _ = compared(name)
    assert error <= BOUNDS.get(name, 0.15), f"{error:.3f}"
    assert off <= 0.15, f"{off:.3f}"


@pytest.mark.parametrize("name", ["DLRM", "towers, dot product"])
def test_forgetting_correlation_would_fail(name):
    error, _, _, matrix = compared(name, method="diag")
    assert error > 0.15 > 3 * sampling_error(matrix, SAMPLES)


def test_item_and_history_share_the_draw():
    """An item minus the mean of a history: rows that occur in both, or twice in the history, are one draw."""

    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(5, 4)

        def forward(self, item: Tensor, history: Tensor) -> Tensor:
            return self.items(item) - self.items(history).mean(1)

    torch.manual_seed(0)
    model = Same().double()
    variance = torch.rand(5, 4, dtype=torch.float64)
    item = torch.tensor([1, 2, 0])
    history = torch.tensor([[1, 1], [2, 3], [3, 4]])
    for method in ("adjoint", "dplr", "full"):
        belief = favour.compile(model, (item, history), posterior={"items.weight": variance}, method=method)(
            item, history
        )
        v = variance
        expected = torch.stack([0 * v[0], (v[2] + v[3]) / 4, v[0] + (v[3] + v[4]) / 4])
        torch.testing.assert_close(belief.variance, expected, rtol=1e-10, atol=1e-12)


def test_recommender_without_noise_is_the_model():
    for name in NETWORKS:
        model, x = trained(name), inputs(name, 4, 7)
        predict = favour.compile(model, x)
        silent = favour.compile(model, x, dropout=dict.fromkeys(predict.graph.dropout_modules, 0.0))
        torch.testing.assert_close(silent(*x).mean, model(*x), rtol=1e-5, atol=1e-5)
