"""What a prediction is expected to take is counted, in proportion to its inputs."""

from __future__ import annotations

import torch
from torch import nn

import favour
from favour.inspect.expected import Count, Work, expected


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 40), nn.ReLU(), nn.Dropout(0.2), nn.Linear(40, 30), nn.ReLU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(30, 5)).eval()


def totals(works: list[Work]) -> tuple[float, float, int]:
    return sum(w.numbers for w in works), sum(w.multiplications for w in works), len(works)


def test_multiplications_of_products_and_convolutions() -> None:
    with torch.no_grad(), Count() as count:
        nn.Linear(7, 3)(torch.randn(4, 7))
        nn.Conv2d(2, 6, 3, padding=1, groups=2)(torch.randn(4, 2, 5, 5))
        nn.ConvTranspose2d(2, 6, 3)(torch.randn(4, 2, 5, 5))
        torch.randn(4, 2, 3) @ torch.randn(4, 3, 5)
    made = [w.multiplications for w in count.works if w.multiplications]
    assert made == [4 * 7 * 3, 4 * 6 * 25 * 9, 4 * 2 * 25 * 6 * 9, 4 * 2 * 3 * 5]


def test_two_small_passes_tell_a_large_one() -> None:
    predict = favour.compile(network(), torch.randn(2, 12), check=False)
    told = predict.cost(torch.randn(1, 12))
    x = torch.randn(64, 12)
    with torch.no_grad(), Count() as count:
        predict(x)
    direct = sum(w.seconds() for w in count.works)
    from_two = told.seconds(64)
    assert direct < from_two < 2 * direct  # and what our own code adds to each operation
    few, twice = (totals(works) for works in told.prediction)
    assert abs(few[1] + 31 * (twice[1] - few[1]) - totals(count.works)[1]) < 1e-6 * totals(count.works)[1]


def test_counts_are_the_same_in_every_call() -> None:
    predict = favour.compile(network(), torch.randn(2, 12), check=False)
    once, again = (expected(predict, (torch.randn(3, 12),), {}) for _ in range(2))
    assert once.seconds(100) == again.seconds(100) and once.forwards(100) == again.forwards(100)


def test_launches_weigh_less_with_more_inputs() -> None:
    told = favour.compile(network(), torch.randn(2, 12), check=False).cost(torch.randn(2, 12))
    assert told.forwards(1) > told.forwards(1000) > 1
    assert told.seconds(1000) > told.seconds(1)


def test_an_event_without_a_batch_is_counted_as_it_is() -> None:
    predict = favour.compile(network(), torch.randn(6, 12), batched=False, check=False)
    assert predict.cost(torch.randn(6, 12)).forwards(1) > 1
