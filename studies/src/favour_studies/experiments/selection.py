"""The weight of the KL term for networks on tables, chosen on validation rows.

    python -m favour_studies.experiments.selection --data FOLDER --out results/kl_weight.json

Mean-field VI minimises −log-likelihood + w·KL. With a few hundred rows for 11,000 weights w = 1 leaves little but the
prior, and w → 0 little but the mode; the paper does not say what it used. For each w of `WEIGHTS` and each of the first
splits a network is trained like those of the regression experiment. Its validation rows, which are not trained on, are
judged by the Gaussian NLL of a cloud of samples, the noise of each half of them fitted to the other half. One w serves
all tables: that of the lowest NLL in units of the target's standard deviation, averaged over tables and splits. No test
row is read.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import favour
from favour_studies.experiments.data import UCI
from favour_studies.experiments.models import seed_of
from favour_studies.experiments.record import Units, environment, write_json
from favour_studies.experiments.regression import moments, validated
from favour_studies.experiments.stack import build
from favour_studies.experiments.tasks import Group, table, training_set
from favour_studies.experiments.training import Step, fresh_stack

WEIGHTS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003, 0.0001)
SPLITS = 3
SAMPLES = 300
EPOCHS = {"power": 200, "kin8nm": 200}  # large tables: as many steps as a small one in 1000


def validation_nll(
    task: str,
    source: str | Path,
    weights: Sequence[float] = WEIGHTS,
    splits: int = SPLITS,
    epochs: int = 1000,
    batch: int = 64,
    device: str = "cpu",
    seed: int = 0,
) -> dict[str, list[float]]:
    """NLL of the validation rows of a table, standardised, for each weight and split.

    The networks of all weights and splits are trained side by side; the test rows are left alone.
    """
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    group = Group(task, "vi", tuple(("vi", split) for _ in weights for split in range(splits)))
    data = training_set(group, source).to(place)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        stack = fresh_stack(group, data, seed).to(place).train()
        stack.kl_weight = torch.tensor(weights, device=place).repeat_interleave(splits)
        step = Step(stack, data, min(batch, data.inputs))
        step.record()
        for epoch in range(epochs):
            step.epoch(seed_of(seed, "selection", task, epoch))
    state = {name: t for name, t in stack.state().items() if name != "log_noise"}
    found = []
    for member, (model, split) in enumerate(group.members):
        net = build(model, 0, inputs=data.x.shape[-1]).requires_grad_(False).eval().to(place)
        net.load_state_dict({name: t[member] for name, t in state.items()})
        held = table(task, split, source).validation
        random = torch.Generator(place).manual_seed(seed + 1)
        draws = favour.sample(net, held.x.to(place), SAMPLES, generator=random)
        found.append(_nll(moments(draws), held.y.double()))
    return {f"{w:g}": found[i * splits : (i + 1) * splits] for i, w in enumerate(weights)}


def _nll(found: tuple[Tensor, Tensor], y: Tensor) -> float:
    stddev = validated(found, y).sqrt()
    return (0.5 * ((y - found[0]) / stddev).square() + stddev.log()).mean().item() + 0.5 * math.log(2 * math.pi)


def best(found: dict[str, dict[str, list[float]]]) -> tuple[str, dict[str, float]]:
    """The weight with the lowest mean over tables and splits, and the means.

    >>> best({"a": {"1": [2.0, 4.0], "0.1": [1.0, 2.0]}, "b": {"1": [0.0, 0.0], "0.1": [1.0, 1.0]}})
    ('0.1', {'1': 1.5, '0.1': 1.25})
    """
    weights = next(iter(found.values()))
    means = {w: statistics.fmean(statistics.fmean(task[w]) for task in found.values()) for w in weights}
    return min(means, key=means.__getitem__), means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, help="folder with uci/")
    parser.add_argument("--out", type=Path, default=Path("results/kl_weight.json"))
    parser.add_argument("--epochs", type=int, help="by default 1000, and 200 for the large tables")
    parser.add_argument("--splits", type=int, default=SPLITS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="*", default=UCI)
    options = parser.parse_args()
    epochs = {task: options.epochs or EPOCHS.get(task, 1000) for task in options.tasks}
    sizes = {"epochs": epochs, "splits": options.splits, "weights": list(WEIGHTS)}
    units = Units(options.out.with_suffix(".units"), sizes, environment(options.device))
    found: dict[str, dict[str, list[float]]] = {}
    for task in options.tasks:

        def compute(task: str = task) -> dict[str, Any]:
            sizes = {"splits": options.splits, "epochs": epochs[task]}
            return dict(validation_nll(task, options.data, device=options.device, **sizes))

        found[task] = units.get((task,), {}, compute)
        print(task, {w: round(statistics.fmean(v), 4) for w, v in found[task].items()}, flush=True)
    chosen, means = best(found)
    content = {"environment": environment(options.device), **sizes, "samples": SAMPLES, "validation_nll": found}
    write_json(options.out, content | {"mean": means, "chosen": float(chosen)})
    print(f"chosen: {chosen}; means {means}", flush=True)


if __name__ == "__main__":
    main()
