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

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.batching import fitting_batch
from favour.rating.columns import rated_columns, schema, text_type
from favour.rating.fit import example_of, reading_for
from favour.rating.identity import Step, identity_of, next_step
from favour.rating.job import Plan
from favour.rating.models import Outputs, Rater, open_model
from favour.rating.options import Options, checked
from favour.rating.sources import Data, Unit, find, units
from favour.rating.store import Store

PART_ROWS = {"images": 1024}
DEFAULT_PART_ROWS = 16384
EXAMPLE = 2  # rows that a network is compiled with
Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


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
        >>> import numpy as np
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


def _tried(rater: Rater, example: npt.NDArray) -> tuple[npt.NDArray, Outputs]:
    """The first rows and what is answered, or zeros where the model fails on those: the columns are the same."""
    try:
        return example, rater(example)
    except Exception as error:
        example = np.zeros_like(example)
        try:
            return example, rater(example)
        except Exception:
            raise error from None


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
    sources = find(data, options.header, options.columns)
    store.keep_apart(sources.places, sources.files)
    device = device or default_device(model)
    opened = open_model(model, weights, options.kind, device)
    reading = reading_for(sources, options, opened if isinstance(opened, Rater) else None)
    carried = (reading.id,) if reading.id and sources.kind != "images" else ()
    rows = options.part_rows or PART_ROWS.get(sources.kind, DEFAULT_PART_ROWS)
    parts = list(units(sources, rows, reading.columns, carried))
    example, id_type = example_of(parts, reading, sources, EXAMPLE)
    rater = opened if isinstance(opened, Rater) else opened(example)
    example, outputs = _tried(rater, example)
    columns = rated_columns(outputs, rater.kind, options.level, rater.labels, options.every_class)
    wanted = schema(columns, id_type if store.form != "csv" else text_type(id_type))
    identity = identity_of(rater, sources, options)
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
        plan = Plan(store.target, reading, batch, wanted, options.level, options.every_class)
        manifest = {"identity": identity, "batch": batch, "columns": list(reading.columns)}
        if step is Step.begin:
            store.begin(manifest)
        done = store.done()
        for number in done:
            _check_part(store, number, parts)
        rows, bad = store.counts(done)
        todo = [i for i in range(len(parts)) if i not in done]
        total = sum(unit.rows for unit in parts)
        yield Prepared(store, manifest, plan, rater, parts, todo, sources, rows, bad, total, began)


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
