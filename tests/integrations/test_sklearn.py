"""The scikit-learn estimators: scikit-learn's own checks, and what these estimators promise beyond them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.base import clone
from sklearn.datasets import make_blobs
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from torch import nn

import favour
from favour.errors import InvalidValue
from favour.integrations.sklearn import FavourClassifier, FavourRegressor, _noise

QUICK: dict[str, Any] = {"hidden": (16,), "epochs": 30, "batch_size": 16, "learning_rate": 2e-2, "random_state": 0}


@parametrize_with_checks([FavourRegressor(**QUICK), FavourClassifier(**QUICK)])
def test_scikit_learn_check(estimator: Any, check: Any) -> None:
    check(estimator)


def wave(n: int, noise: float = 0.2, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    X = rng.uniform(-2, 2, (n, 1))
    return X, 30 + 10 * (np.sin(2 * X[:, 0]) + noise * rng.normal(size=n))


@pytest.fixture(scope="module")
def regressor() -> FavourRegressor:
    return FavourRegressor((32,), dropout=0.05, epochs=100, learning_rate=1e-2, random_state=0).fit(*wave(400))


@pytest.fixture(scope="module")
def classifier() -> FavourClassifier:
    X, y = make_blobs(150, centers=3, random_state=0)
    return FavourClassifier(**QUICK).fit(X, np.array(["a", "b", "c"])[y])


def test_return_std_is_of_observations(regressor: FavourRegressor) -> None:
    """Fresh observations fall into the 90% interval about as often as they should, and the noise is found."""
    X, y = wave(2000, seed=1)
    mean, std = regressor.predict(X, return_std=True)
    covered = (np.abs(y - mean) < stats.norm.ppf(0.95) * std).mean()
    assert 0.84 < covered < 0.96
    assert 1.0 < regressor.noise_[0] ** 0.5 < 3.0  # 2 in truth
    np.testing.assert_allclose(regressor.predict(X), mean)
    assert regressor.score(X, y) > 0.85


def test_return_cov_agrees_with_return_std(regressor: FavourRegressor) -> None:
    X, _ = wave(20, seed=2)
    mean, std = regressor.predict(X, return_std=True)
    same, cov = regressor.predict(X, return_cov=True)
    np.testing.assert_allclose(same, mean, rtol=1e-10)
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), std, rtol=1e-8)
    assert np.linalg.eigvalsh(cov).min() > 0
    with pytest.raises(favour.errors.InvalidValue, match="not both"):
        regressor.predict(X, return_std=True, return_cov=True)


def test_sample_y_has_the_covariance(regressor: FavourRegressor) -> None:
    X, _ = wave(3, seed=3)
    mean, cov = regressor.predict(X, return_cov=True)
    draws = regressor.sample_y(X, 20_000, random_state=1)
    assert draws.shape == (3, 20_000)
    found = np.cov(draws)
    error = np.sqrt((np.outer(np.diag(cov), np.diag(cov)) + cov**2) / 20_000)  # of a Gaussian's sample covariance
    assert (np.abs(found - cov) < 5 * error).all()
    assert (np.abs(draws.mean(1) - mean) < 5 * np.sqrt(np.diag(cov) / 20_000)).all()
    np.testing.assert_array_equal(draws, regressor.sample_y(X, 20_000, random_state=1))


def test_draws_without_noise_are_functions(regressor: FavourRegressor) -> None:
    X = np.array([[0.5], [0.5]])
    draws = regressor.sample_y(X, 10, noise=False)
    np.testing.assert_allclose(draws[0], draws[1], rtol=1e-6)


@pytest.mark.parametrize("several", [False, True])
def test_targets_keep_their_shape(several: bool) -> None:
    X, y = wave(60)
    Y = np.stack([y, -2 * y], 1) if several else y[:, None]
    model = FavourRegressor(**QUICK).fit(X, Y)
    mean, std = model.predict(X, return_std=True)
    assert mean.shape == std.shape == Y.shape
    assert model.predict(X, return_cov=True)[1].shape == (60, 60, Y.shape[1])
    assert model.sample_y(X, 4).shape == (60, Y.shape[1], 4)
    if several:
        assert model.noise_.shape == (2,)


def test_probabilities_and_labels(classifier: FavourClassifier) -> None:
    X, y = make_blobs(150, centers=3, random_state=0)
    labels = np.array(["a", "b", "c"])[y]
    p = classifier.predict_proba(X)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)
    assert classifier.score(X, labels) > 0.9
    assert (classifier.predict(X) == classifier.classes_[p.argmax(1)]).all()
    draws = classifier.sample_y(X[:5], 4000, random_state=2)
    assert draws.shape == (5, 4000)
    frequency = (draws[:, :, None] == classifier.classes_).mean(1)
    assert (np.abs(frequency - p[:5]) < 5 * np.sqrt(p[:5] * (1 - p[:5]) / 4000) + 0.01).all()


@pytest.mark.parametrize("way", [lambda m: pickle.loads(pickle.dumps(m)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_fitted_estimators_survive(regressor: FavourRegressor, classifier: FavourClassifier, way: Any) -> None:
    X, _ = wave(10)
    for a, b in zip(regressor.predict(X, return_std=True), way(regressor).predict(X, return_std=True), strict=True):
        np.testing.assert_array_equal(a, b)
    Z = np.random.default_rng(0).normal(size=(5, 2))
    np.testing.assert_array_equal(classifier.predict_proba(Z), way(classifier).predict_proba(Z))


def test_pipeline_and_grid_search() -> None:
    X, y = wave(80)
    quick = {**QUICK, "epochs": 10}
    pipe = make_pipeline(StandardScaler(), FavourRegressor(**quick))
    search = GridSearchCV(pipe, {"favourregressor__dropout": [0.05, 0.3]}, cv=2).fit(X, y)
    mean, std = search.best_estimator_.predict(X, return_std=True)
    assert mean.shape == std.shape == (80,)
    assert clone(search.best_estimator_)[-1].dropout == search.best_params_["favourregressor__dropout"]


def net(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, outputs))


def test_module_of_your_own() -> None:
    X, y = wave(33)  # the last batch has one row, which a batch norm cannot train on
    model = FavourRegressor(module=net, epochs=5, batch_size=16, validation_fraction=0.0, random_state=0).fit(X, y)
    assert any("running_mean" in name for name in model.state_)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(model.predict(X), again.predict(X))
    with pytest.raises(favour.errors.InvalidType, match="must make a torch"):
        FavourRegressor(module=lambda a, b: None).fit(X, y)


def test_fit_is_reproducible_and_leaves_the_global_seed_alone() -> None:
    X, y = wave(40)
    torch.manual_seed(5)
    a = FavourRegressor(**QUICK).fit(X, y).predict(X)
    after = torch.rand(())
    torch.manual_seed(5)
    assert torch.rand(()) == after
    np.testing.assert_array_equal(a, FavourRegressor(**QUICK).fit(X, y).predict(X))


def test_early_stopping_keeps_the_best_state() -> None:
    X, y = wave(60, noise=1.0)
    model = FavourRegressor((64,), dropout=0.0, epochs=400, patience=5, learning_rate=2e-2, random_state=0).fit(X, y)
    losses = model.validation_losses_
    assert model.n_iter_ == len(losses) < 400
    assert losses.index(min(losses)) == len(losses) - 6
    assert (model.predict(X, return_std=True)[1] ** 2 >= model.noise_).all()


def test_noise_is_the_maximum_of_the_likelihood() -> None:
    rng = np.random.default_rng(0)
    variance = rng.uniform(0.1, 1, 20_000)
    residual = rng.normal(size=20_000) * np.sqrt(variance + 0.7)
    assert abs(_noise(residual**2, variance) - 0.7) < 5 * 0.7 * 1.6 * np.sqrt(2 / 20_000)
    assert _noise(np.zeros(3), np.ones(3)) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"training": "map"},
        {"dropout": 1.0},
        {"hidden": (0,)},
        {"epochs": 0},
        {"activation": "step"},
        {"learning_rate": -1.0},
    ],
    ids=str,
)
def test_wrong_parameters_are_named(wrong: dict[str, Any]) -> None:
    X, y = wave(10)
    with pytest.raises(favour.errors.InvalidValue, match=f"`{next(iter(wrong))}` is"):
        FavourRegressor(**wrong).fit(X, y)


def test_one_class_and_nan_are_refused() -> None:
    X, y = wave(10)
    with pytest.raises(ValueError, match="at least two"):
        FavourClassifier().fit(X, np.ones(10))
    with pytest.raises(ValueError, match="NaN"):
        FavourRegressor().fit(np.full_like(X, np.nan), y)


def test_progress_goes_to_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    FavourRegressor(**{**QUICK, "epochs": 2}, verbose=True).fit(*wave(20))
    captured = capsys.readouterr()
    assert "FavourRegressor" in captured.err
    assert captured.out == ""


class _Ending:
    """Makes a small network that ends in a given activation; importable, as estimators ask."""

    def __init__(self, end):
        self.end = end

    def __call__(self, inputs, outputs):
        layers = [torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, outputs)]
        return torch.nn.Sequential(*layers, self.end)


def test_a_classifier_whose_module_ends_in_a_softmax():
    from sklearn.datasets import load_iris

    X, y = load_iris(return_X_y=True)
    plain, soft = (
        FavourClassifier(module=_Ending(end), epochs=60, random_state=0).fit(X, y)
        for end in (torch.nn.Identity(), torch.nn.Softmax(-1))
    )
    np.testing.assert_allclose(soft.predict_proba(X), plain.predict_proba(X), atol=2e-3)
    draws = soft.sample_y(X, 400)
    frequency = np.stack([(draws == c).mean(1) for c in soft.classes_], 1)
    assert np.abs(frequency - soft.predict_proba(X)).max() < 0.15
    with pytest.raises(InvalidValue, match="ends in a sigmoid"):
        FavourClassifier(module=_Ending(torch.nn.Sigmoid()), epochs=2, random_state=0).fit(X, y)


# ------------------------------------------------------- training="propagation"

PROPAGATION = {**QUICK, "training": "propagation", "epochs": 40}


@parametrize_with_checks([FavourRegressor(**PROPAGATION | {"epochs": 3})])
@pytest.mark.slow
def test_scikit_learn_check_of_propagation(estimator: Any, check: Any) -> None:
    check(estimator)


def test_a_regressor_trained_through_beliefs() -> None:
    X, y = wave(160)
    model = FavourRegressor(**PROPAGATION, dropout=0.05).fit(X, y)
    assert model.rates_.keys() == {"2"} and 0 < float(model.rates_["2"]) != 0.05
    assert set(model.weight_variances_) == {"0.weight", "0.bias", "3.weight", "3.bias"}
    assert model.validation_losses_[-1] < model.validation_losses_[0]
    mean, std = model.predict(X, return_std=True)
    assert np.sqrt(np.mean((mean - y) ** 2)) < 0.6 * y.std() and (std**2 > model.noise_).all()
    _, cov = model.predict(X[:5], return_cov=True)
    np.testing.assert_allclose(np.sqrt(np.diag(cov)), std[:5], rtol=1e-6)
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict(X, return_std=True)[1], std)
    np.testing.assert_array_equal(clone(model).fit(X, y).predict(X), mean)


def test_several_targets_and_no_dropout_through_beliefs() -> None:
    X, y = wave(60)
    both = np.stack([y, -3 * y], 1)
    model = FavourRegressor(**PROPAGATION | {"epochs": 3}, dropout=0.0, validation_fraction=0.0).fit(X, both)
    assert model.rates_ == {} and model.noise_.shape == (2,) and model.predict(X, return_std=True)[1].shape == (60, 2)


def test_a_classifier_trained_through_beliefs() -> None:
    X, y = make_blobs(120, centers=3, cluster_std=0.7, random_state=0)
    model = FavourClassifier(**PROPAGATION).fit(X, np.array(["a", "b", "c"])[y])
    p = model.predict_proba(X)
    assert np.allclose(p.sum(1), 1) and model.score(X, np.array(["a", "b", "c"])[y]) > 0.8
    assert model.weight_variances_ and model.predictor.posterior().names

    def ending(inputs: int, outputs: int) -> nn.Module:
        return nn.Sequential(nn.Linear(inputs, outputs), nn.Softmax(1))

    with pytest.raises(InvalidValue, match="logits"):
        FavourClassifier(module=ending, **PROPAGATION).fit(X, y)
