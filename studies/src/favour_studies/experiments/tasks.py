"""What is trained on what: the data of a task, and the groups of networks trained together.

A *task* is a training set: an image set by name, `NAME07` for its classes 0 … 7, or a UCI set. A *group* is all
networks of one task whose parameters have the same shapes, so that they can be trained side by side (`Stack`): those
with dropout, of whatever rate, and those with Gaussian weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from favour_studies.experiments.data import UCI, Split, images, uci
from favour_studies.experiments.profiles import Profile

ALL_MODELS = ("vi", "dropout10", "dropout25", "dropout50")
TABLE_MODELS = ("dropout10", "dropout50", "vi")
TITLES = {
    "mnist": "MNIST",
    "mnist07": "MNIST 0–7",
    "mnist89": "MNIST 8–9",
    "fashion_mnist": "Fashion-MNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "digits": "Digits",
    "digits07": "Digits 0–7",
    "digits89": "Digits 8–9",
    "diabetes": "Diabetes",
} | {name: name.capitalize() for name in UCI}
VALIDATION = 0.2  # of a table's training rows


@dataclass(frozen=True)
class Group:
    """Networks of one task trained side by side; members are (model, repeat)."""

    task: str
    kind: str
    members: tuple[tuple[str, int], ...]

    @property
    def name(self) -> str:
        return f"{self.task}-{self.kind}"

    @property
    def pictures(self) -> bool:
        return not is_table(self.task)


def is_table(task: str) -> bool:
    return task in UCI or task == "diabetes"


def pictures(task: str, part: str, source: str | Path) -> Split:
    """Pictures of a task; `NAME07` and `NAME89` are some classes of NAME."""
    name, classes = (task[:-2], task[-2:]) if task.endswith(("07", "89")) else (task, None)
    split = images(name, part, None if source in ("hub", "embedded") else source)
    if classes is None:
        return split
    return split[split.y < 8] if classes == "07" else split[split.y >= 8]


@dataclass(frozen=True)
class Table:
    """One split of a UCI set, standardised by the rows trained on; `scale` brings targets back to their unit."""

    train: Split
    validation: Split
    test: Split
    scale: float


def table(task: str, split: int, source: str | Path) -> Table:
    """Training, validation and test rows of a table; a fifth of the usual training rows validate."""
    full, test = uci(task, split, source)
    order = torch.randperm(len(full), generator=torch.Generator().manual_seed(split))
    held = int(VALIDATION * len(full))
    train, validation = full[order[held:]], full[order[:held]]
    mean, std = train.x.mean(0), train.x.std(0).clamp_min(1e-6)
    centre, scale = train.y.mean(), train.y.std()

    def standard(s: Split) -> Split:
        return Split((s.x - mean) / std, (s.y - centre) / scale)

    return Table(standard(train), standard(validation), standard(test), float(scale))


@dataclass(frozen=True)
class TrainingSet:
    """What a group trains on: bytes (n, side, side, channels) shared by all members, or rows (E, n, inputs) of each."""

    x: Tensor
    y: Tensor
    shared: bool

    @property
    def inputs(self) -> int:
        return self.x.shape[0 if self.shared else 1]

    def to(self, device: torch.device) -> TrainingSet:
        return TrainingSet(self.x.to(device), self.y.to(device), self.shared)

    def take(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Rows (E, B) of the inputs and targets."""
        if not self.shared:
            member = torch.arange(len(index), device=index.device).unsqueeze(1)
            return self.x[member, index], self.y[member, index]
        x = self.x[index]
        return (x.float() / 255 if x.shape[-1] == 1 else x.float() / 127.5 - 1), self.y[index]


def training_set(group: Group, source: str | Path, limit: int | None = None) -> TrainingSet:
    """The data of a group, `limit` pictures of it."""
    if group.pictures:
        split = pictures(group.task, "train", source)[:limit]
        return TrainingSet(split.x.permute(0, 2, 3, 1).contiguous(), split.y.long(), True)
    tables = {repeat: table(group.task, repeat, source).train for _, repeat in group.members}
    size = min(len(t) for t in tables.values())
    chosen = [tables[repeat][:size] for _, repeat in group.members]
    return TrainingSet(torch.stack([t.x for t in chosen]), torch.stack([t.y for t in chosen]), False)


def groups(profile: Profile, source: str | Path, tasks: Sequence[str] | None = None) -> list[Group]:
    """All groups of a profile, for some tasks only if given."""
    plan: dict[str, tuple[str, ...]]
    if source == "embedded":
        plan = {"digits": ALL_MODELS[1:2], "digits07": ALL_MODELS, "diabetes": TABLE_MODELS}
    else:
        plan = {"mnist": ALL_MODELS, "mnist07": ALL_MODELS, "fashion_mnist": ("dropout10",), "cifar10": ALL_MODELS}
        plan |= dict.fromkeys(UCI, TABLE_MODELS)
    found = []
    for task, models in plan.items():
        if tasks is not None and task not in tasks:
            continue
        repeats = profile.splits if is_table(task) else profile.repeats
        for kind in ("dropout", "vi"):
            members = tuple((m, r) for m in models if (m == "vi") == (kind == "vi") for r in range(repeats))
            if members:
                found.append(Group(task, kind, members))
    return found
