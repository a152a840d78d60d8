"""Random networks and every operation against the contract, and the networks against samples.

For each seed of the grammar in `tests/fuzz/architectures.py`, and for a small network around every case of every
registered operation (`tests/fuzz/probes.py`), with each setting: what needs no reference (`tests/fuzz/contract.py`:
beliefs are finite, PSD, symmetric, deterministic, the same alone as in a batch, whatever the order of the batch; maps
have the transposes, powers and products of entries that they say, noises are PSD). For the networks and the default
setting also the error of mean and covariance against 2,000 draws by torch alone, the draws' own error subtracted.

    python benchmarks/contract.py [--seeds 0 2000] [--jobs 2] [--rows FILE]

writes results/contract.json: violations, one by one, and errors by family and by word. With `--rows` what is done is
kept there, line by line, and not done again.
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
from common import write

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from fuzz.architectures import draws, network
from fuzz.contract import broken_rules, violations
from fuzz.probes import Ordinary, name, probes
from torch import nn

import favour
from favour.graph.node import Graph
from favour.inspect.agreement import Tally
from favour.methods import Numerics
from favour.methods.keywords import method_of
from favour.passes.capture import capture
from favour.passes.plan.steps import configure
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor
from favour.program.program import Program

REFERENCE, CHUNK = 2000, 500
GOOD, BAD = 0.15, 0.3
SETTINGS: dict[str, dict[str, Any]] = {
    "auto": {"method": "auto"},
    "secants": {"method": "adjoint", "secant": True},
    "pairs": {"method": "adjoint", "pairs": 8},
    "marginals of rank 3": {"method": "adjoint", "rank": 3},
    "dplr": {"method": "dplr"},
    "diag": {"method": "diag"},
}


# Settings whose maps and noises are looked at: those of all sweeps are among them.
LOOKED_AT = ("auto", "secants", "marginals of rank 3")


def predictors(graph: Graph, model: nn.Module) -> dict[str, Predictor]:
    """One for each setting, over one capture."""
    made = {}
    for setting, options in SETTINGS.items():
        asked = method_of(**options)
        asked.validate(Numerics())
        made[setting] = Predictor(Program(configure(graph, None), asked, Posterior.wrap(None), model))
    return made


def broken(predictors: dict[str, Predictor], args: tuple[Any, ...], number: int) -> dict[str, list[str]]:
    """Violations by setting. Two rows are tried alone: other ones for other settings and networks."""
    found = {}
    methods = {repr(predict.method): setting for setting, predict in reversed(predictors.items())}
    for i, setting in enumerate(methods.values(), number):  # what `auto` chose may be asked for by name, too
        predict = predictors[setting]
        told = violations(predict, *args, lone={i % len(args[0]), (i + 2) % len(args[0])})
        if setting in LOOKED_AT:
            told += broken_rules(predict, *args)
        if told:
            found[setting] = told
    return found


def trial(seed: int) -> dict[str, Any]:
    """One network with every setting."""
    torch.set_num_threads(1)
    made = network(seed)
    row: dict[str, Any] = {"seed": seed, "family": made.family, "words": made.words, "violations": {}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            all_of_them = predictors(capture(made.model, made.example), made.model)
            row["violations"] = broken(all_of_them, (made.example,), seed)
        except favour.FavourError as error:
            row["refused"] = f"{type(error).__name__}: {error}"[:300]
            return row
    predict = all_of_them["auto"]
    if predict.is_certain:
        return row
    with torch.no_grad():
        tally = Tally(predict(made.example))
    for i in range(REFERENCE // CHUNK):
        tally.add(draws(made.model, made.example, CHUNK, i))
    told = tally.statistics()
    excess = ((told["mean_z"].square() - 1) / REFERENCE).mean().item()
    gap = (told["covariance_gap"] - told["covariance_noise"]) / told["covariance_size"].clamp(min=1e-300)
    row["mean_error"], row["covariance_error"] = math.sqrt(max(excess, 0)), math.sqrt(max(gap.mean().item(), 0))
    return row


def probe(number: int) -> dict[str, Any]:
    """One operation in a small network with every setting."""
    torch.set_num_threads(1)
    case, way = probes()[number]
    made = Ordinary(case, way)
    if not made.answers:
        return {"probe": name(case, way), "violations": {}, "no answer": "the network's own draws are not finite"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return {
            "probe": name(case, way),
            "violations": broken(predictors(made.graph, nn.Module()), tuple(made.args), number),
        }


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
        grouping: {
            k: {"networks": len(v), "bad": v.count("bad") / len(v), "good": v.count("good") / len(v)}
            for k, v in found.items()
        }
        for grouping, found in by.items()
    }
    return {
        "probes": sum("probe" in r and "no answer" not in r for r in rows),
        "networks": sum("seed" in r for r in rows),
        "refused": sum("refused" in r for r in rows),
        "violations": sum(bool(r["violations"]) for r in rows),
        "classes": dict(Counter(kinds.values())),
        "by family": shares["family"],
        "by word": dict(sorted(shares["word"].items(), key=lambda entry: -entry[1]["bad"])),
    }


def _kind(row: dict[str, Any]) -> str:
    worst = max(row["mean_error"], row["covariance_error"])
    return "good" if worst <= GOOD else "bad" if worst > BAD else "fair"


def _key(row: dict[str, Any]) -> tuple[str, Any]:
    return ("seed", row["seed"]) if "seed" in row else ("probe", row["probe"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs=2, default=(0, 2000), metavar=("FIRST", "END"))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--rows", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if given.rows and given.rows.exists():
        rows = [json.loads(line) for line in given.rows.read_text().splitlines()]
    done = {_key(r) for r in rows}
    with ProcessPoolExecutor(given.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting = [pool.submit(trial, seed) for seed in range(*given.seeds) if ("seed", seed) not in done]
        names = [name(*each) for each in probes()]
        waiting += [pool.submit(probe, i) for i, each in enumerate(names) if ("probe", each) not in done]
        for finished in as_completed(waiting):
            rows.append(finished.result())
            if given.rows:
                with given.rows.open("a") as file:
                    file.write(json.dumps(rows[-1]) + "\n")
            if len(rows) % 100 == 0:
                print(f"{len(rows)} of {len(waiting) + len(done)}", flush=True)
    rows.sort(key=_key)
    found = summary(rows)
    for what, value in found.items():
        print(f"{what}: {value}")
    kept = [r for r in rows if r["violations"] or "refused" in r or ("mean_error" in r and _kind(r) == "bad")]
    write(
        "contract", {"seeds": list(given.seeds), "reference draws": REFERENCE, "summary": found, "bad or broken": kept}
    )


if __name__ == "__main__":
    main()
