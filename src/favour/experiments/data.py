"""Data sets, from a local folder or from the Hugging Face hub.

A local folder holds one sub-folder per image set in the hub's layout (Parquet files with columns `image` and `label`)
and `uci/` with `NAME.csv` and `NAME_test_splits.json`. Without a folder the image sets are fetched by name, which
needs a network.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from favour.errors import CorruptFile, InvalidValue
from favour.experiments import require

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "svhn": "ufldl-stanford/svhn",
}
UCI = ("boston", "concrete", "energy", "kin8nm", "power")


@dataclass(frozen=True)
class Split:
    """Inputs and targets of one part of a data set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)


def images(name: str, part: str, data: str | Path | None = None) -> Split:
    """Pictures as bytes (n, channels, height, width) and labels.

    Args:
        name: One of `HUB`.
        part: `"train"` or `"test"`.
        data: Folder with a sub-folder `name`; None for the hub.

    Raises:
        InvalidValue: Unknown name, or the folder lacks the set.
        CorruptFile: A file cannot be read.
    """
    if name not in HUB:
        raise InvalidValue(f"no image set {name!r}; there are {', '.join(HUB)}.")
    datasets = require("datasets")
    source = HUB[name] if data is None else str(Path(data) / name)
    if data is not None and not Path(source).is_dir():
        raise InvalidValue(
            f"no folder {source}. Get the set from the hub (`{HUB[name]}`) and put its Parquet files there, or leave "
            "out the data folder to fetch it by name."
        )
    try:
        table = datasets.load_dataset(source, split=part)
        label = "label" if "label" in table.column_names else "labels"
        picture = "image" if "image" in table.column_names else "img"
        pixels = np.stack([np.asarray(p) for p in table[picture]])
    except Exception as error:
        raise CorruptFile(
            f"cannot read the {part} part of {source}: {type(error).__name__}: {error}. "
            f"The set is to be had as {HUB[name]}."
        ) from error
    stacked = torch.from_numpy(pixels)
    stacked = stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2)
    return Split(stacked.contiguous(), torch.tensor(np.asarray(table[label])))


def uci(name: str, split: int, data: str | Path) -> tuple[Split, Split]:
    """Training and test rows of a UCI regression set, as they are (not standardised)."""
    if name not in UCI:
        raise InvalidValue(f"no UCI set {name!r}; there are {', '.join(UCI)}.")
    folder = Path(data) / "uci"
    table, splits = folder / f"{name}.csv", folder / f"{name}_test_splits.json"
    for path in (table, splits):
        if not path.is_file():
            raise InvalidValue(f"no file {path}; the set is to be had from the UCI Machine Learning Repository.")
    try:
        rows = torch.tensor(np.loadtxt(table, delimiter=",", skiprows=1), dtype=torch.float32)
        test = torch.tensor(json.loads(splits.read_text())[split])
    except (ValueError, IndexError, json.JSONDecodeError) as error:
        raise CorruptFile(f"cannot read {name}: {type(error).__name__}: {error}") from error
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[test] = True
    return Split(rows[~held, :-1], rows[~held, -1]), Split(rows[held, :-1], rows[held, -1])
