"""scikit-learn estimators: a dropout network that says how sure it is.

`FavourRegressor` and `FavourClassifier` train a small network with dropout (or a module of yours) and answer with
Favour's beliefs: for an input x the network under dropout is N(μ(x), v(x)), and

    regression        y = f(x) + ε,  ε ~ N(0, σ²):   E[y] = μ(x),  Var[y] = v(x) + σ²
    classification    P(class) = E[softmax(z)],  z ~ N(μ(x), Σ(x)) the logits.

With `training="propagation"` no mask is drawn: `favour.fit` learns weights and their variances, dropout rates and σ²
through the belief, which then counts the weights' uncertainty too. Otherwise σ² is fitted by maximum likelihood on the
rows that early stopping held out (on all rows where those are fewer than ten). So `return_std=True` is the standard
deviation of an *observation*; `noise_` holds σ². Inputs and targets are standardised. Training is in float32,
prediction in float64 on the CPU.

A fitted estimator is plain data (parameters as numpy arrays) and can be pickled, copied and cloned; the predictor is
compiled when it is first needed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from favour.classify.classes import classifier, ending_of
from favour.classify.simplex import sums_to_one
from favour.errors import InvalidValue, MissingExtra
from favour.integrations.network import Network

try:
    from scipy.optimize import minimize_scalar
    from sklearn.base import ClassifierMixin, MultiOutputMixin, RegressorMixin
    from sklearn.utils import check_random_state
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import validate_data
except ModuleNotFoundError as error:
    raise MissingExtra(
        f'favour.sklearn needs `{error.name}`, which is not installed: pip install "favour[sklearn]"'
    ) from error

__all__ = ["FavourClassifier", "FavourRegressor"]


class FavourRegressor(MultiOutputMixin, RegressorMixin, Network):
    """Regression with error bars, by a dropout network.

    Args:
        hidden: Sizes of the hidden layers.
        dropout: Rate after each hidden layer; the one to begin with where rates are learned, and 0 for none.
        training: `"dropout"`, on thinned networks, or `"propagation"`, variational inference through beliefs.
        activation: `"relu"`, `"tanh"`, `"gelu"` or `"silu"`.
        module: Instead of those three, a function (n_features, n_outputs) -> torch.nn.Module with dropout in it. It
            must be importable for the estimator to be pickled.
        epochs: At most this many passes over the data.
        learning_rate, weight_decay, batch_size: Of Adam; with `"propagation"` the prior stands for a decay.
        validation_fraction: Share of the rows held out for early stopping and for the noise; with 0, all rows serve.
        patience: Epochs without a better validation loss before training stops.
        device: Where to train.
        random_state: Seed of the split, the initial weights and dropout.
        verbose: Show a progress bar on the error stream.

    Attributes:
        noise_: Variance of the observation noise, (n_outputs,).
        state_: Parameters and buffers of the network by name, numpy arrays.
        rates_, weight_variances_: What `"propagation"` learned besides, by module path and by parameter name.
        validation_losses_: By epoch.
        n_iter_: Epochs trained.

    Example:
        >>> X = np.linspace(-2, 2, 200)[:, None]
        >>> y = np.sin(2 * X[:, 0]) + 0.1 * np.random.default_rng(0).normal(size=200)
        >>> model = FavourRegressor((32,), epochs=60, random_state=0).fit(X, y)
        >>> mean, std = model.predict(X, return_std=True)
        >>> mean.shape, std.shape, model.sample_y(X, 5).shape
        ((200,), (200,), (200, 5))
    """

    def fit(self, X: Any, y: Any) -> FavourRegressor:
        """Train the network, then fit the observation noise.

        Args:
            X: (n_samples, n_features).
            y: (n_samples,) or (n_samples, n_outputs).
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64, multi_output=True, y_numeric=True)
        self._flat = y.ndim == 1
        targets = np.asarray(y, dtype=np.float64).reshape(len(y), -1)
        self.n_network_outputs_ = targets.shape[1]
        self._fit_scale(X)
        self.y_mean_, scale = targets.mean(0), targets.std(0)
        self.y_scale_ = np.where(scale > 0, scale, 1.0)
        standard = (targets - self.y_mean_) / self.y_scale_
        held, fitted = self._train(X, standard, nn.functional.mse_loss, "gaussian")
        if fitted is not None and fitted.noise_variance is not None:
            self.noise_ = fitted.noise_variance.cpu().numpy().astype(np.float64) * self.y_scale_**2
            return self
        mean, variance = self._moments(torch.from_numpy(self._standardised(X[held])))
        noise = [_noise((standard[held] - mean)[:, i] ** 2, variance[:, i]) for i in range(self.n_network_outputs_)]
        self.noise_ = np.array(noise) * self.y_scale_**2
        return self

    def _moments(self, x: Tensor) -> tuple[np.ndarray, np.ndarray]:
        def both(part: Tensor) -> tuple[Tensor, Tensor]:
            belief = self.predictor(part)
            shape = (len(part), self.n_network_outputs_)
            return belief.mean.reshape(shape), belief.variance.reshape(shape)

        mean, variance = self._in_pieces(x, both)
        return mean, variance

    def predict(self, X: Any, return_std: bool = False, return_cov: bool = False) -> Any:
        """Predict E[y], and how far observations lie from it.

        Args:
            X: (n_samples, n_features).
            return_std: Also return the standard deviation of an observation: √(network variance + noise).
            return_cov: Also return the covariance between the rows, noise on its diagonal, (n_samples, n_samples),
                with another axis for several outputs. One draw of the network for all rows, see `Predictor.joint`.
        """
        if return_std and return_cov:
            raise InvalidValue("ask for `return_std` or `return_cov`, not both.")
        x = self._inputs(X)
        if return_cov:
            joint = self._joint(x)
            n, C = len(x), self.n_network_outputs_
            blocks = joint.covariance_matrix.reshape(n, C, n, C).diagonal(dim1=1, dim2=3).numpy()  # (n, n, C)
            cov = blocks * self.y_scale_**2 + np.eye(n)[:, :, None] * self.noise_
            mean = joint.mean.reshape(n, C).numpy() * self.y_scale_ + self.y_mean_
            return self._shaped(mean), cov[:, :, 0] if self._flat else cov
        mean, variance = self._moments(x)
        mean = self._shaped(mean * self.y_scale_ + self.y_mean_)
        if not return_std:
            return mean
        return mean, self._shaped(np.sqrt(variance * self.y_scale_**2 + self.noise_))

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0, *, noise: bool = True) -> np.ndarray:
        """Draw observations, one draw of the network for all rows: a function, with observation noise unless told.

        Returns:
            (n_rows, n_samples), or (n_rows, n_outputs, n_samples) for targets with two axes.
        """
        x = self._inputs(X)
        rng = check_random_state(random_state)
        generator = torch.Generator().manual_seed(int(rng.randint(2**31 - 1)))
        draws = self._joint(x).sample((n_samples,), generator)
        draws = draws.reshape(n_samples, len(x), -1).numpy() * self.y_scale_ + self.y_mean_
        if noise:
            draws = draws + rng.normal(size=draws.shape) * np.sqrt(self.noise_)
        draws = np.moveaxis(draws, 0, -1)  # (rows, outputs, draws)
        return draws[:, 0] if self._flat else draws

    def _shaped(self, values: np.ndarray) -> np.ndarray:
        return values[:, 0] if self._flat else values


class FavourClassifier(ClassifierMixin, Network):
    """Classification by a dropout network, with probabilities that take its uncertainty into account.

    Args:
        hidden, dropout, training, activation, module: As in `FavourRegressor`; `module` makes logits, or, trained by
            dropout, ends in a softmax.
        epochs, learning_rate, weight_decay, batch_size, validation_fraction, patience: As there.
        device, random_state, verbose: As there.

    Attributes:
        classes_: The labels.
        state_, rates_, weight_variances_, validation_losses_, n_iter_: As in `FavourRegressor`.

    Example:
        >>> X = np.random.default_rng(0).normal(size=(200, 2))
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> model = FavourClassifier((32,), epochs=60, random_state=0).fit(X, y)
        >>> model.predict([[2.0, 0.0]]), model.predict_proba(X).shape
        (array(['right'], dtype='<U5'), (200, 2))
    """

    def fit(self, X: Any, y: Any) -> FavourClassifier:
        """Train the network.

        Args:
            X: (n_samples, n_features).
            y: Labels of any type, (n_samples,).
        """
        self._check_parameters()
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InvalidValue(f"`y` holds one class only ({self.classes_[0]!r}); a classifier needs at least two.")
        self.n_network_outputs_ = len(self.classes_)
        self._fit_scale(X)
        self._train(X, labels.astype(np.int64), _classes_loss, "categorical")
        if ending_of(self.predictor).link == "sigmoid":
            raise InvalidValue(
                "`module` ends in a sigmoid, whose outputs are no probabilities of exclusive classes; let it make "
                "logits, or end in a softmax."
            )
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Class probabilities E[softmax(z)], (n_samples, n_classes), in the order of `classes_`.

        A softmax that `module` ends in is not taken twice.
        """
        (p,) = self._in_pieces(self._inputs(X), lambda part: [self.predictor.probabilities(part, estimator="nodes")])
        return p / p.sum(1, keepdims=True)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable class of each row."""
        probabilities = self.predict_proba(X)
        return self.classes_[probabilities.argmax(1)]

    def sample_y(self, X: Any, n_samples: int = 1, random_state: Any = 0) -> np.ndarray:
        """Draw labels, (n_rows, n_samples): logits by one draw of the network for all rows, then a label from each."""
        x = self._inputs(X)
        generator = torch.Generator().manual_seed(int(check_random_state(random_state).randint(2**31 - 1)))
        with torch.no_grad():
            joint = classifier(self.predictor).joint(x)
        logits = joint.sample((n_samples,), generator)  # (draws, 1, rows, classes)
        if ending_of(self.predictor).within and ending_of(self.predictor).logits is None:  # probabilities
            logits = logits.clamp(min=torch.finfo(logits.dtype).tiny).log()
        uniform = torch.rand(logits.shape, generator=generator, dtype=logits.dtype)
        labels = (logits - (-uniform.log()).log()).argmax(-1)  # Gumbel: argmax(z + g) ~ softmax(z)
        return self.classes_[labels.reshape(n_samples, len(x)).T.numpy()]


def _classes_loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """−log p of the labels: of logits, or of probabilities where a module has taken the softmax itself."""
    if sums_to_one(outputs.detach()):
        return nn.functional.nll_loss(outputs.clamp(min=torch.finfo(outputs.dtype).tiny).log(), labels)
    return nn.functional.cross_entropy(outputs, labels)


def _noise(squares: np.ndarray, variance: np.ndarray) -> float:
    """σ² that maximises Σ log N(r; 0, v + σ²), for squared residuals r² and variances v of the network."""
    top = float(squares.mean())
    if top <= 0:
        return 0.0

    def loss(log: float) -> float:
        total = variance + np.exp(log)
        return float((np.log(total) + squares / total).mean())

    best = minimize_scalar(loss, bounds=(np.log(top) - 12, np.log(top) + 1), method="bounded")
    return float(np.exp(best.x))
