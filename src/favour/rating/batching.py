"""A batch size by memory.

Batches of 1, 4, 16, … rows are rated, and the growth of the process's peak memory (on a GPU, of the allocator's) is
read off each. The next size is tried while five times the last growth stays within the budget, a quarter of the free
memory shared by all processes of the machine, up to `LARGEST` rows: more gain nothing (benchmarks/rate.py).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from favour.methods.memory import free_memory

LARGEST = 1024
SHARE = 0.25
_STATUS = Path("/proc/self/status")


def fitting_batch(
    rate: Callable[[npt.NDArray], Any], rows: npt.NDArray, processes: int = 1, device: str = "cpu"
) -> int:
    """The largest power of four, up to `LARGEST`, whose rating stays within the budget.

    Args:
        rate: Of a batch.
        rows: At least one row; repeated as needed.
        processes: That share the memory.
        device: Whose memory it is.
    """
    budget = SHARE * free_memory(device) / processes
    rate(rows[:1])  # what the first call keeps is no cost of a batch
    batch = 1
    while batch < LARGEST:
        growth = _growth(rate, rows[np.arange(batch) % len(rows)], device)
        if 5 * growth > budget:  # four times the rows, and a margin
            break
        batch *= 4
    return batch


def _growth(rate: Callable[[npt.NDArray], Any], x: npt.NDArray, device: str) -> int:
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        rate(x)
        return torch.cuda.max_memory_allocated(device) - before
    _forget_peak()
    before = _resident("VmRSS")
    rate(x)
    return max(_resident("VmHWM") - before, x.nbytes)


def _forget_peak() -> None:
    """Begin a new peak, where the system lets a process do so."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(name: str) -> int:
    """Resident memory, now (VmRSS) or at most (VmHWM), in bytes."""
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    import resource  # not on Windows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
