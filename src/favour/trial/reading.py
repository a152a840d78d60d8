"""Inputs from a file, as a model takes them. No pickled code is run.

.npy .csv .tsv .parquet     one array, rows first
.npz .safetensors           arrays by argument name; a single one is the only argument
.pt                         a tensor, a tuple or a dict of tensors, read with `weights_only`
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.errors import InvalidValue
from favour.extras import require

ENDINGS = (".npy", ".npz", ".pt", ".safetensors", ".csv", ".tsv", ".parquet")


def read(path: str | Path, rows: int, columns: Sequence[str] | None = None) -> Any:
    """The first rows of the inputs in a file: a tensor, a tuple of arguments or a dict of keyword arguments.

    Args:
        path: See the module.
        rows: At most so many.
        columns: Of a table, those that the model reads; all columns of numbers by default.
    """
    path = Path(path)
    if not path.is_file():
        raise InvalidValue(f"there is no file `{path}`.")
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InvalidValue(f"`{path}` is not of a kind that is read; these are: {' '.join(ENDINGS)}.")
    try:
        if ending in (".csv", ".tsv"):
            data: Any = torch.from_numpy(_text(path, rows, columns))
        elif ending == ".parquet":
            data = torch.from_numpy(_parquet(path, rows, columns))
        else:
            data = _tensors(path, ending)
    except (OSError, ValueError, RuntimeError, EOFError) as error:
        if isinstance(error, InvalidValue):
            raise
        raise InvalidValue(f"`{path}` cannot be read: {type(error).__name__}: {str(error).splitlines()[0]}") from error
    if isinstance(data, dict) and len(data) == 1:
        (data,) = data.values()
    leaves = pytree.tree_leaves(data)
    if not leaves or not all(isinstance(t, Tensor) and t.ndim for t in leaves):
        raise InvalidValue(f"`{path}` holds something else than tensors with a batch.")
    return pytree.tree_map(lambda t: t[:rows], data)


def _tensors(path: Path, ending: str) -> Any:
    if ending == ".npy":
        return torch.from_numpy(np.load(path, allow_pickle=False))
    if ending == ".npz":
        with np.load(path, allow_pickle=False) as file:
            return {name: torch.from_numpy(file[name]) for name in file.files}
    if ending == ".safetensors":
        return require("safetensors.torch", "export").load_file(str(path))
    try:
        return torch.load(path, weights_only=True)
    except UnpicklingError as error:
        raise InvalidValue(
            f"`{path}` holds pickled code, which is not run; save tensors, or a dict of them."
        ) from error


def _text(path: Path, rows: int, columns: Sequence[str] | None) -> npt.NDArray:
    with path.open(newline="") as file:
        lines = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        first = next(lines, None)
        if first is None:
            raise InvalidValue(f"`{path}` is empty.")
        named = any(not _is_number(cell) for cell in first)
        names = [cell.strip() for cell in first] if named else [str(i) for i in range(len(first))]
        body = [] if named else [first]
        for line in lines:
            if len(body) == rows:
                break
            body.append(line)
    table = {name: [line[i] for line in body if i < len(line)] for i, name in enumerate(names)}
    return _stacked(path, table, columns)


def _parquet(path: Path, rows: int, columns: Sequence[str] | None) -> npt.NDArray:
    parquet = require("pyarrow.parquet", "rate")
    table = parquet.read_table(path).slice(0, rows)
    return _stacked(path, {name: table[name].to_pylist() for name in table.column_names}, columns)


def _stacked(path: Path, table: dict[str, list[Any]], columns: Sequence[str] | None) -> npt.NDArray:
    unknown = [name for name in columns or () if name not in table]
    if unknown:
        raise InvalidValue(f"`{path}` has no column {', '.join(unknown)} (--columns); it has {', '.join(table)}.")
    chosen = columns or [name for name, values in table.items() if values and all(map(_is_number, values))]
    if not chosen:
        raise InvalidValue(f"`{path}` has no column of numbers; it has {', '.join(table)}.")
    bad = [name for name in chosen if not all(map(_is_number, table[name]))]
    if bad:
        raise InvalidValue(f"columns {', '.join(bad)} of `{path}` hold other things than numbers (--columns).")
    return np.array([[float(v) for v in table[name]] for name in chosen], dtype=np.float64).T


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True
