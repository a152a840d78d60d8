"""The largest of independent entries with rare draws that go far, against fine sums over what is drawn."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from favour.scalar.moments.independent import TwoValued, largest_independent


def reference(mean: Tensor, up: Tensor, down: Tensor, rest: Tensor) -> tuple[float, float]:
    """Mean and variance of the largest, over all values of the draws and a fine grid."""
    chance = down / (up + down)
    low, high = float((mean - down - 9 * rest.sqrt()).min()), float((mean + up + 9 * rest.sqrt()).max())
    t = torch.linspace(low, high, 40_001, dtype=torch.float64)
    first = second = 0.0
    for values in itertools.product((True, False), repeat=len(mean)):
        weight, below = 1.0, torch.ones_like(t)
        for i, value in enumerate(values):
            weight *= float(chance[i] if value else 1 - chance[i])
            shifted = mean[i] + (up[i] if value else -down[i])
            below = below * torch.special.ndtr((t - shifted) / rest[i].sqrt())
        y = torch.diff(below)
        middle = (t[1:] + t[:-1]) / 2
        first += weight * float((y * middle).sum())
        second += weight * float((y * middle.square()).sum())
    return first, second - first**2


def entries(p: float, seed: int, n: int, share: float) -> tuple[Tensor, ...]:
    """n entries of which draws of probability p, some of either sign, have a share of the variance."""
    random = torch.Generator().manual_seed(seed)
    mean, variance = (torch.rand(n, 1, generator=random, dtype=torch.float64) + 0.2 for _ in range(2))
    far, close = ((share * variance * ratio).sqrt() for ratio in ((1 - p) / p, p / (1 - p)))
    sign = torch.rand(n, 1, generator=random) < 0.5
    return mean, torch.where(sign, far, close), torch.where(sign, close, far), (1 - share) * variance


@pytest.mark.parametrize("p", [0.0003, 0.001, 0.03, 0.3, 0.5])
@pytest.mark.parametrize("n", [1, 4])
def test_rare_draws_leave_means_and_variances_right(p: float, n: int) -> None:
    for seed, share in ((0, 0.9), (1, 0.99), (2, 0.5)):
        parts = entries(p, seed, n, share)
        y = largest_independent(TwoValued(*parts), -1e30)
        mean, variance = reference(*(t[:, 0] for t in parts))
        assert abs(float(y.mean) - mean) < 0.02 * variance**0.5
        assert abs(float(y.variance) / variance - 1) < 0.03
        assert ((y.slopes >= 0) & (y.slopes <= 1)).all() and (n > 1 or abs(float(y.slopes) - 1) < 0.01)


@pytest.mark.parametrize("p", [0.001, 0.1])
def test_single_precision_is_enough_for_rare_draws(p: float) -> None:
    parts = entries(p, 5, 4, 0.95)
    exact = largest_independent(TwoValued(*parts), -1e30)
    rounded = largest_independent(TwoValued(*(t.float() for t in parts)), -1e30)
    assert abs(float(rounded.variance) / float(exact.variance) - 1) < 2e-5
    assert abs(float(rounded.third) - float(exact.third)) < 1e-4 * abs(float(exact.third))
