"""`rate`: every row of the data through the model, on one machine.

    prepare    find the data, open the model, decide columns, batch and units, refuse what does not fit
    rate       carry out the units that are not done, join the parts

`favour.scale.rate` prepares in the same way, and leaves the units to a cluster.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from favour.confidence import check_level
from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.batching import fitting_batch
from favour.rating.columns import rated_columns, schema, text_type
from favour.rating.identity import Step, identity_of, next_step
from favour.rating.job import Plan
from favour.rating.models import Rater, open_model
from favour.rating.reading import Bad, Reading, chunks
from favour.rating.sources import Data, Unit, find, is_numeric, open_parquet, units
from favour.rating.store import Store
from favour.rating.text import hint

PART_ROWS = {"images": 1024}
DEFAULT_PART_ROWS = 16384
EXAMPLE = 2  # rows that a network is compiled with
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


@dataclass(frozen=True)
class Options:
    """What shapes the result besides model and data; `favour.rating.rate` says what each is."""

    columns: tuple[str, ...] | None = None
    id: str | None = None
    kind: str | None = None
    level: float | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: str | None = None
    batch_size: int | None = None
    part_rows: int | None = None
    every_class: bool = False
    header: bool | None = None

    def __post_init__(self) -> None:
        if self.level is not None:
            check_level(self.level)
        for name in ("batch_size", "part_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"`{name}` is {value}; at least 1 is required.")
        if self.std is not None and not all(s > 0 for s in self.std):
            raise InvalidValue(f"`std` is {self.std}; every channel's must be above 0.")


@dataclass(frozen=True)
class Rating:
    """What `rate` did.

    Attributes:
        out: The result.
        bad_out: The file (or folder) of bad rows, None if there are none.
        rows, bad: Rated and bad rows of the whole result.
        resumed: Rows of these that an earlier run had done.
        seconds: Of this run; `loop_seconds` of these were spent on its rows, the rest on getting ready.
        batch: Rows rated together.
        columns: Of the data that the model read.
    """

    out: str
    bad_out: str | None
    rows: int
    bad: int
    resumed: int
    seconds: float
    batch: int
    columns: tuple[str, ...] = ()
    loop_seconds: float = 0.0

    @property
    def rows_per_second(self) -> float:
        """Of the rows of this run."""
        return (self.rows + self.bad - self.resumed) / max(self.loop_seconds, 1e-9)

    def __str__(self) -> str:
        text = f"rated {self.rows:,} rows into {self.out}"
        if self.bad:
            text += f", {self.bad:,} bad {'row' if self.bad == 1 else 'rows'} into {self.bad_out}"
        if self.resumed:
            text += f"; {self.resumed:,} were done before"
        return f"{text}; {self.seconds:.1f} s, {self.rows_per_second:,.0f} rows/s, batch {self.batch}"


@dataclass
class Prepared:
    """A rating that is ready to run."""

    store: Store
    manifest: dict[str, Any]
    plan: Plan
    rater: Rater
    units: list[Unit]
    todo: list[int]  # numbers of the units that are not done
    data: Data
    rows: int = 0  # done before
    bad: int = 0
    total: int = 0
    began: float = 0.0
    ready: float = field(default_factory=time.perf_counter)

    def finish(self, rows: int, bad: int) -> Rating:
        """Join the parts. `rows` and `bad` are those of this run."""
        if self.data.fingerprint() != self.manifest["identity"]["data"]:
            raise InvalidValue(
                "the data were written to while they were rated, so that the rows may be of two states of them; "
                f"`{self.store.folder}` keeps what there is. Allow overwriting to begin anew."
            )
        manifest = {**self.manifest, "rows": self.rows + rows, "bad": self.bad + bad}
        self.store.finish(manifest, self.plan.schema, range(len(self.units)))
        return summary(self.store, manifest, self.rows + self.bad, self.began, self.ready)


def rate(
    data: Paths,
    model: Any,
    out: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    **options: Any,
) -> Rating:
    """Rate every row of the data; continue where an interrupted call with the same arguments stopped.

    Memory is bounded whatever the size of the data. See `favour.rating.columns` for what comes out,
    `favour.rating.store` for the files.

    Args:
        data: A Parquet, CSV, TSV or NPY file, a folder of images, a glob, or a list of those.
        model: A .onnx or .pt2 file that `favour.export` wrote, a file that `Predictor.save` wrote,
            `"package.module:factory"`, a `Predictor`, a module with dropout, or a pair (module, posterior). Modules
            are compiled with the first rows.
        out: A .parquet, .csv or .tsv file, or a folder (no suffix, or a slash at the end) for a data set of parts. It
            may not lie where the data are looked for.
        weights: Safetensors file for the module that a factory makes.
        device: `"cpu"` or `"cuda"`; by default the latter where there is one.
        overwrite: Replace an earlier result, once the new one is whole. Files that no rating wrote are never replaced.
        progress: Called with the numbers of rated, bad and all rows.
        columns: Names of the features; by default all columns of numbers but the id, in order.
        id: A column to copy to the result. Of images, any text: their names without suffix become the ids.
        kind: `"softmax"`, `"binary"`, `"multilabel"`, `"ordinal"` or `"regression"`. By default what an exported
            file says; otherwise one output is a regression, several are logits.
        level: Of the intervals of a regression, .95 unless the file says otherwise.
        size, channels, mean, std: Images are resized to (height, width), have 1 or 3 channels, values from 0 to 1, less
            `mean`, by `std`. Size and channels by default those of the model.
        dtype: Of a module's input, `"float32"` by default.
        batch_size: Rows rated together; by default by memory.
        part_rows: Rows of a part, the most that is lost when a run is killed: 16384, 1024 images.
        every_class: Give every class's probability a column.
        header: Of CSV files: whether the first line holds names. Needed where it holds numbers, which may be either.

    Returns:
        A `Rating`; printed, it is a sentence.

    Raises:
        InvalidValue: Arguments do not fit each other, the data or what is in `out`.
        CorruptFile: A file is damaged.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> np.save(f"{folder}/x.npy", np.zeros((5, 3), np.float32))
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        >>> done = rate(f"{folder}/x.npy", net, f"{folder}/rated.parquet")
        >>> done.rows, done.bad
        (5, 0)
    """
    with prepared(data, model, out, Options(**checked(options)), weights, device, overwrite) as ready:
        if isinstance(ready, Rating):
            return ready
        rows = bad = 0

        def tick(more_rows: int, more_bad: int) -> None:
            nonlocal rows, bad
            rows, bad = rows + more_rows, bad + more_bad
            if progress is not None:
                progress(ready.rows + rows, ready.bad + bad, ready.total)

        tick(0, 0)
        for number in ready.todo:
            ready.plan.rate(number, ready.units[number], ready.rater, tick)
        return ready.finish(rows, bad)


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, sequences as tuples; unknown names are a `TypeError`, as of any function."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


@contextmanager
def prepared(
    data: Paths,
    model: Any,
    out: str | os.PathLike[str],
    options: Options,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    overwrite: bool = False,
    processes: int = 1,
) -> Iterator[Prepared | Rating]:
    """Everything up to the first unit, with the output locked; a `Rating` if there is nothing left to do."""
    require("pyarrow", "rate")
    began = time.perf_counter()
    store = Store(out)
    # Whatever can be wrong with the arguments is found before anything is written.
    found = find(data, options.header, options.columns)
    store.keep_apart(found.given, found.files)
    device = device or default_device(model)
    opened = open_model(model, weights, options.kind, device)
    reading = reading_for(found, options, opened if isinstance(opened, Rater) else None)
    carried = (reading.id,) if reading.id and found.kind != "images" else ()
    rows = options.part_rows or PART_ROWS.get(found.kind, DEFAULT_PART_ROWS)
    parts = list(units(found, rows, reading.columns, carried))
    example, id_type = _example(parts, reading, found)
    rater = opened if isinstance(opened, Rater) else opened(example)
    columns = rated_columns(rater(example), rater.kind, options.level, rater.labels, options.every_class)
    wanted = schema(columns, id_type if store.form != "csv" else text_type(id_type))
    identity = identity_of(rater, found, options)
    with store.locked():
        settled = store.settle()
        standing = store.standing()
        here = settled and standing.final is not None and standing.final["identity"] == identity
        step = next_step(store, standing, identity, overwrite and not here)
        if step is Step.ready:
            assert standing.final is not None
            rows = standing.final["rows"] + standing.final["bad"]
            yield summary(store, standing.final, rows, began, time.perf_counter())
            return
        earlier = standing.begun or {} if step is Step.go_on else {}
        batch = options.batch_size or earlier.get("batch") or fitting_batch(rater, example, processes, device)
        plan = Plan(store.given, reading, batch, wanted, options.level, options.every_class)
        manifest = {"identity": identity, "batch": batch, "columns": list(reading.columns)}
        if step is Step.begin:
            store.begin(manifest)
        done = store.done()
        for number in done:
            _check_part(store, number, parts)
        rows, bad = store.counts(done)
        todo = [i for i in range(len(parts)) if i not in done]
        total = sum(unit.rows for unit in parts)
        yield Prepared(store, manifest, plan, rater, parts, todo, found, rows, bad, total, began)


def _check_part(store: Store, number: int, parts: Sequence[Unit]) -> None:
    wanted = parts[number].rows if number < len(parts) else 0
    if (have := sum(store.counts([number]))) != wanted:
        raise InvalidValue(
            f"`{store.part(number)}` has {have} rows with those of its bad rows, and its stretch of the data has "
            f"{wanted}; move it, and the same command rates them again."
        )


def summary(store: Store, manifest: Mapping[str, Any], resumed: int, began: float, ready: float) -> Rating:
    """A finished rating from its manifest, and when it began and was ready for the first row."""
    now = time.perf_counter()
    return Rating(
        str(store.out),
        str(store.bad_out) if manifest["bad"] else None,
        manifest["rows"],
        manifest["bad"],
        resumed,
        now - began,
        manifest["batch"],
        tuple(manifest["columns"]),
        now - ready,
    )


def default_device(model: Any) -> str:
    """A GPU if there is one that can run the model."""
    if not torch.cuda.is_available():
        return "cpu"
    if str(model).lower().endswith(".onnx"):
        runtime = require("onnxruntime", "export")
        return "cuda" if "CUDAExecutionProvider" in runtime.get_available_providers() else "cpu"
    return "cuda"


# ---- how rows become inputs


def reading_for(data: Data, options: Options, rater: Rater | None, rows: Any = None) -> Reading:
    """Columns, shape and dtype that fit both data and model, or an error that says why there are none.

    `rows` is an Arrow table of some of the rows; read from the first file if it is needed and None.
    """
    wanted = rater.shape if rater is not None else None
    dtype = rater.dtype if rater is not None else options.dtype or "float32"
    columns: tuple[str, ...] = ()
    if data.kind == "images":
        shape = _image_shape(options, wanted)
        channels = shape[0]
        for name, values in (("mean", options.mean), ("std", options.std)):
            if values is not None and len(values) not in (1, channels):
                raise InvalidValue(f"`{name}` has {len(values)} values and the images have {channels} channels.")
        return Reading((), options.id, dtype, shape, options.mean or (), options.std or ())
    if data.kind == "npy":
        if options.columns or options.id:
            raise InvalidValue("an NPY file has no named columns; leave out `columns` and `id`.")
        assert data.shape is not None
        given = data.shape
    else:
        columns = _chosen(data, options)
        given = _row_shape(data, columns, wanted, rows)
    return Reading(columns, options.id, dtype, _fitted(given, wanted, columns), header=data.header)


def _chosen(data: Data, options: Options) -> tuple[str, ...]:
    """Names of the features: those that were asked for, or all that hold numbers and are not the id."""
    file, has = data.files[0], ", ".join(name or "''" for name in data.names)
    columns = options.columns or tuple(name for name in data.numeric if name != options.id)
    repeated = sorted({name for name in columns if columns.count(name) > 1})
    if repeated:
        raise InvalidValue(f"`columns` names {', '.join(repeated)} twice; each column is one feature.")
    missing = [n for n in (*columns, *([options.id] if options.id else [])) if n not in data.names]
    if missing:
        raise InvalidValue(f"`{file}` has no column {', '.join(missing)}; it has {has}.{hint(data.names)}")
    if not columns and not data.unclear:
        raise InvalidValue(f"`{file}` has no column of numbers; it has {has}.{hint(data.names)}")
    if not options.columns:
        unclear = [name for name in data.unclear if name != options.id]
        if unclear:
            raise InvalidValue(
                f"column `{unclear[0]}` of `{file}` is neither one of numbers nor one of text in its first rows; choose "
                "the features with `columns`."
            )
        if "" in columns:
            raise InvalidValue(
                f"column {data.names.index('') + 1} of `{file}` holds numbers and has no name, as an index that was "
                "written along; choose the features with `columns`."
            )
    return columns


def _row_shape(
    data: Data, columns: tuple[str, ...], wanted: tuple[int | None, ...] | None, rows: Any
) -> tuple[int, ...]:
    """(features,): the number of columns, or the length of the lists in a column of lists."""
    pa = require("pyarrow", "rate")
    if data.kind == "csv":
        return (len(columns),)
    if rows is None:
        with open_parquet(data.files[0]) as file:
            empty = file.schema_arrow.empty_table()
            rows = next((pa.Table.from_batches([b]) for b in file.iter_batches(1024, columns=list(columns))), empty)
    kinds = {name: rows.schema.field(name).type for name in columns}
    nested = [name for name, kind in kinds.items() if pa.types.is_nested(kind)]
    if not nested:
        return (len(columns),)
    if len(columns) > 1 or not is_numeric(kinds[nested[0]]):
        raise InvalidValue(
            f"column `{nested[0]}` holds {kinds[nested[0]]}; give one column of lists of numbers with `columns`, "
            f"or columns of single numbers. Chosen are {', '.join(columns)}."
        )
    if wanted is not None and None not in wanted:
        return (int(np.prod([size or 0 for size in wanted])),)
    lengths = [len(value) for value in rows.column(nested[0]) if value.is_valid]
    if not lengths:
        raise InvalidValue(f"column `{nested[0]}` of `{data.files[0]}` begins with rows that hold nothing.")
    return (lengths[0],)


def _fitted(given: tuple[int, ...], wanted: tuple[int | None, ...] | None, columns: tuple[str, ...]) -> tuple[int, ...]:
    """The shape of one input: the model's, if the row has as many numbers."""
    if wanted is None:
        return given
    if len(given) == len(wanted) and all(w in (None, g) for g, w in zip(given, wanted, strict=True)):
        return given
    numbers = int(np.prod(given))
    fixed = int(np.prod([size for size in wanted if size is not None]))
    free = [i for i, size in enumerate(wanted) if size is None]
    if not free and numbers == fixed:
        return tuple(size or 0 for size in wanted)
    if len(free) == 1 and fixed and numbers % fixed == 0:
        return tuple(numbers // fixed if size is None else size for size in wanted)
    shown = ", ".join(columns[:8]) + (", …" if len(columns) > 8 else "")
    chosen = f" ({shown}); choose with `columns`" if columns else ""
    raise InvalidValue(f"the model takes inputs of shape {wanted} and a row of the data has {given}{chosen}.")


def _image_shape(options: Options, wanted: tuple[int | None, ...] | None) -> tuple[int, int, int]:
    if wanted is not None and len(wanted) != 3:
        raise InvalidValue(f"the model takes inputs of shape {wanted}; images are (channels, height, width).")
    model: Sequence[int | None] = wanted or (None, None, None)
    channels = options.channels or model[0] or 3
    size = options.size or (model[1], model[2])
    if size[0] is None or size[1] is None:
        raise InvalidValue("the model takes images of any size: say which with `size`, such as 224 224.")
    for name, have, want in zip(("channels", "height", "width"), (channels, *size), model, strict=True):
        if want not in (None, have):
            raise InvalidValue(f"the {name} of images is {have} and the model takes {want}.")
    return channels, size[0], size[1]


def _example(parts: list[Unit], reading: Reading, data: Data) -> tuple[npt.NDArray, Any]:
    """The first rows that are inputs, and the Arrow type of their ids."""
    first: Bad | None = None
    for unit in parts:
        for chunk in chunks(unit, reading, 64):
            if len(chunk.x):
                return chunk.x[:EXAMPLE], None if chunk.ids is None else chunk.ids.type
            first = first or (chunk.bad[0] if chunk.bad else None)
    if first is not None:
        where = f"(`{first.source}`, row {first.row})"
        raise InvalidValue(f"there is no row to rate: the first ones are bad, {first.reason} {where}.")
    more = f" and {len(data.files) - 1} more" if len(data.files) > 1 else ""
    raise InvalidValue(f"there is no row to rate in `{data.files[0]}`{more}.")
