"""Every file of examples/ runs, prints a table, and stays short enough to be read; notebooks hold what they print."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import assert_same

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))
SLOW = {"active_learning", "bayesian_optimisation", "ray_rating"}  # many networks to train, a cluster to start
NEEDS = {"lightning_training": "lightning"}  # packages that none of favour's extras brings


@pytest.mark.parametrize(
    "path", [pytest.param(p, id=p.stem, marks=[pytest.mark.slow] if p.stem in SLOW else []) for p in EXAMPLES]
)
def test_example_runs(path, tmp_path):
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    rows = [line for line in result.stdout.splitlines() if re.search(r"\d\.\d", line)]
    assert len(rows) >= 2, result.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_example_is_short_and_says_what_it_does(path):
    source = path.read_text()
    assert len(source.splitlines()) < 150
    assert source.startswith('"""')


@pytest.fixture(scope="module")
def runner():
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "benchmarks" / "notebooks.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def printed(cell):
    return "".join(line for o in cell.get("outputs", ()) if o["output_type"] == "stream" for line in o["text"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_runs_and_holds_its_outputs(path, runner, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kept = json.loads(path.read_text())
    again = runner.executed(kept, path.name)
    assert (kept["nbformat"], kept["nbformat_minor"]) == (4, 5) and len({c["id"] for c in kept["cells"]}) > 5
    for before, after in zip(kept["cells"], again["cells"], strict=True):
        assert_same(printed(after), printed(before), f"{path.name}, {before['id']}")
        kinds = [[sorted(o.get("data", ())) for o in cell.get("outputs", ())] for cell in (before, after)]
        assert kinds[0] == kinds[1], before["id"]  # tables and pictures stand where they should
    assert any(printed(cell) for cell in kept["cells"])


def test_there_is_a_notebook_for_each_main_story():
    assert [path.stem for path in NOTEBOOKS] == ["classifier", "no_dropout", "regression"]
