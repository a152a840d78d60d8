"""The zoo: unmodified models of many packages, in small configurations, against samples drawn by torch alone.

Each package is installed into an environment of its own (build/zoo/PACKAGE), on top of this one's torch, and each model
runs there in a process of its own (benchmarks/zoo/row.py), in one thread. benchmarks/zoo/held_out.json names ten models
that were drawn by a seed before any was tried; they are reported apart.

    mean error          of the mean, in standard deviations, and
    covariance error    relative, Frobenius; of the variances alone beyond 64 outputs
                        (both beyond the samples' own error)
    scale               √ of total variance over the samples'
    verdict             of `favour.check` on the same inputs
    seconds             of the processor, to compile, and to write and check a .pt2 and an .onnx file

    python benchmarks/zoo.py [--only PATTERN] [--held-out] [--draws 2000] [--jobs 2] [--build]

writes results/zoo.json; rows of models that were not asked for stay as they are.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import re
import site
import subprocess
import sys
import venv
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

from common import RESULTS, write

ROOT = Path(__file__).resolve().parent.parent
HERE = ROOT / "benchmarks" / "zoo"
PACKAGES: dict[str, dict[str, list[str]]] = json.loads((HERE / "packages.json").read_text())
HELD_OUT: list[str] = json.loads((HERE / "held_out.json").read_text())["models"]
COVARIANCE, MEAN = 0.2, 0.3  # errors up to which a belief is right
PARTS = ["beliefs", "files"]
FORMS, PROMPT = ("pt2", "onnx"), 30  # files of `favour.export`, and the seconds one may take
FOLDERS = re.compile(r"/\S*/(?:site-packages|python3\.\d+)/")  # where a package happens to be installed


def environment(package: str) -> Path:
    """The Python of a package's environment, made where it is missing."""
    wanted = PACKAGES[package]
    if not wanted:
        return Path(sys.executable)
    folder = ROOT / "build" / "zoo" / package
    python, stamp = folder / "bin" / "python", folder / "installed.json"
    if stamp.exists() and json.loads(stamp.read_text()) == wanted:
        return python
    if not python.exists():
        venv.create(folder)
    library = next((folder / "lib").glob("python3*")) / "site-packages"
    # This environment's packages, pip among them, behind its own: torch is shared, never fetched.
    (library / "shared.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    for options, key in (([], "with"), (["--no-deps"], "alone")):
        if key in wanted:
            subprocess.run([*pip, *options, *wanted[key]], check=True, cwd=ROOT, stderr=subprocess.DEVNULL)
    for compiled in library.glob("torchaudio/lib/*.so"):
        compiled.unlink()  # of a GPU build; without them it keeps to what is written in Python
    stamp.write_text(json.dumps(wanted))
    return python


def rows_of(names: list[str], python: Path, arguments: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of one package's models as they come; a row that has grown comes again."""
    command = [str(python), "-W", "ignore", str(HERE / "row.py"), *names, *arguments]
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    seen: dict[str, dict[str, Any]] = {}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=ROOT, env=os.environ | threads
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if not line.startswith('{"name": '):
                continue  # what packages print
            found = json.loads(line)
            name = found.pop("name")
            if "broke" in found and seen.get(name, {}).get("compiles"):
                found = seen[name] | {"export broke": found["broke"]}
            seen[name] = found
            yield name, found
    for name in set(names) - set(seen):
        yield name, {"compiles": False, "broke": f"exit {process.returncode} of its package's process"}


def right(found: dict[str, Any]) -> bool:
    """Not a row that was tried for its files alone."""
    return found.get("covariance error", math.inf) <= COVARIANCE and found["mean error"] <= MEAN


def summary(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Counts: how many compile, are right, and are wrong although `favour.check` trusts them."""
    compiled = {name: r for name, r in rows.items() if r["compiles"]}
    wrong = [name for name, r in compiled.items() if not right(r)]
    tried = [r["files"] for r in compiled.values() if "files" in r]
    taken = {form: [f[form] for f in tried if isinstance(f[form], float)] for form in FORMS}
    return {
        "models": len(rows),
        "packages": len({name.split("/")[0] for name in rows}),
        "compile": len(compiled),
        "right": len(compiled) - len(wrong),
        "wrong in silence": [n for n in wrong if rows[n].get("verdict") == "trust it" and not rows[n]["warned"]],
        "export tried": len(tried),
        "exported": {form: len(seconds) for form, seconds in taken.items()},
        f"exported within {PROMPT} s": {form: sum(t <= PROMPT for t in seconds) for form, seconds in taken.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="*", help="names, with wildcards, separated by commas")
    parser.add_argument("--held-out", action="store_true", help="the ten held out, and no others")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="the errors, the exported files, or both"
    )
    parser.add_argument("--build", action="store_true", help="only build the models and call them, without favour")
    given = parser.parse_args()
    listed = [sys.executable, str(HERE / "row.py"), "--list"]
    names: list[str] = json.loads(subprocess.run(listed, capture_output=True, text=True, check=True).stdout)
    patterns = given.only.split(",")
    names = [n for n in names if any(fnmatch.fnmatch(n, p) for p in patterns) and (n in HELD_OUT) == given.held_out]
    arguments = ["--build"] if given.build else ["--draws", str(given.draws), "--parts", *given.parts]
    path = RESULTS / "zoo.json"
    rows: dict[str, dict[str, Any]] = {}
    if path.exists() and not given.build:
        known = json.loads(path.read_text())
        rows = known["rows"] | known["held out rows"]
    pythons = {package: environment(package) for package in sorted({n.split("/")[0] for n in names})}
    writing = Lock()

    def package(which: str) -> None:
        mine = [n for n in names if n.split("/")[0] == which]
        for name, found in rows_of(mine, pythons[which], arguments):
            found = {k: FOLDERS.sub("", v) if isinstance(v, str) else v for k, v in found.items()}
            print(name, json.dumps({k: v if isinstance(v, (bool, list)) else str(v)[:160] for k, v in found.items()}),
                  flush=True)  # fmt: skip
            with writing:
                # What was found of the other part before stays.
                before = rows.get(name, {}) if given.parts != PARTS and found["compiles"] else {}
                rows[name] = (before if before.get("compiles") else {}) | found
                if not given.build:
                    record(rows, given.draws)

    with ThreadPoolExecutor(given.jobs) as pool:
        list(pool.map(package, pythons))
    if not given.build:
        found = json.loads(path.read_text())
        print(json.dumps({"tried": found["summary"], "held out": found["held out"]}, indent=1))


def record(rows: dict[str, dict[str, Any]], draws: int) -> None:
    """Write what is known so far."""
    kept = {n: r for n, r in sorted(rows.items()) if n not in HELD_OUT}
    held = {n: r for n, r in sorted(rows.items()) if n in HELD_OUT}
    write("zoo", {"draws": draws, "summary": summary(kept), "held out": summary(held), "rows": kept,
                  "held out rows": held})  # fmt: skip


if __name__ == "__main__":
    main()
