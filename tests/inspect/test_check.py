"""`favour.check` on networks whose answer is known, and on made-up predictors for every verdict."""

import math
import sys

import pytest
import torch
from scipy import stats
from torch import nn

import favour
from favour.belief import Belief
from favour.errors import InvalidValue
from favour.inspect.check import _spearman
from favour.methods import METHODS

N = 2000


class Told:
    """Believes one thing and draws from another."""

    def __init__(self, belief, truth, method="adjoint"):
        self.belief, self.truth = belief, truth
        self.method = METHODS[method]()
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, x):
        return self.belief

    def sample(self, x, n, generator=None):
        return self.truth[: len(x)].sample((n,), self.generator)


def gaussians(batch=40, scale=None, seed=0):
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(batch, 3, 3, dtype=torch.float64, generator=g)
    size = 10 ** torch.linspace(-1, 1, batch, dtype=torch.float64) if scale is None else scale
    matrix = size.reshape(-1, 1, 1) * (root @ root.mT + torch.eye(3, dtype=torch.float64))
    return Belief(torch.randn(batch, 3, dtype=torch.float64, generator=g), covariance=matrix)


def test_check_trusts_the_truth_and_its_z_scores_are_standard_normal():
    truth = gaussians(200)
    found = favour.check(Told(truth, truth), torch.zeros(200, 1), N)
    assert found.verdict == "trust it"
    for z in (found.mean_z, found.variance_z):
        assert stats.kstest(z[:, 0].numpy(), "norm").pvalue > 1e-3  # one output per input: independent
    assert found.mean_error < 0.02
    assert found.covariance_error < 0.03
    assert found.ranking > 0.99


def test_check_measures_known_errors():
    truth = gaussians()
    wrong = Belief(truth.mean + 0.5 * truth.stddev, covariance=truth.covariance.scale(1.5))
    found = favour.check(Told(wrong, truth), torch.zeros(40, 1), N)
    assert found.mean_error == pytest.approx(0.5, abs=0.03)
    assert found.variance_error == pytest.approx(0.5, abs=0.06)
    assert found.covariance_error == pytest.approx(0.5, abs=0.06)
    assert found.verdict == "trust the ranking only"


def test_check_wants_more_rank_when_correlations_are_lost():
    truth = gaussians()
    lost = Belief(truth.mean, diag=truth.variance)
    found = favour.check(Told(lost, truth, "dplr"), torch.zeros(40, 1), N)
    assert found.verdict == "use more rank"
    assert found.variance_error < 0.05 < 0.15 < found.covariance_error
    assert "rank" in found.reason


def test_check_says_dont():
    truth = gaussians()
    found = favour.check(Told(gaussians(seed=1, scale=torch.ones(40)), truth), torch.zeros(40, 1), N)
    assert found.verdict == "don't"
    assert found.ranking < 0.9
    assert "predict.sample" in found.reason


def test_check_does_not_trust_uncertainty_that_is_not_there():
    point = Belief.point(torch.zeros(6, 2))
    found = favour.check(Told(Belief(point.mean, diag=torch.ones(6, 2)), point), torch.zeros(6, 1), 100)
    assert found.verdict != "trust it"
    assert favour.check(Told(point, point), torch.zeros(6, 1), 100).verdict == "nothing to trust"


def test_check_lists_the_worst_first():
    truth = gaussians()
    mean = truth.mean.clone()
    mean[7, 2] += 3 * truth.stddev[7, 2]
    diag = torch.zeros(40, 3, dtype=torch.float64)
    diag[11, 1] = truth.variance[11, 1]
    off = Belief(mean, covariance=truth.covariance.add_diagonal(diag))
    found = favour.check(Told(off, truth), torch.zeros(40, 1), N)
    first, second = found.worst(2)
    assert (first.row, first.output, first.quantity) == (7, (2,), "mean")
    assert (second.row, second.output, second.quantity) == (11, (1,), "stddev")
    assert first.z == pytest.approx(3 * math.sqrt(N), rel=0.1)
    assert found.worst_inputs(1) == [11]
    printed = str(found)
    assert printed.startswith(f"Verdict: {found.verdict}.")
    assert "input 7, output 2: mean" in printed


@pytest.mark.parametrize("batch", [1, 3, 20])
def test_check_of_a_network(batch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 4))
    predict = favour.compile(model, torch.randn(2, 8))
    found = favour.check(predict, torch.randn(batch, 8), 500, torch.Generator().manual_seed(0))
    assert found.verdict == "trust it"
    assert found.mean_z.shape == (batch, 4)
    assert (found.ranking is None) == (batch < 5)
    assert "Verdict" in found.plot().get_title(loc="left")


def test_a_hundred_draws_of_a_network_say_what_thousands_of_plain_ones_would():
    """z-scores are standard normal with the linear part taken off, and errors far below √(2/100) are seen."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 200), nn.Tanh(), nn.Dropout(0.1), nn.Linear(200, 3), nn.Tanh()).double()
    predict = favour.compile(model, torch.randn(2, 8, dtype=torch.float64), check=False)
    x = 0.5 * torch.randn(300, 8, dtype=torch.float64)
    found = favour.check(predict, x, 100, torch.Generator().manual_seed(0))
    plain = math.sqrt(2 / 100)
    assert found.worth > 500 and "(worth " in str(found)
    assert found.sampling_error > 0.8 * plain  # still that of plain samples
    assert found.mean_error < 0.02 and found.covariance_error < 0.05
    for z in (found.mean_z, found.variance_z):
        assert z.std().item() == pytest.approx(1, abs=0.25)
    # A belief whose variances are 12% too large is told from a right one, which 100 plain draws could not.
    wide = favour.compile(model, torch.randn(2, 8, dtype=torch.float64), check=False)
    wide.program.run = lambda leaves, run=wide.program.run: [
        Belief(b.mean, covariance=1.12 * b.covariance_matrix) for b in run(leaves)
    ]
    off = favour.check(wide, x[:5], 100, torch.Generator().manual_seed(0))
    assert off.variance_z.mean() > 3 and off.variance_error == pytest.approx(0.12, abs=0.05)


def test_check_slices_large_batches(monkeypatch):
    truth = gaussians()
    monkeypatch.setattr(sys.modules["favour.inspect.check"], "_HELD", 3 * 100 * 7)
    seen = []

    class Sliced(Told):
        def sample(self, x, n, generator=None):
            first = int(x[0, 0])
            seen.append(len(x))
            return self.truth[first : first + len(x)].sample((n,), self.generator)

    rows = torch.arange(40.0, dtype=torch.float64)[:, None]
    found = favour.check(Sliced(truth, truth), rows, 100)
    assert seen == [7] * 5 + [5]
    assert found.mean_z.abs().max() < 6


def test_check_chooses_among_outputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.5), nn.Linear(30, 1), nn.Linear(30, 2)

        def forward(self, x):
            x = self.drop(x)
            return {"a": self.a(x), "b": self.b(x)}

    predict = favour.compile(Two(), torch.randn(2, 30))
    with pytest.raises(InvalidValue, match=r"2 outputs; choose one with `output`, out of \[0, 1\]"):
        favour.check(predict, torch.randn(6, 30), 50)
    assert favour.check(predict, torch.randn(6, 30), 50, output=1).mean.shape == (6, 2)
    with pytest.raises(InvalidValue, match="`output` is 2"):
        favour.check(predict, torch.randn(6, 30), 50, output=2)


def test_check_refuses_too_little():
    truth = gaussians(4)
    with pytest.raises(InvalidValue, match="`n` is 5"):
        favour.check(Told(truth, truth), torch.zeros(4, 1), 5)
    with pytest.raises(InvalidValue, match="empty batch"):
        favour.check(Told(truth[:0], truth), torch.zeros(0, 1), 50)


def test_spearman_equals_scipy():
    a, b = torch.randint(6, (30,)).double(), torch.randn(30).double()
    assert _spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


def test_check_needs_no_square_matrix_of_many_outputs():
    """A picture of 256 × 256: its covariance would have four thousand million entries."""
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3, padding=1), torch.nn.Dropout(0.2), torch.nn.Conv2d(2, 1, 1))
    x = torch.randn(2, 1, 256, 256)
    predict = favour.compile(model, x[:, :, :16, :16], method="diag", dynamic=(2, 3))
    found = favour.check(predict, x, 20)
    assert found.mean.shape == (2, 1, 256, 256)


def test_check_does_not_say_agree_where_differences_are_no_accident():
    truth = gaussians(scale=torch.full((40,), 1.0))
    off = Belief(truth.mean + 0.1 * truth.stddev, covariance=truth.covariance.dense())
    found = favour.check(Told(off, truth), torch.zeros(40, 1), 20_000)
    assert found.verdict == "trust it"
    assert "not all are chance" in found.reason and "agree" not in found.reason


def test_so_few_draws_that_nothing_shows_are_no_reason_to_trust():
    right = Belief(torch.zeros(2, 3), torch.ones(2, 3))
    few, many = (Told(right, right) for _ in range(2))
    few.generator.manual_seed(11)
    checked = favour.check(few, torch.zeros(2, 3), n=12)
    assert checked.covariance_error < 0.15 and checked.covariance_bound > 0.3
    assert checked.verdict == "take more draws" and "n=120" in checked.reason
    assert favour.check(many, torch.zeros(2, 3), n=N).verdict == "trust it"
