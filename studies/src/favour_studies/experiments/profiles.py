"""What each profile of `favour reproduce` runs.

    quick    minutes on two cores: 2 repeats, 1,000 test inputs, a few epochs
    paper    10 repeats, all test inputs, the paper's epochs for the OOD experiments; trained on a GPU
    tiny     seconds, for tests: nothing in it means anything

An image network serves two experiments of the paper with different numbers of epochs, 1000 for calibration and 400
(MNIST) or 250 (CIFAR-10) for OOD detection. One training serves both here, and every result says how long it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from favour.errors import InvalidValue

PAPER_EPOCHS = {"classification": 1000, "regression": 1000, "ood": {"cifar10": 250, "mnist": 400, "mnist07": 400}}


@dataclass(frozen=True)
class Profile:
    """Sizes of a run.

    Attributes:
        name: As in `--profile`.
        repeats: Networks trained for each image task and model.
        splits: Of the UCI sets, at most 20; a network is trained for each.
        epochs: Of training by task; `"*"` for the others.
        least: As `epochs`: what all tasks get before any gets the rest of its epochs.
        train_inputs: Pictures trained on, None for all.
        test_inputs: Pictures tested on, None for all.
        batch: Of training on pictures and on tables.
        naive, cached: Numbers of samples of the two samplers.
        rounds: Of timing.
        ranks, iterations, weight_ranks: Grid of `dplr`, with all three activations.
        resamples: Of the bootstrap.
        jsd_inputs, jsd_reference: Gaussians of the concordance, and the draws of its reference.
        time_inputs: Inputs in the batch that is timed.
        fit_inputs: Training pictures that the Mahalanobis distance is fitted to.
        figure_steps: Training steps of the two figures' networks.
    """

    name: str
    repeats: int
    splits: int
    epochs: Mapping[str, int]
    least: Mapping[str, int]
    train_inputs: int | None
    test_inputs: int | None
    batch: tuple[int, int]
    naive: tuple[int, ...]
    cached: tuple[int, ...]
    rounds: int
    ranks: tuple[int, ...]
    iterations: tuple[int, ...]
    weight_ranks: tuple[int, ...]
    resamples: int = 1000
    jsd_inputs: int = 200
    jsd_reference: int = 100_000
    time_inputs: int = 500
    fit_inputs: int = 10_000
    figure_steps: int = 3000

    def epochs_of(self, task: str) -> int:
        return self.epochs.get(task, self.epochs["*"])

    def least_of(self, task: str) -> int:
        return min(self.epochs_of(task), self.least.get(task, self.least.get("*", self.epochs_of(task))))

    def describe(self) -> dict[str, Any]:
        """For the JSON."""
        return asdict(self)


UCI_SMALL = ("boston", "concrete", "energy", "diabetes")

PROFILES = {
    "quick": Profile(
        "quick",
        repeats=2,
        splits=2,
        epochs={"*": 2, "cifar10": 3, "digits": 20, "digits07": 20}
        | dict.fromkeys(UCI_SMALL, 200)
        | dict.fromkeys(("power", "kin8nm"), 40),
        least={},
        train_inputs=None,
        test_inputs=1000,
        batch=(64, 32),
        naive=(1, 3, 10, 30, 100),
        cached=(1, 3, 10, 30, 100, 300, 1000),
        rounds=7,
        ranks=(1, 2, 4),
        iterations=(0, 2),
        weight_ranks=(20,),
        time_inputs=500,
    ),
    "paper": Profile(
        "paper",
        repeats=10,
        splits=20,
        epochs={"*": 400, "cifar10": 250} | dict.fromkeys((*UCI_SMALL, "power", "kin8nm"), 1000),
        least={"*": 100, "cifar10": 50},
        train_inputs=None,
        test_inputs=None,
        batch=(256, 64),
        naive=(1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000),
        cached=(1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000),
        rounds=5,
        ranks=(1, 2, 4, 8),
        iterations=(0, 1, 2),
        weight_ranks=(20,),
        time_inputs=1000,
    ),
    "tiny": Profile(
        "tiny",
        repeats=2,
        splits=2,
        epochs={"*": 1},
        least={},
        train_inputs=256,
        test_inputs=60,
        batch=(32, 32),
        naive=(1, 4),
        cached=(1, 4, 16),
        rounds=1,
        ranks=(1,),
        iterations=(0,),
        weight_ranks=(),
        resamples=50,
        jsd_inputs=10,
        jsd_reference=500,
        time_inputs=20,
        fit_inputs=200,
        figure_steps=20,
    ),
}


def profile(name: str) -> Profile:
    """A profile by name."""
    if name not in PROFILES:
        raise InvalidValue(f"no profile {name!r}; there are {', '.join(PROFILES)}.")
    return PROFILES[name]
