"""The demo: one small dropout classifier, its predictions made three ways.

The network is 64-100-100-10 with ReLU and dropout 0.2, trained on scikit-learn's 8 × 8 handwritten digits.
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import favour
from favour import metrics
from favour.experiments import require

if TYPE_CHECKING:
    from rich.console import Console

SAMPLES = (10, 100)
PATIENCE = 15.0  # seconds
CHUNK = 250  # draws at a time, so that the hidden layers of all of them need not fit in memory at once


@dataclass(frozen=True)
class Data:
    """Standardised pixels, (N, 64), and labels, (N,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


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


def load(seed: int = 0) -> Data:
    """The digits, 70% for training; pixels standardised by the training set's mean and deviation.

    Pixels that are constant there, the corners of the image, are only centred.
    """
    x, y = require("sklearn.datasets").load_digits(return_X_y=True)
    split = require("sklearn.model_selection").train_test_split
    train_x, test_x, train_y, test_y = split(x, y, test_size=0.3, stratify=y, random_state=seed)
    scaler = require("sklearn.preprocessing").StandardScaler().fit(train_x)
    return Data(
        torch.from_numpy(scaler.transform(train_x)).float(),
        torch.from_numpy(train_y),
        torch.from_numpy(scaler.transform(test_x)).float(),
        torch.from_numpy(test_y),
    )


def network(seed: int = 0) -> nn.Sequential:
    """64-100-100-10, ReLU, dropout 0.2 after each hidden layer; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, 100),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(100, 100),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(100, 10),
        )


def train(model: nn.Module, data: Data, epochs: int = 60, seed: int = 0, batch: int = 64) -> Iterator[float]:
    """Adam on the cross-entropy; yields the mean loss of each epoch and leaves the model in eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random_state = torch.get_rng_state()
    for _ in range(epochs):
        losses = []
        # A generator function is suspended at `yield`, so the caller's random state is swapped out per epoch.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            model.train()
            for index in torch.randperm(len(data.train_x)).split(batch):
                loss = nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            model.eval()
            random_state = torch.get_rng_state()
        yield statistics.fmean(losses)


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


def show(comparison: Comparison, console: Console) -> None:
    """Print the table and what it means."""
    from rich.table import Table

    table = Table(
        title=f"Handwritten digits, {comparison.inputs} test images",
        caption=f"times in forward passes, on {comparison.threads} CPU thread(s)",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("accuracy", "NLL", "ECE", "covariance error", "to logits", "in all"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        error = "–" if row.covariance_error is None else f"{row.covariance_error:.1%}"
        table.add_row(
            row.method,
            f"{row.accuracy:.1%}",
            f"{row.nll:.4f}",
            f"{row.ece:.4f}",
            error,
            f"{row.logit_forwards:.1f}",
            f"{row.forwards:.1f}",
        )
    console.print(table)
    console.print(
        "NLL and ECE (lower is better) say how far the stated probabilities can be trusted; the covariance "
        f"error is the distance from the covariance of {comparison.draws:,} samples, itself uncertain "
        f"by about {comparison.reference_error:.1%}; times are in forward passes on the same images, to the "
        "distribution of the logits and on to the class probabilities."
    )


def reliability(p: Tensor, y: Tensor, bins: int = 10) -> dict[str, list[float]]:
    """Confidence, accuracy and number of inputs in each occupied bin of equal width."""
    confidence, guess = p.double().max(1)
    which = (confidence * bins).long().clamp(max=bins - 1)
    count = torch.bincount(which, minlength=bins)
    used = count > 0

    def mean(values: Tensor) -> list[float]:
        total = torch.zeros(bins, dtype=torch.float64).index_add_(0, which, values.double())
        return (total[used] / count[used]).tolist()

    return {"confidence": mean(confidence), "accuracy": mean(guess == y), "count": count[used].tolist()}


@torch.no_grad()
def write(comparison: Comparison, model: nn.Module, data: Data, epochs: int, seed: int, out: Path) -> Path:
    """Put the comparison into `out/demo.json` and build its report; returns the report."""
    import favour.report
    from favour.experiments.record import FORMAT, environment, write_json

    x, y = data.test_x, data.test_y
    curves = {"plain": model(x).softmax(-1), "Favour": favour.compile(model, x[:2]).probabilities(x)}
    content = {
        "experiment": "demo",
        "format": FORMAT,
        "profile": {"name": "demo"},
        "environment": environment(),
        "seeds": {"training": seed, "sampling": seed},
        "data": {"source": "embedded"},
        "training": [
            {"task": "digits", "model": "64-100-100-10, dropout 20%", "epochs": epochs, "inputs": len(data.train_x)}
        ],
        "complete": True,
        "notes": [],
        "title": "Handwritten digits",
        "inputs": comparison.inputs,
        "threads": comparison.threads,
        "draws": comparison.draws,
        "reference_error": comparison.reference_error,
        "rows": [vars(row) for row in comparison.rows],
        "reliability": {name: reliability(p, y) for name, p in curves.items()},
    }
    write_json(out / "demo.json", content)
    return favour.report.build(out)


def main(epochs: int = 60, seed: int = 0, threads: int = 1, out: Path | None = None) -> None:
    """Train, compare, print, write a report to `out`. This is `favour demo`; 0 threads stand for PyTorch's default."""
    require("sklearn")
    console_module, progress = require("rich.console", "cli"), require("rich.progress", "cli")
    console = console_module.Console()
    data, model = load(seed), network(seed)
    console.print(f"Training 64-100-100-10 (ReLU, dropout 0.2) on {len(data.train_x)} digits for {epochs} epochs.")
    if threads > 0:
        torch.set_num_threads(threads)
    for _ in progress.track(train(model, data, epochs, seed), "training", total=epochs, console=console):
        pass
    with console.status("predicting three ways"):
        comparison = compare(model, data, seed)
    show(comparison, console)
    if out is not None:
        console.print(f"The report is {write(comparison, model, data, epochs, seed, out)}")
