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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from favour.errors import CorruptFile, InvalidValue
from favour.extras import require
from favour.rating.fingerprint import files_digest
from favour.rating.text import column_kinds, delimiter, has_header, header

TABLES = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv", ".npy": "npy"}
IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp", ".ppm", ".pgm"}
CSV_BYTES = 2**25  # of text in a unit: it is parsed in one piece
MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs put first
_BLOCK = 2**22


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
        stamp: Changes when a file is written to.
    """

    kind: str
    source: str
    start: int
    rows: int
    first: int = 0
    last: int = 0
    files: tuple[str, ...] = ()
    stamp: str = ""

    def check(self) -> None:
        """Raise `InvalidValue` if a file was written to since the data were divided."""
        if self.stamp and self.stamp != stamp(self.files or (self.source,)):
            raise InvalidValue(
                f"`{self.source}` "
                + (f"or one of the {len(self.files) - 1} images after it " if len(self.files) > 1 else "")
                + "was written to while the data were rated; give the same command again when it is whole."
            )


def stamp(files: Sequence[str]) -> str:
    """Sizes and times of modification."""
    try:
        stats = [os.stat(file) for file in files]
    except OSError as error:
        return f"gone: {error.filename}"
    text = " ".join(f"{s.st_size}:{s.st_mtime_ns}" for s in stats)
    return text if len(files) == 1 else hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True)
class Data:
    """The files to rate, all of one kind, and the columns that every one of them has."""

    kind: str
    files: tuple[str, ...]
    names: tuple[str, ...] = ()  # all columns of the first file
    numeric: tuple[str, ...] = ()  # those that hold numbers, or a list of numbers
    shape: tuple[int, ...] | None = None  # of a row of an NPY file
    header: bool = True  # whether the first line of CSV files holds names
    unclear: tuple[str, ...] = ()  # columns of a CSV file that hold numbers in some rows and not in most
    places: tuple[str, ...] = ()  # paths, folders and globs, as the user named them

    def fingerprint(self) -> str:
        """Changes when a file comes, goes or is written to; see `favour.rating.fingerprint`."""
        return files_digest(self.files)


def find(
    data: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    header: bool | None = None,
    columns: Sequence[str] | None = None,
) -> Data:
    """The files behind a path, a folder, a glob or a list of those.

    Args:
        data: See `favour.rating.rate`.
        header: Of CSV files, whether the first line holds names; None if that is to be seen.
        columns: Names that the user gave, which can tell.

    Raises:
        InvalidValue: Nothing there, or files of different kinds.
        CorruptFile: A file is not what its name says.
    """
    items = [os.fspath(item) for item in ([data] if isinstance(data, str | os.PathLike) else data)]
    files = [file for item in items for file in _expand(item)]
    _check_files(files)
    kinds = {_kind(file) for file in files}
    if not files:
        shown = ", ".join(items)
        raise InvalidValue(
            f"no data at `{shown}`: give a Parquet, CSV, TSV or NPY file, a folder of images, or a glob of those."
        )
    if len(kinds) > 1:
        raise InvalidValue(f"the data mixes {', '.join(sorted(kinds))} files; rate one kind at a time.")
    kind = kinds.pop()
    if kind != "csv" and header is not None:
        raise InvalidValue(f"`header` belongs to CSV files; these are {kind} files.")
    if kind == "parquet":
        sources = _parquet(files)
    elif kind == "csv":
        sources = _csv(files, header, columns)
    else:
        sources = _npy(files) if kind == "npy" else Data(kind, tuple(files))
    return replace(sources, places=tuple(items))


def _check_files(files: Sequence[str]) -> None:
    seen: set[str] = set()
    for file in files:
        if not os.path.isfile(file):
            raise InvalidValue(f"`{file}` is no regular file" + (" (a broken link)." if os.path.islink(file) else "."))
        path = os.path.abspath(file)
        if path in seen:
            raise InvalidValue(f"`{file}` is among the data twice, and its rows would be; name it once.")
        seen.add(path)


def _expand(item: str) -> list[str]:
    if os.path.isdir(item):
        # A link that leads nowhere stays in the list, and is refused: its rows are missing.
        inside = sorted(str(p) for p in Path(item).rglob("*") if not p.is_dir() and not p.name.startswith((".", "_")))
        return [p for p in inside if os.path.splitext(p)[1].lower() in {*TABLES, *IMAGES}]
    if os.path.exists(item):
        return [item]
    return [p for path in sorted(glob.glob(item, recursive=True)) for p in _expand(path)]


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
    except OSError as error:
        raise CorruptFile(f"`{file}` cannot be read, or is damaged: {error}") from error


def _parquet(files: list[str]) -> Data:
    with open_parquet(files[0]) as first:
        schema = first.schema_arrow
    _require_once(files[0], schema.names)
    return Data("parquet", tuple(files), tuple(schema.names), tuple(f.name for f in schema if is_numeric(f.type)))


def _csv(files: list[str], named: bool | None, columns: Sequence[str] | None) -> Data:
    named = has_header(files[0], columns) if named is None else named
    names = header(files[0], named)[0]
    for file in files:  # the first that has a record decides
        kinds = column_kinds(file, header(file, named)[0], named)
        if kinds:
            break
    else:
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        raise InvalidValue(f"there is no row to rate in `{files[0]}`{more}.")
    numeric, unclear = (tuple(n for n in names if kinds.get(n) == kind) for kind in ("numbers", "unclear"))
    return Data("csv", tuple(files), tuple(names), numeric, header=named, unclear=unclear)


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


def units(data: Data, rows: int, columns: Sequence[str] = (), carried: Sequence[str] = ()) -> Iterator[Unit]:
    """Divide the data, files in order; a file without one of `columns` or of those `carried` along is an error, and so
    is one in which `columns` hold no numbers."""
    if data.kind == "images":
        for i in range(0, len(data.files), rows):
            files = data.files[i : i + rows]
            yield Unit("images", files[0], 0, len(files), files=files, stamp=stamp(files))
        return
    for file in data.files:
        before = stamp((file,))
        if data.kind == "parquet":
            parts = _row_groups(file, rows, columns, carried)
        elif data.kind == "csv":
            parts = _records(file, rows, (*columns, *carried), data.header)
        else:
            total = len(open_npy(file))
            parts = (Unit("npy", file, start, min(rows, total - start)) for start in range(0, total, rows))
        for unit in parts:
            yield replace(unit, stamp=before)


def _require_columns(file: str, names: Sequence[str], columns: Sequence[str]) -> None:
    missing = [name for name in columns if name not in names]
    if missing:
        raise InvalidValue(f"`{file}` has no column {', '.join(map(repr, missing))}; it has {', '.join(names)}.")


def _require_once(file: str, names: Sequence[str]) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise CorruptFile(
            f"`{file}` has columns of the same name: {', '.join(f'`{n}`' for n in repeated)}. Rename them."
        )


def _row_groups(file: str, rows: int, columns: Sequence[str], carried: Sequence[str] = ()) -> Iterator[Unit]:
    types = require("pyarrow", "rate").types
    with open_parquet(file) as opened:
        _require_once(file, opened.schema_arrow.names)
        _require_columns(file, opened.schema_arrow.names, (*columns, *carried))
        for name in columns:
            kind = opened.schema_arrow.field(name).type
            kind = kind.value_type if types.is_dictionary(kind) else kind
            single = is_numeric(kind) or types.is_string(kind) or types.is_large_string(kind)
            if not single or (len(columns) > 1 and types.is_nested(kind)):
                what = "one column of lists, or columns of single numbers" if is_numeric(kind) else "numbers"
                raise InvalidValue(f"column `{name}` of `{file}` holds {kind}; {what} are required.")
        sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
    start = first = held = 0
    for i, size in enumerate(sizes):
        held += size
        if held and (i + 1 == len(sizes) or held + sizes[i + 1] > rows):
            yield Unit("parquet", file, start, held, first, i + 1)
            start, first, held = start + held, i + 1, 0


def _records(file: str, rows: int, columns: Sequence[str], named: bool = True) -> Iterator[Unit]:
    _require_columns(file, header(file, named)[0], columns)
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
    position = record = 0

    def lines() -> Iterator[str]:
        nonlocal position
        with open(file, encoding="latin-1", newline="") as stream:  # a character is a byte
            if stream.read(len(MARK)) == MARK.decode("latin-1"):
                position = len(MARK)
            else:
                stream.seek(0)
            for line in stream:
                position += len(line)
                yield line

    held: list[str] = []  # lines of the record that is read
    last: list[str] = []  # of the one before

    def kept() -> Iterator[str]:
        for line in lines():
            held.append(line)
            yield line

    try:
        for fields in csv.reader(kept(), delimiter=delimiter(file)):
            if fields:
                yield position
                record += 1
            last = list(held)
            held.clear()
        if last and _unclosed(last, file):
            record -= 1
            raise csv.Error("a quotation mark that opens in it is never closed")
    except csv.Error as error:
        raise CorruptFile(
            f"record {record} of `{file}`, which ends near byte {position}, cannot be read: {error}."
        ) from error


def _unclosed(lines: Sequence[str], file: str) -> bool:
    """Whether a record ends within quotes, so that one more line would belong to it; the end of a file does that."""
    return list(csv.reader([*lines[:-1], lines[-1].rstrip("\r\n") + "\n", "x"], delimiter=delimiter(file)))[-1] != ["x"]


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
