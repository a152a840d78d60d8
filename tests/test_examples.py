"""Every file of examples/ runs, prints a table, and stays short enough to be read."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
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
