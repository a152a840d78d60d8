"""Convolutional networks for tests against Monte Carlo, trained on 8 × 8 digits in a few seconds."""

from __future__ import annotations

from functools import cache

import torch
from networks import digits
from torch import Tensor, nn

import favour
from favour.nn import BayesConv2d, BayesLinear


def lenet(conv_drop: nn.Module, head_drop: float, pool: nn.Module, pooled_drop: nn.Module | None = None) -> nn.Module:
    """Two convolutions, two linear layers; `conv_drop` before each pooling, `pooled_drop` behind it."""
    behind = nn.Identity() if pooled_drop is None else pooled_drop
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        conv_drop,
        pool,
        behind,
        nn.Conv2d(8, 16, 3, padding=1),
        nn.ReLU(),
        conv_drop,
        pool,
        behind,
        nn.Flatten(),
        nn.Dropout(head_drop),
        nn.Linear(64, 32),
        nn.ReLU(),
        nn.Dropout(head_drop),
        nn.Linear(32, 10),
    )


class Residual(nn.Module):
    """A residual CNN with batch norm and dropout behind every convolution, averaged at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.convs = nn.ModuleList(nn.Conv2d(12, 12, 3, padding=1, bias=False) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(12) for _ in range(4))
        self.down = nn.Conv2d(12, 12, 1, stride=2)
        self.drop, self.pool, self.head = nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Linear(12, 10)

    def block(self, x: Tensor, i: int) -> Tensor:
        h = self.drop(torch.relu(self.norms[i](self.convs[i](x))))
        return torch.relu(x + self.drop(self.norms[i + 1](self.convs[i + 1](h))))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.relu(self.norm(self.first(x))))
        x = self.down(self.block(x, 0))
        return self.head(self.pool(self.block(x, 2)).flatten(1))


def bayes() -> nn.Module:
    def conv(n: int, m: int) -> nn.Module:
        return BayesConv2d(n, m, 3, padding=1, initial_std=0.05)

    return nn.Sequential(
        conv(1, 8),
        nn.ReLU(),
        nn.AvgPool2d(2),
        conv(8, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        BayesLinear(64, 10, initial_std=0.05),
    )


NETWORKS = {
    "dropout in the top layers": lambda: lenet(nn.Identity(), 0.2, nn.MaxPool2d(2)),
    "channel dropout everywhere": lambda: lenet(nn.Identity(), 0.1, nn.MaxPool2d(2), nn.Dropout2d(0.1)),
    "channel dropout before max pooling": lambda: lenet(nn.Dropout2d(0.1), 0.1, nn.MaxPool2d(2)),
    "dropout before max pooling": lambda: lenet(nn.Dropout(0.1), 0.1, nn.MaxPool2d(2)),
    "dropout before and behind max pooling": lambda: lenet(nn.Dropout(0.1), 0.1, nn.MaxPool2d(2), nn.Dropout(0.1)),
    "residual": Residual,
    "Gaussian kernels": bayes,
}


def images() -> tuple[Tensor, Tensor]:
    """Training and test images, (n, 1, 8, 8)."""
    train, _, test, _ = digits()
    return train.reshape(-1, 1, 8, 8), test.reshape(-1, 1, 8, 8)


@cache
@torch.enable_grad()  # whoever asks first
def trained(name: str, epochs: int = 15) -> nn.Module:
    """A network of `NETWORKS`, trained, in float64 and eval mode."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    x, labels = images()[0], digits()[1]
    optimiser = torch.optim.Adam(model.parameters(), 4e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval().double()


def compiles_whole(model: nn.Module, x: Tensor) -> None:
    """The predictor is one graph to the compiler and gives the same moments."""
    predict = favour.compile(model, x, method="adjoint")

    def moments_of(x: Tensor) -> tuple[Tensor, Tensor]:
        belief = predict(x)
        return belief.mean, belief.covariance_matrix

    with torch.no_grad():
        expected = moments_of(x)
        got = torch.compile(moments_of, fullgraph=True, backend="aot_eager")(x)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
