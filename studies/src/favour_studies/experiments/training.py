"""Training of a group of networks, in steps that a GPU runs as one recorded graph.

Adam at 2e-4 on the sum of the members' losses. Every epoch has its own seed, made of the group's and its number, so a
training that is interrupted and resumed gives the networks that an uninterrupted one would. Two files are kept:

    GROUP.safetensors           the networks' parameters (E, …); what the experiments read
    GROUP.state.safetensors     the same with Adam's moments; what training resumes from

Both carry the number of epochs and the members. Where only the first is left, training goes on from it with fresh
moments, which is near but not identical. Batches are drawn without replacement, for each member in an order of
its own; the last, incomplete batch of an epoch is left out.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import CorruptFile, InvalidValue
from favour_studies.experiments import checkpoint
from favour_studies.experiments.models import seed_of
from favour_studies.experiments.stack import CONVOLUTIONS, Stack, build
from favour_studies.experiments.tasks import Group, TrainingSet

RATE = 2e-4
SAVE_EVERY = 10.0  # seconds


@dataclass(frozen=True)
class Trained:
    """What is known of a group's training."""

    epochs: int
    seconds: float
    inputs: int
    batch: int
    device: str
    members: list[tuple[str, int]]
    loss: list[float]
    convolution: str = ""
    kl_weight: float | None = None  # of VI; None in files that do not say

    @staticmethod
    def read(metadata: dict[str, str]) -> Trained:
        content = json.loads(metadata["favour"])
        content["members"] = [(str(m), int(r)) for m, r in content["members"]]
        return Trained(**content)

    def metadata(self) -> dict[str, str]:
        return {"favour": json.dumps(vars(self))}


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()


def save(path: Path, tensors: dict[str, Tensor], trained: Trained) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(checkpoint.encode({k: v.detach().cpu() for k, v in tensors.items()}, trained.metadata()))
    os.replace(part, path)


def read(path: Path) -> tuple[dict[str, Tensor], Trained]:
    """The tensors and the history of a file of this module."""
    tensors, metadata = checkpoint.decode(path)
    return tensors, _trained(path, metadata)


def _trained(path: Path, metadata: dict[str, str]) -> Trained:
    try:
        return Trained.read(metadata)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFile(f"{path} does not say how it was trained ({error}); delete it and train anew.") from error


def history(path: Path) -> Trained | None:
    """How long a group has been trained, None if not at all."""
    if not path.is_file():
        return None
    return _trained(path, checkpoint.header(path)[0].get("__metadata__", {}))


def network(group: Group, model: str, repeat: int, folder: Path) -> tuple[nn.Module, Trained]:
    """One trained network of a group, in eval mode and without gradients.

    Raises:
        InvalidValue: It has not been trained.
    """
    path = folder / f"{group.name}.safetensors"
    if not path.is_file():
        raise InvalidValue(f"no file {path}: train {group.name} first.")
    tensors, trained = read(path)
    if (model, repeat) not in trained.members:
        raise InvalidValue(f"{path} has no {model} number {repeat}; train it anew with more repeats.")
    own = {name: t[trained.members.index((model, repeat))] for name, t in tensors.items()}
    own.pop("log_noise", None)
    net = _fresh(group, model, repeat, own)
    net.load_state_dict(own)
    return net.eval().requires_grad_(False), trained


def _fresh(group: Group, model: str, repeat: int, shapes: dict[str, Tensor], seed: int = 0) -> nn.Module:
    own = seed_of(seed, group.task, model, repeat)
    if group.pictures:
        return build(model, own, channels=shapes["conv1.weight"].shape[1], classes=len(shapes["fc3.bias"]))
    return build(model, own, inputs=shapes["fc1.weight"].shape[1])


def fresh_stack(group: Group, data: TrainingSet, seed: int = 0) -> Stack:
    """Untrained networks for a group; each is the same whatever the others are."""
    if group.pictures:
        shape = {"channels": data.x.shape[-1], "classes": int(data.y.max()) + 1}
    else:
        shape = {"inputs": data.x.shape[-1]}
    networks = [build(m, seed_of(seed, group.task, m, r), **shape) for m, r in group.members]
    return Stack(networks, [m for m, _ in group.members])


class Step:
    """One step of Adam on a batch of indices, recorded as a CUDA graph where there is a GPU."""

    def __init__(self, stack: Stack, data: TrainingSet, batch: int) -> None:
        self.stack, self.data, self.batch = stack, data, batch
        device = data.x.device
        self.cuda = device.type == "cuda"
        self.parameters = list(stack.parameters())
        self.adam = torch.optim.Adam(self.parameters, lr=RATE, fused=True, capturable=self.cuda)
        self.total = torch.zeros(len(stack.rates), device=device)
        self.index = torch.zeros(len(stack.rates), batch, dtype=torch.long, device=device)
        # A step without gradient makes the moments, all zero, and moves nothing.
        for p in self.parameters:
            p.grad = torch.zeros_like(p)
        self.adam.step()
        for state in self.adam.state.values():
            state["step"].zero_()
        self.graph: torch.cuda.CUDAGraph | None = None

    def moments(self) -> dict[str, Tensor]:
        names = [name for name, _ in self.stack.named_parameters()]
        states = [self.adam.state[p] for p in self.parameters]
        return {
            f"adam.{key}.{name.replace('/', '.')}": state[key]
            for name, state in zip(names, states, strict=True)
            for key in ("step", "exp_avg", "exp_avg_sq")
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, own in self.moments().items():
                own.copy_(tensors[name])

    def _run(self) -> None:
        self.adam.zero_grad(set_to_none=True)
        x, y = self.data.take(self.index)
        losses = self.stack.losses(self.stack(x), y, self.data.inputs)
        losses.sum().backward()
        self.adam.step()
        self.total += losses.detach()

    def record(self) -> None:
        """Capture the step; what the trial steps changed is put back."""
        if not self.cuda:
            return
        kept = [p.detach().clone() for p in self.parameters]
        moments = {name: t.clone() for name, t in self.moments().items()}
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self.graph = torch.cuda.CUDAGraph()
        self.adam.zero_grad(set_to_none=True)
        with torch.cuda.graph(self.graph):
            self._run()
        with torch.no_grad():
            for p, before in zip(self.parameters, kept, strict=True):
                p.copy_(before)
        self.load(moments)

    def __call__(self, index: Tensor) -> None:
        self.index.copy_(index)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()

    def epoch(self, seed: int) -> list[float]:
        """All batches once; the members' mean losses."""
        torch.manual_seed(seed)
        self.total.zero_()
        inputs, members = self.data.inputs, len(self.stack.rates)
        order = torch.rand(members, inputs, device=self.index.device).argsort(1)
        steps = max(1, inputs // self.batch)
        for i in range(steps):
            self(order[:, i * self.batch : (i + 1) * self.batch])
        return (self.total / steps).tolist()


def fastest(stack: Stack, data: TrainingSet, batch: int) -> str:
    """The convolution whose recorded step is the fastest on this GPU; the stack is left as it was."""
    seconds = {}
    before = {name: t.clone() for name, t in stack.state().items()}
    for name in tuple(CONVOLUTIONS)[1:]:
        stack.convolution = CONVOLUTIONS[name]
        step = Step(stack, data, batch)
        step.record()
        for _ in range(3):
            step(step.index)
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(10):
            step(step.index)
        torch.cuda.synchronize()
        seconds[name] = (time.perf_counter() - start) / 10
        stack.load(before)
        stack.zero_grad(set_to_none=True)
        del step
        torch.cuda.empty_cache()
    return min(seconds, key=seconds.__getitem__)


def train(
    group: Group,
    data: TrainingSet,
    folder: Path,
    epochs: int,
    batch: int,
    device: str | torch.device = "cpu",
    seed: int = 0,
    convolution: str | None = None,
    kl_weight: float | None = None,
    deadline: float | None = None,
    report: Callable[[int, Trained], Any] | None = None,
) -> Trained:
    """Train a group up to a number of epochs, from where its file left off.

    Args:
        group: The networks.
        data: What they are trained on.
        folder: Where the files are.
        epochs: In all, those already done included.
        batch: Inputs in a step, for each member.
        device: `"cpu"` or `"cuda"`.
        seed: Of everything.
        convolution: One of `CONVOLUTIONS`; by default a loop on a CPU, and on a GPU the fastest.
        kl_weight: Of VI; by default 1 for pictures and `TABLE_KL_WEIGHT` for tables.
        deadline: A value of `time.monotonic()` at which to stop after an epoch.
        report: Called after every epoch with its number.

    Returns:
        The history, which says whether all epochs were reached.
    """
    place = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device(device)
    product, resume = folder / f"{group.name}.safetensors", folder / f"{group.name}.state.safetensors"
    done = history(product)
    if done is not None and done.members != list(group.members):
        raise InvalidValue(
            f"{product} has {len(done.members)} networks and this profile has {len(group.members)}, or others; use "
            "another folder."
        )
    if done is not None and done.epochs >= epochs:
        return done
    batch = min(batch, data.inputs)
    data = data.to(place)
    with torch.random.fork_rng(devices=[place] if place.type == "cuda" else []):
        stack = fresh_stack(group, data, seed).to(place).train()
        if group.pictures and not convolution:
            convolution = "loop" if place.type == "cpu" else fastest(stack, data, batch)
        stack.convolution = CONVOLUTIONS[convolution or "loop"]
        if kl_weight is not None:
            stack.kl_weight = kl_weight
        step = Step(stack, data, batch)
        spent = 0.0
        first, losses = 0, [0.0]
        if resume.is_file() or product.is_file():
            tensors, trained = read(resume if resume.is_file() else product)
            stack.load(tensors)
            if resume.is_file():
                step.load(tensors)
            first, spent, losses = trained.epochs, trained.seconds, trained.loss
        step.record()
        start = saved = time.monotonic()
        fixed = (data.inputs, batch, device_name(place), list(group.members))
        how = (convolution or "", float(stack.kl_weight) if stack.bayesian else None)
        trained = Trained(first, spent, *fixed, losses, *how)
        for epoch in range(first, epochs):
            losses = step.epoch(seed_of(seed, group.name, "epoch", epoch))
            now = time.monotonic()
            trained = Trained(epoch + 1, spent + now - start, *fixed, losses, *how)
            last = epoch + 1 == epochs or (deadline is not None and now >= deadline)
            if last or now - saved > SAVE_EVERY:
                save(resume, stack.state() | step.moments(), trained)
                save(product, stack.state(), trained)
                saved = now
            if report is not None:
                report(epoch + 1, trained)
            if last:
                break
    return trained
