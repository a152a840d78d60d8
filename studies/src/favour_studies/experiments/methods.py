"""Ways to predict, the same in all experiments: plain inference, two samplers, `dplr` and `adjoint`.

plain       one forward pass with the means
naive       n forward passes of the whole network with dropout and weights live, norms as in eval
cached      `favour.sample`: the deterministic trunk once, then all draws of the rest at a time
dplr        over rank, K, rank-q weights and the three activation modes
adjoint     the reverse sweep; its probabilities as `Predictor.probabilities` chooses to estimate them, or always from
            nodes of the Gaussian, or from fixed draws of the last layers (`favour.classify.head`): the default number
            or `MANY`

NLL and JSD of n draws, fixed or not, are off by O(1/n) on average: a softmax averaged over few draws is too sure of
itself. So 1000 samples are to be matched by as many draws, not by a tenth of them, and the draws of a head are cheap.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import favour
from favour_studies.experiments.profiles import Profile
from favour_studies.experiments.tasks import Group
from favour_studies.experiments.training import Trained, network

PATIENCE = 0.4  # seconds; what takes longer is timed three times only
ACTIVATIONS = ("price", "matched", "taylor")
MANY = 1536  # draws of the head
_ASKED = ("estimator", "draws")
NAIVE_RUN = 100  # larger numbers of naive samples have the quality of as many cached ones, and their time is scaled up


@dataclass(frozen=True)
class Method:
    """One way to predict."""

    id: str
    family: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    n: int | None = None

    @property
    def asked(self) -> dict[str, Any]:
        """Options of `Predictor.probabilities`; the other settings are those of `favour.compile`."""
        return {k: v for k, v in self.settings.items() if k in _ASKED}

    def identity(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "family": self.family,
            "label": self.label,
            "settings": dict(self.settings),
            "n": self.n,
        }


SWEEP = {"method": "adjoint", "secant": True}  # what `auto` takes for these networks of pictures
ADJOINT = Method("adjoint", "adjoint", "adjoint", SWEEP)
# One output is worth more work: a sweep costs little there.
ADJOINT_TABLE = Method("adjoint", "adjoint", "adjoint, second order", {**SWEEP, "pairs": 16})
SECANTS = Method("adjoint secants", "adjoint", "adjoint, secants", SWEEP)
TANGENTS = Method("adjoint tangents", "adjoint", "adjoint, tangents", {"method": "adjoint"})
HEAD = Method("adjoint head", "adjoint", "adjoint, draws of the head", {**SWEEP, "estimator": "head"})
HEAD_MANY = Method(
    f"adjoint head {MANY}",
    "adjoint",
    f"adjoint, {MANY:,} draws of the head",
    {**SWEEP, "estimator": "head", "draws": MANY},
)
NODES = Method("adjoint nodes", "adjoint", "adjoint, Gaussian nodes", {**SWEEP, "estimator": "nodes"})
PLAIN = Method("plain", "plain", "plain inference")


def dplr(rank: int, iterations: int = 2, activation: str = "price", weight_rank: int | None = None) -> Method:
    """`dplr` with some settings."""
    q = "" if weight_rank is None else f" q={weight_rank}"
    settings = {"method": "dplr", "rank": rank, "iterations": iterations, "activation": activation}
    if weight_rank is not None:
        settings["weight_rank"] = weight_rank
    name = f"dplr r={rank} K={iterations}{q} {activation}"
    return Method(name, "dplr", name, settings)


def naive(n: int) -> Method:
    return Method(f"naive-{n}", "naive", f"{n} sample{'s' * (n > 1)}, naive", n=n)


def cached(n: int) -> Method:
    return Method(f"cached-{n}", "cached", f"{n} sample{'s' * (n > 1)}, trunk once", n=n)


def methods(profile: Profile, pictures: bool = True) -> list[Method]:
    """All methods of a profile; rank-q weights only for pictures, whose layers are wide enough."""
    grid = [dplr(r, k, a) for r in profile.ranks for k in profile.iterations for a in ACTIVATIONS]
    if pictures:
        grid += [dplr(r, 2, a, q) for q in profile.weight_ranks for r in profile.ranks for a in ACTIVATIONS]
    best = [ADJOINT, NODES, HEAD_MANY] if pictures else [ADJOINT_TABLE, SECANTS, TANGENTS]
    return [PLAIN, *map(naive, profile.naive), *map(cached, profile.cached), *grid, *best]


class Subject:
    """A network that holds the weights of one repeat after another; predictors follow it, so each is compiled once."""

    def __init__(self, group: Group, model: str, folder: Path, device: str = "cpu") -> None:
        self.group, self.model, self.folder = group, model, folder
        self.device = torch.device(device)
        self.net: nn.Module | None = None
        self.repeat: int | None = None
        self._predictors: dict[str, favour.Predictor] = {}

    def load(self, repeat: int) -> nn.Module:
        """The network with the weights of a repeat."""
        if self.net is None or self.repeat != repeat:
            fresh, self.trained = network(self.group, self.model, repeat, self.folder)
            if self.net is None:
                self.net = fresh.to(self.device)
            else:
                self.net.load_state_dict(fresh.state_dict())
            self.repeat = repeat
        return self.net

    trained: Trained

    def predictor(self, settings: Mapping[str, Any], x: Tensor) -> favour.Predictor:
        """Compiled for inputs like x."""
        assert self.net is not None
        chosen = {k: v for k, v in settings.items() if k not in _ASKED}
        key = repr(sorted(chosen.items()))
        if key not in self._predictors:
            self._predictors[key] = favour.compile(self.net, x[:2], check=False, **chosen)
        return self._predictors[key]

    def draws(self, x: Tensor, n: int, generator: torch.Generator) -> Tensor:
        """(n, B, outputs) by the cached sampler."""
        assert self.net is not None
        return favour.sample(self.net, x, n, generator=generator)

    def naive_draws(self, x: Tensor, n: int) -> Iterator[Tensor]:
        """n outputs (B, outputs), one forward pass each; follows torch's global seed."""
        assert self.net is not None
        with live(self.net):
            for _ in range(n):
                yield self.net(x)


@contextmanager
def live(net: nn.Module) -> Iterator[None]:
    """Dropout and random weights on, everything else as it is."""
    drops = [m for m in net.modules() if isinstance(m, nn.modules.dropout._DropoutNd)]
    before = [m.training for m in drops]
    try:
        for m in drops:
            m.train()
        with favour.nn.sampling(net):
            yield
    finally:
        for m, flag in zip(drops, before, strict=True):
            m.train(flag)


def generator(device: torch.device, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def medians(calls: Mapping[str, Callable[[], Any]], rounds: int, cuda: bool = False) -> dict[str, float]:
    """Median seconds of each call; all take turns, after one untimed call each."""

    def once(call: Callable[[], Any]) -> float:
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    for call in calls.values():
        call()
    seconds: dict[str, list[float]] = {name: [once(call)] for name, call in calls.items()}
    for done in range(1, rounds):
        for name, call in calls.items():
            if done < 3 or seconds[name][0] < PATIENCE:
                seconds[name].append(once(call))
    return {name: statistics.median(s) for name, s in seconds.items()}


@torch.no_grad()
def timing(
    subject: Subject,
    every: Sequence[Method],
    batch: Tensor,
    rounds: int,
    plain: Callable[[Tensor], Any],
    drawn: Callable[[Tensor], Any],
    predicted: Callable[[favour.Predictor, Method, Tensor], Any],
) -> dict[str, float]:
    """Median seconds from a batch to what an experiment wants of it, by method.

    Args:
        subject: The network.
        every: Methods; naive sampling beyond `NAIVE_RUN` is left out.
        batch: On the subject's device.
        rounds: See `medians`.
        plain, drawn, predicted: From plain outputs, from draws (n, B, outputs) and from a predictor to the result.
    """
    net, random = subject.load(0), generator(subject.device, 0)

    def call(method: Method) -> Callable[[], Any]:
        n = method.n or 0
        if method.family == "plain":
            return lambda: plain(net(batch))
        if method.family == "naive":
            return lambda: drawn(torch.stack(list(subject.naive_draws(batch, n))))
        if method.family == "cached":
            return lambda: drawn(favour.sample(net, batch, n, generator=random))
        predict = subject.predictor(method.settings, batch)
        return lambda: predicted(predict, method, batch)

    timed = [m for m in every if m.family != "naive" or (m.n or 0) <= NAIVE_RUN]
    with torch.random.fork_rng(devices=[]):
        return medians({m.id: call(m) for m in timed}, rounds, subject.device.type == "cuda")


def times(seconds: Mapping[str, float], every: Sequence[Method]) -> dict[str, dict[str, Any]]:
    """The time block of each method: in forward passes, in naive samples and in cached samples."""
    curve = sorted((m.n, seconds[m.id]) for m in every if m.family == "cached" and m.n and m.id in seconds)
    one = min((seconds[m.id] / m.n for m in every if m.family == "naive" and m.n and m.id in seconds), default=None)
    blocks = {}
    for method in every:
        spent, scaled_up = seconds.get(method.id), False
        if spent is None and method.family == "naive" and one is not None and method.n:
            spent, scaled_up = one * method.n, True
        if spent is None:
            continue
        blocks[method.id] = {
            "seconds": spent,
            "forwards": spent / seconds["plain"],
            "naive_samples": None if one is None else spent / one,
            "cached_samples": _samples_of_time(curve, spent),
        }
        if scaled_up:
            blocks[method.id]["extrapolated"] = True
    return blocks


def _samples_of_time(curve: Sequence[tuple[int, float]], seconds: float) -> float | None:
    """How many cached samples take this long, by linear interpolation; 0 … the smallest n if even that takes longer."""
    if not curve:
        return None
    if seconds <= curve[0][1]:
        return curve[0][0] * seconds / curve[0][1]
    for (n, low), (m, high) in itertools.pairwise(curve):
        if low <= seconds <= high and high > low:
            return n + (m - n) * (seconds - low) / (high - low)
    n, last = curve[-1]
    return n * seconds / last
