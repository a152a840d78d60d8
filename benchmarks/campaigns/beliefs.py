"""Beliefs about random networks against samples: how many are good, fair, bad, and bad without a word.

Every seed is a network of the grammar in `tests/fuzz/architectures.py`, or with `--grammar families` of the hard
families in `tests/fuzz/families.py` (maxima, norms, second order), compiled as a user would, self-check included. Its
belief is compared with draws by torch alone: the error of the mean in standard deviations and the relative error of
the covariance, the draws' own error taken off. Good is at most .15 in both, bad more than .3 in either, fair between;
*silently bad* is bad where `favour.compile` did not warn (`UntrustedBelief`).

    python benchmarks/campaigns/beliefs.py [--seeds 2000 2300] [--draws 4000] [--jobs 1] [--name beliefs]
        [--grammar architectures] [--rows FILE]

writes results/campaigns/NAME.json: counts, shares by word of the grammar, and every network that is not good. With
`--rows` what is done is kept there, line by line, and not done again.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent / "tests")]

from common import write  # noqa: E402
from fuzz import architectures, families  # noqa: E402
from fuzz.architectures import draws  # noqa: E402

import favour  # noqa: E402
from favour.inspect.agreement import Tally  # noqa: E402

CHUNK = 500
GOOD, BAD = 0.15, 0.3


GRAMMARS = {"architectures": architectures.network, "families": families.network}


def trial(grammar: str, seed: int, reference: int) -> dict[str, Any]:
    """One network."""
    torch.set_num_threads(1)
    made = GRAMMARS[grammar](seed)
    row: dict[str, Any] = {"seed": seed, "family": made.family, "words": made.words}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            predict = favour.compile(made.model, made.example)
        except favour.FavourError as error:
            return row | {"kind": "refused", "reason": f"{type(error).__name__}: {error}"[:300]}
    warned = any(issubclass(w.category, favour.UntrustedBelief) for w in said)
    if predict.is_certain:
        return row | {"kind": "certain"}
    with torch.no_grad():
        tally = Tally(predict(made.example))
    for i in range(max(1, reference // CHUNK)):
        tally.add(draws(made.model, made.example, CHUNK, i))
    told = tally.statistics()
    excess = ((told["mean_z"].square() - 1) / reference).mean().item()
    gap = (told["covariance_gap"] - told["covariance_noise"]) / told["covariance_size"].clamp(min=1e-300)
    mean, covariance = math.sqrt(max(excess, 0)), math.sqrt(max(gap.mean().item(), 0))
    worst = max(mean, covariance)
    kind = "good" if worst <= GOOD else "bad" if not worst <= BAD else "fair"
    return row | {"kind": kind, "mean": round(mean, 4), "covariance": round(covariance, 4), "warned": warned}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts, and shares by family and by word."""
    judged = [r for r in rows if "mean" in r]
    by: dict[str, list[str]] = defaultdict(list)
    for r in judged:
        for word in {r["family"], *(w.split("(")[0].split(" ")[0] for w in r["words"])}:
            by[word].append(r["kind"])
    shares = {word: (len(kinds), round(kinds.count("bad") / len(kinds), 3)) for word, kinds in by.items()}
    n = max(len(judged), 1)
    return {
        "networks": len(rows),
        "kinds": dict(Counter(r["kind"] for r in rows)),
        "good or fair": round(sum(r["kind"] != "bad" for r in judged) / n, 4),
        "silently bad": round(sum(r["kind"] == "bad" and not r["warned"] for r in judged) / n, 4),
        "warned though good": round(sum(r["kind"] == "good" and r["warned"] for r in judged) / n, 4),
        "networks and share of bad by word": dict(sorted(shares.items(), key=lambda entry: -entry[1][1])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(2000, 2300), metavar=("FIRST", "END"))
    parser.add_argument("--draws", type=int, default=4000)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--grammar", choices=GRAMMARS, default="architectures")
    parser.add_argument("--name", default="beliefs")
    parser.add_argument("--rows", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.rows and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    left = sorted(set(range(*given.seeds)) - {row["seed"] for row in rows})
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(trial, given.grammar, seed, given.draws) for seed in left]
        for done in as_completed(waiting):
            rows.append(done.result())
            if given.rows:
                with given.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            if len(rows) % 50 == 0:
                print(f"{len(rows)} of {len(waiting)}", flush=True)
    rows.sort(key=lambda r: r["seed"])
    found = summary(rows)
    for name, value in found.items():
        print(f"{name}: {value}")
    kept = [r for r in rows if r["kind"] != "good"]
    content = {"seeds": list(given.seeds), "reference draws": given.draws, "summary": found, "not good": kept}
    write(f"campaigns/{given.name}", content)


if __name__ == "__main__":
    main()
