"""Shared by the benchmarks: interleaved timing, the environment, and writing results.

A cost is always a ratio within one run. Candidates and the baseline take turns, so that a slow moment of the machine
hits all of them, and the ratio of their minima over the rounds is reported.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

import favour

RESULTS = Path(__file__).resolve().parent.parent / "results"


def environment() -> dict[str, Any]:
    """What a number depends on."""
    root = Path(__file__).resolve().parent.parent
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True
    ).stdout.strip()
    dirty = bool(
        subprocess.run(["git", "status", "--porcelain", "src"], cwd=root, capture_output=True, text=True).stdout
    )
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), cpu)
    return {
        "favour": favour.__version__,
        "commit": commit + ("+changes" if dirty else ""),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "allocator": "keeps freed memory" if "MALLOC_TRIM_THRESHOLD_" in os.environ else "default",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "when": time.strftime("%Y-%m-%d"),
    }


KEPT_MEMORY = {
    "MALLOC_TOP_PAD_": str(2**29),
    "MALLOC_TRIM_THRESHOLD_": str(2**31),
    "MALLOC_MMAP_THRESHOLD_": str(2**30),
}


def keep_freed_memory() -> None:
    """Start again with an allocator that keeps what is freed, as jemalloc and tcmalloc do in production.

    glibc gives large blocks back to the system and takes them anew on the next call, page fault by page fault; how
    often depends on what else was allocated, which makes times wander by a tenth. Everything timed in the run has the
    same allocator.
    """
    if sys.platform == "linux" and any(os.environ.get(k) != v for k, v in KEPT_MEMORY.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **KEPT_MEMORY})


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
