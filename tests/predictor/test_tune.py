"""`favour.tune`: the choice, the table, and what is refused."""

import warnings

import pytest
import torch
from torch import nn

import favour
from favour.errors import InvalidType, InvalidValue, UntrustedBelief
from favour.methods import Adjoint, Diag, Linearised, Sampling


def mlp(p: float = 0.2, outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 40), nn.ReLU(), nn.Dropout(p), nn.Linear(40, 40), nn.ReLU(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(40, outputs)).eval()


def test_the_cheapest_of_the_best_is_chosen_and_the_table_says_why():
    model, x = mlp(), torch.randn(50, 6)
    predict = favour.tune(model, x, budget=None)
    rows = {repr(row.method): row for row in predict.tuned.rows}
    assert [row.forwards for row in predict.tuned.rows] == sorted(row.forwards for row in predict.tuned.rows)
    chosen = next(row for row in rows.values() if row.verdict == "chosen")
    assert repr(predict.method) == repr(chosen.method) and isinstance(chosen.method, Adjoint)
    good = [row for row in rows.values() if row.verdict in ("chosen", "as good")]
    assert chosen.forwards == min(row.forwards for row in good)
    assert rows["Diag()"].verdict == rows["Sampling(n=100)"].verdict == "worse"
    # The errors are what many more draws say.
    truth = favour.check(predict, x[:32], n=4000, generator=torch.Generator().manual_seed(1))
    assert chosen.least - 0.02 <= truth.covariance_error <= chosen.most + 0.02
    assert rows["Diag()"].covariance_error > 0.2
    text = str(predict.tuned)
    assert "400 draws at 32 inputs" in text and "chosen" in text and "Adjoint(rank=8, pairs=16)" in text
    assert "checked against 400 samples of 32 inputs" in str(predict)
    torch.testing.assert_close(
        predict(x).covariance_matrix, favour.compile(model, x, method=chosen.method, check=False)(x).covariance_matrix
    )


def test_the_same_seed_chooses_the_same():
    model, x = mlp(), torch.randn(8, 6)
    once, again = (favour.tune(model, x, budget=None, n=100, seed=3).tuned for _ in range(2))
    assert str(once) == str(again)


def test_what_is_off_is_not_chosen_whatever_it_costs():
    """Among a linearisation, variances alone and samples, the last of a network that is anything but linear."""

    class Squares(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.mix, self.head = nn.Dropout(0.5), nn.Linear(5, 5), nn.Linear(5, 2)

        def forward(self, x):
            return self.head(torch.sin(4 * self.mix(self.drop(x))).square())

    candidates = [Diag(), Linearised(), Sampling(2000)]
    predict = favour.tune(Squares().eval(), 3 * torch.randn(8, 5), None, candidates=candidates)
    assert isinstance(predict.method, Sampling)
    assert len(predict.tuned.rows) == 3


def test_it_follows_the_model_and_its_posterior():
    model, x = mlp(p=0.0), torch.randn(8, 6)
    with torch.no_grad():
        variances = {name: 0.01 * torch.rand_like(p) for name, p in model.named_parameters()}
    predict = favour.tune(model, x, None, n=60, posterior=variances)
    before = predict(x).mean
    with torch.no_grad():
        model[-1].bias += 1
    torch.testing.assert_close(predict(x).mean, before + 1)
    model[2].p = 0.5
    with pytest.raises(favour.errors.StalePredictor):
        predict(x)


def test_a_short_budget_runs_less_and_says_so():
    predict = favour.tune(mlp(), torch.randn(8, 6), budget=1e-6)
    assert predict.tuned.n == 60
    verdicts = [row.verdict for row in predict.tuned.rows]
    assert sorted(set(verdicts)) == ["chosen", "not run: the budget is spent"] and verdicts.count("chosen") == 1
    assert predict.method.name == "adjoint"  # what `auto` takes is always measured


def test_many_outputs_are_judged_by_some():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 30), nn.Tanh(), nn.Dropout(0.2), nn.Linear(30, 700)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.FavourWarning)
        predict = favour.tune(model, torch.randn(6, 4), None, n=60, candidates=[Diag(), Adjoint(), Sampling(20)])
    assert predict.tuned.share == 1 and isinstance(predict.method, Adjoint)


def test_it_warns_where_nothing_serves():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.mix = nn.Dropout(0.5), nn.Linear(5, 5)

        def forward(self, x):
            return torch.sin(9 * self.mix(self.drop(x)))

    with pytest.warns(UntrustedBelief, match=r"favour\.tune"):
        favour.tune(Odd().eval(), torch.randn(8, 5), None, candidates=[Linearised(), Adjoint()])


def test_what_makes_no_sense_is_refused():
    model, x = mlp(), torch.randn(4, 6)
    with pytest.raises(InvalidType, match="`rank` is what"):
        favour.tune(model, x, rank=3)
    with pytest.raises(InvalidValue, match="`budget` is 0"):
        favour.tune(model, x, 0)
    with pytest.raises(InvalidValue, match="at least 60 draws"):
        favour.tune(model, x, n=10)
    with pytest.raises(InvalidValue, match="empty batch"):
        favour.tune(model, x[:0])
    with pytest.warns(favour.NothingUncertain):
        assert favour.tune(nn.Linear(6, 2), x).tuned is None
