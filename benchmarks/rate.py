"""Rows per second of `favour rate`: exported networks on CPU, one process and a pool of Ray actors.

Two networks on rows of 784 numbers, an MLP 784-400-400-10 and a LeNet on 1 × 28 × 28, both with dropout, as .onnx and
.pt2 files and as a predictor. The data are Parquet files, a column of lists; reading, rating and writing are timed
together, without start-up: from the end of the first part to the end of the last one. Start-up, bytes and the time of
joining the parts are reported beside it: `docs/scaling.md` reckons with all of them.

    python benchmarks/rate.py [--rows 65536] [--workers 2]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from common import write
from torch import nn

import favour
from favour.exporting import export
from favour.rating import rate
from favour.rating.sources import find, units
from favour.rating.store import Store, join

PART = 2048


def networks() -> dict[str, nn.Module]:
    """Untrained: speed does not depend on the weights."""
    torch.manual_seed(0)
    mlp = [nn.Linear(784, 400), nn.ReLU(), nn.Dropout(0.1), nn.Linear(400, 400), nn.ReLU(), nn.Dropout(0.1)]
    lenet = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    head = [nn.Flatten(), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.5), nn.Linear(500, 10)]
    return {
        "mlp": nn.Sequential(*mlp, nn.Linear(400, 10)),
        "lenet": nn.Sequential(*lenet, *head),
    }


def data(folder: Path, rows: int) -> Path:
    """A Parquet file of random rows."""
    x = np.random.default_rng(0).random((rows, 784), np.float32)
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), 784)
    pq.write_table(pa.table({"key": np.arange(rows), "pixels": lists}), folder / "x.parquet", row_group_size=PART)
    return folder / "x.parquet"


class Clock:
    """Progress with the time of day: rows per second between the first part and the last."""

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.marks: list[tuple[float, int, float]] = []  # seconds, rows, seconds of this process's CPU

    def __call__(self, rows: int, bad: int, total: int) -> None:
        if rows and (not self.marks or rows // PART > self.marks[-1][1] // PART):
            self.marks.append((time.perf_counter() - self.began, rows, time.process_time()))

    def measured(self) -> dict[str, float]:
        """Start-up in seconds, and the steady rate; by the CPU time of this process too, which other work on the
        machine changes little."""
        (first, before, spent), (last, rows, all_spent) = self.marks[0], self.marks[-1]
        return {
            "rows_per_second": (rows - before) / (last - first),
            "rows_per_cpu_second": (rows - before) / max(all_spent - spent, 1e-9),
            "first_part_after_s": first,
        }


def single(model: Any, source: Path, out: Path, threads: int, rows: int) -> dict[str, float]:
    """One process."""
    torch.set_num_threads(threads)
    clock = Clock()
    done = rate(source, model, out, id="key", part_rows=PART, progress=clock, overwrite=True)
    assert (done.rows, done.bad) == (rows, 0)
    return {**clock.measured(), "threads": threads, "batch": done.batch, "bytes_per_row": out.stat().st_size / rows}


def pool(model: Any, source: Path, out: Path, workers: int, rows: int) -> dict[str, float]:
    """Ray actors of one thread each, on this machine."""
    torch.set_num_threads(1)
    clock = Clock()
    done = favour.scale.rate(
        source, model, out, id="key", part_rows=PART, progress=clock, overwrite=True, workers=workers
    )
    assert (done.rows, done.bad) == (rows, 0)
    found = {**clock.measured(), "workers": workers, "batch": done.batch}
    del found["rows_per_cpu_second"]  # of this process, which only waits
    return found


def batches(model: Any, source: Path, out: Path) -> dict[str, float]:
    """Rows per second, one thread, by batch size."""
    torch.set_num_threads(1)
    found = {}
    for size in (64, 256, 1024, 2048):
        clock = Clock()
        rate(source, model, out, id="key", part_rows=PART, batch_size=size, progress=clock, overwrite=True)
        found[str(size)] = clock.measured()["rows_per_second"]
    return found


def other_costs(folder: Path) -> dict[str, float]:
    """Per row: planning a CSV file, joining parts."""
    rows = 2_000_000
    text = b"1.25,2.5,3.75,5.0,6.25,7.5,8.75,10.0\n" * rows
    (folder / "x.csv").write_bytes(b"a,b,c,d,e,f,g,h\n" + text)
    start = time.perf_counter()
    list(units(find(folder / "x.csv"), PART))
    scan = rows / (time.perf_counter() - start)
    generator = np.random.default_rng(0)
    names = ("probability", "stddev", "jsd", "entropy", "max_probability", "least_confidence")
    columns = {name: generator.random(16384, np.float32) for name in names}
    part = pa.table({"source": ["x.parquet"] * 16384, "row": np.arange(16384), "id": np.arange(16384), **columns})
    store = Store(folder / "joined.parquet")
    store.folder.mkdir()
    for i in range(64):
        pq.write_table(part, store.part(i), compression="zstd")
    start = time.perf_counter()
    join(store.out, [store.part(i) for i in range(64)], part.schema)
    return {"csv_rows_counted_per_second": scan, "rows_joined_per_second": 64 * 16384 / (time.perf_counter() - start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    import ray

    before = os.getloadavg()[0]  # processes that wanted a core: other work on the machine slows what is timed here
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, out = data(folder, options.rows), folder / "out.parquet"
        ray.init(
            num_cpus=options.workers,
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=2**28,
        )
        try:
            for network, model in networks().items():
                example = torch.zeros(2, 784) if network == "mlp" else torch.zeros(2, 1, 28, 28)
                predictor = favour.compile(model.eval().requires_grad_(False), example)
                forms: dict[str, Any] = {"predictor": predictor}
                for suffix in ("onnx", "pt2"):
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        forms[suffix] = Path(export(predictor, folder / f"{network}.{suffix}"))
                for form, what in forms.items():
                    found: dict[str, Any] = {"one thread": single(what, source, out, 1, options.rows)}
                    found["all cores"] = single(what, source, out, os.cpu_count() or 1, options.rows)
                    found["ray"] = pool(what, source, out, options.workers, options.rows)
                    alone = found["one thread"]["rows_per_second"]
                    found["ray"]["efficiency"] = found["ray"]["rows_per_second"] / (options.workers * alone)
                    if form == "onnx":
                        found["by batch"] = batches(what, source, out)
                    results[f"{network}, {form}"] = found
                    print(network, form, {k: round(v.get("rows_per_second", 0)) for k, v in found.items()}, flush=True)
        finally:
            ray.shutdown()
        content = {"rows": options.rows, "features": 784, "cores": os.cpu_count(), "load before": before}
        write("rate", {**content, "models": results, "others": other_costs(folder)})


if __name__ == "__main__":
    main()
