"""`favour reproduce`: train what is missing, run experiments, write results and the report.

Everything is kept as it is made: networks at every epoch, results at every unit. The same command continues a run that
was interrupted.

Methods are timed first, with nothing else running. Then the units, which are independent of each other, are computed,
by several processes if asked for: small networks leave a GPU idle, and many cores too. A process that ends early costs
nothing but time: whatever is missing at the end is computed then.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import rich
import torch
from rich.progress import Progress
from torch import multiprocessing

from favour.errors import InvalidValue
from favour_studies.experiments import classification, figures, jsd, ood, regression
from favour_studies.experiments.profiles import profile
from favour_studies.experiments.run import Part, Run, Turns
from favour_studies.experiments.tasks import Group, groups
from favour_studies.experiments.train_all import train_all
from favour_studies.experiments.training import Trained

EXPERIMENTS: dict[str, Callable[[Run], Any]] = {
    "figures": figures.figures,
    "jsd": jsd.jsd,
    "classification": classification.classification,
    "regression": regression.regression,
    "ood": ood.ood,
}

PARTS: dict[str, Callable[[Run], Iterator[Part]]] = {
    "classification": classification.parts,
    "regression": regression.parts,
    "ood": ood.parts,
}


def needed(name: str, run: Run) -> list[str]:
    """The tasks an experiment evaluates networks of."""
    if name == "classification":
        return list(classification.tasks(run))
    if name == "regression":
        return list(regression.tasks(run))
    if name == "ood":
        return [a for a, _ in ood.pairs(run)]
    return []


def source_of(data: str | None) -> str:
    """`hub`, `embedded`, or a folder that exists."""
    if data is None:
        return "embedded"
    if data in ("hub", "embedded") or Path(data).is_dir():
        return data
    raise InvalidValue(
        f"no folder {data}. `--data` takes a folder with mnist/, fashion_mnist/, cifar10/, svhn/ and uci/, or `hub`; "
        "without it scikit-learn's digits and diabetes are used."
    )


def reproduce(
    which: str,
    profile_name: str = "quick",
    data: str | None = None,
    device: str = "cpu",
    out: str | Path = "results/reproduce",
    checkpoints: str | Path | None = None,
    seed: int = 0,
    quiet: bool = False,
    time_device: str = "cpu",
    workers: int = 1,
) -> Path:
    """Run one experiment or all; returns the report.

    Args:
        which: One of `EXPERIMENTS`, or `"all"`.
        profile_name: `"quick"` or `"paper"`.
        data: Folder, `"hub"`, or None for the embedded sets.
        device: `"cpu"` or `"cuda"`.
        out: Folder of the results.
        checkpoints: Folder of the networks; `out/checkpoints` by default.
        seed: Of everything.
        quiet: No progress bars.
        time_device: Where methods are timed, `"cpu"` whatever the device of the rest: these networks are so small that
            on a GPU their times are those of launching kernels, which no method is to blame for.
        workers: Processes that compute units beside each other, each with one CPU thread if there are several.
    """
    if which != "all" and which not in EXPERIMENTS:
        raise InvalidValue(f"no experiment {which!r}; there are all, {', '.join(EXPERIMENTS)}.")
    for option, place in (("--device", device), ("--time-device", time_device)):
        if place.startswith("cuda") and not torch.cuda.is_available():
            raise InvalidValue(f"`{option} {place}`: torch sees no GPU here; use cpu.")
    if workers < 1:
        raise InvalidValue(f"`--workers {workers}`: at least one process is needed.")
    out = Path(out)
    kept = out / "checkpoints" if checkpoints is None else Path(checkpoints)
    run = Run(profile(profile_name), source_of(data), kept, out, device, seed, quiet, time_device)
    names = list(EXPERIMENTS) if which == "all" else [which]
    tasks = list(dict.fromkeys(t for name in names for t in needed(name, run)))
    if tasks:
        train_missing(run, tasks)
    if workers > 1:
        share(run, [name for name in names if name in PARTS], workers)
    for name in names:
        begin = time.perf_counter()
        EXPERIMENTS[name](run)
        _say(run, f"{name}: {time.perf_counter() - begin:.0f} s, written to {out / (name + '.json')}")
    from favour_studies.report import build

    report = build(out)
    _say(run, f"report: {report}")
    return report


def share(run: Run, names: Sequence[str], workers: int) -> None:
    """Compute the units of some experiments by several processes, this one among them, after timing all methods."""
    for name in names:
        for _ in PARTS[name](run):
            pass  # a part is timed as it is made
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    plain = dataclasses.replace(run, quiet=True, _units={})
    others = [context.Process(target=_help, args=(plain, names, taken), daemon=True) for _ in range(workers - 1)]
    for process in others:
        process.start()
    try:
        _work(run, names, taken)
        for process in others:
            process.join()
    finally:
        for process in others:
            process.terminate()
    ended = sum(process.exitcode != 0 for process in others)
    if ended:
        _say(run, f"{ended} of {workers} processes ended early; what they left is computed now.")


def _work(run: Run, names: Sequence[str], taken: Synchronized[int]) -> None:
    """What one process does: every unit whose turn it has."""
    turns = Turns(taken)
    for name in names:
        for part in PARTS[name](run):
            run.values(name, part, turns.mine)


def _help(run: Run, names: Sequence[str], taken: Synchronized[int]) -> None:
    """A process beside the first: one thread, and no word when the user interrupts, who hears of it from the first."""
    torch.set_num_threads(1)
    with contextlib.suppress(KeyboardInterrupt):
        _work(run, names, taken)


def _say(run: Run, text: str) -> None:
    if not run.quiet:
        rich.print(text)


def train_missing(run: Run, tasks: Sequence[str]) -> None:
    """Train what has fewer epochs than the profile says, with a progress bar for each group.

    Networks from a folder of their own are taken as they are if they have at least the profile's least number.
    """
    own = run.checkpoints == run.out / "checkpoints"
    goal = run.profile.epochs_of if own else run.profile.least_of
    short = {
        g.task for g in groups(run.profile, run.source, tasks) if run.epochs(g.task, g.members[0][0]) < goal(g.task)
    }
    tasks = [task for task in tasks if task in short]
    if not tasks:
        return
    if run.quiet:
        train_all(run.profile, run.source, run.checkpoints, run.device, tasks, seed=run.seed)
        return
    bars: dict[str, Any] = {}
    with Progress() as progress:

        def report(group: Group, epoch: int, trained: Trained) -> None:
            if group.name not in bars:
                total = run.profile.epochs_of(group.task)
                bars[group.name] = progress.add_task(f"training {len(group.members)} × {group.name}", total=total)
            progress.update(bars[group.name], completed=epoch)

        train_all(run.profile, run.source, run.checkpoints, run.device, tasks, seed=run.seed, report=report)
