"""UCI tables: variational inference through beliefs beside sampled variational inference and what else is common.

    python -m favour_studies.learning.uci --data DIR --out results/learning_uci.json [--workers N] [--splits N]

One hidden layer of 50 ReLUs, Gaussian noise of one variance; all numbers standardised by the rows trained on, results
in the table's units. Every method gets the same rows, 10% of them held out, and the same number of updates; `NAME@time`
is a sampled method with as many epochs as fit into the time that `closed` took on that split. Time is that of the
processor, in one thread.

Splits that the result file holds already are not run again, so a longer run may be interrupted and continued.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing as mp
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from favour_studies.experiments.data import UCI, uci
from favour_studies.learning import record
from favour_studies.learning.regressors import METHODS, Rows, Trained, sampled

EPOCHS = {"boston": 1000, "concrete": 1000, "energy": 1500, "kin8nm": 150, "power": 100}
Z = 1.6448536269514722  # Φ⁻¹(.95)


def rows_of(name: str, split: int, data: str) -> tuple[Rows, Tensor, Tensor, float]:
    """Rows to train on, test inputs (standardised) and targets (standardised), and the scale of the targets."""
    train, test = uci(name, split, data)
    order = torch.randperm(len(train.x), generator=torch.Generator().manual_seed(split))
    cut = max(10, len(order) // 10)
    held, kept = order[:cut], order[cut:]
    m, s = train.x[kept].mean(0), train.x[kept].std(0)
    s = torch.where(s > 0, s, 1.0)
    ym, ys = train.y[kept].mean(), train.y[kept].std()
    x, y = (train.x - m) / s, ((train.y - ym) / ys)[:, None]
    rows = Rows(x[kept], y[kept], x[held], y[held])
    return rows, (test.x - m) / s, ((test.y - ym) / ys)[:, None], float(ys)


def score(trained: Trained, x: Tensor, y: Tensor, scale: float) -> dict[str, float]:
    """Test log-likelihood, root mean square error, share within 90% intervals, seconds."""
    mean, variance = trained.answer(x)
    log = -0.5 * (math.log(2 * math.pi) + variance.log() + (y - mean).square() / variance)
    found = {
        "ll": float(log.mean()) - math.log(scale),
        "rmse": float((y - mean).square().mean().sqrt()) * scale,
        "coverage90": float(((y - mean).abs() <= Z * variance.sqrt()).float().mean()),
        "seconds": trained.seconds,
    }
    if trained.draws is not None and trained.noise is not None:  # of the mixture of 500 draws
        f = trained.draws(x, 500)
        each = -0.5 * (math.log(2 * math.pi) + trained.noise.log() + (y - f).square() / trained.noise)
        mixture = torch.logsumexp(each, 0) - math.log(500)
        found["ll_draws"] = float(mixture.mean()) - math.log(scale)
    return found


def unit(job: tuple[str, int, str, float, tuple[str, ...]]) -> dict[str, Any]:
    """All methods on one split."""
    name, split, data, share, methods = job
    torch.set_num_threads(1)
    rows, x, y, scale = rows_of(name, split, data)
    epochs = max(2, round(EPOCHS[name] * share))
    found: dict[str, Any] = {"set": name, "split": split, "epochs": epochs, "updates": epochs * rows.steps}
    seconds = {}
    for method in methods:
        trained = METHODS[method](rows, epochs, split)
        seconds[method] = trained.seconds
        found[method] = score(trained, x, y, scale)
        if split == 0 and trained.curve:
            every = max(1, len(trained.curve) // 50)
            found[method]["curve"] = [(i + 1, *trained.curve[i]) for i in range(0, len(trained.curve), every)]
    for draws in (d for d in (1, 10) if f"sampled{d}" in methods and "closed" in methods):
        longer = max(2, round(epochs * seconds["closed"] / seconds[f"sampled{draws}"]))
        trained = sampled(rows, longer, split, draws)
        found[f"sampled{draws}@time"] = score(trained, x, y, scale) | {"epochs": longer}
    return found


def summarise(units: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over splits with standard errors, and paired differences of log-likelihoods to `closed`."""
    result: dict[str, Any] = {}
    for name in dict.fromkeys(u["set"] for u in units):
        own = [u for u in units if u["set"] == name]
        methods = [m for m in own[0] if isinstance(own[0][m], dict)]
        table: dict[str, Any] = {}
        for method in methods:
            kinds = [k for k in ("ll", "ll_draws", "rmse", "coverage90", "seconds") if k in own[0][method]]
            table[method] = {k: record.summary([u[method][k] for u in own]) for k in kinds}
            if method != "closed":
                paired = [u["closed"]["ll"] - u[method]["ll"] for u in own]
                table[method]["closed_less_this"] = record.summary(paired)
                if "ll_draws" in own[0][method]:
                    paired = [u["closed"]["ll"] - max(u[method]["ll"], u[method]["ll_draws"]) for u in own]
                    table[method]["closed_less_the_better_of_both"] = record.summary(paired)
        result[name] = {"splits": len(own), "updates": own[0]["updates"], "methods": table}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/learning_uci.json"))
    parser.add_argument("--sets", default=",".join(UCI))
    parser.add_argument("--splits", type=int, default=20)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--share", type=float, default=1.0, help="Of the epochs.")
    options = parser.parse_args()
    units: list[dict[str, Any]] = []
    if options.out.is_file():
        before = json.loads(options.out.read_text())
        if before["share"] != options.share:
            parser.error(f"{options.out} has runs of --share {before['share']:g}; name another file.")
        units = before["units"]
    done = {(u["set"], u["split"]) for u in units}
    sets = options.sets.split(",")  # split by split, so that an interrupted run has all sets
    methods = tuple(options.methods.split(","))
    jobs = [(name, split, options.data, options.share, methods) for split in range(options.splits) for name in sets]
    jobs = [job for job in jobs if job[:2] not in done]
    with mp.get_context("spawn").Pool(options.workers) as pool:
        for found in pool.imap_unordered(unit, jobs):
            units.append(found)
            parts = {m: v for m, v in found.items() if isinstance(v, dict)}
            line = ", ".join(f"{m} {v['ll']:.3f} ({v['seconds']:.0f} s)" for m, v in parts.items())
            print(f"{len(units)} {found['set']} {found['split']}: {line}", flush=True)
            units.sort(key=lambda u: (u["set"], u["split"]))
            content = {"environment": record.environment(), "workers": options.workers, "share": options.share}
            record.write(options.out, content | {"summary": summarise(units), "units": units})


if __name__ == "__main__":
    main()
