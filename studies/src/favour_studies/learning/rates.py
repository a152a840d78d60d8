"""Dropout rates learned by gradient beside a grid of rates: scikit-learn's digits, 64-100-100-10 with two dropouts.

    python -m favour_studies.learning.rates --out results/learning_rates.json [--seeds 5]

Every point of the grid is a training of its own with drawn masks, Adam on the cross-entropy; `favour.fit` learns
weights and both rates in one, through beliefs. All have the same rows, batches, step sizes (falling along a cosine) and
number of updates, all keep the last state, and all answer with `Predictor.probabilities`. The best point of the grid is
the one with the least −log p on the validation rows; the test rows say what that choice is worth. Seconds are those of
the processor, in one thread.

Seeds that the result file holds already are not run again.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import favour
from favour_studies.experiments import bootstrap
from favour_studies.learning import record

GRID = (0.05, 0.1, 0.2, 0.35, 0.5)
WIDTH, EPOCHS, BATCH, LR = 100, 40, 64, 3e-3
TRAIN, VALIDATION = 900, 400  # rows; the other 497 are for testing
Rows = tuple[Tensor, Tensor]


def network(first: float, second: float) -> nn.Sequential:
    """64 → 100 → 100 → 10."""
    return nn.Sequential(
        *(nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(first)),
        *(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Dropout(second), nn.Linear(WIDTH, 10)),
    )


def rows_of(seed: int) -> tuple[Rows, Rows, Rows]:
    """Rows to train on, to choose by and to test on."""
    pictures, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pictures, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    cuts = (slice(0, TRAIN), slice(TRAIN, TRAIN + VALIDATION), slice(TRAIN + VALIDATION, None))
    train, validation, test = ((x[cut], y[cut]) for cut in cuts)
    return train, validation, test


def drawn(rows: Rows, first: float, second: float, seed: int) -> nn.Module:
    """Trained with masks."""
    torch.manual_seed(seed)
    (x, y), model = rows, network(first, second)
    optimiser = torch.optim.Adam(model.parameters(), LR)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, EPOCHS * math.ceil(len(x) / BATCH))
    for _ in range(EPOCHS):
        for part in torch.randperm(len(x)).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[part]), y[part]).backward()
            optimiser.step()
            schedule.step()
    return model.eval()


def minus_log_p(predict: favour.Predictor, rows: Rows) -> Tensor:
    """Of every row."""
    with torch.no_grad():
        p = predict.probabilities(rows[0])
    return -p.gather(1, rows[1][:, None])[:, 0].clamp(min=1e-12).log()


def unit(seed: int) -> dict[str, Any]:
    """The grid and the learned rates on one split of the rows."""
    train, validation, test = rows_of(seed)
    grid: list[dict[str, Any]] = []
    each = {}
    for first in GRID:
        for second in GRID:
            begin = time.process_time()
            model = drawn(train, first, second, seed)
            seconds = time.process_time() - begin
            predict = favour.compile(model, train[0][:2], check=False)
            each[first, second] = minus_log_p(predict, validation)
            tested = float(minus_log_p(predict, test).mean())
            mean = float(each[first, second].mean())
            grid.append({"rates": (first, second), "validation": mean, "test": tested, "seconds": seconds})
    best = min(grid, key=lambda g: g["validation"])
    torch.manual_seed(seed)
    begin = time.process_time()
    fitted = favour.fit(
        network(0.2, 0.2),
        train,
        likelihood="categorical",
        learn=("means", "rates"),
        epochs=EPOCHS,
        lr={"means": LR, "rates": 0.03},
        validation=0,
        batch_size=BATCH,
        seed=seed,
        check=False,
        progress=False,
    )
    seconds = time.process_time() - begin
    mine = minus_log_p(fitted.predict, validation)
    learned: dict[str, Any] = {
        "rates": [float(p) for p in fitted.rates.values()],
        "validation": float(mine.mean()),
        "test": float(minus_log_p(fitted.predict, test).mean()),
        "seconds": seconds,
    }
    apart = bootstrap.means(mine, each[best["rates"]], 2000, 0)
    judged = bootstrap.verdict("validation nll", "lower", learned["validation"], best["validation"], apart)
    return {"seed": seed, "grid": grid, "best": best, "learned": learned, "paired": judged}


def summarise(units: list[dict[str, Any]]) -> dict[str, Any]:
    """Means over splits, and paired differences to the best point of the grid."""
    found: dict[str, Any] = {"splits": len(units), "trainings of the grid": len(GRID) ** 2}
    for rows in ("validation", "test"):
        found[rows] = {
            "learned": record.summary([u["learned"][rows] for u in units]),
            "best of the grid": record.summary([u["best"][rows] for u in units]),
            "median of the grid": record.summary(
                [sorted(g[rows] for g in u["grid"])[len(u["grid"]) // 2] for u in units]
            ),
            "learned less best": record.summary([u["learned"][rows] - u["best"][rows] for u in units]),
        }
    found["seconds"] = {
        "learned": record.summary([u["learned"]["seconds"] for u in units]),
        "one point": record.summary([g["seconds"] for u in units for g in u["grid"]]),
        "the grid": record.summary([sum(g["seconds"] for g in u["grid"]) for u in units]),
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("results/learning_rates.json"))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    units = json.loads(options.out.read_text())["units"] if options.out.is_file() else []
    for seed in range(len(units), options.seeds):
        units.append(unit(seed))
        content = {"environment": record.environment(), "summary": summarise(units), "units": units}
        record.write(options.out, content)
        print(seed, {k: units[-1][k] for k in ("best", "learned")}, flush=True)


if __name__ == "__main__":
    main()
