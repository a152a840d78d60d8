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


def with_dropout(model: nn.Module) -> nn.Module:
    """The same weights with dropout on: one call is one naive sample."""
    return copy.deepcopy(model).train()
