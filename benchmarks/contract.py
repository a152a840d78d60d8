"""Random networks against the contract and against samples.

For each seed of the grammar in `tests/fuzz/architectures.py` and each setting: promises that need no reference (finite,
PSD, symmetric, deterministic, the same alone as in a batch, whatever the order of the batch), and for the default the
error of mean and covariance against 4,000 draws by torch alone, the draws' own error subtracted.

    python benchmarks/contract.py [--seeds 0 2000] [--jobs 2]

writes results/contract.json: violations, one by one, and errors by family and by word.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch
from common import write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz.architectures import draws, network
from fuzz.contract import violations

import favour
from favour.inspect.agreement import Tally

REFERENCE, CHUNK = 4000, 500
GOOD, BAD = 0.15, 0.3
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {},
    "secants": {"method": "adjoint", "secant": True},
    "pairs": {"method": "adjoint", "pairs": 8},
    "marginals of rank 3": {"method": "adjoint", "rank": 3},
    "dplr": {"method": "dplr"},
    "diag": {"method": "diag"},
}


def trial(seed: int) -> dict[str, Any]:
    """One network with every setting."""
    torch.set_num_threads(1)
    made = network(seed)
    row: dict[str, Any] = {"seed": seed, "family": made.family, "words": made.words, "violations": {}}
    for name, options in SETTINGS.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                predict = favour.compile(made.model, made.example, check=False, **options)
                found = violations(predict, made.example)
            except favour.FavourError as error:
                row["refused"] = f"{type(error).__name__}: {error}"[:300]
                return row
        if found:
            row["violations"][name] = found
        if name != "auto" or predict.is_certain:
            continue
        with torch.no_grad():
            tally = Tally(predict(made.example))
        for i in range(REFERENCE // CHUNK):
            tally.add(draws(made.model, made.example, CHUNK, i))
        told = tally.statistics()
        excess = ((told["mean_z"].square() - 1) / REFERENCE).mean().item()
        gap = (told["covariance_gap"] - told["covariance_noise"]) / told["covariance_size"].clamp(min=1e-300)
        row["mean_error"], row["covariance_error"] = math.sqrt(max(excess, 0)), math.sqrt(max(gap.mean().item(), 0))
    return row


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and shares of bad beliefs by family and by word."""
    judged = [r for r in rows if "mean_error" in r]
    kinds = {r["seed"]: _kind(r) for r in judged}
    by: dict[str, dict[str, list[str]]] = {"family": defaultdict(list), "word": defaultdict(list)}
    for r in judged:
        by["family"][r["family"]].append(kinds[r["seed"]])
        for word in {w.split("(")[0].split(" ")[0] for w in r["words"]}:
            by["word"][word].append(kinds[r["seed"]])
    shares = {
        name: {
            k: {"networks": len(v), "bad": v.count("bad") / len(v), "good": v.count("good") / len(v)}
            for k, v in found.items()
        }
        for name, found in by.items()
    }
    return {
        "networks": len(rows),
        "refused": sum("refused" in r for r in rows),
        "violations": sum(bool(r["violations"]) for r in rows),
        "classes": dict(Counter(kinds.values())),
        "by family": shares["family"],
        "by word": dict(sorted(shares["word"].items(), key=lambda entry: -entry[1]["bad"])),
    }


def _kind(row: dict[str, Any]) -> str:
    worst = max(row["mean_error"], row["covariance_error"])
    return "good" if worst <= GOOD else "bad" if worst > BAD else "fair"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 2000), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(trial, seed) for seed in range(*given.seeds)]
        for done in as_completed(waiting):
            rows.append(done.result())
            if len(rows) % 100 == 0:
                print(f"{len(rows)} of {len(waiting)}", flush=True)
    rows.sort(key=lambda r: r["seed"])
    found = summary(rows)
    for name, value in found.items():
        print(f"{name}: {value}")
    kept = [r for r in rows if r["violations"] or "refused" in r or ("mean_error" in r and _kind(r) == "bad")]
    write(
        "contract", {"seeds": list(given.seeds), "reference draws": REFERENCE, "summary": found, "bad or broken": kept}
    )


if __name__ == "__main__":
    main()
