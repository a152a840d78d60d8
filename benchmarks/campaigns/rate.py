"""Kills and resumes of `favour rate` with what may change in between: nothing lost, nothing twice, nothing mixed.

Each trial rates a file of rows, bad ones among them, into a result of a random form (Parquet, CSV, TSV, a folder), over
an earlier result or not, in processes that are killed (SIGKILL) at random moments. Between kills it tries what must be
refused while a run is unfinished: another model under the same name, changed data (of the same size and the same
time, too), other settings, files of others at every path that the rating uses. In the end the result must equal that of
one uninterrupted run, to the last bit, and every file of others must have its bytes, kind and time of modification.

    rows lost, rows twice, rows wrong     against the uninterrupted run
    rows of another model                 those of the wrong ones that equal another model's
    earlier results broken                after a kill, `OUT` is neither the earlier result nor the new one, whole
    wrongly accepted                      a run that had to be refused
    foreign files touched                 bytes, kind or time of modification
    raw errors                            an exception that is no FavourError
    hangs                                 a run that had to be ended from outside
    left behind                           files of ours that nothing will use

    python benchmarks/campaigns/rate.py [--trials 200] [--commands 5] [--processes 1]   → results/campaigns/rate.json

Most processes are forks, which have imported everything already; `--commands` trials use the command itself.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.dataset
import pyarrow.parquet as pq
import torch
from safetensors.torch import save_file
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, environment

import favour
from favour.errors import FavourError
from favour.rating import rate

ROWS, FEATURES, PART = 1500, 4, 100
FORMS = ("out.parquet", "out.csv", "out.tsv", "out")
SETTINGS: dict[str, Any] = {"id": "key", "part_rows": PART, "batch_size": 50}
REFUSED, RAW, TIMEOUT = 3, 4, 60
BAD = (
    "rows lost",
    "rows twice",
    "rows wrong",
    "rows of another model",
    "earlier results broken",
    "wrongly accepted",
    "foreign files touched",
    "raw errors",
    "hangs",
    "left behind",
)

MODELS = """
import torch
from torch import nn


def net():
    return nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))


def pair():
    model = nn.Sequential(nn.Linear(4, 3))
    state = torch.load("pair.pt", weights_only=True)
    model.load_state_dict(state["weights"])
    return model, {"0.weight": state["variance"]}
"""


def network(factor: float) -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3)).eval()
    with torch.no_grad():
        net[3].weight *= factor
    return net


class Model:
    """One name, and what may stand behind it: `put(0)` is the model that is rated with, `put(1)` another."""

    def __init__(self, form: str, folder: Path) -> None:
        self.form, self.folder = form, folder
        self.options: dict[str, Any] = {}
        self.name: Any = {"net": "campaign_models:net", "pair": "campaign_models:pair"}.get(form, form)
        if form in ("file", "pt2"):
            self.name = str(folder / f"model.{'favour' if form == 'file' else form}")
        if form == "net":
            self.options["weights"] = str(folder / "w.safetensors")
        self.objects = [self._made(i) for i in range(2)]
        self.put(0)

    def _made(self, i: int) -> Any:
        net = network(1.0 + i)
        if self.form == "net":
            return {k: v.clone() for k, v in net.state_dict().items()}
        if self.form == "pair":  # the same weights: only the posterior differs
            weights = {"weight": torch.ones(3, 4), "bias": torch.zeros(3)}
            return {"weights": {f"0.{k}": v for k, v in weights.items()}, "variance": torch.full((3, 4), 0.1 + i)}
        predict = favour.compile(net, torch.zeros(2, FEATURES))
        if self.form == "object":
            return predict
        path = self.folder / f"made-{i}"
        if self.form == "file":
            predict.save(path)
        else:
            path = path.with_suffix(".pt2")
            favour.export(predict, path)
        return path.read_bytes()

    def put(self, i: int) -> None:
        """Let the name stand for one of the two."""
        made = self.objects[i]
        if self.form == "object":
            self.name = made
        elif self.form == "net":
            save_file(made, self.folder / "w.safetensors")
        elif self.form == "pair":
            torch.save(made, self.folder / "pair.pt")
        else:
            Path(self.name).write_bytes(made)


def in_a_fork(call: Callable[[], Any], kill_after: float | None = None) -> tuple[int, str]:
    """Exit status of a call in a process of its own (-9: killed), and what it said."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status, said = 0, ""
        try:
            os.close(reading)
            warnings.simplefilter("ignore")
            call()
        except FavourError as error:
            status, said = REFUSED, str(error)
        except BaseException as error:
            status, said = RAW, f"{type(error).__name__}: {error}"
        os.write(writing, said.encode()[:4000])
        os._exit(status)
    os.close(writing)
    deadline = time.monotonic() + (TIMEOUT if kill_after is None else kill_after)
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.0005)
    with os.fdopen(reading, "rb") as stream:
        said = stream.read().decode()
    return os.waitstatus_to_exitcode(status), said


def as_command(data: Path, model: Model, out: Path, overwrite: bool, kill_after: float | None) -> tuple[int, str]:
    """The same by `favour rate`."""
    arguments = [sys.executable, "-m", "favour.cli", "rate", str(model.name), str(data), "--out", str(out)]
    arguments += ["--id", "key", "--part-rows", str(PART), "--batch-size", "50"]
    arguments += ["--weights", model.options["weights"]] if model.options else []
    arguments += ["--overwrite"] if overwrite else []
    process = subprocess.Popen(arguments, cwd=model.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        _, said = process.communicate(timeout=kill_after or TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        _, said = process.communicate()
    return {1: REFUSED}.get(process.returncode, process.returncode), said


def write_data(path: Path, bad: list[int]) -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, FEATURES)).astype(np.float32)
    x[bad, 1] = np.nan
    table = pa.table({"key": np.arange(ROWS), **{f"f{i}": x[:, i] for i in range(FEATURES)}})
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=50)
    else:
        pacsv.write_csv(table, path)


def read(out: Path) -> pa.Table | None:
    """A result of any form without its metadata; None where there is none that is whole."""
    try:
        if out.is_dir():
            return pyarrow.dataset.dataset(out).to_table().replace_schema_metadata()
        if out.suffix == ".parquet":
            return pq.read_table(out).replace_schema_metadata()
        separator = "\t" if out.suffix == ".tsv" else ","
        return pacsv.read_csv(out, parse_options=pacsv.ParseOptions(delimiter=separator))
    except (OSError, pa.ArrowInvalid):
        return None


def bad_rows(out: Path) -> list[int]:
    if out.is_dir():
        folder = out / "_bad"
        found = pyarrow.dataset.dataset(folder, ignore_prefixes=["."]).to_table() if any(folder.iterdir()) else None
    else:
        path = out.with_name(f"{out.stem}.bad{out.suffix}")
        found = read(path) if path.exists() else None
    return [] if found is None else found["row"].to_pylist()


def state(path: Path) -> Any:
    """Kind, bytes and time of modification of a file of others."""
    if not os.path.lexists(path):
        return None
    if path.is_symlink():
        target = Path(os.readlink(path))
        return "link", str(target), state(target)
    if path.is_dir():
        return "folder", {p.name: state(p) for p in path.iterdir()}
    if path.is_file():
        return "file", path.read_bytes(), path.stat().st_mtime_ns
    return "special", path.stat().st_mode


class Trial:
    """One result, from the first process to the last."""

    def __init__(self, folder: Path, random: random.Random, found: Counter[str], command: bool) -> None:
        self.folder, self.random, self.found, self.command = folder, random, found, command
        self.out = folder / "results" / random.choice(FORMS)
        self.out.parent.mkdir()
        (folder / "campaign_models.py").write_text(MODELS)
        forms = ("net", "file") if command else ("object", "file", "net", "pair", "pt2", "object", "file")
        self.model = Model(random.choice(forms), folder)
        self.data = folder / f"x{random.choice(('.parquet', '.csv'))}"
        write_data(self.data, sorted(random.sample(range(2, ROWS), random.choice((0, 1, 40)))))
        self.overwrite = random.random() < 0.5
        self.reference: dict[int, pa.Table] = {}
        for i in (1, 0):
            self.model.put(i)
            name = folder / f"reference-{i}" / self.out.name
            name.parent.mkdir()
            began = time.monotonic()
            self.expect(0, *in_a_fork(lambda name=name: self.rate(name, False)))
            self.seconds = time.monotonic() - began
            table = read(name)
            assert table is not None
            self.reference[i] = table
        self.bad = bad_rows(folder / "reference-0" / self.out.name)
        self.earlier: pa.Table | None = None
        if self.overwrite:  # by another model
            self.model.put(1)
            self.expect(0, *in_a_fork(lambda: self.rate(self.out, False)))
            self.earlier = read(self.out)
            self.model.put(0)

    def rate(self, out: Path, overwrite: bool, **other: Any) -> None:
        os.chdir(self.folder)
        sys.path.insert(0, str(self.folder))
        rate(self.data, self.model.name, out, overwrite=overwrite, **{**SETTINGS, **self.model.options, **other})

    def run(self, kill_after: float | None = None, overwrite: bool | None = None, **other: Any) -> tuple[int, str]:
        over = self.overwrite if overwrite is None else overwrite
        self.found["processes"] += 1
        if self.command and not other:
            status, said = as_command(self.data, self.model, self.out, over, kill_after)
        else:
            status, said = in_a_fork(lambda: self.rate(self.out, over, **other), kill_after)
        if status == RAW or status not in (0, -9, REFUSED):
            self.note("raw errors", said)
        if kill_after is None and status == -9:
            self.note("hangs", f"for {TIMEOUT} s")
        self.found["killed"] += kill_after is not None and status == -9
        return status, said

    def expect(self, wanted: int, status: int, said: str) -> None:
        if status != wanted:
            self.note("raw errors" if status not in (0, REFUSED) else "wrongly accepted", f"{status}: {said}")

    def note(self, what: str, said: str) -> None:
        self.found[what] += 1
        print(f"{what}: {self.out.name}, {self.model.form}, {self.data.suffix}: {said[-600:]}", flush=True)

    @property
    def unfinished(self) -> bool:
        return (self.out.with_name(self.out.name + ".parts") / "_manifest.json").exists()

    def whole(self) -> str:
        """Which result there is now."""
        table = read(self.out) if os.path.lexists(self.out) else None
        if table is None and not os.path.lexists(self.out):
            return "none"
        for name, known in (("new", self.reference[0]), ("earlier", self.earlier)):
            if table is not None and known is not None and table.equals(known):
                return name
        return "broken"

    def check_earlier(self) -> None:
        here = self.whole()
        if here == "broken" or (here == "none" and self.overwrite):
            self.note("earlier results broken", here)

    # ---- what must be refused

    def refused(self, why: str, **other: Any) -> None:
        self.found["refusals tried"] += 1
        status, _ = self.run(**other)
        if status == 0:
            self.note("wrongly accepted", why)
        self.found["refused"] += status == REFUSED

    def other_model(self) -> None:
        if self.whole() == "earlier":
            return  # that is the other model's: asked for again, it is there
        self.model.put(1)
        self.refused("another model", overwrite=False)
        self.model.put(0)

    def other_data(self) -> None:
        content, before = self.data.read_bytes(), self.data.stat()
        changed = bytearray(content)
        if self.random.random() < 0.5:  # of the same size and time
            at = len(content) // 2 + self.random.randrange(len(content) // 4)
            changed[at] = ord("7") if changed[at] != ord("7") else ord("8")
        else:
            changed += b"1500,1,2,3,4\n"
        self.data.write_bytes(bytes(changed))
        os.utime(self.data, ns=(before.st_atime_ns, before.st_mtime_ns))
        self.refused("changed data", overwrite=False)
        self.data.write_bytes(content)
        os.utime(self.data, ns=(before.st_atime_ns, before.st_mtime_ns))

    def other_settings(self) -> None:
        name, value = self.random.choice(
            (("every_class", True), ("part_rows", 150), ("columns", ["f0", "f1", "f2", "f3"]))
        )
        self.refused(f"other {name}", overwrite=False, **{name: value})

    def foreign_files(self) -> None:
        """Put things at the paths of the rating, and in its folders, and look at them again."""
        out = self.out
        paths = [out, out.with_name(out.name + ".parts"), out.with_name(f".{out.name}.lock")]
        if out.suffix:
            paths.append(out.with_name(f"{out.stem}.bad{out.suffix}"))
        if out.suffix in (".csv", ".tsv"):
            paths.append(out.with_name(f"{out.name}.rating.json"))
        paths += [p / name for p in paths[:2] if p.is_dir() for name in ("notes", "part-999999.parquet", "_bad/notes")]
        free = [p for p in paths if not os.path.lexists(p) and p.parent.is_dir()]
        if not free:
            return
        path, elsewhere = self.random.choice(free), self.folder / "thesis"
        elsewhere.write_text("years of work")
        kind = self.random.choice(("text", "parquet", "link", "folder", "pipe"))
        if kind == "text":
            path.write_text("years of work")
        elif kind == "parquet":
            pq.write_table(pa.table({"source": ["a"], "row": [1]}), path)
        elif kind == "link":
            path.symlink_to(elsewhere)
        elif kind == "folder":
            path.mkdir()
            (path / "part-000000.parquet").write_text("years of work")
        else:
            os.mkfifo(path)
        before = state(path), state(elsewhere)
        for overwrite in (False, True):
            self.found["foreign files"] += 1
            status, _ = self.run(overwrite=overwrite)
            if status == 0 and self.whole() != "new":  # there is no need to refuse what is done already
                self.note("wrongly accepted", f"{kind} at {path.name}")
            if (state(path), state(elsewhere)) != before:
                self.note("foreign files touched", f"{kind} at {path.name}")
        if os.path.lexists(path):
            shutil.rmtree(path) if kind == "folder" and path.is_dir() else path.unlink()

    # ---- the trial

    def carry_out(self) -> None:
        others = (self.other_model, self.other_data, self.other_settings, self.foreign_files)
        for _ in range(self.random.randrange(3, 9)):
            # Late moments more often than not: that is where results change places.
            share = self.random.uniform(0.0, 1.0) if self.random.random() < 0.5 else self.random.uniform(0.7, 1.0)
            status, said = self.run(kill_after=share * self.seconds)
            if status == REFUSED:
                self.note("raw errors", f"refused to go on: {said}")
            self.check_earlier()
            if self.unfinished and self.random.random() < 0.6:
                self.random.choice(others)()
                self.check_earlier()
            if status == 0 or self.whole() == "new":  # if killed in its last steps, the next one tidies up
                break
        if self.whole() != "new":
            status, said = self.run()
            self.expect(0, status, said)
        self.compare()
        status, said = self.run(overwrite=False)  # there is nothing left to do, but to tidy up
        self.expect(0, status, said)
        self.other_model()
        self.foreign_files()
        self.compare()
        wanted = {p.name for p in (self.folder / "reference-0").iterdir()}
        extra = {p.name for p in self.out.parent.iterdir()} - wanted
        if extra:
            self.note("left behind", ", ".join(sorted(extra)))

    def compare(self) -> None:
        """The result, row by row."""
        table, wanted = read(self.out), self.reference[0]
        self.found["rows compared"] += wanted.num_rows
        if table is not None and table.equals(wanted) and bad_rows(self.out) == self.bad:
            return
        got = Counter(table["row"].to_pylist()) if table is not None else Counter()
        rows = Counter({k: 1 for k in wanted["row"].to_pylist()})
        self.found["rows lost"] += sum((rows - got).values())
        self.found["rows twice"] += sum((got - rows).values())
        self.found["rows lost"] += len(set(self.bad) ^ set(bad_rows(self.out)))
        if table is not None and "stddev" in table.column_names:
            mine, other = ({r["row"]: r["stddev"] for r in self.reference[i].to_pylist()} for i in range(2))
            for row in table.to_pylist():
                if row["stddev"] != mine.get(row["row"]):
                    self.found["rows wrong"] += 1
                    self.found["rows of another model"] += row["stddev"] == other.get(row["row"])
        print(f"differs: {self.out}", flush=True)


def campaign(trials: int, commands: int, seed: int, minutes: float) -> dict[str, int]:
    """What was found, by name; everything in `BAD` should be 0. The commands come first."""
    found: Counter[str] = Counter(dict.fromkeys(BAD, 0))
    deadline = time.monotonic() + 60 * minutes
    for number in range(trials + commands):
        if time.monotonic() > deadline:
            break
        with tempfile.TemporaryDirectory() as folder:
            generator = random.Random(1000 * seed + number)
            found["trials"] += 1
            try:
                Trial(Path(folder), generator, found, command=number < commands).carry_out()
            except Exception as error:  # of the campaign itself: a result it cannot even read
                found["raw errors"] += 1
                print(f"trial {number}: {type(error).__name__}: {error}", flush=True)
        if number % 10 == 9:
            print(number + 1, json.dumps({k: v for k, v in found.items() if v}), flush=True)
    return dict(found)


def in_processes(options: argparse.Namespace) -> dict[str, int]:
    """The campaign divided among processes, each with a seed of its own."""
    found: Counter[str] = Counter(dict.fromkeys(BAD, 0))
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(options.processes):
            given = {
                "trials": -(-options.trials // options.processes),
                "commands": -(-options.commands // options.processes),
                "minutes": options.minutes,
                "seed": 1000 * options.seed + i + 1,
                "out": Path(folder, f"{i}.json"),
            }
            arguments = [part for name, value in given.items() for part in (f"--{name}", str(value))]
            running.append((given["out"], subprocess.Popen([sys.executable, __file__, *arguments])))
        for out, process in running:
            if process.wait() > 1:
                found["raw errors"] += 1
            found.update(json.loads(out.read_text())["found"])
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--commands", type=int, default=5)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=30, help="no trial begins later")
    parser.add_argument("--out", type=Path, default=RESULTS / "campaigns" / "rate.json")
    options = parser.parse_args()
    torch.set_num_threads(1)  # threads do not survive a fork
    began = time.monotonic()
    if options.processes > 1:
        found = in_processes(options)
    else:
        found = campaign(options.trials, options.commands, options.seed, options.minutes)
    given = {k: v for k, v in vars(options).items() if k != "out"}
    content = {
        "environment": environment(),
        "options": given,
        "seconds": round(time.monotonic() - began),
        "found": found,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    print(f"wrote {options.out}: {found}")
    raise SystemExit(any(found[name] for name in BAD))


if __name__ == "__main__":
    main()
