"""A maximum over maxima of what dropout leaves: one maximum, against every outcome of the draws."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import favour


class Amax(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.amax(2)


NESTS = {
    "global": [nn.MaxPool1d(2), nn.AdaptiveMaxPool1d(1)],
    "a function between": [nn.MaxPool1d(2), nn.Tanh(), Amax()],
    "not all entries": [nn.MaxPool1d(3), Amax()],
    "windows of windows": [nn.MaxPool1d(2), nn.LeakyReLU(), nn.MaxPool1d(2)],
    "overlapping": [nn.MaxPool1d(3, 2), nn.MaxPool1d(2, 1), nn.MaxPool1d(2)],
    "averages": [nn.AvgPool1d(2), nn.AdaptiveMaxPool1d(1)],
}


@pytest.mark.parametrize("name", NESTS)
def test_moments_are_those_of_all_outcomes(name):
    torch.manual_seed(2)
    x, p = torch.randn(3, 1, 8, dtype=torch.float64), 0.3
    behind = nn.Sequential(*NESTS[name], nn.Flatten())
    belief = favour.compile(nn.Sequential(nn.ReLU(), nn.Dropout(p), behind), x, check=False)(x)
    masks = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 8)
    chance = (p ** (1 - masks) * (1 - p) ** masks).prod(-1)
    outcomes = behind((x.relu() * masks / (1 - p)).flatten(0, 1).unsqueeze(1))
    outcomes = outcomes.unflatten(0, (len(x), -1))
    mean = torch.einsum("m,bmo->bo", chance, outcomes)
    variance = torch.einsum("m,bmo->bo", chance, (outcomes - mean.unsqueeze(1)).square())
    exact = name != "averages"
    assert ((belief.mean - mean).abs() <= (1e-9 if exact else 0.05) * variance.sqrt() + 1e-12).all()
    assert ((belief.variance - variance).abs() <= (1e-9 if exact else 0.1) * variance + 1e-12).all()
