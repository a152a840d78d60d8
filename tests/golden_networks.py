"""Ten networks for the golden results: what the library meets most, untrained, seeded, small, in double precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from favour.nn import BayesConv2d, BayesLinear, RowBayesLinear

randn = partial(torch.randn, dtype=torch.float64)


class Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop, self.cell, self.head = nn.Dropout(0.2), nn.LSTM(4, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(self.drop(x))[0].mean(1))


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(7, 5) for _ in range(3))
        self.bottom = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Dropout(0.2))
        self.top = nn.Sequential(nn.Linear(21, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        rows = [table(x[:, 4 + i].long()) for i, table in enumerate(self.tables)]
        parts = torch.stack([self.bottom(x[:, :4]), *rows], 1)
        products = (parts @ parts.mT).flatten(1)
        return self.top(torch.cat([products, parts[:, 0]], 1))


class SmallUNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.1))
        self.inner = nn.Sequential(
            nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.Upsample(scale_factor=2)
        )
        self.up = nn.Conv2d(10, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.up(torch.cat([skip, self.inner(skip)], 1))


def mlp() -> nn.Module:
    layers = [nn.Linear(6, 20), nn.ReLU(), nn.Dropout(0.2), nn.Linear(20, 20), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Linear(20, 4))


def bayes() -> nn.Module:
    layers = [BayesLinear(6, 12, initial_std=0.1), nn.Tanh(), RowBayesLinear(12, 12, initial_std=0.1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(12, 3))


def lenet() -> nn.Module:
    first = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(0.1)]
    second = [nn.Conv2d(4, 6, 3), nn.ReLU(), nn.Dropout(0.1), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(24, 10), nn.ReLU(), nn.Dropout(0.3), nn.Linear(10, 4))


def residual() -> nn.Module:
    def block() -> nn.Module:
        return Residual(nn.Sequential(nn.BatchNorm1d(12), nn.SiLU(), nn.Dropout(0.2), nn.Linear(12, 12)))

    return nn.Sequential(nn.Linear(6, 12), block(), block(), nn.LayerNorm(12), nn.Linear(12, 3))


def bayes_convolution() -> nn.Module:
    layers = [BayesConv2d(1, 3, 3, initial_std=0.05), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(27, 3)]
    return nn.Sequential(*layers)


def encoder(first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=first)
    return nn.Sequential(layer, nn.TransformerEncoderLayer(8, 2, 16, 0.1, batch_first=True, norm_first=first))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "mlp": (mlp, lambda: randn(2, 6)),
    "bayes": (bayes, lambda: randn(2, 6)),
    "lenet": (lenet, lambda: randn(2, 1, 14, 14)),
    "residual": (residual, lambda: randn(2, 6)),
    "bayes convolution": (bayes_convolution, lambda: randn(2, 1, 8, 8)),
    "encoder, pre-norm": (lambda: encoder(True), lambda: randn(2, 5, 8)),
    "encoder, post-norm": (lambda: encoder(False), lambda: randn(2, 5, 8)),
    "recurrent": (Recurrent, lambda: randn(2, 5, 4)),
    "recommender": (Recommender, lambda: torch.cat([randn(2, 4), torch.randint(0, 7, (2, 3)).double()], 1)),
    "unet": (SmallUNet, lambda: randn(2, 1, 8, 8)),
}

SETTINGS: dict[str, dict] = {
    "adjoint": {"method": "adjoint", "secant": False},
    "secants": {"method": "adjoint", "secant": True},
    "pairs": {"method": "adjoint", "pairs": 8},
    "marginals of rank 4": {"method": "adjoint", "rank": 4},
    "directions": {"method": "adjoint", "directions": 1},
    "taylor": {"method": "adjoint", "activation": "taylor"},
    "matched": {"method": "adjoint", "activation": "matched"},
    "dplr": {"method": "dplr", "rank": 3},
    "diag": {"method": "diag"},
}


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A network and two inputs, functions of the name alone."""
    make, inputs = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    with torch.no_grad():
        for m in model.modules():
            if isinstance(m, nn.modules.batchnorm._BatchNorm):
                m.running_mean.normal_(0, 0.3)
                m.running_var.uniform_(0.5, 2.0)
    return model, inputs()
