"""What all experiments share: a run with its profile, data, checkpoints and output; the head of a result file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from favour.experiments.methods import Subject
from favour.experiments.profiles import Profile
from favour.experiments.record import FORMAT, Units, code_digest, digest, environment
from favour.experiments.tasks import Group, groups
from favour.experiments.training import history


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
    """

    profile: Profile
    source: str
    checkpoints: Path
    out: Path
    device: str = "cpu"
    seed: int = 0
    quiet: bool = False
    _units: dict[str, Units] = field(default_factory=dict)

    def units(self, experiment: str) -> Units:
        """The units of an experiment; the same object each time."""
        if experiment not in self._units:
            sizes = {k: v for k, v in self.profile.describe().items() if k not in ("epochs", "least")}
            key = {"sizes": digest(sizes), "seed": self.seed, "code": code_digest()}
            self._units[experiment] = Units(self.out / "units" / experiment, key, environment(self.device))
        return self._units[experiment]

    def group(self, task: str, model: str) -> Group:
        """The group that a network is trained in."""
        kind = "vi" if model == "vi" else "dropout"
        return next(g for g in groups(self.profile, self.source, [task]) if g.kind == kind)

    def subject(self, task: str, model: str) -> Subject:
        return Subject(self.group(task, model), model, self.checkpoints, self.device)

    def epochs(self, task: str, model: str) -> int:
        """How long a network was trained; part of the key of what is computed from it."""
        done = history(self.checkpoints / f"{self.group(task, model).name}.safetensors")
        return 0 if done is None else done.epochs

    def track(self, items: Sequence[Any], description: str) -> Iterable[Any]:
        """The items, with a progress bar unless quiet."""
        if self.quiet:
            return items
        return self._bar(items, description)

    def _bar(self, items: Sequence[Any], description: str) -> Iterator[Any]:
        from favour.experiments import require

        yield from require("rich.progress", "cli").track(items, description)

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
                }
            )
        where = self.units(experiment).environments or [environment(self.device)]
        return {
            "experiment": experiment,
            "format": FORMAT,
            "profile": self.profile.describe(),
            "environment": where[0],
            "other_environments": where[1:],
            "seeds": {"training": self.seed, "sampling": self.seed + 1},
            "data": {"source": self.source if self.source in ("hub", "embedded") else "a local folder"},
            "training": training,
            "complete": True,
            "notes": list(notes),
        }
