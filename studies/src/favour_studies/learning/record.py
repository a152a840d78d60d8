"""Where results were made, and writing them."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

import favour


def environment(device: str = "cpu") -> dict[str, Any]:
    """What the numbers depend on besides the code."""
    return {
        "favour": favour.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": torch.cuda.get_device_name(0) if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    os.replace(part, path)


def summary(values: list[float]) -> dict[str, float]:
    """Mean, standard error and count.

    >>> summary([1.0, 3.0])
    {'mean': 2.0, 'se': 1.0, 'n': 2}
    """
    t = torch.tensor(values, dtype=torch.float64)
    se = float(t.std() / len(t) ** 0.5) if len(t) > 1 else float("nan")
    return {"mean": float(t.mean()), "se": se, "n": len(values)}
