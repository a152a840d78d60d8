"""What a value carries beside its variances, through chains of operations: whole networks against sampling.

The draws are the model's own, in training mode with its norms in evaluation: nothing of favour takes part. With n of
them the mean is off by 1/√n standard deviations, and an entry of a C × C covariance by at most √(2/n) of its variances.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import favour

DRAWS = 6000
ROWS = 3


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((2, 3))


def norm(channels: int, images: bool = True) -> nn.Module:
    """A batch norm that has seen data."""
    layer = nn.BatchNorm2d(channels) if images else nn.BatchNorm1d(channels)
    with torch.no_grad():
        layer.running_mean.normal_(0, 0.3)
        layer.running_var.uniform_(0.2, 1.5)
        layer.weight.uniform_(0.5, 1.5)
        layer.bias.normal_(0, 0.3)
    return layer


def pooled(p: float, *between: nn.Module) -> list[nn.Module]:
    """A convolution, channel dropout, what is between, and maxima."""
    tail = [nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 16, 3)]
    return [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Dropout2d(p), *between, *tail]


def averaged(drop: nn.Module) -> list[nn.Module]:
    """A convolution, dropout, a norm, a kink and an average."""
    return [nn.Conv2d(3, 16, 3), drop, norm(16), nn.ReLU(), Mean(), nn.Linear(16, 3)]


CHAINS = {
    "max": lambda: pooled(0.3),
    "norm, max": lambda: pooled(0.3, norm(16)),
    "twice, max": lambda: pooled(0.3, Double()),
    "relu, norm, max": lambda: pooled(0.3, nn.ReLU(), norm(16)),
    "norm, leaky relu, twice, max": lambda: pooled(0.2, norm(16), nn.LeakyReLU(0.2), Double()),
    "elements, norm, relu, average": lambda: averaged(nn.Dropout(0.1)),
    "channels, norm, relu, average": lambda: averaged(nn.Dropout2d(0.1)),
    "vector, norm, relu": lambda: [
        nn.Flatten(), nn.Linear(300, 40), nn.Dropout(0.1), norm(40, images=False), nn.ReLU(), nn.Linear(40, 3)
    ],
}  # fmt: skip


def draws(model: nn.Module, x: Tensor) -> Tensor:
    """(n, batch, C), each with masks of its own."""
    model.eval()
    for module in model.modules():
        if "Dropout" in type(module).__name__:
            module.train()
    with torch.no_grad():
        y = torch.cat([model(x.repeat(200, 1, 1, 1)).unflatten(0, (200, len(x))) for _ in range(DRAWS // 200)])
    model.eval()
    return y


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_chain_against_sampling(name: str, seed: int) -> None:
    torch.manual_seed(seed)
    model, x = nn.Sequential(*CHAINS[name]()).eval(), torch.randn(ROWS, 3, 10, 10)
    belief = favour.compile(model, x, method="adjoint", secant=True)(x)
    y = draws(model, x).double()
    mean, deviation = y.mean(0), y.std(0)
    sampled = torch.einsum("nbi,nbj->bij", y - mean, y - mean) / (DRAWS - 1)
    assert ((belief.mean - mean) / deviation).abs().max() <= 0.1 + 4 / DRAWS**0.5
    noise = 4 * (2 / DRAWS) ** 0.5 * torch.einsum("bi,bj->bij", deviation, deviation).flatten(1).norm(dim=1)
    gap = (belief.covariance_matrix - sampled).flatten(1).norm(dim=1)
    assert (gap <= 0.1 * sampled.flatten(1).norm(dim=1) + noise).all()
