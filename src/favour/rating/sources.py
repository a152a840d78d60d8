"""What there is to rate: files found, and divided into units of work.

A unit is a range of rows of one file (or a range of images) that is read, rated and written at once. Units depend
on the data and on `rows` alone, never on how many processes share them, and the rows of a unit are rated in batches
that start at its first row. So one process and a cluster of them rate the same batches and give the same numbers.

| data | a unit is | found from |
|---|---|---|
| Parquet | whole row groups, at least one | the footer |
| CSV, TSV | whole records, up to `rows` or 32 MiB | one scan for the ends of records |
| NPY | `rows` rows of the first axis | the header |
| images | a stretch of the sorted list of files | the listing |
"""

from __future__ import annotations

import csv
import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from favour.errors import CorruptFile, InvalidValue
from favour.extras import require

TABLES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
CSV_BYTES = 2**25  # of text in a unit: it is parsed in one piece
_BLOCK = 2**22
_SAMPLE = 200  # records of a CSV file that decide which columns are numbers


@dataclass(frozen=True)
class Unit:
    """A stretch of the data.

    Attributes:
        kind: `"parquet"`, `"csv"`, `"npy"` or `"images"`.
        source: The file; of images, the first.
        start: Number of its first row in the file.
        rows: How many.
        first, last: Row groups, or bytes of the file, from `first` up to but without `last`.
        files: Images.
    """

    kind: str
    source: str
    start: int
    rows: int
    first: int = 0
    last: int = 0
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Data:
    """The files to rate, all of one kind, and the columns that every one of them has."""

    kind: str
    files: tuple[str, ...]
    names: tuple[str, ...] = ()  # all columns of the first file
    numeric: tuple[str, ...] = ()  # those that hold numbers, or a list of numbers
    shape: tuple[int, ...] | None = None  # of a row of an NPY file

    def fingerprint(self) -> str:
        """Changes when a file comes, goes, or is written to (by size and time of modification)."""
        digest = hashlib.sha256()
        for file in self.files:
            stat = os.stat(file)
            digest.update(f"{file}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def find(data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]]) -> Data:
    """The files behind a path, a folder, a glob or a list of those.

    Raises:
        InvalidValue: Nothing there, or files of different kinds.
        CorruptFile: A file is not what its name says.
    """
    given = [data] if isinstance(data, str | os.PathLike) else list(data)
    files = [file for item in given for file in _expand(os.fspath(item))]
    kinds = {_kind(file) for file in files}
    if not files:
        shown = ", ".join(os.fspath(item) for item in given)
        raise InvalidValue(
            f"no data at `{shown}`: give a Parquet, CSV, TSV or NPY file, a folder of images, or a glob of those."
        )
    if len(kinds) > 1:
        raise InvalidValue(f"the data mixes {', '.join(sorted(kinds))} files; rate one kind at a time.")
    kind = kinds.pop()
    if kind == "parquet":
        return _parquet(files)
    if kind == "csv":
        return _csv(files)
    return _npy(files) if kind == "npy" else Data(kind, tuple(files))


def _expand(item: str) -> list[str]:
    if os.path.isdir(item):
        inside = sorted(str(p) for p in Path(item).rglob("*") if p.is_file() and not p.name.startswith((".", "_")))
        return [p for p in inside if os.path.splitext(p)[1].lower() in {*TABLES, *IMAGES}]
    if os.path.exists(item):
        return [item]
    return [p for found in sorted(glob.glob(item, recursive=True)) for p in _expand(found)]


def _kind(file: str) -> str:
    suffix = os.path.splitext(file)[1].lower()
    kind = "images" if suffix in IMAGES else TABLES.get(suffix)
    if kind is None:
        known = ", ".join(sorted({*TABLES, *IMAGES}))
        raise InvalidValue(f"`{file}` has the suffix {suffix!r}; known are {known}.")
    return kind


# ---- what is in a file


def is_numeric(dtype: Any) -> bool:
    """Whether an Arrow type is a number, or a list of floats or integers."""
    types = require("pyarrow", "rate").types
    if types.is_list(dtype) or types.is_large_list(dtype) or types.is_fixed_size_list(dtype):
        dtype = dtype.value_type
    return types.is_integer(dtype) or types.is_floating(dtype) or types.is_decimal(dtype) or types.is_boolean(dtype)


def open_parquet(file: str) -> Any:
    """The Parquet file, or `CorruptFile`."""
    pa, pq = require("pyarrow", "rate"), require("pyarrow.parquet", "rate")
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise CorruptFile(f"`{file}` is no Parquet file, or is damaged: {error}") from error


def _parquet(files: list[str]) -> Data:
    with open_parquet(files[0]) as first:
        schema = first.schema_arrow
    return Data("parquet", tuple(files), tuple(schema.names), tuple(f.name for f in schema if is_numeric(f.type)))


def delimiter(file: str) -> str:
    """What separates fields: a tab in .tsv files, else a comma."""
    return "\t" if file.lower().endswith(".tsv") else ","


def header(file: str) -> tuple[list[str], bool]:
    """Names of the columns, and whether they stand in the first line; a first line of numbers only is data."""
    with open(file, encoding="utf-8-sig", errors="replace", newline="") as stream:
        fields = next(csv.reader(stream, delimiter=delimiter(file)), None)
    if not fields:
        raise CorruptFile(f"`{file}` is empty, or begins with an empty line; a line of column names is expected there.")
    if all(number(field) is not None for field in fields):
        return [f"column_{i}" for i in range(len(fields))], False
    repeated = sorted({name for name in fields if fields.count(name) > 1})
    if repeated:
        raise CorruptFile(f"`{file}` has columns of the same name: {', '.join(repeated)}.")
    return [name.strip() for name in fields], True


def number(text: str) -> float | None:
    """The number that a field of a CSV file holds, or None.

    >>> number(" 1e3 "), number("1_000"), number("")
    (1000.0, None, None)
    """
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def _csv(files: list[str]) -> Data:
    names, named = header(files[0])
    counts = [0] * len(names)
    records = 0
    with open(files[0], encoding="utf-8-sig", errors="replace", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter(files[0]))
        if named:
            next(reader)
        for fields in reader:
            records += 1
            for i, field in enumerate(fields[: len(names)]):
                counts[i] += number(field) is not None
            if records == _SAMPLE:
                break
    # A column with the odd unreadable number is one of numbers: the rows are reported, not the column dropped.
    numeric = tuple(name for name, count in zip(names, counts, strict=True) if 2 * count > records)
    return Data("csv", tuple(files), tuple(names), numeric)


def open_npy(file: str) -> Any:
    """The array, mapped into memory, or `CorruptFile`. Pickled objects are refused."""
    try:
        array = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise CorruptFile(f"`{file}` is no NPY file of numbers, or is damaged: {error}") from error
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        raise CorruptFile(f"`{file}` holds {array.dtype} of shape {array.shape}; rows of numbers are required.")
    return array


def _npy(files: list[str]) -> Data:
    shapes = {file: open_npy(file).shape[1:] for file in files}
    different = next((file for file in files if shapes[file] != shapes[files[0]]), None)
    if different is not None:
        raise InvalidValue(
            f"rows of `{files[0]}` have shape {shapes[files[0]]} and those of `{different}` {shapes[different]}; "
            "all files must agree."
        )
    return Data("npy", tuple(files), shape=shapes[files[0]] or (1,))


# ---- units


def units(data: Data, rows: int, columns: Sequence[str] = ()) -> Iterator[Unit]:
    """Divide the data, files in order; a file without one of `columns` is an error."""
    if data.kind == "images":
        for i in range(0, len(data.files), rows):
            files = data.files[i : i + rows]
            yield Unit("images", files[0], 0, len(files), files=files)
        return
    for file in data.files:
        if data.kind == "parquet":
            yield from _row_groups(file, rows, columns)
        elif data.kind == "csv":
            yield from _records(file, rows, columns)
        else:
            total = len(open_npy(file))
            for start in range(0, total, rows):
                yield Unit("npy", file, start, min(rows, total - start))


def _require_columns(file: str, names: Sequence[str], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in names]
    if missing:
        raise InvalidValue(f"`{file}` has no column {', '.join(map(repr, missing))}; it has {', '.join(names)}.")


def _row_groups(file: str, rows: int, columns: Sequence[str]) -> Iterator[Unit]:
    with open_parquet(file) as opened:
        _require_columns(file, opened.schema_arrow.names, columns)
        sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
    start = first = held = 0
    for i, size in enumerate(sizes):
        held += size
        if held and (i + 1 == len(sizes) or held + sizes[i + 1] > rows):
            yield Unit("parquet", file, start, held, first, i + 1)
            start, first, held = start + held, i + 1, 0


def _records(file: str, rows: int, columns: Sequence[str]) -> Iterator[Unit]:
    _require_columns(file, header(file)[0], columns)
    named = header(file)[1]
    start = held = 0
    begin = -1  # of the unit, in bytes
    previous = 0
    for end in record_ends(file):
        if named:
            named, previous = False, end
            continue
        begin = previous if begin < 0 else begin
        held, previous = held + 1, end
        if held == rows or end - begin >= CSV_BYTES:
            yield Unit("csv", file, start, held, begin, end)
            start, held, begin = start + held, 0, -1
    if held:
        yield Unit("csv", file, start, held, begin, previous)


def record_ends(file: str) -> Iterator[int]:
    """Where the records of a CSV file end, in bytes from its beginning; empty lines are no records.

    Without a quotation mark a record is a line, and lines are found a block at a time. Where there are quotes, or
    carriage returns alone, the same reader decides that later reads the records.
    """
    if _plain(file):
        yield from _line_ends(file)
        return
    position = 0

    def lines() -> Iterator[str]:
        nonlocal position
        with open(file, encoding="latin-1", newline="") as stream:  # a character is a byte
            for line in stream:
                position += len(line)
                yield line

    try:
        for fields in csv.reader(lines(), delimiter=delimiter(file)):
            if fields:
                yield position
    except csv.Error as error:
        raise CorruptFile(f"`{file}` cannot be read near byte {position}: {error}") from error


def _plain(file: str) -> bool:
    """Whether every record is a line that ends in a newline, with a carriage return before it or without."""
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            block += stream.read(1) if block.endswith(b"\r") else b""
            if b'"' in block or block.count(b"\r") != block.count(b"\r\n"):
                return False
    return True


def _line_ends(file: str) -> Iterator[int]:
    offset, last = 0, 0  # of the block; of the last newline
    with open(file, "rb") as stream:
        while block := stream.read(_BLOCK):
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 10) + 1 + offset
            lengths = np.diff(ends, prepend=last)
            for end, length in zip(ends.tolist(), lengths.tolist(), strict=True):
                # One byte is the newline itself, two may be a carriage return before it.
                if length > 2 or (length == 2 and end - offset >= 2 and block[end - offset - 2] != 13):
                    yield end
                elif length == 2 and end - offset < 2:  # its first byte was in the block before
                    with open(file, "rb") as again:
                        again.seek(end - 2)
                        if again.read(1) != b"\r":
                            yield end
            last = int(ends[-1]) if len(ends) else last
            offset += len(block)
    if offset > last:
        yield offset  # the last line ends without a newline
