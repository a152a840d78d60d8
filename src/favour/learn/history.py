"""What a fit reports while it runs, and how it judges itself on held-out rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.classify.predictive import fit_noise, probabilities
from favour.inspect.metrics import ece
from favour.learn.learner import Learner
from favour.learn.likelihoods import Gaussian
from favour.learn.rows import Batch, moved
from favour.progress import Bar

LEVEL = 0.9
_Z = 1.6448536269514722  # Φ⁻¹(.95)


@dataclass(frozen=True)
class Record:
    """One epoch, or one weight of the divergence where that is searched for.

    Attributes:
        epoch: Counted from 1.
        kl_weight: w of the divergence.
        bound: −(N · nll + divergence), nats: the bound on log p(y) of the rows trained on.
        nll: Mean expected −log p of the epoch's batches.
        divergence: Of the weights, unweighted.
        held_nll: −log E[p] of held-out rows, a mean; None without any.
        calibration: Of held-out rows: expected calibration error of classes; for numbers how far the share within their
            90% intervals is from .9.
        seconds: Since the fit began.
    """

    epoch: int
    kl_weight: float
    bound: float
    nll: float
    divergence: float
    held_nll: float | None
    calibration: float | None
    seconds: float

    def __str__(self) -> str:
        parts = [f"bound {self.bound:,.1f}", f"likelihood {-self.nll:.4f}"]
        parts += [] if self.held_nll is None else [f"held out {-self.held_nll:.4f}"]
        parts += [] if self.calibration is None else [f"calibration {self.calibration:.4f}"]
        return ", ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers by name."""
        return asdict(self)


Callback = Callable[[Learner, Record], Any]


@dataclass(frozen=True)
class Judged:
    """Of held-out rows: mean −log E[p], calibration, and the noise they were judged with."""

    nll: float
    calibration: float | None
    noise: Tensor | None


def judge(learner: Learner, held: Sequence[Batch], device: torch.device, *, refit_noise: bool = False) -> Judged | None:
    """Score the learner on held-out rows.

    Args:
        learner: As it is.
        held: Batches.
        device: Of its parameters.
        refit_noise: Score with the noise that makes these rows most likely (Gaussian likelihoods).
    """
    if not held:
        return None
    with torch.no_grad():
        answers = []
        for batch in held:
            x, y = moved(batch, device)
            belief = learner(x)
            answers.append((belief, learner.targets(y, belief)))
        noise = learner.noise()
        if refit_noise and isinstance(learner.likelihood, Gaussian):
            whole = Belief(
                torch.cat([b.mean for b, _ in answers]), torch.cat([b.variance for b, _ in answers]), validate=False
            )
            y = torch.cat([y for _, y in answers])
            least = 1e-6 * (y - whole.mean).square().mean(0)
            noise = torch.maximum(fit_noise(whole, y), least.clamp(min=torch.finfo(least.dtype).tiny))
        rows = [learner.likelihood.predictive(belief, y, noise) for belief, y in answers]
        return Judged(float(torch.cat(rows).mean()), _calibration(learner, answers, noise), noise)


def _calibration(learner: Learner, answers: list[tuple[Belief, Tensor]], noise: Tensor | None) -> float | None:
    likelihood = learner.likelihood
    if likelihood.classes and likelihood.covariance:
        p = torch.cat([probabilities(belief, kind="softmax") for belief, _ in answers])
        return ece(p, torch.cat([y for _, y in answers]))
    if likelihood.classes:
        p = torch.cat([probabilities(belief, kind="multilabel") for belief, _ in answers]).flatten()
        y = torch.cat([y for _, y in answers]).flatten()
        return ece(torch.stack([1 - p, p], 1), y.round().long())
    if not isinstance(likelihood, Gaussian) or noise is None:
        return None
    inside = [((y - b.mean).abs() <= _Z * (b.variance + noise).sqrt()).double().flatten() for b, y in answers]
    return abs(float(torch.cat(inside).mean()) - LEVEL)


@contextmanager
def bar(shown: bool, title: str, total: int) -> Iterator[Callable[[str], None]]:
    """Shows steps on a terminal's error stream, by tqdm where it is installed, else by a line of our own."""
    if not shown or not sys.stderr.isatty():
        yield lambda text: None
        return
    try:
        tqdm = import_module("tqdm").tqdm
    except ModuleNotFoundError:
        with Bar(title, total) as line:
            yield lambda text: line.advance(0)
        return
    with tqdm(total=total, desc=title, leave=False) as line:

        def advance(text: str) -> None:
            line.set_postfix_str(text, refresh=False)
            line.update()

        yield advance
