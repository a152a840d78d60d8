"""Train all networks of a profile, in several sittings if need be.

    python -m favour_studies.experiments.train_all --profile paper --device cuda --data FOLDER --out FOLDER --minutes 9

Every group first gets the profile's least number of epochs, then the rest, in shares; a run with `--minutes` stops in
time and the next one continues.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from favour_studies.experiments.profiles import Profile, profile
from favour_studies.experiments.tasks import Group, TrainingSet, groups, training_set
from favour_studies.experiments.training import Trained, history, train


def stages(chosen: Profile, group: Group, shares: int = 4) -> list[int]:
    """Numbers of epochs to reach one after the other: the least, then equal shares of the rest."""
    least, most = chosen.least_of(group.task), chosen.epochs_of(group.task)
    return sorted({least + (most - least) * k // shares for k in range(shares + 1)})


def train_all(
    chosen: Profile,
    source: str,
    folder: Path,
    device: str = "cpu",
    tasks: Sequence[str] | None = None,
    minutes: float | None = None,
    seed: int = 0,
    convolution: str | None = None,
    kl_weight: float | None = None,
    report: Callable[[Group, int, Trained], Any] | None = None,
) -> bool:
    """Train every group of a profile; False if the time ran out first."""
    deadline = None if minutes is None else time.monotonic() + 60 * minutes
    every = groups(chosen, source, tasks)
    kept: dict[str, TrainingSet] = {}
    convolutions: dict[str, str] = {}  # the fastest, found once for each group
    for stage in range(max(len(stages(chosen, g)) for g in every)):
        for group in every:
            plan = stages(chosen, group)
            goal = plan[min(stage, len(plan) - 1)]
            done = history(folder / f"{group.name}.safetensors")
            if done is not None and done.epochs >= goal and done.members == list(group.members):
                continue
            if deadline is not None and time.monotonic() >= deadline:
                return False
            key = group.name if not group.pictures else group.task
            if key not in kept:
                kept[key] = training_set(group, source, chosen.train_inputs)
            batch = chosen.batch[0 if group.pictures else 1]
            told = None if report is None else (lambda e, t, g=group: report(g, e, t))
            how = convolution or convolutions.get(group.name)
            weight = None if group.pictures else kl_weight
            trained = train(group, kept[key], folder, goal, batch, device, seed, how, weight, deadline, told)
            convolutions[group.name] = trained.convolution
            if trained.epochs < goal:
                return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", default="paper")
    parser.add_argument("--data", default="embedded", help="folder, `hub` or `embedded`")
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tasks", nargs="*", help="some tasks only, such as `mnist concrete`")
    parser.add_argument("--minutes", type=float, help="stop after this time; the next run continues")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--convolution", help="loop, grouped, patches or 'bf16 patches'")
    parser.add_argument("--kl-weight", type=float, help="of VI on tables, instead of the one `selection` chose")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.benchmark = True
    start = time.monotonic()
    told = {"at": 0.0}

    def report(group: Group, epoch: int, trained: Trained) -> None:
        now = time.monotonic()
        if now - told["at"] > 10 or epoch == 1:
            told["at"] = now
            mean = sum(trained.loss) / len(trained.loss)
            print(
                f"{now - start:6.0f} s  {group.name:24s} epoch {epoch:4d}  loss {mean:.4f}  "
                f"{trained.seconds:.0f} s of training {trained.convolution}",
                flush=True,
            )

    finished = train_all(
        profile(options.profile),
        options.data,
        options.out,
        options.device,
        options.tasks,
        options.minutes,
        options.seed,
        options.convolution,
        options.kl_weight,
        report,
    )
    for path in sorted(options.out.glob("*.safetensors")):
        if not path.name.endswith(".state.safetensors"):
            done = history(path)
            assert done is not None
            mean = sum(done.loss) / len(done.loss)
            print(f"{path.name:36s} {done.epochs:5d} epochs  {done.seconds:6.0f} s  mean loss {mean:.4f}")
    print("finished" if finished else "out of time; run again to continue", flush=True)


if __name__ == "__main__":
    main()
