"""What a run of the benchmark leaves behind: JSON with the environment.

    format, environment, options
    networks    name → title, origin of the weights, parameters, the reference sample and its error law
    rows        network, method, batch, mode (eager or compiled) and what was measured
    skipped     the same keys and why

Times are seconds with their spread (half the interquartile range); costs are ratios within the run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from favour.errors import CorruptFile
from favour_studies.experiments.record import environment as _environment
from favour_studies.experiments.record import read_json, write_json

FORMAT = 1
KEYS = ("network", "method", "batch", "mode", "device")


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a number depends on."""
    kept = "MALLOC_TRIM_THRESHOLD_" in os.environ
    found = _environment(device) | {"allocator": "keeps freed memory" if kept else "default"}
    if device == "cuda":
        found["tf32"] = torch.backends.cuda.matmul.allow_tf32
    return found


def write(path: Path, record: Mapping[str, Any]) -> Path:
    """Write a record, whole or not at all."""
    return write_json(Path(path), record)


def read(path: Path) -> dict[str, Any]:
    """A record, refused where it is none."""
    content = read_json(Path(path))
    if not isinstance(content, dict) or content.get("format") != FORMAT or "rows" not in content:
        raise CorruptFile(f"{path} is no result of `favour bench` (format {FORMAT}, with rows); run it again.")
    return content


def key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What identifies a row."""
    return tuple(row.get(k) for k in KEYS)
