"""Networks that the benchmarks share."""

from __future__ import annotations

import copy
import itertools

from torch import nn


def mlp(*sizes: int, p: float = 0.2) -> nn.Sequential:
    """Linear, ReLU and dropout between each two sizes; the last layer is linear only."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(n, m), nn.ReLU(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def lenet(p: float = 0.2) -> nn.Sequential:
    """For pictures (1, 28, 28): two convolutions with pooling, then two linear layers with dropout."""
    return nn.Sequential(
        *(nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(p)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(800, 500), nn.ReLU(), nn.Dropout(p), nn.Linear(500, 10)),
    )


def with_dropout(model: nn.Module) -> nn.Module:
    """The same weights with dropout on: one call is one naive sample."""
    return copy.deepcopy(model).train()
