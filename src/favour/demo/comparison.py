"""One dropout classifier, its predictions made three ways.

With dropout left on, its logits z are random. Each row of the table estimates p = E[softmax(z)]:

    plain              softmax of one forward pass with dropout off; no covariance
    n samples          the average softmax of n forward passes with dropout on
    Favour             from the mean and covariance of z, computed without sampling

The covariance is judged against S, that of 2,000 further samples, by ‖Σ − S‖_F / ‖S‖_F averaged over the test
inputs. S has an error of its own: for draws with deviations d from their mean,

    E‖S − Cov z‖²_F  ≈  1/n · (mean ‖d‖⁴ − ‖S‖²_F)

and an estimate whose error is near the root of this cannot be told from the truth by this reference.

Times are taken twice, from the inputs to the logits (their draws, or their mean and covariance) and on to the
class probabilities, and are divided by that of one forward pass on the same batch in the same run: medians,
all methods taking turns so that a busy moment touches them alike. They are taken on one thread unless told
otherwise: operations this small gain little from a second, and where another program competes for the cores,
threads that wait for each other make the ratios meaningless.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import favour
from favour import metrics
from favour.demo.digits import Data

SAMPLES = (10, 100)
PATIENCE = 15.0  # seconds
CHUNK = 250  # draws at a time, so that the hidden layers of all of them need not fit in memory at once


@dataclass(frozen=True)
class Method:
    """A way to predict: the logits in the form it has them, and what follows from that form."""

    name: str
    logits: Callable[[], Any]
    probabilities: Callable[[Any], Tensor]
    covariance: Callable[[Any], Tensor] | None

    def predict(self) -> Tensor:
        """The class probabilities, (batch, classes)."""
        return self.probabilities(self.logits())


@dataclass(frozen=True)
class Row:
    """One line of the table; times in forward passes, to the distribution of the logits and in all.

    `covariance_error` is None where the method gives no covariance.
    """

    method: str
    accuracy: float
    nll: float
    ece: float
    covariance_error: float | None
    logit_forwards: float
    forwards: float


@dataclass(frozen=True)
class Comparison:
    """The table, how many samples judged the covariance and their own error, and the circumstances."""

    rows: tuple[Row, ...]
    draws: int
    reference_error: float
    inputs: int
    threads: int


@torch.no_grad()
def compare(model: nn.Module, data: Data, seed: int = 0, repeats: int = 15, draws: int = 2000) -> Comparison:
    """Predict the test set three ways; `draws` samples are the reference for the covariance."""
    x, y = data.test_x, data.test_y
    predict = favour.compile(model, x[:2])
    generator = torch.Generator().manual_seed(seed)
    reference, reference_error = _reference(model, x, draws, generator)

    def sampled(n: int) -> Method:
        return Method(
            f"{n} samples",
            lambda: favour.sample(model, x, n, generator=generator),
            lambda z: z.softmax(-1).mean(0),
            _covariance,
        )

    def believe() -> favour.Belief:
        belief = predict(x)
        belief.covariance_matrix  # noqa: B018  (it may be formed on demand, and that is part of the price)
        return belief

    methods = [
        Method("plain", lambda: model(x), lambda z: z.softmax(-1), None),
        *map(sampled, SAMPLES),
        Method("Favour", believe, favour.probabilities, lambda b: b.covariance_matrix),
    ]
    logits = [method.logits() for method in methods]
    seconds = _medians([call for m in methods for call in (m.logits, m.predict)], repeats)
    forwards = [duration / seconds[0] for duration in seconds]
    rows = []
    for method, z, *times in zip(methods, logits, forwards[::2], forwards[1::2], strict=True):
        p = method.probabilities(z)
        error = None if method.covariance is None else _relative_error(method.covariance(z), reference)
        rows.append(Row(method.name, metrics.accuracy(p, y), metrics.nll(p, y), metrics.ece(p, y), error, *times))
    return Comparison(tuple(rows), draws, reference_error, len(x), torch.get_num_threads())


def _reference(model: nn.Module, x: Tensor, n: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """The covariance of n draws, (batch, C, C), and its own relative error, averaged over the batch."""
    sizes = [CHUNK] * (n // CHUNK) + [n % CHUNK] * (n % CHUNK > 0)
    z = torch.cat([favour.sample(model, x, size, generator=generator) for size in sizes]).double()
    covariance = _covariance(z)
    fourth = (z - z.mean(0)).square().sum(-1).square().mean(0)  # mean ‖d‖⁴, (batch,)
    norm = torch.linalg.matrix_norm(covariance)
    return covariance, (((fourth - norm.square()) / n).sqrt() / norm).mean().item()


def _covariance(draws: Tensor) -> Tensor:
    """The unbiased sample covariance: (n, batch, C) → (batch, C, C)."""
    d = draws - draws.mean(0)
    return torch.einsum("nbi,nbj->bij", d, d) / (len(d) - 1)


def _relative_error(covariance: Tensor, reference: Tensor) -> float:
    norm = torch.linalg.matrix_norm
    return (norm(covariance.to(reference) - reference) / norm(reference)).mean().item()


def _medians(calls: list[Callable[[], object]], repeats: int) -> list[float]:
    """The median seconds of each call over `repeats` rounds of turns.

    An untimed call precedes each timed one, so that none pays for the caches its predecessor emptied. On a
    busy machine the rounds stop early, after `PATIENCE` seconds.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for done in range(repeats):
        if done >= 3 and time.perf_counter() - begin > PATIENCE:
            break
        for call, record in zip(calls, seconds, strict=True):
            call()
            start = time.perf_counter()
            call()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in seconds]
