"""Rating on a cluster: the units of `favour.rating` carried out by a pool of Ray actors.

    files       a Ray data set of units → map_batches(actors: read, rate, write a part) → counts → join the parts
    data sets   a Ray data set of rows  → map_batches(actors: rate)                     → write parts → join them

An actor holds the model, one CPU core and, where there is one, a GPU. Units, batches and the model are those of the
single-machine run, so the rows and numbers are too; a part is written under another name and renamed, so whatever Ray
repeats after losing a worker replaces an equal file: nothing is missing and nothing is there twice. `out` has to be on
storage that all machines see.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.batching import fitting_batch
from favour.rating.columns import bad_schema, bad_table, rated_columns, schema, text_type
from favour.rating.fit import reading_for
from favour.rating.identity import versions
from favour.rating.job import Plan
from favour.rating.loop import Prepared, Rating, prepared, summary
from favour.rating.models import Rater, open_model, unpack
from favour.rating.options import Options, checked
from favour.rating.reading import from_table
from favour.rating.sources import Data, Unit, is_numeric
from favour.rating.store import Store

__all__ = ["BLOCKS", "EXAMPLE_ROWS", "RowWorker", "UnitWorker", "rate"]

BLOCKS = 10_000  # of units, at most: Ray keeps track of each
EXAMPLE_ROWS = 64


def rate(
    data: Any,
    model: Any,
    out: str | os.PathLike[str],
    *,
    weights: str | os.PathLike[str] | None = None,
    device: str | None = None,
    overwrite: bool = False,
    progress: Callable[[int, int, int], None] | None = None,
    workers: int | None = None,
    cpus_per_worker: int = 1,
    **options: Any,
) -> Rating:
    """Rate every row on a Ray cluster; `favour.rating.rate` describes the arguments that are not below.

    A cluster that `ray.init` has joined is used; otherwise one is started on this machine and stopped at the end.

    Args:
        data: What `favour.rating.rate` takes, or a `ray.data.Dataset`, whose rows are told apart by the column `id`
            alone: `source` and `row` stay empty, and an interrupted run begins anew.
        model: The same. Only this process needs the code of a module or factory; the workers get a captured graph.
        out: The same, on storage that all machines see.
        workers: Actors; by default one for each GPU, or one for every `cpus_per_worker` cores.
        cpus_per_worker: Cores, and threads, of an actor.
    """
    chosen = Options(**checked(options))
    ray = require("ray", "ray")
    dataset = require("ray.data", "ray").Dataset
    with _cluster(ray):
        resources = ray.cluster_resources()
        cores = float(resources.get("CPU", 1))
        gpus = int(resources.get("GPU", 0)) if device in (None, "cuda") else 0
        count = workers or gpus or max(1, int(cores // cpus_per_worker))
        machines = sum(bool(node.get("Alive")) for node in ray.nodes())
        pool = _Pool(count, cpus_per_worker, 1 if gpus else 0, -(-count // max(1, machines)), cores)
        if isinstance(data, dataset):
            done = _rate_dataset(data, (model, weights), Store(out), chosen, overwrite, pool)
            if progress is not None:
                progress(done.rows, done.bad, done.rows + done.bad)
            return done
        with prepared(data, model, out, chosen, weights, pool.driver, overwrite, pool.local) as ready:
            return ready if isinstance(ready, Rating) else _rate_units(ready, progress, pool)


@dataclass(frozen=True)
class _Pool:
    """Actors: how many, and what each has."""

    count: int
    threads: int
    gpus: int
    local: int  # on one machine
    cores: float  # of the cluster

    @property
    def device(self) -> str:
        """Of the workers."""
        return "cuda" if self.gpus else "cpu"

    @property
    def driver(self) -> str:
        """Of this process, which may have no GPU."""
        return self.device if torch.cuda.is_available() else "cpu"

    def arguments(self, most: int, spare: int = 0) -> dict[str, Any]:
        """For `map_batches`: up to `most` actors that leave `spare` cores to others."""
        strategy = require("ray.data", "ray").ActorPoolStrategy(size=min(self.count, most))
        # Tasks that read and write need a core. Were all of them an actor's, neither would ever begin.
        cores = min(float(self.threads), math.floor(1000 * max(0.0, self.cores - spare) / self.count) / 1000)
        return {"compute": strategy, "num_cpus": cores, "num_gpus": self.gpus}


@contextmanager
def _cluster(ray: Any) -> Iterator[None]:
    """A cluster, and Ray Data without its own progress bars and reports."""
    started = not ray.is_initialized()
    if started:
        ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    context = require("ray.data", "ray").DataContext.get_current()
    logger = logging.getLogger("ray.data")
    before = context.enable_progress_bars, logger.level
    context.enable_progress_bars = False
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        context.enable_progress_bars = before[0]
        logger.setLevel(before[1])
        if started:
            ray.shutdown()


class _Worker:
    """Holds the model in an actor; one that replaces a dead actor finds the model beside the parts."""

    def __init__(self, plan: Plan, device: str, threads: int) -> None:
        torch.set_num_threads(threads)
        self.plan = plan
        self.store = Store(plan.out)
        self.rater = unpack(self.store.model(), device, threads)


# ---- files


class UnitWorker(_Worker):
    """Carries out units and answers with the numbers of rows."""

    def __call__(self, batch: dict[str, npt.NDArray]) -> dict[str, npt.NDArray]:
        store = self.store
        counts = []
        for number, described in zip(batch["number"].tolist(), batch["unit"].tolist(), strict=True):
            if store.part(number).exists():  # done by a worker that died before it could say so
                counts.append(store.counts([number]))
                continue
            fields = json.loads(described)
            unit = Unit(**{**fields, "files": tuple(fields["files"])})
            counts.append(self.plan.rate(number, unit, self.rater))
        rows, bad = np.array(counts, np.int64).T
        return {"number": batch["number"], "rows": rows, "bad": bad}


def _rate_units(ready: Prepared, progress: Callable[[int, int, int], None] | None, pool: _Pool) -> Rating:
    rows = bad = 0
    if progress is not None:
        progress(ready.rows, ready.bad, ready.total)
    if ready.todo:
        ready.store.keep_model(ready.rater.packed)
        items = [{"number": i, "unit": json.dumps(asdict(ready.units[i]))} for i in ready.todo]
        described = require("ray.data", "ray").from_items(items, override_num_blocks=min(len(items), BLOCKS))
        rated = described.map_batches(
            UnitWorker,
            batch_size=1,
            fn_constructor_args=(ready.plan, pool.device, pool.threads),
            **pool.arguments(len(items)),
        )
        for done in rated.iter_rows():
            rows, bad = rows + int(done["rows"]), bad + int(done["bad"])
            if progress is not None:
                progress(ready.rows + rows, ready.bad + bad, ready.total)
    return ready.finish(rows, bad)


# ---- data sets


class RowWorker(_Worker):
    """Rates rows. Bad ones come out with a reason and without numbers."""

    def __call__(self, batch: Any) -> Any:
        pa = require("pyarrow", "ray")
        nowhere = np.full(batch.num_rows, None, object)
        chunk = from_table(batch, None, nowhere, self.plan.reading)
        rated, bad = self.plan.results(chunk, self.rater)
        failed = bad_table(bad).rename_columns([f"_bad_{name}" for name in bad_schema().names])
        both = pa.unify_schemas([rated.schema, failed.schema])
        return pa.concat_tables([_widened(part, both) for part in (rated, failed)])


def _widened(table: Any, wanted: Any) -> Any:
    pa = require("pyarrow", "ray")
    columns = [
        table.column(f.name) if f.name in table.column_names else pa.nulls(table.num_rows, f.type) for f in wanted
    ]
    return pa.table(columns, schema=wanted)


def _sink(plan: Plan) -> Any:
    """Writes what `RowWorker` made as parts, numbered by task: a task that is repeated replaces its part."""
    base = require("ray.data", "ray").Datasink

    class Parts(base):  # type: ignore[misc,valid-type]
        def write(self, blocks: Iterable[Any], ctx: Any) -> tuple[int, int]:
            pa, pc = require("pyarrow", "ray"), require("pyarrow.compute", "ray")
            store = Store(plan.out)
            counts = [0, 0]
            with (
                store.writer(ctx.task_idx, plan.schema) as rated,
                store.bad_writer(ctx.task_idx) as failed,
            ):
                for block in blocks:
                    table = block if isinstance(block, pa.Table) else pa.Table.from_pandas(block)
                    reasons = table.column("_bad_reason")
                    good, bad = table.filter(pc.is_null(reasons)), table.filter(pc.is_valid(reasons))
                    rated.write(good.select(plan.schema.names).cast(plan.schema))
                    names = bad_schema().names
                    failed.write(
                        bad.select([f"_bad_{name}" for name in names]).rename_columns(names).cast(bad_schema())
                    )
                    counts = [counts[0] + good.num_rows, counts[1] + bad.num_rows]
            if not counts[1]:
                store.bad_part(ctx.task_idx).unlink(missing_ok=True)
            return counts[0], counts[1]

    return Parts()


def _rate_dataset(
    dataset: Any, model: tuple[Any, Any], store: Store, options: Options, overwrite: bool, pool: _Pool
) -> Rating:
    """Rate the rows of a data set; `model` is a pair of the model and its weights."""
    began = time.perf_counter()
    if options.id is None:
        raise InvalidValue("rows of a Ray data set have no numbers: name the column that tells them apart with `id`.")
    plan, rater = _planned(dataset, model, store, options, pool)
    listed = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()}
    identity: dict[str, Any] = {
        "model": rater.digest(),
        "data": None,
        "options": listed,
        "versions": versions(rater),
    }
    with store.locked():
        store.settle()
        standing = store.standing()
        # An unfinished rating of a data set cannot be continued, and makes way; one of files could be.
        kept = standing.begun is not None and standing.begun["identity"]["data"] is not None
        if not overwrite and (kept or standing.final is not None):
            what = "is there already" if standing.final is not None else "is an unfinished rating of files"
            raise InvalidValue(f"`{store.out}` {what}; give another name, or allow overwriting.")
        manifest = {"identity": identity, "batch": plan.batch, "columns": list(plan.reading.columns)}
        store.begin(manifest)
        store.keep_model(rater.packed)
        ready = time.perf_counter()
        rated = dataset.select_columns(list(dict.fromkeys([*plan.reading.columns, options.id]))).map_batches(
            RowWorker,
            batch_size=plan.batch,
            batch_format="pyarrow",
            fn_constructor_args=(plan, pool.device, pool.threads),
            **pool.arguments(pool.count, spare=1),
        )
        rated.write_datasink(_sink(plan))
        done = sorted(store.done())
        rows, bad = store.counts(done)
        manifest |= {"rows": rows, "bad": bad}
        store.finish(manifest, plan.schema, done)
        return summary(store, manifest, 0, began, ready)


def _planned(dataset: Any, model: tuple[Any, Any], store: Store, options: Options, pool: _Pool) -> tuple[Plan, Rater]:
    """Columns, batch and result's schema, from the first rows."""
    pa = require("pyarrow", "ray")
    first = dataset.take_batch(EXAMPLE_ROWS, batch_format="pyarrow")
    numeric = tuple(f.name for f in first.schema if is_numeric(f.type))
    data = Data("rows", ("the data set",), tuple(first.column_names), numeric)
    opened = open_model(*model, options.kind, pool.driver)
    reading = reading_for(data, options, opened if isinstance(opened, Rater) else None, first)
    chunk = from_table(first, None, np.full(first.num_rows, None, object), reading)
    if not len(chunk.x):
        raise InvalidValue(f"none of the first {first.num_rows} rows can be rated: {chunk.bad[0].reason}.")
    example = chunk.x[:2]
    rater = opened if isinstance(opened, Rater) else opened(example)
    batch = options.batch_size or fitting_batch(rater, example, pool.local, pool.driver)
    columns = rated_columns(rater(example), rater.kind, options.level, rater.labels, options.every_class)
    id_type = first.schema.field(options.id).type
    id_type = pa.string() if pa.types.is_large_string(id_type) else id_type
    wanted = schema(columns, text_type(id_type) if store.form == "csv" else id_type)
    plan = Plan(store.target, reading, batch, wanted, options.level, options.every_class)
    return plan, rater
