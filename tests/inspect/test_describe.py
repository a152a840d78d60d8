"""What is said of a predictor, a check and an attribution, in text and in notebooks."""

import re

import pytest
import torch
from torch import nn

import favour
from favour.errors import NothingUncertain
from favour.inspect.describe import noise_sources


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))


class Twice(nn.Module):
    """One dropout module, called twice; one that never drops; one that reaches no output."""

    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(5, 5), nn.Linear(5, 2)
        self.noisy, self.still, self.lost = nn.Dropout(0.2), nn.Dropout(0.0), nn.Dropout(0.5)

    def forward(self, x):
        self.lost(x)
        return self.head(self.still(self.noisy(self.fc(self.noisy(x)))))


def test_sources_of_noise_are_counted_and_named():
    posterior = {"fc.weight": torch.full((5, 5), 0.01)}
    predict = favour.compile(Twice(), torch.randn(4, 5), posterior=posterior, check=False)
    assert noise_sources(predict) == {("dropout in", "noisy"): 2, ("posterior of", "fc.weight"): 1}
    assert "3 sources of noise: dropout in `noisy` (2 draws); posterior of `fc.weight`" in repr(predict)


def test_many_sources_are_cut():
    layers = [layer for _ in range(8) for layer in (nn.Linear(4, 4), nn.Dropout(0.1))]
    predict = favour.compile(nn.Sequential(*layers, nn.Linear(4, 2)), torch.randn(4, 4), check=False)
    assert re.search(r"8 sources of noise: .*`11` and 2 more", repr(predict))


@pytest.mark.self_check
def test_cost_is_measured_with_the_check():
    predict = favour.compile(make_net(), torch.randn(6, 5))
    cost = predict.checked.cost
    assert 1 <= cost.inputs <= 6 and cost.forwards > 0 and cost.seconds > 0
    assert re.search(
        r"\d+\.\d forward passes by products alone, \d+\.\d measured here \(\d inputs?, not compiled\)", repr(predict)
    )
    html = predict._repr_html_()
    assert "batch × 5" in html and "dropout in `2`" in html and "checked against" in html


def test_without_a_check_nothing_is_measured():
    predict = favour.compile(make_net(), torch.randn(6, 5), check=False)
    assert predict.checked.cost is None and "measured" not in repr(predict)


@pytest.mark.filterwarnings("ignore::favour.errors.NothingUncertain")
def test_nothing_uncertain_is_said():
    predict = favour.compile(nn.Linear(3, 2), torch.randn(4, 3))
    assert "nothing is uncertain" in repr(predict) and "nothing is uncertain" in predict._repr_html_()
    assert issubclass(NothingUncertain, Warning)


def test_attribution_prints_as_a_table():
    predict = favour.compile(Twice(), torch.randn(4, 5), check=False, posterior={"fc.bias": torch.full((5,), 0.1)})
    found = predict.attribute(torch.randn(6, 5))
    first, header, *rows, last = str(found).splitlines()
    assert first == "Variance by source, over 6 inputs and 2 outputs" and header.split()[:2] == ["source", "share"]
    shares = [float(row.split()[-2].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True) and sum(shares) == pytest.approx(100, abs=0.2)
    assert last.split()[1] == "100.0%"
    assert float(last.split()[2]) == pytest.approx(found.variance.mean().sqrt().item(), rel=1e-3)
    html = found._repr_html_()
    assert html.count("<tr>") == len(rows) + 2


def test_check_in_a_notebook_leads_with_the_verdict():
    predict = favour.compile(make_net(), torch.randn(6, 5), check=False)
    found = favour.check(predict, torch.randn(6, 5), n=100, generator=torch.Generator().manual_seed(0))
    html = found._repr_html_()
    assert f"Verdict: {found.verdict}" in html and "100 samples of 6 inputs" in html


def test_dropout_that_a_plan_joins_to_a_maximum_is_a_source():
    layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Dropout(0.3), nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(4, 2)]
    predict = favour.compile(nn.Sequential(*layers), torch.randn(2, 3, 6, 6))
    assert "1 source of noise: dropout in `2`" in repr(predict)
