"""Rating on a cluster: the same rows as on one machine, whatever happens to a worker.

The tests marked slow start a real Ray cluster of several processes on this machine: `make test-slow`.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

import favour
from favour.errors import InvalidValue
from favour.rating import loop, rate, store

# Ray leaves sockets and files to the garbage collector, and sets options that it calls deprecated.
pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning",
    "ignore::pytest.PytestUnraisableExceptionWarning",
    r"ignore::DeprecationWarning:ray\..*",
    r"ignore::FutureWarning:ray\..*",
    r"ignore::UserWarning:ray\..*",
)

FEATURES, ROWS = 4, 1000


def network(width: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(FEATURES, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 3)).eval()


def write(folder: Path, n: int = ROWS) -> Path:
    """A Parquet file with a row in it that cannot be rated."""
    x = np.random.default_rng(0).standard_normal((n, FEATURES)).astype(np.float32)
    x[n // 2, 1] = np.nan
    table = pa.table({"key": np.arange(n), **{f"f{i}": x[:, i] for i in range(FEATURES)}})
    pq.write_table(table, folder / "x.parquet", row_group_size=max(1, n // 50))
    return folder / "x.parquet"


@pytest.fixture(scope="module")
def predictor():
    return favour.compile(network(), torch.zeros(2, FEATURES))


def units(ready, numbers) -> dict[str, np.ndarray]:
    """Units as Ray Data hands them over."""
    described = np.array([json.dumps(asdict(ready.units[i])) for i in numbers], object)
    return {"number": np.array(numbers), "unit": described}


def test_worker_carries_out_units_and_skips_those_done(tmp_path, predictor):
    scale = pytest.importorskip("favour.scale")
    data = write(tmp_path)
    settings = {"id": "key", "batch_size": 32, "part_rows": 200}
    rate(data, predictor, tmp_path / "one.parquet", **settings)
    with loop.prepared(data, predictor, tmp_path / "many.parquet", loop.Options(**settings)) as ready:
        ready.store.keep_model(ready.rater.packed)
        first, second = (scale.UnitWorker(ready.plan, "cpu", 1) for _ in range(2))
        done = [first(units(ready, [0, 3])), second(units(ready, [1])), second(units(ready, [4, 2]))]
        assert [d["rows"].tolist() for d in done] == [[200, 200], [200], [200, 199]]
        assert [d["bad"].tolist() for d in done] == [[0, 0], [0], [0, 1]]
        written = ready.store.part(2).stat().st_mtime_ns
        again = first(units(ready, [2]))  # as after the loss of a worker that had written the part
        assert (again["rows"].tolist(), again["bad"].tolist()) == ([199], [1])
        assert ready.store.part(2).stat().st_mtime_ns == written
        result = ready.finish(999, 1)
    assert (result.rows, result.bad) == (999, 1)
    for end in ("parquet", "bad.parquet"):
        assert pq.read_table(tmp_path / f"many.{end}").equals(pq.read_table(tmp_path / f"one.{end}"))
    assert not (tmp_path / "many.parquet.parts").exists()


def test_rows_of_a_data_set_are_split_into_rated_and_bad(tmp_path, predictor):
    scale = pytest.importorskip("favour.scale")
    pytest.importorskip("ray.data")
    data = write(tmp_path, 100)
    settings = loop.Options(id="key", batch_size=100)
    with loop.prepared(data, predictor, tmp_path / "out.parquet", settings) as ready:
        ready.store.keep_model(ready.rater.packed)
        block = scale.RowWorker(ready.plan, "cpu", 1)(pq.read_table(data))
        assert block.num_rows == 100
        sink = scale._sink(ready.plan)
        for _ in range(2):  # a task that is repeated replaces what it wrote
            assert sink.write([block.slice(0, 60), block.slice(60)], SimpleNamespace(task_idx=7)) == (99, 1)
        assert ready.store.done() == {7} and ready.store.counts([7]) == (99, 1)
        rated, bad = pq.read_table(ready.store.part(7)), pq.read_table(ready.store.bad_part(7))
    assert sorted([*rated["id"].to_pylist(), *map(int, bad["id"].to_pylist())]) == list(range(100))
    assert bad["id"].to_pylist() == ["50"] and "`f1`" in bad["reason"][0].as_py()
    assert rated["row"].null_count == 99


def test_actors_leave_a_core_to_tasks():
    scale = pytest.importorskip("favour.scale")
    pytest.importorskip("ray.data")
    for count, threads, cores in [(2, 1, 2), (8, 1, 8), (3, 1, 2), (1, 4, 8), (1, 1, 1)]:
        pool = scale._Pool(count, threads, 0, count, float(cores))
        assert pool.arguments(99, spare=1)["num_cpus"] * count <= cores - 1
        assert pool.arguments(99)["num_cpus"] == min(threads, cores / count) or count > cores


# ---- a cluster


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=3,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        object_store_memory=200 * 2**20,
    )
    try:
        yield ray
    finally:
        ray.shutdown()


def workers(name: str) -> list[int]:
    """Processes below this one that hold an actor of the pool."""
    parents, titles = {}, {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                titles[int(folder.name)] = (folder / "cmdline").read_bytes().decode(errors="replace")
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue

    def ours(process: int) -> bool:
        while process > 1:
            process = parents.get(process, 0)
            if process == os.getpid():
                return True
        return False

    return [p for p, title in titles.items() if title.startswith("ray::") and name in title and ours(p)]


def compare(out: Path, one: Path) -> None:
    """Same rows, same numbers, to the last bit."""
    for end in ("parquet", "bad.parquet"):
        found, wanted = (pq.read_table(f"{path}.{end}").sort_by([("row", "ascending")]) for path in (out, one))
        assert found.equals(wanted)


@pytest.mark.slow
def test_cluster_gives_the_rows_of_one_machine(tmp_path, predictor, cluster):
    data = write(tmp_path)
    settings = {"id": "key", "batch_size": 32, "part_rows": 200}
    rate(data, predictor, tmp_path / "one.parquet", **settings)
    seen = []
    done = favour.scale.rate(
        data, predictor, tmp_path / "many.parquet", workers=2, progress=lambda *n: seen.append(n), **settings
    )
    assert (done.rows, done.bad, done.resumed) == (ROWS - 1, 1, 0)
    assert seen[-1] == (ROWS - 1, 1, ROWS)
    compare(tmp_path / "many", tmp_path / "one")
    assert favour.scale.rate(data, predictor, tmp_path / "many.parquet", **settings).resumed == ROWS


@pytest.mark.slow
@pytest.mark.parametrize("victims", [1, 2])
def test_killed_workers_lose_and_repeat_nothing(tmp_path, cluster, victims):
    data = write(tmp_path, 20_000)
    settings = {"id": "key", "batch_size": 64, "part_rows": 400}
    model = favour.compile(network(1500), torch.zeros(2, FEATURES))  # slow enough to be met at work
    out = tmp_path / "many.parquet"
    killed: list[tuple[int, int]] = []

    def kill() -> None:
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and len(killed) < victims:
            parts = len(list(Path(f"{out}.parts").glob("part-*.parquet")))
            found = [p for p in workers("UnitWorker") if p not in {p for p, _ in killed}]
            if parts >= 5 * (1 + len(killed)) and found:
                os.kill(found[0], signal.SIGKILL)
                killed.append((found[0], parts))
            time.sleep(0.05)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        done = favour.scale.rate(data, model, out, workers=3, **settings)
    finally:
        thread.join()
    assert len(killed) == victims
    assert all(parts < 50 for _, parts in killed), "the run was over before the worker was killed"
    assert (done.rows, done.bad) == (19_999, 1)
    table = pq.read_table(out)
    assert table["row"].to_pylist() == [i for i in range(20_000) if i != 10_000]
    rate(data, model, tmp_path / "one.parquet", **settings)
    compare(tmp_path / "many", tmp_path / "one")


@pytest.mark.slow
def test_cluster_continues_what_one_machine_began(tmp_path, predictor, cluster):
    data = write(tmp_path)
    settings = {"id": "key", "batch_size": 32, "part_rows": 200}

    def stop(rows: int, bad: int, total: int) -> None:
        if rows > 500:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rate(data, predictor, tmp_path / "out.parquet", progress=stop, **settings)
    done = favour.scale.rate(data, predictor, tmp_path / "out.parquet", workers=2, **settings)
    assert (done.rows, done.resumed) == (ROWS - 1, 400)
    rate(data, predictor, tmp_path / "one.parquet", **settings)
    compare(tmp_path / "out", tmp_path / "one")


@pytest.mark.slow
def test_rows_of_a_ray_data_set(tmp_path, predictor, cluster):
    table = pq.read_table(write(tmp_path))
    dataset = cluster.data.from_arrow([table.slice(i, 250) for i in range(0, ROWS, 250)])
    with pytest.raises(InvalidValue, match="with `id`"):
        favour.scale.rate(dataset, predictor, tmp_path / "many.parquet")
    done = favour.scale.rate(dataset, predictor, tmp_path / "many.parquet", id="key", batch_size=250, workers=2)
    rate(tmp_path / "x.parquet", predictor, tmp_path / "one.parquet", id="key", batch_size=250)
    assert (done.rows, done.bad) == (ROWS - 1, 1)
    found, wanted = (pq.read_table(tmp_path / f"{name}.parquet").sort_by("id") for name in ("many", "one"))
    assert found.schema.names == wanted.schema.names
    assert found["id"].equals(wanted["id"]) and found["prediction"].equals(wanted["prediction"])
    for name in ("probability", "stddev", "jsd", "entropy", "max_probability", "least_confidence"):
        np.testing.assert_allclose(found[name].to_numpy(), wanted[name].to_numpy(), rtol=1e-5, atol=1e-7)
    assert pq.read_table(tmp_path / "many.bad.parquet")["id"].to_pylist() == [str(ROWS // 2)]
    with pytest.raises(InvalidValue, match="is there already"):
        favour.scale.rate(dataset, predictor, tmp_path / "many.parquet", id="key")
    assert not store.Store(tmp_path / "many.parquet").folder.exists()


def lose_a_machine(folder: Path) -> None:
    """Rate on a cluster of two nodes, one of which is killed with all its workers once a few parts are there."""
    import ray
    from ray.cluster_utils import Cluster

    torch.set_num_threads(1)
    memory = {"num_cpus": 2, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={**memory, "include_dashboard": False})
    second = cluster.add_node(**memory)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    seen = []
    try:
        machines = len([n for n in ray.nodes() if n["Alive"]])

        def progress(rows: int, bad: int, total: int) -> None:
            if rows > 2000 and not seen:
                seen.append(rows)
                cluster.remove_node(second, allow_graceful=False)

        model = favour.compile(network(1500), torch.zeros(2, FEATURES))
        settings = {"id": "key", "batch_size": 64, "part_rows": 400}
        done = favour.scale.rate(
            folder / "x.parquet", model, folder / "many.parquet", workers=4, progress=progress, **settings
        )
        (folder / "seen.json").write_text(json.dumps([machines, seen[0], done.rows, done.bad]))
    finally:
        ray.shutdown()
        cluster.shutdown()
    rate(folder / "x.parquet", model, folder / "one.parquet", **settings)
    compare(folder / "many", folder / "one")


def started(*arguments: str, **options) -> subprocess.Popen:
    """A process of its own, with the paths of this one."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, *arguments], env=environment, text=True, **options)


@pytest.mark.slow
def test_lost_machine_loses_and_repeats_nothing(tmp_path):
    pytest.importorskip("ray")
    write(tmp_path, 20_000)
    code = f"import pathlib, test_scale; test_scale.lose_a_machine(pathlib.Path({str(tmp_path)!r}))"
    process = started("-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        _, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors[-3000:]
    machines, when, rated, bad = json.loads((tmp_path / "seen.json").read_text())
    assert machines == 2 and when < 19_999 and (rated, bad) == (19_999, 1)


@pytest.mark.slow
def test_killed_command_goes_on(tmp_path):
    data = write(tmp_path, 20_000)
    favour.compile(network(1500), torch.zeros(2, FEATURES)).save(tmp_path / "model.favour")
    out = tmp_path / "out.parquet"
    command = ("-m", "favour.cli", "rate", str(tmp_path / "model.favour"), str(data), "--out", str(out), "--id", "key")
    settings = ("--part-rows", "400", "--batch-size", "64")
    process = started(*command, *settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while len(list(Path(f"{out}.parts").glob("part-*"))) < 5 and time.monotonic() < deadline:
            time.sleep(0.02)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == -signal.SIGKILL and not out.exists()
    before = len(list(Path(f"{out}.parts").glob("part-*")))
    again = started(*command, *settings, "--engine", "ray", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        output, errors = again.communicate(timeout=300)
    finally:
        again.kill()
    assert again.returncode == 0, errors[-3000:]
    assert "rated 19,999 rows" in output and f"{400 * before:,} were done before" in output
    rate(data, tmp_path / "model.favour", tmp_path / "one.parquet", id="key", part_rows=400, batch_size=64)
    compare(tmp_path / "out", tmp_path / "one")
