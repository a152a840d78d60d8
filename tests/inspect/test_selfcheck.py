"""The check at compile time: what it finds, what it leaves alone, what it says where it cannot tell."""

import warnings

import pytest
import torch
from fuzz.architectures import network
from torch import nn

import favour
from favour.errors import NothingUncertain, UntrustedBelief
from favour.inspect import selfcheck

pytestmark = pytest.mark.self_check


def make_net(p=0.2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 3))


class Distances(nn.Module):
    """Squared distances behind dropout: the tangent knows nothing of the square's curvature."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Dropout(0.2), nn.Linear(50, 50))
        self.prototypes = nn.Parameter(0.1 * torch.randn(4, 50))

    def forward(self, x):
        return -(self.trunk(x)[:, None] - self.prototypes).square().sum(-1)


def test_a_good_belief_is_checked_without_a_word():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict = favour.compile(make_net(), torch.randn(8, 4))
    assert predict.checked.trusted and predict.checked.n == selfcheck.DRAWS
    assert "checked against 200 samples of 8 inputs" in repr(predict)


def test_a_bad_belief_is_warned_of_with_figures_and_remedy():
    x = torch.randn(8, 10)
    with pytest.warns(UntrustedBelief) as told:
        predict = favour.compile(Distances(), x, secant=False)
    message = str(told[0].message)
    for part in ("against 200 samples", "covariances by", "secant=True", "favour.check"):
        assert part in message
    assert told[0].filename == __file__
    assert "UNTRUSTED" in repr(predict)
    assert favour.compile(Distances(), x, secant=True).checked.trusted  # the remedy is one


def test_check_takes_inputs_of_the_users():
    """The example is harmless, the user's inputs are not: saturated units hide the error."""
    quiet = torch.zeros(4, 10)
    model = Distances()
    model.trunk[0].bias.data.fill_(-50.0)  # no unit is active, so nothing varies at the example
    model.trunk[0].weight.data.mul_(30.0)
    favour.compile(model, quiet, secant=False, check=False)
    with pytest.warns(UntrustedBelief):
        favour.compile(model, quiet, secant=False, check=torch.randn(8, 10) * 3)


def test_check_false_checks_nothing_and_says_so():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict = favour.compile(Distances(), torch.randn(8, 10), secant=False, check=False)
    assert "not checked" in repr(predict)


def test_global_random_state_is_left_alone():
    model, x = make_net(), torch.randn(8, 4)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    favour.compile(model, x)
    torch.testing.assert_close(torch.rand(3), expected)


def test_the_check_is_deterministic(monkeypatch):
    """With the same time for the same work: how much of it there is depends on the clock."""
    monkeypatch.setattr(selfcheck, "_seconds_per_draw", lambda *_: selfcheck.LEAST_SECONDS / 1000)
    monkeypatch.setattr(selfcheck, "measured", lambda *_: None)
    monkeypatch.setattr(selfcheck.time, "perf_counter", lambda: 0.0)
    x = torch.randn(8, 4)
    assert favour.compile(make_net(), x).checked == favour.compile(make_net(), x).checked


def test_too_dear_a_network_is_not_checked_and_says_so(monkeypatch):
    monkeypatch.setattr(selfcheck, "_seconds_per_draw", lambda *_: 100.0)
    predict = favour.compile(make_net(), torch.randn(8, 4))
    assert "not checked (60 samples of one input would take 6000.0 s)" in repr(predict)


def test_fewer_inputs_then_fewer_draws_where_samples_are_dear(monkeypatch):
    monkeypatch.setattr(selfcheck, "_seconds_per_draw", lambda *_: selfcheck.LEAST_SECONDS / 300)
    monkeypatch.setattr(selfcheck, "measured", lambda *_: None)
    monkeypatch.setattr(selfcheck.time, "perf_counter", lambda: 0.0)
    made = selfcheck.self_check(favour.compile(make_net(), torch.randn(8, 4), check=False), torch.randn(8, 4), 0.0)
    assert (made.inputs, made.n) == (1, 200)


def test_too_few_draws_to_tell_are_no_check():
    """As on a busy machine, where there is time for sixty draws of one input."""
    for seed in (2, 29, 31, 64):
        made = network(seed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            predict = favour.compile(made.model, made.example, secant=False, check=False)
            predict.checked = selfcheck.self_check(predict, made.example[:1], 0.0, draws=60)
        assert predict.checked.n == 60
        assert not predict.checked.trusted or "not checked (60 samples of 1 inputs are too few" in repr(predict)


def test_an_example_of_nothing_but_noise_is_no_ground_for_suspicion():
    predict = favour.compile(make_net(), torch.empty(2, 4).fill_(float("nan")))
    assert predict.checked.trusted


def test_power_in_small():
    """Four networks whose beliefs are known to be bad and four that are good, of `results/selfcheck.json`."""
    bad, good = (2, 29, 31, 64), (0, 3, 8, 11)
    for seeds, expected in ((bad, False), (good, True)):
        for seed in seeds:
            made = network(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                checked = favour.compile(made.model, made.example, secant=False).checked  # tangents, which may be wrong
                assert checked.trusted is expected, (seed, made.words)


# ------------------------------------------------------------------------------------------------- nothing uncertain


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU()), "no dropout"),
        (lambda: make_net(0.0), "p = 0 counts as none"),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), "favour.adapters"),
    ],
)
def test_a_model_without_noise_is_warned_of(model, words):
    with pytest.warns(NothingUncertain) as told:
        predict = favour.compile(model(), torch.randn(2, 4))
    assert words in str(told[0].message)
    assert "posterior=" in str(told[0].message)
    assert told[0].filename == __file__
    assert "nothing is uncertain" in repr(predict)
    found = favour.check(predict, torch.randn(6, 4), 50)
    assert found.verdict == "nothing to trust"
    assert "posterior" in found.reason


def test_a_silenced_dropout_counts_as_no_noise_and_a_belief_as_some():
    with pytest.warns(NothingUncertain):
        predict = favour.compile(make_net(), torch.randn(2, 4), dropout={"2": 0})
    x = favour.Belief(torch.randn(2, 4), diag=torch.full((2, 4), 0.1))
    assert bool((predict(x).variance > 0).all())


class Weighed(nn.Module):
    """Dropout whose result is multiplied by a weight."""

    def __init__(self, weight):
        super().__init__()
        self.linear, self.dropout, self.weight = nn.Linear(4, 4), nn.Dropout(0.3), weight

    def forward(self, x):
        return self.linear(x) + self.weight * self.dropout(x)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (lambda: nn.Linear(4, 3), {"posterior": {"weight": torch.zeros(3, 4)}}),
        (lambda: Weighed(0.0), {}),
        (lambda: Weighed(0.0), {"check": torch.zeros(3, 4)}),
    ],
)
def test_noise_of_no_size_is_warned_of(model, options):
    with pytest.warns(NothingUncertain, match="neither beliefs nor 200 samples vary") as told:
        predict = favour.compile(model(), torch.randn(4, 4), **options)
    assert told[0].filename == __file__
    assert "nothing varies in 200 samples" in repr(predict)


def test_an_example_of_zeros_is_not_taken_for_a_model_without_noise():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        predict = favour.compile(nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 3)), torch.zeros(2, 4))
    assert predict.checked.trusted and not predict.checked.still


def test_noise_that_is_given_is_enough():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(4, 3)
        favour.compile(model, torch.randn(4, 4), posterior={"weight": torch.full((3, 4), 0.01)})
        favour.compile(make_net(0.0), torch.randn(4, 4), dropout={"2": 0.2})


@pytest.mark.parametrize("method", ["adjoint", "linearised", "sampling"])
def test_a_posterior_without_variance_is_warned_of(method):
    still = {"0.weight": torch.zeros(3, 4)}
    with pytest.warns(NothingUncertain, match="posterior that are 0"):
        favour.compile(nn.Sequential(nn.Linear(4, 3), nn.ReLU()), torch.randn(2, 4), posterior=still, method=method)
