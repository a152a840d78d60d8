"""The campaign of kills and resumes, in small; `benchmarks/campaigns/rate.py` is the large one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "benchmarks/campaigns/rate.py"


def test_kills_and_resumes_in_small(tmp_path):
    # In a process of its own: it forks, which the threads of others would not survive.
    paths = os.pathsep.join([str(ROOT / "src"), *(p for p in sys.path if p)])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    options = ("--trials", "4", "--commands", "0", "--seed", "11", "--out", str(tmp_path / "found.json"))
    done = subprocess.run([sys.executable, NAME, *options], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())["found"]
    assert found["trials"] == 4 and found["processes"] > 8 and found["rows compared"] > 10_000


@pytest.mark.parametrize("name", ["rows lost", "rows twice", "foreign files touched", "earlier results broken"])
def test_committed_results_hold_the_promise(name):
    content = json.loads((ROOT / "results" / "campaigns" / "rate.json").read_text())
    assert content["found"][name] == 0 and content["found"]["killed"] >= 100
