"""What the scikit-learn estimators share: parameters, training, and the predictor.

"dropout"       Adam on the loss of thinned networks, at the rate that is given
"propagation"   `favour.fit`: weights with a mean-field posterior, dropout rates and noise, through beliefs
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from favour.belief import Belief
from favour.classify.simplex import sums_to_one
from favour.errors import InvalidType, InvalidValue, MissingExtra
from favour.learn.fit import fit
from favour.learn.fitted import Fitted
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor

try:
    from sklearn.base import BaseEstimator
    from sklearn.utils import check_random_state
    from sklearn.utils.validation import check_is_fitted, validate_data
except ModuleNotFoundError as error:
    raise MissingExtra(
        f'favour.sklearn needs `{error.name}`, which is not installed: pip install "favour[sklearn]"'
    ) from error

TRAINING = ("dropout", "propagation")
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU, "silu": nn.SiLU}
ROWS = 4096  # predicted at a time
FEW = 10  # held-out rows below which the noise is fitted on all rows

# Not attributes of the estimators: predicting must not change them, nor may they be pickled.
_predictors: weakref.WeakKeyDictionary[Any, Predictor] = weakref.WeakKeyDictionary()


class Network(BaseEstimator):
    """What both estimators share: parameters, training and the predictor."""

    def __init__(
        self,
        hidden: Sequence[int] = (64, 64),
        *,
        dropout: float = 0.1,
        training: str = "dropout",
        activation: str = "relu",
        module: Callable[[int, int], nn.Module] | None = None,
        epochs: int = 300,
        learning_rate: float = 3e-3,
        weight_decay: float = 1e-4,
        batch_size: int = 32,
        validation_fraction: float = 0.1,
        patience: int = 30,
        device: str = "cpu",
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.hidden = hidden
        self.dropout = dropout
        self.training = training
        self.activation = activation
        self.module = module
        self.epochs = epochs
        self.learning_rate = learning_rate
        self.weight_decay = weight_decay
        self.batch_size = batch_size
        self.validation_fraction = validation_fraction
        self.patience = patience
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def _check_parameters(self) -> None:
        sizes = [self.hidden] if isinstance(self.hidden, Integral) else list(self.hidden)
        problems = [
            f"`hidden` is {self.hidden!r}; give sizes of at least 1"
            for size in sizes
            if not isinstance(size, Integral) or size < 1
        ]
        for name, least, most in (("dropout", 0, 1), ("validation_fraction", 0, 1), ("weight_decay", 0, np.inf)):
            value = getattr(self, name)
            if not isinstance(value, (int, float, np.number)) or not least <= value < most:
                problems.append(f"`{name}` is {value!r}; it must be at least {least} and below {most}")
        for name in ("epochs", "batch_size", "patience"):
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < 1:
                problems.append(f"`{name}` is {value!r}; it must be a whole number of at least 1")
        if not self.learning_rate > 0:
            problems.append(f"`learning_rate` is {self.learning_rate!r}; it must be above 0")
        if self.activation not in ACTIVATIONS:
            problems.append(f"`activation` is {self.activation!r}; it must be one of {', '.join(ACTIVATIONS)}")
        if self.training not in TRAINING:
            problems.append(f"`training` is {self.training!r}; it must be one of {', '.join(TRAINING)}")
        if problems:
            raise InvalidValue("; ".join(problems) + ".")

    def _module(self) -> nn.Module:
        """A fresh network, n_features_in_ to n_network_outputs_."""
        inputs, outputs = self.n_features_in_, self.n_network_outputs_
        if self.module is not None:
            made = self.module(inputs, outputs)
            if not isinstance(made, nn.Module):
                raise InvalidType(
                    f"`module({inputs}, {outputs})` returned a {type(made).__name__}; it must make a torch.nn.Module "
                    f"from (batch, {inputs}) to (batch, {outputs})."
                )
            return made
        layers: list[nn.Module] = []
        for size in [self.hidden] if isinstance(self.hidden, Integral) else self.hidden:
            layers += [nn.Linear(inputs, int(size)), ACTIVATIONS[self.activation](), nn.Dropout(self.dropout)]
            inputs = int(size)
        return nn.Sequential(*layers, nn.Linear(inputs, outputs))

    def _train(
        self, X: np.ndarray, y: np.ndarray, loss: Callable[[Tensor, Tensor], Tensor], likelihood: str
    ) -> tuple[np.ndarray, Fitted | None]:
        """Train on standardised inputs; returns the numbers of the rows held out, and what `favour.fit` gave."""
        rng = check_random_state(self.random_state)
        rows = rng.permutation(len(X))
        held = round(self.validation_fraction * len(X)) if len(X) > 1 else 0
        validation, training = (rows[:held], rows[held:]) if held else (rows, rows)
        seed = int(rng.randint(2**31 - 1))
        with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay as they are
            torch.manual_seed(seed)
            net = self._module().to(self.device, torch.float32)
            tensors = [torch.as_tensor(t, device=self.device) for t in (self._standardised(X).astype(np.float32), y)]
            tensors = [t.float() if t.is_floating_point() else t for t in tensors]
            fitted = None
            self.validation_losses_: list[float] = []
            self.rates_: dict[str, np.ndarray] = {}
            self.weight_variances_: dict[str, np.ndarray] = {}
            if self.training == "propagation":
                net, fitted = self._propagate(net, tensors, training, validation if held else None, likelihood, seed)
            else:
                self._descend(net, tensors, training, validation, loss)
        self.state_ = {name: t.detach().cpu().numpy() for name, t in net.state_dict().items()}
        _predictors.pop(self, None)
        return validation if len(validation) >= FEW else rows, fitted

    def _propagate(
        self,
        net: nn.Module,
        tensors: list[Tensor],
        training: np.ndarray,
        validation: np.ndarray | None,
        likelihood: str,
        seed: int,
    ) -> tuple[nn.Module, Fitted]:
        """`favour.fit` on the rows for training; the best state on those held out is kept."""
        x, y = tensors
        net.eval()
        with torch.no_grad():
            if likelihood == "categorical" and sums_to_one(net(x[:2])):
                raise InvalidValue('`module` ends in a softmax; for training="propagation" let it make logits.')
        held = 0 if validation is None else (x[torch.as_tensor(validation)], y[torch.as_tensor(validation)])
        rows = torch.as_tensor(training)
        fitted = fit(
            net,
            (x[rows], y[rows]),
            likelihood=likelihood,
            epochs=self.epochs,
            lr={"means": self.learning_rate},
            validation=held,
            batch_size=self.batch_size,
            patience=self.patience,
            seed=seed,
            check=False,
            progress=self.verbose,
        )
        model = fitted.model
        assert model is not None
        named = dict(model.named_parameters())
        variances = fitted.posterior.variances(named)
        self.weight_variances_ = {name: v.detach().cpu().numpy() for name, v in variances.items()}
        self.rates_ = {path: p.cpu().numpy() for path, p in fitted.rates.items()}
        self.validation_losses_ = [r.nll if r.held_nll is None else r.held_nll for r in fitted.history]
        self.n_iter_ = len(fitted.history)
        return model, fitted

    def _descend(
        self,
        net: nn.Module,
        tensors: list[Tensor],
        training: np.ndarray,
        validation: np.ndarray,
        loss: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        """Adam with early stopping: the best state on the held-out rows is kept."""
        x, y = tensors
        held, train = torch.as_tensor(validation), torch.as_tensor(training)
        optimiser = torch.optim.Adam(net.parameters(), self.learning_rate, weight_decay=self.weight_decay)
        best, since, state = np.inf, 0, None
        self.validation_losses_ = []
        with _bar(self.verbose, type(self).__name__, self.epochs) as show:
            for epoch in range(self.epochs):
                net.train()
                for batch in train[torch.randperm(len(train))].split(self.batch_size):
                    if len(batch) == 1 and len(train) > 1 and self.module is not None:
                        continue  # a batch norm cannot train on one row
                    optimiser.zero_grad()
                    loss(net(x[batch]), y[batch]).backward()
                    optimiser.step()
                net.eval()
                with torch.no_grad():
                    now = float(loss(net(x[held]), y[held]))
                self.validation_losses_.append(now)
                show(epoch + 1, now)
                if not np.isfinite(now):
                    raise InvalidValue(
                        f"the loss became {now} in epoch {epoch + 1}; lower `learning_rate` ({self.learning_rate})."
                    )
                if now < best:
                    best, since = now, 0
                    state = {name: t.detach().clone() for name, t in net.state_dict().items()}
                else:
                    since += 1
                    if since >= self.patience:
                        break
        self.n_iter_ = len(self.validation_losses_)
        assert state is not None
        net.load_state_dict(state)

    def _fit_scale(self, X: np.ndarray) -> None:
        self.x_mean_ = X.mean(0)
        scale = X.std(0)
        self.x_scale_ = np.where(scale > 0, scale, 1.0)

    def _standardised(self, X: np.ndarray) -> np.ndarray:
        return (X - self.x_mean_) / self.x_scale_

    @property
    def predictor(self) -> Predictor:
        """The compiled predictor, from standardised inputs (float64) to standardised targets or logits."""
        check_is_fitted(self)
        if self not in _predictors:
            with torch.random.fork_rng(devices=[]):  # its first weights are drawn, and then replaced
                net = self._module()
            net.load_state_dict({name: torch.as_tensor(t) for name, t in self.state_.items()})
            for path, p in self.rates_.items():
                net.get_submodule(path).p = float(p)  # type: ignore[assignment]
            variances = {name: torch.as_tensor(v).double() for name, v in self.weight_variances_.items()}
            example = torch.zeros(2, self.n_features_in_, dtype=torch.float64)
            _predictors[self] = compile(net.double().eval(), example, method="adjoint", posterior=variances or None)
        return _predictors[self]

    def _inputs(self, X: Any) -> Tensor:
        check_is_fitted(self)
        return torch.from_numpy(self._standardised(validate_data(self, X, reset=False, dtype=np.float64)))

    def _in_pieces(self, x: Tensor, function: Callable[[Tensor], Sequence[Tensor]]) -> list[np.ndarray]:
        with torch.no_grad():
            pieces = [function(part) for part in x.split(ROWS)]
        return [torch.cat(parts).numpy() for parts in zip(*pieces, strict=True)]

    def _joint(self, x: Tensor) -> Belief:
        with torch.no_grad():
            return self.predictor.joint(x)


@contextmanager
def _bar(verbose: bool, title: str, epochs: int) -> Iterator[Callable[[int, float], None]]:
    """Shows epochs on the error stream: a bar where rich is installed, else a line."""
    if not verbose:
        yield lambda epoch, loss: None
        return
    try:
        from rich.console import Console
        from rich.progress import Progress
    except ModuleNotFoundError:
        yield lambda epoch, loss: print(
            f"\r{title}: epoch {epoch} of {epochs}, validation loss {loss:.4g}", end="", file=sys.stderr, flush=True
        )
        print(file=sys.stderr)
        return
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task(title, total=epochs)
        yield lambda epoch, loss: progress.update(
            task, completed=epoch, description=f"{title}, validation loss {loss:.4g}"
        )
