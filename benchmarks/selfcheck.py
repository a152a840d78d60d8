"""How many bad beliefs the check at compile time finds, how many good ones it suspects, and what it takes.

Networks of the grammar in `tests/fuzz/architectures.py` are compiled as users do it. Then 4,000 draws by torch alone
say how good the belief is: its covariance error in the Frobenius norm relative to the samples', and the error of its
mean in standard deviations, the draws' own error subtracted. It is *good* where both are at most .15, *bad* where one
is beyond .3, else fair.

    python benchmarks/selfcheck.py [--seeds 0 1000] [--jobs 2]

writes results/selfcheck.json. Seeds are given as a range; the rule's limits were set on even seeds below 900.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from common import write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz.architectures import draws, network

import favour
from favour.inspect.agreement import Tally

REFERENCE, CHUNK = 4000, 500
GOOD, BAD = 0.15, 0.3


def trial(seed: int) -> dict[str, Any]:
    """One network: its verdict at compile time, and the truth."""
    torch.set_num_threads(1)
    made = network(seed)
    row: dict[str, Any] = {"seed": seed, "family": made.family, "words": made.words}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        begin = time.perf_counter()
        try:
            favour.compile(made.model, made.example, check=False)
            middle = time.perf_counter()
            predict = favour.compile(made.model, made.example)
        except favour.FavourError as error:
            return row | {"class": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
        seconds = time.perf_counter() - middle
    if predict.is_certain:
        return row | {"class": "certain"}
    with torch.no_grad():
        belief = predict(made.example)
    tally = Tally(belief)
    for i in range(REFERENCE // CHUNK):
        tally.add(draws(made.model, made.example, CHUNK, i))
    found = tally.statistics()
    excess = ((found["mean_z"].square() - 1) / REFERENCE).mean().item()
    share = ((found["covariance_gap"] - found["covariance_noise"]) / found["covariance_size"].clamp(min=1e-300)).mean()
    mean, covariance = math.sqrt(max(excess, 0)), math.sqrt(max(share.item(), 0))
    worst = max(mean, covariance)
    return row | {
        "class": "good" if worst <= GOOD else "bad" if worst > BAD else "fair",
        "covariance_error": covariance,
        "mean_error": mean,
        "draws": predict.checked.n,
        "undecided": predict.checked.undecided,
        "suspected": any(issubclass(w.category, favour.UntrustedBelief) for w in told),
        "seconds_without": middle - begin,
        "seconds_with": seconds,
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares by class, with their number."""
    judged = [r for r in rows if "suspected" in r]
    shares = {
        kind: {
            "networks": len(some),
            "suspected": sum(r["suspected"] for r in some) / max(1, len(some)),
            "too few draws to tell": sum(r["undecided"] and not r["suspected"] for r in some) / max(1, len(some)),
        }
        for kind in ("good", "fair", "bad")
        for some in [[r for r in judged if r["class"] == kind]]
    }
    bad = [r for r in judged if r["covariance_error"] > BAD]
    extra = sorted(r["seconds_with"] / r["seconds_without"] for r in judged)
    return {
        "classes": dict(Counter(r["class"] for r in rows)),
        **shares,
        "covariance error beyond .3": {
            "networks": len(bad),
            "suspected": sum(r["suspected"] for r in bad) / max(1, len(bad)),
        },
        "draws": {
            "median": sorted(r["draws"] for r in judged)[len(judged) // 2],
            "least": min(r["draws"] for r in judged),
        },
        "compile time with the check, relative": {
            "median": extra[len(extra) // 2],
            "99 %": extra[int(0.99 * len(extra))],
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 1000), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(trial, seed) for seed in range(*given.seeds)]
        for done in as_completed(waiting):
            rows.append(done.result())
            if len(rows) % 25 == 0 or len(rows) == len(waiting):  # what is done is kept, should the rest be cut off
                rows.sort(key=lambda r: r["seed"])
                found = summary(rows)
                ran = {"seeds": list(given.seeds), "reference_draws": REFERENCE, "summary": found, "networks": rows}
                write("selfcheck", ran)
                print(f"{len(rows)} of {len(waiting)}", flush=True)
    for name, value in found.items():
        print(f"{name}: {value}")


if __name__ == "__main__":
    main()
