"""What all experiments share: a run with its profile, data, checkpoints and output; the head of a result file.

An experiment is a sequence of *parts* (a data set and a model), each a list of *jobs* and what becomes of their
results. Jobs do not know each other, so that several processes can share them: all walk through the same list, and a
counter in shared memory says whose turn the next one is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

from favour_studies.experiments.methods import Subject
from favour_studies.experiments.profiles import Profile
from favour_studies.experiments.record import FORMAT, Units, code_digest, digest, environment
from favour_studies.experiments.tasks import Group, groups
from favour_studies.experiments.training import history


@dataclass(frozen=True)
class Job:
    """A unit of work: its name, what its result depends on, and the computation."""

    names: tuple[object, ...]
    key: Mapping[str, Any]
    compute: Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Part:
    """Jobs of one kind, and what is made of their results, in their order."""

    title: str
    jobs: Sequence[Job]
    finish: Callable[[list[Any]], Any]


def by_name(jobs: Sequence[Job], values: Sequence[Any]) -> dict[str, list[Any]]:
    """Results by the last of each job's names: the method, a value for each repeat."""
    found: dict[str, list[Any]] = {}
    for job, value in zip(jobs, values, strict=True):
        found.setdefault(str(job.names[-1]), []).append(value)
    return found


class Turns:
    """Which jobs a process does; all processes of a run count the same jobs, and each takes the next that nobody has.

    >>> import multiprocessing
    >>> shared = multiprocessing.Value("q", 0)
    >>> one, two = Turns(shared), Turns(shared)
    >>> [one.mine(), two.mine(), two.mine(), two.mine(), one.mine(), one.mine(), one.mine()]
    [True, False, True, True, False, False, True]
    """

    def __init__(self, taken: Synchronized[int]) -> None:
        self.taken, self._next, self._seen = taken, -1, 0

    def mine(self) -> bool:
        """Whether the job that is met now is this process's."""
        if self._next < self._seen:  # done with the last one
            with self.taken.get_lock():
                self._next = self.taken.value
                self.taken.value += 1
        self._seen += 1
        return self._next == self._seen - 1


@dataclass
class Run:
    """One call of `favour reproduce`.

    Attributes:
        profile: Sizes.
        source: Folder, `"hub"` or `"embedded"`.
        checkpoints: Folder of trained networks.
        out: Folder of the results.
        device: Where networks are evaluated.
        seed: Of training; sampling has the next.
        quiet: No progress bars.
        time_device: Where methods are timed.
    """

    profile: Profile
    source: str
    checkpoints: Path
    out: Path
    device: str = "cpu"
    seed: int = 0
    quiet: bool = False
    time_device: str = "cpu"
    _units: dict[tuple[str, str], Units] = field(default_factory=dict)

    def units(self, experiment: str, kind: str = "quality") -> Units:
        """The units of an experiment, of `"quality"` or of `"time"`; the same object each time."""
        if (experiment, kind) not in self._units:
            sizes = {k: v for k, v in self.profile.describe().items() if k not in ("epochs", "least")}
            key = {"sizes": digest(sizes), "seed": self.seed, "code": code_digest()}
            where = environment(self.device if kind == "quality" else self.time_device)
            self._units[experiment, kind] = Units(self.out / "units" / experiment, key, where)
        return self._units[experiment, kind]

    def timed(
        self, experiment: str, subject: Subject, key: Mapping[str, Any], clock: Callable[[Subject], dict[str, float]]
    ) -> dict[str, float]:
        """Seconds of each method for a network, measured on `time_device`."""
        task, model = subject.group.task, subject.model
        own = subject if self.device == self.time_device else self.subject(task, model, self.time_device)
        full = {**key, "device": self.time_device}
        return self.units(experiment, "time").get((task, model, "timing"), full, lambda: clock(own))

    def group(self, task: str, model: str) -> Group:
        """The group that a network is trained in."""
        kind = "vi" if model == "vi" else "dropout"
        return next(g for g in groups(self.profile, self.source, [task]) if g.kind == kind)

    def subject(self, task: str, model: str, device: str | None = None) -> Subject:
        return Subject(self.group(task, model), model, self.checkpoints, device or self.device)

    def epochs(self, task: str, model: str) -> int:
        """How long a network was trained; part of the key of what is computed from it."""
        done = history(self.checkpoints / f"{self.group(task, model).name}.safetensors")
        return 0 if done is None else done.epochs

    def values(self, experiment: str, part: Part, mine: Callable[[], bool] = lambda: True) -> list[Any]:
        """Results of the jobs of a part that are `mine`: read where they are on disk, else computed and kept there."""
        units = self.units(experiment)
        return [units.get(job.names, job.key, job.compute) for job in self.track(part.jobs, part.title) if mine()]

    def track(self, items: Sequence[Any], description: str) -> Iterable[Any]:
        """The items, with a progress bar unless quiet."""
        if self.quiet:
            return items
        return self._bar(items, description)

    def _bar(self, items: Sequence[Any], description: str) -> Iterator[Any]:
        from rich.progress import track

        yield from track(items, description)

    def envelope(
        self, experiment: str, used: Sequence[tuple[str, str]], paper_epochs: Any, notes: Sequence[str]
    ) -> dict[str, Any]:
        """What every result file begins with; `used` lists the (task, model) it evaluates."""
        training = []
        for task, model in used:
            group = self.group(task, model)
            done = history(self.checkpoints / f"{group.name}.safetensors")
            if done is None:
                continue
            paper = paper_epochs.get(task) if isinstance(paper_epochs, dict) else paper_epochs
            training.append(
                {
                    "task": task,
                    "model": model,
                    "epochs": done.epochs,
                    "paper_epochs": paper,
                    "inputs": done.inputs,
                    "batch": done.batch,
                    "networks": sum(m == model for m, _ in done.members),
                    "trained_together": len(done.members),
                    "device": done.device,
                    "seconds": done.seconds,
                    "kl_weight": done.kl_weight if model == "vi" else None,
                }
            )
        where = self.units(experiment).environments or [environment(self.device)]
        return {
            "experiment": experiment,
            "format": FORMAT,
            "profile": self.profile.describe(),
            "environment": where[0],
            "other_environments": where[1:],
            "timing_environments": self.units(experiment, "time").environments,
            "seeds": {"training": self.seed, "sampling": self.seed + 1},
            "data": {"source": self.source if self.source in ("hub", "embedded") else "a local folder"},
            "training": training,
            "complete": True,
            "notes": list(notes),
        }
