"""Networks whose uncertainty is an adapted posterior: dropout in them is silent, and said to be."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_iris
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import favour
from favour import adapters
from favour.errors import InvalidValue, SilencedDropout


def data():
    x, y = load_iris(return_X_y=True)
    x = torch.tensor(x, dtype=torch.float32)
    return (x - x.mean(0)) / x.std(0), torch.tensor(y)


def network(p=0.3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Dropout(p), nn.Linear(12, 3))


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 12), nn.Linear(12, 3)

    def forward(self, x):
        return self.last(F.dropout(self.first(x).tanh(), 0.3, self.training))


def collected(model):
    swag = adapters.SWAG(rank=2)
    g = torch.Generator().manual_seed(0)
    twin = copy.deepcopy(model)
    for _ in range(5):
        with torch.no_grad():
            for p in twin.parameters():
                p += 0.05 * torch.randn(p.shape, generator=g)
        swag.collect(twin)
    return swag


def belief_of(adapted, x):
    return favour.compile(adapted.model, x[:2], posterior=adapted.posterior)(x)


def same(a, b):
    assert_close(a.mean, b.mean)
    assert_close(a.covariance_matrix, b.covariance_matrix)


@pytest.mark.parametrize("training", [True, False])
def test_dropout_is_silent_by_default_and_kept_on_request(training):
    x, model = data()[0], network().train(training)
    swag = collected(model)
    with pytest.warns(SilencedDropout, match=r"`2` \(0\.3\).*keep_dropout"):
        silent = adapters.adapt(swag, model)
    assert model.training is training and model[2].p == 0.3
    without = network(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = adapters.adapt(swag, without)
    same(belief_of(silent, x), belief_of(plain, x))
    kept = adapters.adapt(swag, model, keep_dropout=True)
    more = belief_of(kept, x)
    assert (more.variance > belief_of(silent, x).variance).all()
    again = favour.compile(kept.model, x[:2], posterior=kept.posterior, dropout={"2": 0.0})(x)
    same(again, belief_of(silent, x))
    draws = favour.sample(silent.model, x, 4000, posterior=silent.posterior)
    assert (draws.var(0) / belief_of(silent, x).variance - 1).abs().max() < 0.35


def test_functional_dropout_is_silent_and_told_of_when_compiling():
    x, model = data()[0], Functional()
    adapted = adapters.adapt(collected(model), model)
    with pytest.warns(SilencedDropout, match="keep_dropout"):
        belief = belief_of(adapted, x)
    without = network(0.0)
    without.load_state_dict(
        {f"{k}.{n}": t for k, m in (("0", model.first), ("3", model.last)) for n, t in m.state_dict().items()}
    )
    same(belief, belief_of(adapters.adapt(collected(without), without), x))


def test_a_rate_for_a_silenced_dropout_is_refused():
    x, model = data()[0], network()
    with pytest.warns(SilencedDropout):
        model, posterior = adapters.adapt(collected(model), model)
    favour.compile(model, x[:2], posterior=posterior, dropout={"2": 0.0})
    with pytest.raises(InvalidValue, match="keep_dropout"):
        favour.compile(model, x[:2], posterior=posterior, dropout={"2": 0.2})


def test_dropouts_without_the_name_of_a_module():
    kinds = {
        "lstm": nn.LSTM(4, 4, 2, dropout=0.1),
        "attention": nn.MultiheadAttention(4, 2, dropout=0.1),
        "favour": favour.nn.Dropout(torch.full((4,), 0.2)),
        "plane": nn.Dropout2d(0.2),
        "none": nn.Dropout(0.0),
        "linear": nn.Linear(2, 2),
    }
    found = adapters.silence.dropouts_of(nn.ModuleDict(kinds))
    assert [text.split("`")[1] for text in found] == ["lstm", "attention", "favour", "plane"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning:laplace")
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_laplace_with_dropout_is_what_laplace_torch_samples(structure):
    laplace = pytest.importorskip("laplace")
    (x, y), model = data(), network()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        la = laplace.Laplace(model, "classification", subset_of_weights="all", hessian_structure=structure)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=50))
        la.prior_precision = torch.tensor([20.0])
        draws = la.functional_samples(x[::10], pred_type="nn", n_samples=8000)
    with pytest.warns(SilencedDropout, match="laplace-torch predicts with dropout switched off"):
        adapted = adapters.adapt(la, linearised=False)
    belief = belief_of(adapted, x[::10])
    assert (draws.var(0) / belief.variance - 1).abs().mean() < 0.1
    assert (draws.mean(0) - belief.mean).abs().max() < 0.2 * belief.stddev.max()


def test_plain_members_of_an_ensemble_run_in_eval_mode():
    x, members = data()[0], [network(p) for p in (0.2, 0.5)]
    with pytest.warns(SilencedDropout, match="favour.compile"):
        predict = adapters.Ensemble(members)
    predict.train()
    assert all(m.training for m in members)
    assert_close(predict(x).mean, predict(x).mean, rtol=0, atol=0)
    want = torch.stack([m.eval()(x) for m in members])
    assert_close(predict(x).mean, want.mean(0))
    assert_close(predict.logits(x).mean, want.mean(0))
    with torch.no_grad():
        members[0][3].bias += 1.0  # tensors are shared
    assert_close(predict(x).mean, want.mean(0) + 0.5)
    with pytest.raises(favour.errors.NotCalibrated):
        predict.interval(x)
    y = want.mean(0) + torch.randn(150, 3)
    low, high = predict.with_noise(1.0).interval(x, 0.9)
    assert 0.8 < favour.metrics.coverage(low, high, y) < 1
