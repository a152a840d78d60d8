"""Times, memory and errors.

**Times.** Candidates take turns, so that a slow moment of the machine hits all of them; a time is the median over the
rounds and its spread half the distance between the quartiles. What is short is called several times in a round.

**Errors.** With S the covariance of N draws (the reference), Σ an estimate and d the draws less their mean,

    V = mean ‖d‖⁴ − ‖S‖²_F                          so E‖S − Cov‖²_F ≈ V/N, and V/n for n draws
    e² = mean over inputs of (‖Σ − S‖² − V/N)/‖S‖²  the error of Σ less what the reference contributes
    c² = mean over inputs of V/‖S‖²                 the error of n draws is c/√n

and an estimate is worth n = c²/e² draws. Beyond N draws nothing can be told apart: there n is given as at least N. The
c that counts is fitted to errors measured with fresh draws at a few n; V's own is recorded beside.

**Memory.** The peak of a call over what was there before: on a GPU by the allocator's count, on a CPU the bytes of all
tensors alive at the worst moment, counted operation by operation in eager code (compiled code allocates less).
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SHORT = 2e-3  # seconds: what takes less is called several times a round

KEPT_MEMORY = {
    "MALLOC_TOP_PAD_": str(2**29),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


def keep_freed_memory() -> None:
    """Start the program again with an allocator that keeps what is freed, as jemalloc and tcmalloc do in production.

    glibc gives large blocks back to the system and takes them anew on the next call, page fault by page fault; how
    often depends on what else was allocated, which makes times wander by a tenth. Everything timed in the run has the
    same allocator.
    """
    if sys.platform == "linux" and any(os.environ.get(k) != v for k, v in KEPT_MEMORY.items()):
        sys.stdout.flush()
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **KEPT_MEMORY})


@dataclass(frozen=True)
class Time:
    """Seconds per call: the median, half the interquartile range, and the number of rounds."""

    median: float
    spread: float
    rounds: int

    def as_dict(self) -> dict[str, float]:
        return {"seconds": self.median, "spread": self.spread, "rounds": self.rounds}


def summary(values: Sequence[float]) -> Time:
    """Median and spread of repeats.

    >>> summary([1.0, 2.0, 3.0, 4.0, 5.0])
    Time(median=3.0, spread=1.0, rounds=5)
    """
    ordered = sorted(values)
    if len(ordered) < 2:
        return Time(ordered[0], 0.0, 1)
    low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return Time(statistics.median(ordered), (high - low) / 2, len(ordered))


def once(function: Callable[[], Any], device: str | torch.device, calls: int = 1) -> float:
    """Seconds per call, of a few calls in a row; on a GPU each is waited for."""
    wait = torch.device(device).type == "cuda"
    if wait:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        function()
        if wait:
            torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls


def time_all(
    candidates: Mapping[str, Callable[[], Any]],
    device: str | torch.device = "cpu",
    budget: float = 10.0,
    rounds: tuple[int, int] = (5, 40),
) -> dict[str, Time]:
    """Time candidates in turns.

    Args:
        candidates: What to call, by name.
        device: `"cuda"` to wait for the GPU after every call.
        budget: Seconds to spend, about.
        rounds: The least and the largest number of rounds.
    """
    first: dict[str, float] = {}
    for name, function in candidates.items():
        function()  # compiles
        first[name] = min(once(function, device), once(function, device))
    calls = {name: max(1, min(100, math.ceil(SHORT / max(seconds, 1e-7)))) for name, seconds in first.items()}
    per_round = sum(first[name] * calls[name] for name in candidates)
    count = max(rounds[0], min(rounds[1], int(budget / max(per_round, 1e-9))))
    seen: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(count):
        for name, function in candidates.items():
            seen[name].append(once(function, device, calls[name]))
    return {name: summary(values) for name, values in seen.items()}


# --------------------------------------------------------------------------------------------------------- errors


class Moments:
    """Mean, covariance and ‖d‖⁴ of draws that come in pieces, (n, batch, C), in float64.

    Deviations d are first taken from the mean of the first piece. With t their mean, the sums about the mean of all are

        Σ(d − t)(d − t)ᵀ = Σddᵀ − n ttᵀ
        Σ‖d − t‖⁴ = Σ‖d‖⁴ + 4 tᵀ(Σddᵀ)t + 2‖t‖² tr Σddᵀ − 4 t·Σ‖d‖²d − 3n‖t‖⁴
    """

    def __init__(self) -> None:
        self.n = 0
        self.shift = self.total = self.outer = self.third = self.fourth = torch.zeros(())

    def add(self, draws: Tensor) -> Moments:
        draws = draws.double()
        if self.n == 0:
            self.shift = draws.mean(0)
            self.total, self.third = torch.zeros_like(self.shift), torch.zeros_like(self.shift)
            self.fourth = self.shift.new_zeros(len(self.shift))
            self.outer = self.shift.new_zeros(*self.shift.shape, self.shift.shape[-1])
        d = (draws - self.shift).transpose(0, 1)  # (batch, n, C)
        self.total += d.sum(1)
        self.outer += d.transpose(1, 2) @ d
        square = d.square().sum(-1)  # (batch, n)
        self.third += (square.unsqueeze(-1) * d).sum(1)
        self.fourth += square.square().sum(1)
        self.n += len(draws)
        return self

    @property
    def mean(self) -> Tensor:
        return self.shift + self.total / self.n

    @property
    def covariance(self) -> Tensor:
        t = self.total / self.n
        return (self.outer - self.n * t.unsqueeze(-1) * t.unsqueeze(-2)) / (self.n - 1)

    @property
    def scatter(self) -> Tensor:
        """V for each input: ‖S_n − Cov‖² is V/n on average."""
        t, n = self.total / self.n, self.n
        size = t.square().sum(-1)
        along = torch.einsum("bi,bij,bj->b", t, self.outer, t)
        trace = self.outer.diagonal(dim1=-2, dim2=-1).sum(-1)
        fourth = self.fourth + 4 * along + 2 * size * trace - 4 * (t * self.third).sum(-1) - 3 * n * size.square()
        return (fourth / n - self.covariance.square().sum((-2, -1))).clamp_min(0)


@dataclass(frozen=True)
class Judgement:
    """The error of one estimate.

    `error` is the mean relative Frobenius error as measured, `net` the root mean square without the reference's share
    (0 where the reference cannot tell), `worth` the number of draws with that error, at most the reference's
    (`capped`).
    """

    error: float
    net: float
    variance_error: float
    mean_error: float
    worth: float
    capped: bool


@dataclass(frozen=True)
class Reference:
    """A large sample: moments per input, and the error law of smaller ones."""

    n: int
    mean: Tensor
    covariance: Tensor
    scatter: Tensor
    constant: float
    measured: dict[int, float]

    @classmethod
    def draw(
        cls,
        sample: Callable[[int], Tensor],
        n: int,
        piece: int,
        trials: Sequence[int] | None = None,
        repeats: int = 8,
        tick: Callable[[int], Any] = lambda done: None,
    ) -> Reference:
        """Draw `n` times, then measure the errors of fresh samples of `trials` sizes, `repeats` times each.

        Sizes are by default up to 800, and such that all of them take fewer draws than the reference.
        """
        if trials is None:
            trials = sorted({max(4, min(n // part, most)) for part, most in ((128, 50), (32, 200), (16, 800))})
        moments = Moments()
        while moments.n < n:
            size = min(piece, n - moments.n)
            moments.add(sample(size))
            tick(size)
        whole = cls(n, moments.mean, moments.covariance, moments.scatter, math.nan, {})
        measured = {}
        for size in (t for t in trials if t < n):
            squares = []
            for _ in range(repeats):
                few = Moments()
                while few.n < size:
                    few.add(sample(min(piece, size - few.n)))
                squares.append(whole.square(few.covariance))
            tick(size * repeats)
            measured[size] = statistics.fmean(squares)
        # e²(n) = c²/n, so c² is the mean of n e² over the sizes (each is as uncertain as the others, relatively).
        fitted = statistics.fmean(size * square for size, square in measured.items()) if measured else whole.law**2
        return cls(
            n,
            whole.mean,
            whole.covariance,
            whole.scatter,
            math.sqrt(max(fitted, 0)),
            {k: math.sqrt(max(v, 0)) for k, v in measured.items()},
        )

    @property
    def law(self) -> float:
        """c as the fourth moments have it."""
        return (self.scatter / self._norm()).mean().sqrt().item()

    def _norm(self) -> Tensor:
        return self.covariance.square().sum((-2, -1)).clamp_min(torch.finfo(torch.float64).tiny)

    def square(self, covariance: Tensor) -> float:
        """e² of an estimate."""
        distance = (covariance.double() - self.covariance).square().sum((-2, -1))
        return ((distance - self.scatter / self.n) / self._norm()).mean().item()

    def judge(self, mean: Tensor, covariance: Tensor) -> Judgement:
        """The errors of a mean (batch, C) and a covariance (batch, C, C)."""
        covariance = covariance.double()
        error = ((covariance - self.covariance).square().sum((-2, -1)) / self._norm()).sqrt().mean().item()
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        off = (covariance.diagonal(dim1=-2, dim2=-1) - variance).norm(dim=-1) / variance.norm(dim=-1)
        shift = (mean.double() - self.mean).abs() / variance.clamp_min(1e-300).sqrt()
        square = self.square(covariance)
        floor = self.constant**2 / self.n
        capped = square <= floor
        worth = float(self.n) if capped else self.constant**2 / square
        return Judgement(
            error, math.sqrt(max(square, 0.0)), off.mean().item(), shift.mean().item(), worth, bool(capped)
        )
