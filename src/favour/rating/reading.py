"""From a unit of data to arrays of rows, and to reasons where a row cannot be one.

Every row of a unit comes out exactly once: as a row of `Chunk.x`, or as a `Bad` with the reason. A row is bad when a
number is missing, unreadable, NaN or infinite (also after conversion to the model's dtype), when it has the wrong
length, or when an image cannot be decoded.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from favour.errors import CorruptFile
from favour.extras import require
from favour.rating.pictures import decode
from favour.rating.sources import MARK, Unit, open_npy, open_parquet
from favour.rating.text import LOST, delimiter, header, number, whole

BLOCK_ROWS, BLOCK_BYTES = 4096, 2**26  # of a table that is converted at once
CONTENT = 1000  # characters of a bad row that are kept


@dataclass(frozen=True)
class Reading:
    """How rows become inputs of the model.

    Attributes:
        columns: Of a table, in the order of the model's features; or one column of lists.
        id: A column to carry along, or None.
        dtype: Of the model's input.
        shape: Of one input; rows are reshaped to it.
        mean, std: Of images, one for each channel, taken from values between 0 and 1.
        header: Of CSV files: whether the first line holds names.
    """

    columns: tuple[str, ...] = ()
    id: str | None = None
    dtype: str = "float32"
    shape: tuple[int, ...] = ()
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    header: bool = True


@dataclass(frozen=True)
class Bad:
    """A row that could not be rated."""

    source: str | None
    row: int | None
    reason: str
    content: str = ""
    id: str | None = None


@dataclass
class Chunk:
    """Rows that are rated together.

    Attributes:
        x: Inputs, (n, *shape).
        sources, rows: Where each comes from: file, and number in the file; None where that is unknown.
        ids: An Arrow array, or None.
        bad: Rows of the same stretch that are no inputs.
    """

    x: npt.NDArray
    sources: Sequence[str | None]
    rows: npt.NDArray
    ids: Any = None
    bad: list[Bad] = field(default_factory=list)

    def take(self, index: npt.NDArray[np.int64]) -> Chunk:
        """Some of the rows, without the bad ones."""
        ids = None if self.ids is None else self.ids.take(require("pyarrow", "rate").array(index))
        return Chunk(self.x[index], [self.sources[i] for i in index], self.rows[index], ids)


def chunks(unit: Unit, reading: Reading, batch: int) -> Iterator[Chunk]:
    """The rows of a unit, `batch` at a time from its first."""
    if unit.kind == "images":
        yield from _images(unit, reading, batch)
    elif unit.kind == "npy":
        array = open_npy(unit.source)
        for begin in range(unit.start, unit.start + unit.rows, batch):
            rows = np.arange(begin, min(begin + batch, unit.start + unit.rows))
            x, reasons = typed(np.asarray(array[rows[0] : rows[-1] + 1]), reading.dtype)
            yield assemble(x, reasons, unit.source, rows, None, reading, lambda i, x=x: str(x[i].ravel()[:50].tolist()))
    else:
        row = unit.start
        for table in _tables(unit, reading, batch):
            for begin in range(0, table.num_rows, batch):
                part = table.slice(begin, batch)
                rows = np.arange(row, row + part.num_rows)
                yield from_table(part, unit.source, rows, reading)
                row += part.num_rows


# ---- tables


def _tables(unit: Unit, reading: Reading, batch: int) -> Iterator[Any]:
    """Arrow tables of a multiple of `batch` rows, but for the last; problems of a record are in `_problem`."""
    pa = require("pyarrow", "rate")
    bytes_per_row = 8 * max(1, int(np.prod(reading.shape)))
    block = batch * max(1, min(BLOCK_ROWS, BLOCK_BYTES // bytes_per_row) // batch)
    if unit.kind == "csv":
        table = _csv(unit, reading)
        for begin in range(0, table.num_rows, block):
            yield table.slice(begin, block)
        return
    names = list(dict.fromkeys([*reading.columns, *([reading.id] if reading.id else [])]))
    held: list[Any] = []  # batches of a file may end with its row groups
    with open_parquet(unit.source) as file:
        try:
            for part in file.iter_batches(block, row_groups=range(unit.first, unit.last), columns=names):
                held.append(part)
                if sum(b.num_rows for b in held) >= block:
                    table = pa.Table.from_batches(held)
                    yield table.slice(0, block)
                    held = table.slice(block).to_batches()
        except (pa.ArrowInvalid, OSError) as error:
            groups = f"row groups {unit.first} to {unit.last - 1}"
            raise CorruptFile(f"{groups} of `{unit.source}` cannot be read: {error}") from error
    if held:
        yield pa.Table.from_batches(held)


def from_table(table: Any, source: str | None, rows: npt.NDArray, reading: Reading) -> Chunk:
    """Inputs from the columns of an Arrow table."""
    wide, reasons = _numbers(table, reading)
    if "_problem" in table.column_names:
        for i, problem in enumerate(table.column("_problem").to_pylist()):
            if problem is not None:
                reasons[i] = problem
    x, odd = typed(wide, reading.dtype, reading.columns, reasons)
    ids = None
    if reading.id:
        ids = table.column(reading.id).combine_chunks()
    shown = [name for name in table.column_names if name != "_problem"]

    def content(i: int) -> str:
        if "_content" in table.column_names:
            return table.column("_content")[i].as_py() or ""
        return json.dumps({name: table.column(name)[i].as_py() for name in shown}, default=str, ensure_ascii=False)

    return assemble(x, odd, source, rows, ids, reading, content)


def _numbers(table: Any, reading: Reading) -> tuple[npt.NDArray, dict[int, str]]:
    """Columns as an array (rows, features), NaN where there is none, and the reasons for those."""
    pa, pc = require("pyarrow", "rate"), require("pyarrow.compute", "rate")
    reasons: dict[int, str] = {}
    features = int(np.prod(reading.shape))
    kinds = [table.schema.field(name).type for name in reading.columns]
    if len(kinds) == 1 and (pa.types.is_nested(kinds[0])):
        return _lists(table.column(reading.columns[0]), reading.columns[0], features)
    integers = reading.dtype.startswith(("int", "uint"))
    x = np.empty((table.num_rows, len(kinds)), np.int64 if integers else np.float64)
    for j, name in enumerate(reading.columns):
        column = table.column(name)
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if column.null_count:
            for i in np.flatnonzero(np.asarray(pc.is_null(column))):
                reasons.setdefault(int(i), f"column `{name}` is missing")
        if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
            values = _parsed(column.to_pylist(), name, integers, reasons)
        else:
            if pa.types.is_boolean(column.type) or pa.types.is_decimal(column.type):
                column = column.cast(pa.float64())
            values = (column.fill_null(0) if column.null_count else column).to_numpy()
        x[:, j] = _whole(values, name, reasons) if integers else values
    return x, reasons


def _parsed(texts: list[str | None], name: str, integers: bool, reasons: dict[int, str]) -> npt.NDArray:
    """Numbers from text; 0 and a reason where there is none."""
    parsed: list[int | float] = []
    for i, text in enumerate(texts):
        value = None if text is None else whole(text) if integers else number(text)
        if value is None and text is not None:
            shown = f"is no number: {_printable(text)[:50]!r}" if text.strip() else "is missing"
            reasons.setdefault(i, f"column `{name}` {shown}")
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            reasons.setdefault(i, f"column `{name}` is {value}, which 64 bits do not hold")
            value = None
        parsed.append(0 if value is None else value)
    if not integers:
        return np.array(parsed, np.float64)
    odd = {i: v for i, v in enumerate(parsed) if isinstance(v, float)}  # each is a whole number, or has a reason
    values = np.array([0 if i in odd else v for i, v in enumerate(parsed)], np.int64)
    if odd:
        at = np.array(list(odd))
        refused: dict[int, str] = {}
        values[at] = _whole(np.array(list(odd.values())), name, refused)
        for k, reason in refused.items():
            reasons.setdefault(int(at[k]), reason)
    return values


def _whole(values: npt.NDArray, name: str, reasons: dict[int, str]) -> npt.NDArray:
    """As 64-bit integers, and why some are none."""
    if values.dtype.kind == "f":
        fine = np.isfinite(values) & (np.trunc(values) == values) & (np.abs(values) < 2**63)
        for i in np.flatnonzero(~fine):
            reasons.setdefault(int(i), f"column `{name}` is no whole number: {values[i]}")
        return np.where(fine, values, 0).astype(np.int64)
    if values.dtype == np.uint64:
        for i in np.flatnonzero(values > np.uint64(2**63 - 1)):
            reasons.setdefault(int(i), f"column `{name}` is {values[i]}, which a 64-bit integer does not hold")
    return values.astype(np.int64)


def _lists(column: Any, name: str, features: int) -> tuple[npt.NDArray, dict[int, str]]:
    pa, pc = require("pyarrow", "rate"), require("pyarrow.compute", "rate")
    reasons: dict[int, str] = {}
    lengths = pc.fill_null(pc.list_value_length(column), -1).to_numpy()
    for i in np.flatnonzero(lengths != features):
        length = f"holds {lengths[i]} values instead of {features}"
        reasons[int(i)] = f"column `{name}` {length if lengths[i] >= 0 else 'is missing'}"
    fits = lengths == features
    flat = pc.list_flatten(column.filter(pa.array(fits)))
    x = np.zeros((len(lengths), features), flat.type.to_pandas_dtype())
    if flat.null_count:  # kept apart, so that integers beside them keep their digits
        rows = np.flatnonzero(fits)
        lost = np.asarray(pc.is_null(flat)).reshape(-1, features)
        for i, k in zip(*np.nonzero(lost), strict=True):
            reasons.setdefault(int(rows[i]), f"value {k} of column `{name}` is missing")
        flat = flat.fill_null(0)
    x[fits] = flat.to_numpy().reshape(-1, features)
    return x, reasons


def typed(
    x: npt.NDArray, dtype: str, names: Sequence[str] = (), reasons: dict[int, str] | None = None
) -> tuple[npt.NDArray, dict[int, str]]:
    """In the model's dtype, and why rows do not fit it: NaN, infinity, too large, no whole number."""
    reasons = dict(reasons or {})
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(dtype)
        if x.dtype.kind == "f":
            fine = np.isfinite(narrow) if narrow.dtype.kind == "f" else np.isfinite(x) & (narrow == x)
        else:
            fine = np.ones(x.shape, bool) if narrow.dtype.kind == "f" else narrow == x
    if not fine.all():
        for i in np.flatnonzero(~fine.reshape(len(x), -1).all(1)):
            at = int(np.flatnonzero(~fine[i].ravel())[0])
            where = f"column `{names[at]}`" if at < len(names) > 1 else f"value {at}"
            reasons.setdefault(int(i), f"{where} is {x[i].ravel()[at]}, which is no finite {dtype}")
    return narrow, reasons


def assemble(
    x: npt.NDArray,
    reasons: dict[int, str],
    source: str | None,
    rows: npt.NDArray,
    ids: Any,
    reading: Reading,
    content: Any,
) -> Chunk:
    """A chunk of the rows without a reason, and the others as bad ones."""
    shaped = x.reshape(len(x), *reading.shape)
    chunk = Chunk(shaped, [source] * len(x), rows, ids)
    if not reasons:
        return chunk
    bad = [
        Bad(source, rows[i], reasons[i], content(i)[:CONTENT], None if ids is None else _text(ids[i].as_py()))
        for i in sorted(reasons)
    ]
    chunk = chunk.take(np.array([i for i in range(len(x)) if i not in reasons], np.int64))
    chunk.bad = bad
    return chunk


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _csv(unit: Unit, reading: Reading) -> Any:
    """The records of a unit: by Arrow's parser, or one by one where that meets a problem."""
    pa, pacsv = require("pyarrow", "rate"), require("pyarrow.csv", "rate")
    names = header(unit.source, reading.header)[0]
    with open(unit.source, "rb") as stream:
        stream.seek(unit.first)
        text = stream.read(unit.last - unit.first)
    if unit.first == 0:
        text = text.removeprefix(MARK)
    integers = reading.dtype.startswith(("int", "uint"))
    if integers and (b"x" in text or b"X" in text):
        return _one_by_one(text, names, unit, reading)  # Arrow would read 0x10 as 16
    kind = pa.int64() if integers else pa.float64()
    types = {name: kind for name in reading.columns} | ({reading.id: pa.string()} if reading.id else {})
    try:
        table = pacsv.read_csv(
            io.BytesIO(text),
            read_options=pacsv.ReadOptions(column_names=names, use_threads=False, block_size=max(len(text), 1)),
            parse_options=pacsv.ParseOptions(delimiter=delimiter(unit.source), newlines_in_values=True),
            # No text stands for a missing number: an empty field is one that cannot be read, and takes the other way.
            convert_options=pacsv.ConvertOptions(column_types=types, include_columns=list(types), null_values=[]),
        )
    except (pa.ArrowInvalid, pa.ArrowKeyError):
        return _one_by_one(text, names, unit, reading)
    return table if table.num_rows == unit.rows else _one_by_one(text, names, unit, reading)


def _one_by_one(text: bytes, names: list[str], unit: Unit, reading: Reading) -> Any:
    pa = require("pyarrow", "rate")
    records: list[list[str]] = []
    problems: list[str | None] = []
    stream = io.StringIO(text.decode("utf-8", "surrogateescape"), newline="")
    wanted = [names.index(name) for name in dict.fromkeys([*reading.columns, *([reading.id] if reading.id else [])])]
    for fields in csv.reader(stream, delimiter=delimiter(unit.source)):
        if not fields:
            continue
        lost = next((j for j in wanted if j < len(fields) and LOST.search(fields[j])), None)
        records.append([_printable(field) for field in fields])
        if len(fields) != len(names):
            problems.append(f"{len(fields)} fields instead of {len(names)}")
        else:
            problems.append(
                None if lost is None else f"column `{names[lost]}` is no UTF-8: {_printable(fields[lost])!r}"
            )
    if len(records) != unit.rows:
        raise CorruptFile(
            f"bytes {unit.first} to {unit.last} of `{unit.source}` held {unit.rows} records when they were counted "
            f"and {len(records)} now; was the file changed meanwhile?"
        )
    columns: dict[str, Any] = {}
    for name in dict.fromkeys([*reading.columns, *([reading.id] if reading.id else [])]):
        j = names.index(name)
        blank = "" if name == reading.id else "0"  # what a record of the wrong length lacks; its problem is known
        columns[name] = pa.array([f[j] if not p else _at(f, j, blank) for f, p in zip(records, problems, strict=True)])
        columns[name] = columns[name].cast(pa.string())
    columns["_problem"] = pa.array(problems, pa.string())
    separator = delimiter(unit.source)
    columns["_content"] = pa.array([separator.join(f)[:CONTENT] for f in records], pa.string())
    return pa.table(columns)


def _printable(text: str) -> str:
    """Bytes that are no UTF-8 as \\x.., so that they can be shown."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") if LOST.search(text) else text


def _at(fields: list[str], j: int, blank: str) -> str:
    return fields[j] if j < len(fields) else blank


# ---- images


def _images(unit: Unit, reading: Reading, batch: int) -> Iterator[Chunk]:
    require("PIL.Image", "rate")
    with ThreadPoolExecutor(max(1, min(8, os.cpu_count() or 1))) as pool:
        for begin in range(0, len(unit.files), batch):
            files = unit.files[begin : begin + batch]
            decoded = list(pool.map(lambda file: _decoded(file, reading), files))
            good = [i for i, image in enumerate(decoded) if not isinstance(image, str)]
            x = np.stack([decoded[i] for i in good]) if good else np.empty((0, *reading.shape), reading.dtype)
            bad = [Bad(files[i], 0, image) for i, image in enumerate(decoded) if isinstance(image, str)]
            ids = None
            if reading.id:
                ids = require("pyarrow", "rate").array([os.path.splitext(os.path.basename(files[i]))[0] for i in good])
            yield Chunk(x, [files[i] for i in good], np.zeros(len(good), np.int64), ids, bad)


def _decoded(file: str, reading: Reading) -> Any:
    """An image as an array, or why it is none."""
    try:
        return decode(file, reading.shape, reading.mean, reading.std).astype(reading.dtype)
    except Exception as error:  # pillow raises all sorts of things for damaged files
        return f"cannot be decoded: {type(error).__name__}: {error}"[:300]
