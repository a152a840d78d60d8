"""Shared by the benchmarks: interleaved timing, the environment, and writing results.

A cost is always a ratio within one run. Candidates and the baseline take turns, so that a slow moment of the machine
hits all of them, and the ratio of their minima over the rounds is reported.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from favour_studies.bench import environment, keep_freed_memory

__all__ = ["RESULTS", "environment", "keep_freed_memory", "time_all", "write"]

RESULTS = Path(__file__).resolve().parent.parent / "results"


def _once(function: Callable[[], Any]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def time_all(candidates: Mapping[str, Callable[[], Any]], rounds: int = 30, warmup: int = 3) -> dict[str, float]:
    """Seconds per call: the least over interleaved rounds."""
    for function in candidates.values():
        for _ in range(warmup):
            function()
    best = dict.fromkeys(candidates, float("inf"))
    for _ in range(rounds):
        for name, function in candidates.items():
            best[name] = min(best[name], _once(function))
    return best


def write(name: str, content: Mapping[str, Any]) -> Path:
    """Put a result with its environment under results/."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), **content}, indent=1) + "\n")
    print(f"wrote {path}")
    return path
