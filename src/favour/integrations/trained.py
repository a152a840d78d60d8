"""scikit-learn estimators around a network that is trained already.

`fit` changes no weight. It compiles the predictor and learns what the network does not say: the variance of the
observations around it (regression), the names of the classes (classification). Give it data that the network was not
trained on, or its noise comes out too small.

    regression        y = f(x) + ε,  ε ~ N(0, σ²):   E[y] = μ(x),  Var[y] = v(x) + σ²
    classification    P(class) = E[softmax(z)],  z ~ N(μ(x), Σ(x)) the logits
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import torch
from torch import nn

from favour.belief import Belief
from favour.classify.predictive import fit_noise
from favour.errors import InvalidValue, MissingExtra, ShapeMismatch
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor

try:
    from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise MissingExtra(
        f'favour.sklearn needs `{error.name}`, which is not installed: pip install "favour[sklearn]"'
    ) from error

__all__ = ["TrainedClassifier", "TrainedRegressor"]

ROWS = 4096  # predicted at a time

# Not attributes of the estimators: they can be compiled again, and need not be pickled.
_predictors: weakref.WeakKeyDictionary[Any, Predictor] = weakref.WeakKeyDictionary()


class _Trained(BaseEstimator):
    """What both estimators share."""

    def __init__(self, model: nn.Module, *, posterior: Any = None) -> None:
        self.model = model
        self.posterior = posterior

    @property
    def predictor(self) -> Predictor:
        """The compiled predictor."""
        check_is_fitted(self)
        if self not in _predictors:
            parameter = next((p for p in self.model.parameters() if p.is_floating_point()), torch.empty(0))
            example = torch.zeros(2, self.n_features_in_, dtype=parameter.dtype, device=parameter.device)
            _predictors[self] = compile(self.model, example, posterior=self.posterior)
        return _predictors[self]

    def _rows(self, X: Any) -> list[np.ndarray]:
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, dtype=np.float64)
        return [X[i : i + ROWS] for i in range(0, len(X), ROWS)]


class TrainedRegressor(RegressorMixin, _Trained):
    """A trained network as a regressor with error bars.

    Args:
        model: From (batch, n_features) to (batch,), (batch, 1) or (batch, n_outputs), with dropout or a `posterior`.
        posterior: As for `favour.compile`.

    Attributes:
        noise_: Variance of the observations around the network, (n_outputs,).

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        >>> X, y = np.random.default_rng(0).normal(size=(50, 2)), np.zeros(50)
        >>> mean, std = TrainedRegressor(net).fit(X, y).predict(X, return_std=True)
        >>> mean.shape, std.shape
        ((50,), (50,))
    """

    def fit(self, X: Any, y: Any) -> TrainedRegressor:
        """Compile, and fit the observation noise; the network stays as it is.

        Args:
            X: (n_samples, n_features), not trained on.
            y: (n_samples,) or (n_samples, n_outputs).
        """
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        _predictors.pop(self, None)
        self._flat = y.ndim == 1
        self.noise_ = np.zeros(1)
        belief = Belief.cat([self.predictor(part) for part in self._rows(X)])
        if belief.mean.numel() != np.asarray(y).size:
            raise ShapeMismatch(
                f"the network's outputs have shape {tuple(belief.mean.shape)}, `y` has {np.shape(y)}; they must agree."
            )
        targets = torch.as_tensor(np.asarray(y), dtype=belief.dtype, device=belief.device).reshape(belief.mean.shape)
        self.noise_ = np.atleast_1d(fit_noise(belief, targets).cpu().numpy().astype(np.float64))
        return self

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """E[y], and on request the standard deviation of an observation, √(network variance + noise)."""
        means, stds = [], []
        for part in self._rows(X):
            mean, stddev = self.predictor(part).numpy()
            means.append(mean.reshape(len(part), -1))
            stds.append(np.sqrt(stddev.reshape(len(part), -1).astype(np.float64) ** 2 + self.noise_))
        mean, std = (np.concatenate(parts) for parts in (means, stds))
        if self._flat:
            mean, std = mean[:, 0], std[:, 0]
        return (mean, std) if return_std else mean


class TrainedClassifier(ClassifierMixin, _Trained):
    """A trained network as a classifier whose probabilities take its uncertainty into account.

    Args:
        model: From (batch, n_features) to logits (batch, n_classes), or to their softmax.
        posterior: As for `favour.compile`.
        classes: Names of the outputs in order; by default the sorted labels that `fit` sees.

    Attributes:
        classes_: The labels.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
        >>> X = np.random.default_rng(0).normal(size=(50, 2))
        >>> TrainedClassifier(net, classes=["a", "b", "c"]).fit(X, ["a"] * 25 + ["b"] * 25).predict_proba(X).shape
        (50, 3)
    """

    def __init__(self, model: nn.Module, *, posterior: Any = None, classes: Any = None) -> None:
        super().__init__(model, posterior=posterior)
        self.classes = classes

    def fit(self, X: Any, y: Any) -> TrainedClassifier:
        """Compile, and learn the names of the classes; the network stays as it is."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        _predictors.pop(self, None)
        self.classes_ = np.unique(y) if self.classes is None else np.asarray(self.classes)
        outputs = self.predictor(np.zeros((1, self.n_features_in_))).mean.shape[-1]
        if outputs != len(self.classes_):
            raise InvalidValue(
                f"the network has {outputs} outputs and `y` {len(self.classes_)} classes; name all of them in order: "
                "`TrainedClassifier(model, classes=[...])`."
            )
        unknown = sorted(set(np.unique(y).tolist()) - set(self.classes_.tolist()))
        if unknown:
            raise InvalidValue(f"`y` holds {unknown}, which are not among `classes`.")
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities E[softmax(z)], (n_samples, n_classes), in the order of `classes_`."""
        p = np.concatenate([np.asarray(self.predictor.probabilities(part).cpu()) for part in self._rows(X)])
        return p / p.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]
