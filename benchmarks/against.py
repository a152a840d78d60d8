"""The cost of eager predictions on this code and on another checkout's, in turns.

    python benchmarks/cost.py --against PATH [--rounds 60]

One process for each code, one thread, the same networks and inputs. In every round both predict, the first one of the
round in turns; a round's ratio is that of the processor times, which a busy machine moves less than the clock. What is
reported is the median of the rounds' ratios, this code over the other, with an interval of 95% from their order
statistics. results/cost_against.json.

Both processes keep the memory they free: glibc's allocator returns blocks of a megabyte to the system or keeps them
depending on what else was allocated before (3,000 to 5,000 page faults in a pass of `dplr`), which makes times of one
code differ from process to process.
"""

from __future__ import annotations

import inspect
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from favour_studies.bench.measure import KEPT_MEMORY

CASES: dict[str, dict[str, Any]] = {
    "784-400-400-10, batch 512": {"network": "wide", "batch": 512, "calls": 4},
    "784-400-400-10, batch 512, secants": {"network": "wide", "batch": 512, "calls": 4, "secant": True},
    "784-400-400-10, batch 512, dplr": {"network": "wide", "batch": 512, "calls": 3, "method": "dplr"},
    "LeNet, batch 64": {"network": "lenet", "batch": 64, "calls": 2, "secant": False},
    "64-128-128-10, batch 64": {"network": "small", "batch": 64, "calls": 30, "secant": False},
    "64-128-128-10, one input": {"network": "small", "batch": 1, "calls": 50, "secant": False},
}


def work() -> None:
    """Answer lines of standard input, the name of a case, with the processor seconds of its calls."""
    import torch
    from networks import lenet, mlp

    import favour

    torch.set_num_threads(1)
    made = {}
    for name, case in CASES.items():
        torch.manual_seed(0)
        shape = (1, 28, 28) if case["network"] == "lenet" else (784,) if case["network"] == "wide" else (64,)
        networks = {
            "wide": lambda: mlp(784, 400, 400, 10),
            "small": lambda: mlp(64, 128, 128, 10),
            "lenet": lambda: lenet(),
        }
        model = networks[case["network"]]().eval().requires_grad_(False)
        x = torch.rand(case["batch"], *shape)
        settings = {k: case[k] for k in ("method", "secant") if k in case}
        if "check" in inspect.signature(favour.compile).parameters:  # of samples, when compiling
            settings["check"] = False
        predict = favour.compile(model, x[:2], **settings)
        made[name] = (predict, x, case["calls"])
    with torch.no_grad():
        for line in sys.stdin:
            predict, x, calls = made[line.strip()]
            start = time.process_time()
            for _ in range(calls):
                belief = predict(x)
                belief.variance  # noqa: B018  what a lazy belief would put off
            print((time.process_time() - start) / calls, flush=True)


class Side:
    """A process that predicts with the code of a checkout."""

    def __init__(self, checkout: Path) -> None:
        here = Path(__file__).resolve()
        paths = os.pathsep.join(map(str, (checkout / "src", here.parent)))
        environment = os.environ | KEPT_MEMORY | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(here)], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __call__(self, case: str) -> float:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(f"{case}\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


def median_interval(values: list[float]) -> tuple[float, float, float]:
    """The median and an interval that holds the true one with 95%, from order statistics."""
    ordered, n = sorted(values), len(values)
    reach = 0.98 * math.sqrt(n)
    low, high = max(math.floor(n / 2 - reach), 0), min(math.ceil(n / 2 + reach), n - 1)
    middle = (ordered[(n - 1) // 2] + ordered[n // 2]) / 2
    return middle, ordered[low], ordered[high]


def compare(other: Path, rounds: int) -> dict[str, Any]:
    """Ratios by case."""
    if not (other / "src" / "favour").is_dir():
        raise SystemExit(f"{other} is no checkout of favour.")
    commit = subprocess.run(
        ["git", "-C", str(other), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    sides = Side(Path(__file__).resolve().parent.parent), Side(other)
    rows = {}
    for name in CASES:
        for side in sides * 3:
            side(name)
        times: list[tuple[float, float]] = []
        for i in range(rounds):
            first, second = sides if i % 2 else sides[::-1]
            one, two = first(name), second(name)
            times.append((one, two) if i % 2 else (two, one))
        ratio, low, high = median_interval([a / b for a, b in times])
        here, there = (sorted(t[k] for t in times)[rounds // 2] * 1e3 for k in (0, 1))
        rows[name] = {"ratio": ratio, "interval": [low, high], "milliseconds": here, "milliseconds before": there}
        print(f"{name:36s} {ratio:.3f} [{low:.3f}, {high:.3f}]   {here:.2f} ms, before {there:.2f} ms", flush=True)
    return {"against": commit, "rounds": rounds, "rows": rows}


if __name__ == "__main__":
    work()
