r"""`favour.fit`: posterior, dropout rates and noise learned through beliefs, without samples.

Two ways of training:

    means among what is learned    variational inference: epochs of Adam on the bound, step sizes that fall to 0 along a
                                   cosine; the divergence's weight rises to 1 with the square of the epochs over the
                                   first half, and of the states behind that the one is kept that gives held-out rows
                                   the greatest likelihood
    means fixed                    a fit after the fact: the weight w of the divergence is not known, so w walks down
                                   WEIGHTS in equal shares of the steps, each beginning where the last ended, and the w
                                   (and state) is kept that gives held-out rows the greatest likelihood

With fixed means the residuals of the rows trained on are too small, since the means were fitted to them: Gaussian noise
is then that of the held-out rows, and in the end what makes them most likely.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import InvalidType, InvalidValue, OutOfRange
from favour.learn.divergence import Prior
from favour.learn.fitted import Fitted
from favour.learn.history import Callback, bar
from favour.learn.learner import LEARN, Learner
from favour.learn.likelihoods import Likelihood
from favour.learn.rows import Rows, moved, rows_of
from favour.learn.task import Schedule, Task
from favour.methods.method import check_whole
from favour.posterior import Posterior

WEIGHTS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 3e-4, 1e-4)
WARM_UP = 0.5  # of the epochs: counted in full from the start, the divergence prunes units before they learn anything
LR = {"means": 1e-3, "variances": 1e-2, "rates": 3e-2, "noise": 1e-2}
LR_AFTER = {"means": 1e-3, "variances": 1e-1, "rates": 1e-1, "noise": 3e-2}  # with fixed means: few steps, no harm
WORSE = 2  # weights in a row that are worse than the best before the walk ends
STEPS = 30  # at least, for each weight


def fit(
    model: nn.Module,
    loader: Any,
    *,
    likelihood: str | Likelihood,
    learn: Sequence[str] = LEARN,
    posterior: str | Posterior | Mapping[Any, Any] = "mean_field",
    epochs: int = 1,
    lr: float | Mapping[str, float] | None = None,
    precision: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    validation: Any = 0.1,
    kl_weight: float | None = None,
    prior: Prior | None = None,
    noise: float | Tensor | None = None,
    layers: Sequence[str] | None = None,
    rank: int = 2,
    initial_std: float = 0.1,
    batch_size: int = 128,
    patience: int | None = None,
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    compiled: bool = False,
    check: bool = True,
    **options: Any,
) -> Fitted:
    """Learn what a network does not know: variances of its weights, dropout rates, noise; its weights too if wanted.

    Args:
        model: Not touched; its copy is trained.
        loader: Pairs (inputs, targets): a `DataLoader`, a list of batches or any other iterable; or one pair of
            tensors.
        likelihood: `"gaussian"`, `"heteroscedastic"`, `"categorical"`, `"bernoulli"`, `"poisson"`, `"student_t"`, or
            one of those objects of `favour.losses`.
        learn: Any of `"means"`, `"variances"`, `"rates"`, `"noise"` and `"prior"` (its scale, by empirical Bayes).
            `("variances", "noise")` fits a posterior to a trained network, `("rates",)` its dropout; all five, the
            default, are variational inference.
        posterior: `"mean_field"`, `"rows"` (each row of a weight diagonal plus rank `rank`), `"low_rank"` (diagonal
            plus `rank` directions across all layers), `"last_layer"` (Kronecker over the last layer and its bias), or
            a `favour.Posterior` to begin at.
        epochs: Passes over the rows trained on, in all.
        lr: Step size of Adam, one, or by the names of `learn`.
        precision: Of the variance and reverse sweeps, as in `favour.compile`.
        callbacks: Called with the learner and a `favour.learn.history.Record` after every epoch; True ends the fit.
        progress: Show a bar on a terminal.
        validation: Share of the rows that is held out, or a loader or pair of tensors; 0 for none.
        kl_weight: Of the divergence. None: 1 where means are learned, reached after half of the epochs; else chosen on
            the held-out rows.
        prior: Standard deviations of the weights' prior: a number, numbers by parameter name, or `"parameter"`,
            `"layer"` or `"shared"` for empirical Bayes. None: `"layer"` where the prior is learned, else the root mean
            square that each layer's weights begin with.
        noise: Variance of the observations to begin with, or to keep.
        layers: Names of the modules whose weights are uncertain; all linear and convolutional layers by default.
        rank: Of `"rows"` and `"low_rank"`.
        initial_std: Standard deviations to begin with, over the root mean square of the layer's weights.
        batch_size: Where `loader` is a pair of tensors.
        patience: Epochs without a better held-out likelihood before training stops; None to train to the end.
        seed: Of the rows held out, the order of the rows and the posterior's start.
        checkpoint: File that every epoch is written to, and that an interrupted fit goes on from.
        compiled: Through `torch.compile`, worth it from some minutes of training on.
        check: Whether to compare the fitted predictor with samples, as `favour.compile` does.
        options: Of `favour.compile`, for training and for the result: `directions=3`, `method="diag"`.

    Returns:
        A `Fitted`, at the state that gave held-out rows the greatest likelihood (the last one without any).

    Raises:
        InvalidValue, InvalidType, ShapeMismatch, UnknownName: Of what is given, before anything is trained.
        DivergedFit: The bound became NaN or grew beyond bounds; its `fitted` is the last good state.

    Example:
        >>> import favour
        >>> x = torch.linspace(-2, 2, 200)[:, None]
        >>> y = torch.sin(2 * x) + 0.1 * torch.randn(200, 1)
        >>> model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
        >>> fitted = favour.fit(model, (x, y), likelihood="gaussian", epochs=2)
        >>> fitted.predict(x).variance.shape, fitted.noise_variance.shape
        (torch.Size([200, 1]), torch.Size([1]))
    """
    _check(model, callbacks, checkpoint, kl_weight)
    for name, number, least in (
        ("epochs", epochs, 1),
        ("batch_size", batch_size, 1),
        ("rank", rank, 0),
        ("seed", seed, 0),
    ):
        check_whole(name, number, least)
    check_whole("patience", patience, 1, optional=True)
    rows = rows_of(loader, validation, batch_size, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        first = next(iter(rows.batches()))
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        learner = Learner(
            model,
            moved(first, device)[0],
            likelihood=likelihood,
            learn=learn,
            posterior=posterior,
            layers=layers,
            rank=rank,
            initial_std=initial_std,
            prior=prior,
            noise=noise,
            seed=seed,
            compiled=compiled,
            precision=precision,
            **options,
        )
        for _, y in rows.held:
            learner.checked(y)
        task = Task(learner, rows, device, seed, tuple(callbacks), options | {"precision": precision}, check)
        if learner.log_noise is not None and noise is None:
            task.start_noise()
        task.checkpoint = None if checkpoint is None else Path(checkpoint)
        plan = _schedule(learner, rows, epochs, kl_weight, lr, patience)
        with bar(progress, f"fitting {type(model).__name__}", sum(plan.steps)) as show:
            task.run(plan, show)
        return task.result()


def _check(model: Any, callbacks: Sequence[Any], checkpoint: Any, kl_weight: float | None) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidType(f"`model` is a {type(model).__name__}; a torch.nn.Module is needed.")
    if kl_weight is not None and not 0 <= kl_weight < math.inf:
        raise InvalidValue(f"`kl_weight` is {kl_weight}; a number of at least 0 is needed.")
    for callback in callbacks:
        if not callable(callback):
            raise InvalidType(f"`callbacks` holds {callback!r}; functions of a learner and a record are needed.")
    if checkpoint is not None and (Path(checkpoint).is_dir() or not Path(checkpoint).parent.is_dir()):
        raise InvalidValue(f"`checkpoint` is `{checkpoint}`; the name of a file in a folder that exists is needed.")


def _schedule(
    learner: Learner,
    rows: Rows,
    epochs: int,
    kl_weight: float | None,
    lr: float | Mapping[str, float] | None,
    patience: int | None,
) -> Schedule:
    after = "means" not in learner.learn
    step_sizes = _step_sizes(lr, LR_AFTER if after else LR)
    if not after or kl_weight is not None:
        last, rise = 1.0 if kl_weight is None else float(kl_weight), WARM_UP * epochs if "means" in learner.learn else 1
        rising = [last * min(1.0, (i + 1) / max(1.0, rise)) ** 2 for i in range(epochs)]
        return Schedule(rising, (rows.steps,) * epochs, step_sizes, False, patience)
    if not rows.held:
        raise InvalidValue(
            "with fixed means the weight of the divergence is chosen on held-out rows, and there are none: give "
            "`validation` or `kl_weight`."
        )
    total = epochs * rows.steps
    few = max(1, -(-len(WEIGHTS) * STEPS // total))
    weights = WEIGHTS[:: min(few, 4)]
    if total < STEPS * len(weights):
        warnings.warn(
            f"{total} steps are few to choose among {len(weights)} weights of the divergence; {STEPS} for each are "
            f"advisable. Raise `epochs`, to {-(-STEPS * len(WEIGHTS) // rows.steps)} for all {len(WEIGHTS)} weights.",
            OutOfRange,
            stacklevel=3,
        )
    steps = [total * (i + 1) // len(weights) - total * i // len(weights) for i in range(len(weights))]
    return Schedule(weights, steps, step_sizes, True, WORSE)


def _step_sizes(lr: float | Mapping[str, float] | None, default: Mapping[str, float]) -> dict[str, float]:
    sizes = dict.fromkeys(default, float(lr)) if isinstance(lr, int | float) else dict(lr or {})
    unknown = [name for name in sizes if name not in default]
    if unknown:
        raise InvalidValue(f"`lr` names {', '.join(map(repr, unknown))}; step sizes are of {', '.join(default)}.")
    if bad := [f"{name}: {value}" for name, value in sizes.items() if not 0 < value < math.inf]:
        raise InvalidValue(f"`lr` holds {', '.join(bad)}; step sizes are positive.")
    return dict(default) | sizes
