"""The largest of independent entries, against enumeration, a closed form and draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from favour.scalar.moments.independent import TwoValued, largest_independent

F64 = torch.float64
ABSENT = -1e30


def column(*numbers):
    return torch.tensor(numbers, dtype=F64).unsqueeze(1)


def test_two_values_are_enumerated():
    mean, up, down = (0.3, 0.1, -0.2, 0.0), (0.2, 0.5, 1.0, 0.3), (1.0, 0.4, 0.6, 0.9)
    outcomes = []
    for ups in itertools.product((True, False), repeat=4):
        chance = math.prod(d / (u + d) if is_up else u / (u + d) for is_up, u, d in zip(ups, up, down, strict=True))
        x = [m + (u if is_up else -d) for is_up, m, u, d in zip(ups, mean, up, down, strict=True)]
        outcomes.append((chance, max(x), x))
    m = sum(c * y for c, y, _ in outcomes)
    v = sum(c * (y - m) ** 2 for c, y, _ in outcomes)
    slopes = [sum(c * (y - m) * (x[i] - mean[i]) for c, y, x in outcomes) / (up[i] * down[i]) for i in range(len(mean))]
    y = largest_independent(TwoValued(column(*mean), column(*up), column(*down), column(0, 0, 0, 0)), ABSENT)
    assert abs(y.mean.item() - m) < 0.02 * v**0.5  # a step is met to half the distance of nodes
    assert abs(y.variance.item() / v - 1) < 0.03
    assert (y.slopes.squeeze(1) - torch.tensor(slopes, dtype=F64)).abs().max() < 0.02
    assert abs(y.third.item() - sum(c * (t - m) ** 3 for c, t, _ in outcomes)) < 0.03 * v**1.5


@pytest.mark.parametrize("gap", [0.0, 0.7, 6.0])
def test_two_gaussians_have_a_closed_form(gap):
    none = column(0, 0)
    y = largest_independent(TwoValued(column(0, gap), none, none, column(1, 0.5)), ABSENT)
    s = 1.5**0.5
    first = 0.5 * math.erfc(gap / s / 2**0.5)
    density = math.exp(-0.5 * (gap / s) ** 2) / (2 * math.pi) ** 0.5
    mean = gap * (1 - first) + s * density
    second = first + (gap**2 + 0.5) * (1 - first) + gap * s * density
    assert abs(y.mean.item() - mean) < 1e-4
    assert abs(y.variance.item() - (second - mean**2)) < 1e-3
    assert abs(y.slopes[0].item() - first) < 1e-3


def test_certain_and_absent_entries():
    none = column(0, 0, 0)
    y = largest_independent(TwoValued(column(1, 2, ABSENT), none, none, none), ABSENT)
    assert y.mean.item() == 2
    assert y.variance.item() == 0
