"""Data sets: from a local folder, from the Hugging Face hub, or those that scikit-learn brings.

A source is a folder, `"hub"` or `"embedded"`. A folder holds

    NAME/                       an image set in the hub's layout, Parquet files with columns `image` and `label`
    NAME-PART-0.npz, …          the same packed by `python -m favour_studies.experiments.pack`, read without `datasets`
    uci/NAME.csv                a table with the target in the last column
    uci/NAME_test_splits.json   20 lists of test rows

The embedded sets need nothing: `digits`, 8 × 8 pictures enlarged threefold and padded to 28 × 28, and `diabetes`, whose
splits are drawn here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.errors import CorruptFile, InvalidValue

HUB = {
    "mnist": "ylecun/mnist",
    "fashion_mnist": "zalando-datasets/fashion_mnist",
    "cifar10": "uoft-cs/cifar10",
    "svhn": "ufldl-stanford/svhn",
    "cifar100": "uoft-cs/cifar100",
}
UCI = ("boston", "concrete", "energy", "kin8nm", "power")
EMBEDDED_SPLITS = 20
PATIENCE = 5.0  # seconds to wait for the hub


@dataclass(frozen=True)
class Split:
    """Inputs and targets of one part of a data set."""

    x: Tensor
    y: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Split:
        return Split(self.x[rows], self.y[rows])


def images(name: str, part: str, data: str | Path | None = None) -> Split:
    """Pictures as bytes (n, channels, height, width) and labels.

    Args:
        name: One of `HUB`, or `"digits"`.
        part: `"train"` or `"test"`.
        data: Folder with a sub-folder `name` or its packed files; None or `"hub"` for the hub.

    Raises:
        InvalidValue: Unknown name, or the folder lacks the set.
        CorruptFile: A file cannot be read.
    """
    if name == "digits":
        return _digits(part)
    if name not in HUB:
        raise InvalidValue(f"no image set {name!r}; there are digits, {', '.join(HUB)}.")
    hub = data is None or data == "hub"
    if data is not None and not hub:
        packed = sorted(Path(data).glob(f"{name}-{part}-*.npz"))
        if packed:
            return _unpacked(packed)
    import datasets

    source = HUB[name] if data is None or hub else str(Path(data) / name)
    if not hub and not Path(source).is_dir():
        raise InvalidValue(
            f"no folder {source}. Get the set from the hub (`{HUB[name]}`) and put its Parquet files there, or name "
            "the source `hub` to fetch it."
        )
    quiet = datasets.utils.are_progress_bars_disabled()
    offline = datasets.config.HF_HUB_OFFLINE
    try:
        datasets.disable_progress_bars()
        datasets.config.HF_HUB_OFFLINE = offline or (hub and not _reachable(source))  # then from its cache, or not
        table = datasets.load_dataset(source, split=part)
        label = next(n for n in ("label", "labels", "fine_label") if n in table.column_names)
        picture = "image" if "image" in table.column_names else "img"
        pixels = np.stack([np.asarray(p) for p in table[picture]])
    except Exception as error:
        raise CorruptFile(
            f"cannot read the {part} part of {source}: {type(error).__name__}: {error}. "
            f"The set is to be had as {HUB[name]}."
        ) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = offline
        if not quiet:
            datasets.enable_progress_bars()
    stacked = torch.from_numpy(pixels)
    stacked = stacked.unsqueeze(1) if stacked.ndim == 3 else stacked.permute(0, 3, 1, 2)
    return Split(stacked.contiguous(), torch.tensor(np.asarray(table[label])))


def _reachable(name: str) -> bool:
    """Whether the hub answers at all: one short question, where `load_dataset` would try six times for 25 s."""
    import huggingface_hub as hub

    try:
        hub.HfApi().dataset_info(name, timeout=PATIENCE)
    except Exception as error:
        return isinstance(error, hub.errors.HfHubHTTPError)  # an answer, if a bad one
    return True


def scaled(x: Tensor) -> Tensor:
    """Bytes as numbers, (…, channels, height, width): grey in 0 … 1, colours in −1 … 1."""
    return x.float() / 255 if x.shape[-3] == 1 else x.float() / 127.5 - 1


def _digits(part: str) -> Split:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.Generator(np.random.PCG64(0)).permutation(len(x))
    rows = order[:540] if part == "test" else order[540:]
    large = (x[rows].reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8).repeat(3, 1).repeat(3, 2)
    padded = np.pad(large, ((0, 0), (2, 2), (2, 2)))
    return Split(torch.from_numpy(padded).unsqueeze(1), torch.from_numpy(y[rows]))


def residuals(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Differences to the left and upper neighbours, colours less green: small numbers, which compress well."""
    x = x.copy()
    if x.shape[1] == 3:
        x[:, ::2] -= x[:, 1:2]
    x[..., 1:] = x[..., 1:] - x[..., :-1]
    x[..., 1:, :] = x[..., 1:, :] - x[..., :-1, :]
    return x


def from_residuals(x: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """The inverse of `residuals`; sums of bytes wrap around.

    >>> picture = np.random.default_rng(0).integers(0, 256, (1, 3, 4, 5)).astype(np.uint8)
    >>> bool((from_residuals(residuals(picture)) == picture).all())
    True
    """
    x = x.cumsum(-2, dtype=np.uint8).cumsum(-1, dtype=np.uint8)
    if x.shape[1] == 3:
        x[:, ::2] += x[:, 1:2]
    return x


def _unpacked(paths: list[Path]) -> Split:
    pictures, labels = [], []
    for path in paths:
        try:
            with np.load(path) as content:
                pictures.append(from_residuals(content["residuals"]))
                labels.append(content["labels"])
        except Exception as error:
            raise CorruptFile(f"cannot read {path}: {type(error).__name__}: {error}; pack it anew.") from error
    return Split(torch.from_numpy(np.concatenate(pictures)), torch.from_numpy(np.concatenate(labels)).long())


def uci(name: str, split: int, data: str | Path) -> tuple[Split, Split]:
    """Training and test rows of a table, as they are (not standardised).

    Args:
        name: One of `UCI`, or `"diabetes"`.
        split: 0 … 19.
        data: Folder with a sub-folder `uci`.
    """
    if name == "diabetes":
        from sklearn.datasets import load_diabetes

        x, y = load_diabetes(return_X_y=True, scaled=False)
        rows = torch.tensor(np.column_stack([x, y]), dtype=torch.float32)
        order = np.random.Generator(np.random.PCG64(split)).permutation(len(rows))
        test = torch.from_numpy(order[: len(rows) // 10])
    else:
        rows, test = _table(name, split, data)
    held = torch.zeros(len(rows), dtype=torch.bool)
    held[test] = True
    return Split(rows[~held, :-1], rows[~held, -1]), Split(rows[held, :-1], rows[held, -1])


def _table(name: str, split: int, data: str | Path) -> tuple[Tensor, Tensor]:
    if name not in UCI:
        raise InvalidValue(f"no UCI set {name!r}; there are {', '.join(UCI)}.")
    if data == "hub":
        raise InvalidValue("the UCI sets are not fetched from the hub; give a folder with `uci/NAME.csv`.")
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
    return rows, test
