"""Networks and data for tests against Monte Carlo. Trained on scikit-learn's digits, a few seconds each."""

from __future__ import annotations

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from favour.nn import BayesLinear


@cache
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels."""
    bunch = load_digits()
    images = torch.tensor(bunch.data, dtype=torch.float32) / 16
    labels = torch.tensor(bunch.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:1400], order[1400:]
    return images[train], labels[train], images[test], labels[test]


class TwoHidden(nn.Module):
    """64-100-100-10 with dropout and a hand-written activation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 100), nn.Linear(100, 100), nn.Linear(100, 10)
        self.drop = nn.Dropout(0.2)

    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.first(x)))
        return self.head(self.drop(self.act(self.second(x))))


class HandGelu(TwoHidden):
    def act(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))


class HandAbs(TwoHidden):
    def act(self, x: Tensor) -> Tensor:
        return torch.relu(x) + torch.relu(-x)


class Parallel(nn.Module):
    """One Bayesian layer applied to two tensors side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.head = (
            nn.Linear(64, 100),
            BayesLinear(100, 100, initial_std=0.05),
            nn.Linear(100, 10),
        )
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.head(torch.relu(self.shared(self.drop(h))) + torch.tanh(self.shared(self.drop(0.5 * h))))


class Series(Parallel):
    """One Bayesian layer applied twice in a row."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        h = torch.relu(self.shared(self.drop(h)))
        return self.head(torch.relu(self.shared(self.drop(h))))


def mean_field() -> nn.Module:
    def layer(n: int, m: int) -> nn.Module:
        return BayesLinear(n, m, initial_std=0.05, local_reparametrisation=True)

    return nn.Sequential(layer(64, 100), nn.ReLU(), layer(100, 100), nn.ReLU(), layer(100, 10))


NETWORKS = {
    "dropout": TwoHidden,
    "mean-field": mean_field,
    "hand-written GELU": HandGelu,
    "hand-written |x|": HandAbs,
    "layer used in parallel": Parallel,
    "layer used in series": Series,
}


@cache
@torch.enable_grad()  # whoever asks first
def trained(name: str, epochs: int = 25) -> nn.Module:
    """A network of `NETWORKS`, trained, in float64 and eval mode."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    images, labels, _, _ = digits()
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(images)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval().double()


def moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    """Mean (batch, C) and covariance (batch, C, C) of draws (n, batch, C)."""
    mean = draws.mean(0)
    centred = draws - mean
    return mean, torch.einsum("nbi,nbj->bij", centred, centred) / (len(draws) - 1)


def relative_error(matrix: Tensor, reference: Tensor) -> float:
    """Relative Frobenius error, averaged over the batch."""
    return ((matrix - reference).norm(dim=(1, 2)) / reference.norm(dim=(1, 2))).mean().item()


def sampling_error(covariance: Tensor, n: int) -> float:
    """Expected relative Frobenius error of the covariance of n Gaussian draws, averaged over the batch.

    E‖S − Σ‖² = (tr(Σ)² + ‖Σ‖²)/(n − 1), the second moment of a Wishart matrix.
    """
    trace = covariance.diagonal(dim1=1, dim2=2).sum(1)
    norm = covariance.norm(dim=(1, 2))
    return (((trace**2 + norm**2) / (n - 1)).sqrt() / norm).mean().item()
