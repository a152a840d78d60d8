"""Pack image sets into plain .npz files, which a machine without `datasets` and Pillow can read.

    python -m favour_studies.experiments.pack --data FOLDER --out FOLDER mnist fashion_mnist cifar10:train

Lossless; files of at most `--megabytes`, so that a large set can travel in parts.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

import numpy as np

from favour_studies.experiments.data import images, residuals


def pack(name: str, part: str, data: str, out: Path, megabytes: float = 45.0) -> list[Path]:
    """Write one part of an image set; returns the files."""
    split = images(name, part, data)
    x, y = residuals(split.x.numpy()), split.y.numpy().astype(np.uint8)
    probe = slice(0, max(1, len(x) // 20))
    per_picture = len(_compressed(x[probe], y[probe])) / len(x[probe])
    rows = max(1, int(megabytes * 1e6 / per_picture))
    out.mkdir(parents=True, exist_ok=True)
    paths = []
    parts = -(-len(x) // rows)
    for i, chunk in enumerate(np.array_split(np.arange(len(x)), parts)):
        path = out / f"{name}-{part}-{i}.npz"
        path.write_bytes(_compressed(x[chunk], y[chunk]))
        paths.append(path)
    return paths


def _compressed(x: np.ndarray, y: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.savez_compressed(buffer, residuals=x, labels=y)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sets", nargs="+", help="NAME or NAME:PART; `uci` copies the tables")
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--megabytes", type=float, default=45.0, help="largest file")
    options = parser.parse_args()
    for chosen in options.sets:
        if chosen == "uci":
            shutil.copytree(Path(options.data) / "uci", options.out / "uci", dirs_exist_ok=True)
            continue
        name, _, part = chosen.partition(":")
        for one in [part] if part else ["train", "test"]:
            for path in pack(name, one, options.data, options.out, options.megabytes):
                print(f"{path}  {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
