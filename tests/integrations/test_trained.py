"""A trained network in scikit-learn: weights stay, noise and classes are learnt, pipelines and scores work."""

import numpy as np
import pytest
import torch
from torch import nn

import favour
from favour.errors import InvalidValue, ShapeMismatch

sklearn = pytest.importorskip("sklearn")
from sklearn.base import clone  # noqa: E402
from sklearn.pipeline import make_pipeline  # noqa: E402
from sklearn.preprocessing import StandardScaler  # noqa: E402

from favour.sklearn import TrainedClassifier, TrainedRegressor  # noqa: E402


def make_net(outputs):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, outputs))


def data(n=400, spread=0.5):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 4))
    with torch.no_grad():
        mean = make_net(1).eval()(torch.tensor(X, dtype=torch.float32)).numpy()[:, 0]
    return X, mean + spread * rng.normal(size=n)


def test_fit_leaves_weights_and_mode_alone_and_finds_the_noise():
    net = make_net(1)
    before = {name: t.clone() for name, t in net.state_dict().items()}
    X, y = data()
    model = TrainedRegressor(net).fit(X, y)
    assert net.training and all(torch.equal(before[k], t) for k, t in net.state_dict().items())
    # The rest of the squared residuals, beyond the network's own variance, belongs to the noise.
    predict = favour.compile(net, torch.zeros(2, 4))
    belief = predict(X)
    expected = np.mean((y - np.asarray(belief.mean)[:, 0]) ** 2 - np.asarray(belief.variance)[:, 0])
    assert model.noise_[0] == pytest.approx(expected, rel=0.1)
    mean, std = model.predict(X, return_std=True)
    np.testing.assert_allclose(mean, np.asarray(belief.mean)[:, 0], rtol=1e-6)
    np.testing.assert_allclose(std**2, np.asarray(belief.variance)[:, 0] + model.noise_, rtol=1e-5)


def test_pipelines_clones_and_columns_of_targets():
    X, y = data(60)
    pipe = make_pipeline(StandardScaler(), TrainedRegressor(make_net(2))).fit(X, np.stack([y, y], 1))
    assert pipe.predict(X).shape == (60, 2) and np.isfinite(pipe.score(X, np.stack([y, y], 1)))
    assert clone(TrainedRegressor(make_net(1))).fit(X, y[:, None]).predict(X).shape == (60, 1)
    with pytest.raises(ShapeMismatch, match="outputs have shape"):
        TrainedRegressor(make_net(3)).fit(X, y)


def test_classifier_has_the_predictors_probabilities_and_labels():
    X, _ = data(50)
    net, names = make_net(3), np.array(["a", "b", "c"])
    labels = names[np.arange(50) % 3]
    model = TrainedClassifier(net).fit(X, labels)
    expected = favour.compile(net, torch.zeros(2, 4)).probabilities(X)
    np.testing.assert_allclose(model.predict_proba(X), expected, atol=1e-5)
    assert set(model.predict(X)) <= set(names) and 0 <= model.score(X, labels) <= 1


def test_classes_that_fit_did_not_see_are_named():
    X, _ = data(20)
    few = ["a", "b"] * 10
    with pytest.raises(InvalidValue, match="classes="):
        TrainedClassifier(make_net(3)).fit(X, few)
    assert TrainedClassifier(make_net(3), classes=["a", "b", "c"]).fit(X, few).predict_proba(X).shape == (20, 3)
    with pytest.raises(InvalidValue, match="not among"):
        TrainedClassifier(make_net(3), classes=["a", "c", "d"]).fit(X, few)
