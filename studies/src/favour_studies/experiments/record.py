"""Results on disk: JSON written whole or not at all, with what a number depends on.

A run is made of *units*, the smallest pieces of work worth keeping (a task, model, repeat and method). Each has a file
of its own with the *key* it was computed for, the library's source among it; a run that is interrupted and started
again reads the units whose key is unchanged and computes the others.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import favour
from favour.errors import CorruptFile

FORMAT = 1
# Folders that no experiment's number depends on.
_ASIDE = {"adapters", "bench", "cli", "commands", "demo", "pages", "rating", "report", "serving"}


def environment(device: str = "cpu") -> dict[str, Any]:
    """What a number depends on besides the code's input."""
    cpu = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            cpu = next((line.split(":", 1)[1].strip() for line in file if line.startswith("model name")), cpu)
    return {
        "favour": favour.__version__,
        "commit": _commit(),
        "code": code_digest(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu": cpu,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "device": device,
        "when": time.strftime("%Y-%m-%d"),
    }


def _commit() -> str | None:
    """The commit of the code, if it runs from a working tree; `+changes` if files differ from it."""

    def git(*arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=True, timeout=20
        )
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + (
            "+changes" if git("status", "--porcelain", *map(str, _roots())) else ""
        )
    except (OSError, subprocess.SubprocessError):
        return None


def _roots() -> tuple[Path, Path]:
    """The folders of the library's and of this package's source."""
    return Path(favour.__file__).parent, Path(__file__).parents[1]


@functools.cache
def code_digest() -> str:
    """A fingerprint of the library's and the experiments' source, so that no result mixes two versions of them."""
    parts = hashlib.sha256()
    for root in _roots():
        for path in sorted(root.rglob("*.py")):
            if not _ASIDE & set(path.relative_to(root).parts):
                parts.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return parts.hexdigest()[:12]


def plain(value: Any) -> Any:
    """A value as JSON can hold it: tensors and arrays as lists, NaN and infinity as null."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        return plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_json(path: Path, content: Any) -> Path:
    """Write a file so that a reader finds the old or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(plain(content), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    os.replace(part, path)
    return path


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CorruptFile(f"cannot read {path}: {error}. Delete it and run again.") from error


class Units:
    """The units of one experiment, under `folder`.

    Args:
        folder: Where their files are.
        key: What all of them depend on, such as the sizes of the profile and the seed.
        environment: Where units are computed now; each keeps its own.

    Attributes:
        environments: Those of the units asked for so far, without repetition: a folder of units may be continued, or
            brought together, on another machine.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], environment: Mapping[str, Any]) -> None:
        self.folder, self.key = folder, plain(dict(key))
        self.environment = plain(dict(environment))
        self.environments: list[dict[str, Any]] = []

    def path(self, *names: object) -> Path:
        cleaned = [re.sub(r"[^\w.=-]+", "_", str(name)) for name in names]
        return self.folder.joinpath(*cleaned).with_name(cleaned[-1] + ".json")

    def get(self, names: Sequence[object], key: Mapping[str, Any], compute: Callable[[], dict[str, Any]]) -> Any:
        """The content of a unit, computed if it is not there.

        `compute` returns a dict; a numpy array among its values goes to a file beside and comes back as an array.
        """
        path = self.path(*names)
        full = plain({**self.key, **key})
        if path.is_file():
            try:
                content = read_json(path)
                if content["key"] == full:
                    self._note(content["environment"])
                    return content["value"] | self._arrays(path, content["arrays"])
            except (CorruptFile, KeyError, OSError, ValueError):
                pass  # damaged, so computed anew
        value = compute()
        arrays = {k: v for k, v in value.items() if isinstance(v, np.ndarray)}
        if arrays:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(path.stem + ".part.npz")
            np.savez(part, **arrays)  # type: ignore[arg-type]
            os.replace(part, path.with_suffix(".npz"))
        rest = plain({k: v for k, v in value.items() if k not in arrays})
        write_json(path, {"key": full, "environment": self.environment, "value": rest, "arrays": sorted(arrays)})
        self._note(self.environment)
        return rest | arrays

    def _note(self, environment: dict[str, Any]) -> None:
        if environment not in self.environments:
            self.environments.append(environment)

    @staticmethod
    def _arrays(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
        if not names:
            return {}
        with np.load(path.with_suffix(".npz")) as content:
            return {name: content[name] for name in names}


def digest(value: Any) -> str:
    """A short fingerprint of anything JSON can hold."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()[:12]


def stat(values: Sequence[float]) -> dict[str, Any]:
    """Mean and standard deviation over repeats.

    >>> stat([1.0, 3.0])["mean"]
    2.0
    """
    sd = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "sd": sd, "values": list(values)}
