"""What a prediction costs here: its time over that of one forward pass without noise, on the same inputs.

Both in eager code: `torch.compile` makes small networks' passes several times faster, which `favour check` and
`favour bench` measure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from favour.graph.interpreter import interpret, noiseless
from favour.program.propagator import Propagator

ROUNDS = 5
ENOUGH = 0.25  # seconds, after which no further round begins


@dataclass(frozen=True)
class Cost:
    """Of one prediction.

    Attributes:
        forwards: Its time in forward passes.
        seconds: Its time.
        inputs: How many inputs it was for.
    """

    forwards: float
    seconds: float
    inputs: int

    def __str__(self) -> str:
        return f"{self.forwards:.1f} measured here ({self.inputs} input{'s' * (self.inputs != 1)}, not compiled)"


def measured(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], inputs: int) -> Cost:
    """Time a prediction and a forward pass of its graph, by turns."""
    graph = predict.graph
    known = predict.program.points(predict.program.leaves(args, kwargs))

    def forward() -> None:
        interpret(graph.calls, dict(known), noiseless)

    def wait() -> None:
        if predict.device.type == "cuda":
            torch.cuda.synchronize(predict.device)

    with torch.no_grad():
        once, plain = medians([lambda: predict(*args, **kwargs), forward], ROUNDS, ENOUGH, wait)
    return Cost(once / plain, once, inputs)


def medians(
    calls: list[Callable[[], object]], rounds: int, enough: float, wait: Callable[[], object] = lambda: None
) -> list[float]:
    """The median seconds of each call over rounds of turns.

    An untimed call precedes each timed one, so that none pays for the caches that its predecessor emptied.

    Args:
        calls: What to time.
        rounds: At most so many; three at least unless one round alone takes longer than `enough`.
        enough: Seconds after which no further round begins.
        wait: Returns when the device is done.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    begin = time.perf_counter()
    for done in range(rounds):
        spent = time.perf_counter() - begin
        if spent > enough and (done >= 3 or spent > enough * done):
            break
        for call, record in zip(calls, seconds, strict=True):
            call()
            wait()
            start = time.perf_counter()
            call()
            wait()
            record.append(time.perf_counter() - start)
    return [statistics.median(record) for record in seconds]
