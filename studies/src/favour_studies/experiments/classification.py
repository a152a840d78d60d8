"""Calibration of classifiers against the time they take (paper, figures 3 and 9).

LeNet with 10% dropout on its two top layers, on each image set. Every method gives class probabilities p for the same
test pictures; accuracy, Brier score, ECE, NLL and PAvPU judge them, PAvPU with the entropy of p above its median as
"uncertain". Times are of a batch, from pictures to probabilities, all methods taking turns.

The draws of the cached sampler are nested: n samples are the first n of the largest number.

The adjoint pass is put to the test with the estimator of the probabilities that it chooses by default, with nodes of
the Gaussian, and with many draws of the head, each at its own cost. As a control, so are as many fresh samples.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from favour import metrics
from favour.errors import UnsupportedOperation
from favour_studies.experiments import bootstrap
from favour_studies.experiments.data import scaled
from favour_studies.experiments.headline import headline, pareto
from favour_studies.experiments.methods import (
    ADJOINT,
    HEAD,
    HEAD_MANY,
    NAIVE_RUN,
    NODES,
    Method,
    Subject,
    generator,
    methods,
    times,
    timing,
)
from favour_studies.experiments.models import TITLES as MODEL_TITLES
from favour_studies.experiments.profiles import PAPER_EPOCHS
from favour_studies.experiments.record import digest, stat, write_json
from favour_studies.experiments.run import Job, Part, Run, by_name
from favour_studies.experiments.tasks import TITLES, pictures

METRICS = [
    {"id": "accuracy", "title": "Accuracy", "better": "higher"},
    {"id": "brier", "title": "Brier score", "better": "lower"},
    {"id": "ece", "title": "ECE", "better": "lower"},
    {"id": "nll", "title": "NLL", "better": "lower"},
    {"id": "pavpu", "title": "PAvPU", "better": "higher"},
]
BETTER = {str(m["id"]): str(m["better"]) for m in METRICS}
MODEL = "dropout10"
CHUNK = 1000  # pictures at a time
NOTES = [
    "Repeats are networks trained from different seeds; the paper repeats the inference of one network.",
    "The paper trains 1000 epochs; the table of trainings says how many were run here.",
    f"Naive samples beyond {NAIVE_RUN} have the quality of as many cached samples, from which they differ in time "
    "only; that time is scaled up from fewer.",
    "NLL of n draws is too high by O(1/n), of samples and of draws of the head alike.",
]
ESTIMATORS = {"head": HEAD.label.removeprefix("adjoint, "), "nodes": "nodes of the Gaussian"}
CONTROL = "control"  # as many fresh samples as the most


def tasks(run: Run) -> tuple[str, ...]:
    return ("digits",) if run.source == "embedded" else ("mnist", "fashion_mnist", "cifar10")


def judged(p: Tensor, y: Tensor) -> dict[str, float]:
    """All metrics of probabilities (N, C)."""
    p = p.double()
    entropy = -(p * p.clamp_min(1e-300).log()).sum(1)
    return {
        "accuracy": metrics.accuracy(p, y),
        "brier": metrics.brier(p, y),
        "ece": metrics.ece(p, y),
        "nll": metrics.nll(p.clamp_min(1e-30) / p.clamp_min(1e-30).sum(1, keepdim=True), y),
        "pavpu": metrics.pavpu(p, y, entropy),
    }


def chunks(x: Tensor, device: torch.device, size: int = CHUNK) -> list[Tensor]:
    return [scaled(part).to(device) for part in x.split(size)]


def nested(subject: Subject, x: Tensor, numbers: Sequence[int], seed: int, family: str) -> dict[int, Tensor]:
    """Probabilities of the first n draws, for each n."""
    parts: dict[int, list[Tensor]] = {n: [] for n in numbers}
    random = generator(subject.device, seed)
    torch.manual_seed(seed)
    for chunk in chunks(x, subject.device):
        if family == "cached":
            p = subject.draws(chunk, max(numbers), random).softmax(-1)
            for n in numbers:
                parts[n].append(p[:n].mean(0).cpu())
            continue
        total = torch.zeros(())
        for i, z in enumerate(subject.naive_draws(chunk, max(numbers)), 1):
            total = total.to(z.device) + z.softmax(-1)
            if i in parts:
                parts[i].append((total / i).cpu())
    return {n: torch.cat(part) for n, part in parts.items()}


def seconds_of(subject: Subject, every: Sequence[Method], x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds from a batch of pictures to class probabilities."""
    return timing(
        subject,
        every,
        scaled(x).to(subject.device),
        rounds,
        plain=lambda z: z.softmax(-1),
        drawn=lambda z: z.softmax(-1).mean(0),
        predicted=lambda predict, method, batch: predict.probabilities(batch, **method.asked),
    )


@torch.no_grad()
def predicted(subject: Subject, method: Method, x: Tensor) -> Tensor:
    """Probabilities (N, C) by plain inference or a predictor."""
    parts = []
    for chunk in chunks(x, subject.device):
        if method.family == "plain":
            assert subject.net is not None
            parts.append(subject.net(chunk).softmax(-1).cpu())
        else:
            parts.append(subject.predictor(method.settings, chunk).probabilities(chunk, **method.asked).cpu())
    return torch.cat(parts)


@torch.no_grad()
def default_estimator(subject: Subject, x: Tensor) -> str:
    """What `Predictor.probabilities` estimates with by default: `head` or `nodes`."""
    few = scaled(x[:8]).to(subject.device)
    predict = subject.predictor(ADJOINT.settings, few)
    try:
        return (
            "head" if torch.allclose(predict.probabilities(few), predict.probabilities(few, **HEAD.asked)) else "nodes"
        )
    except UnsupportedOperation:
        return "nodes"


@torch.no_grad()
def classification(run: Run) -> dict[str, Any]:
    """Run the experiment; writes classification.json."""
    body: dict[str, Any] = {"metrics": METRICS, "tasks": []}
    used = [(task, MODEL) for task in tasks(run)]
    for part in parts(run):
        body["tasks"].append(part.finish(run.values("classification", part)))
        body["summary"] = summary(body["tasks"])
        content = run.envelope("classification", used, PAPER_EPOCHS["classification"], NOTES) | body
        content["complete"] = len(body["tasks"]) == len(used)
        write_json(run.out / "classification.json", content)
    return content


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many tasks NLL and ECE are not worse than those of the most samples, by method.

    `HEAD_MANY` is held to it: it has as many draws as there are samples.
    """
    found = {
        f"{own} {metric}": bootstrap.tally(
            [(task["task"], b) for task in done for b in task["bootstrap"] if (b["ours"], b["metric"]) == (own, metric)]
        )
        for own in (ADJOINT.id, NODES.id, HEAD_MANY.id, CONTROL)
        for metric in ("nll", "ece")
    }
    judged = {metric: found[f"{HEAD_MANY.id} {metric}"] for metric in ("nll", "ece")}
    return {"ours": HEAD_MANY.id, "required": len(done), **judged, "by_method": found}


def parts(run: Run) -> Iterator[Part]:
    """One for each task."""
    for task in tasks(run):
        yield one_task(run, task)


def one_task(run: Run, task: str) -> Part:
    profile = run.profile
    every = methods(profile)
    test = pictures(task, "test", run.source)[: profile.test_inputs]
    subject = run.subject(task, MODEL)
    key = {"epochs": run.epochs(task, MODEL)}
    seconds = run.timed(
        "classification",
        subject,
        key | {"methods": digest([m.id for m in every])},
        lambda own: seconds_of(own, every, test.x[: profile.time_inputs], profile.rounds),
    )
    alone = [m for m in every if m.family in ("plain", "dplr", "adjoint")]
    largest = max(profile.cached)
    kept = (ADJOINT.id, NODES.id, HEAD_MANY.id)  # whose probabilities are compared

    @torch.no_grad()
    def sampled(family: str, repeat: int) -> dict[str, Any]:
        subject.load(repeat)
        seed = run.seed + 1 + repeat
        if family == CONTROL:
            return {"p": nested(subject, test.x, [largest], seed + 1_000_003, "cached")[largest].numpy()}
        numbers = profile.cached if family == "cached" else [n for n in profile.naive if n <= NAIVE_RUN]
        found = nested(subject, test.x, numbers, seed, family)
        value: dict[str, Any] = {str(n): judged(p, test.y) for n, p in found.items()}
        return value | ({"p": found[largest].numpy()} if family == "cached" else {})

    @torch.no_grad()
    def single(method: Method, repeat: int) -> dict[str, Any]:
        subject.load(repeat)
        p = predicted(subject, method, test.x)
        value: dict[str, Any] = judged(p, test.y)
        if method is ADJOINT:
            value["estimator"] = default_estimator(subject, test.x)
        return value | ({"p": p.numpy()} if method.id in kept else {})

    jobs = []
    for r in range(profile.repeats):
        jobs += [Job((task, r, f), key, partial(sampled, f, r)) for f in ("naive", "cached", CONTROL)]
        jobs += [Job((task, r, m.id), key, partial(single, m, r)) for m in alone]

    def finish(values: list[Any]) -> dict[str, Any]:
        return assembled(run, task, every, by_name(jobs, values), test.y, times(seconds, every))

    return Part(f"classification, {TITLES[task]}", jobs, finish)


def assembled(
    run: Run,
    task: str,
    every: Sequence[Method],
    found: dict[str, list[dict[str, Any]]],
    y: Tensor,
    clock: dict[str, dict[str, Any]],
) -> dict[str, Any]:
    """One entry of `tasks`, from the results of all jobs by sampler or method."""

    def repeats(method: Method) -> list[dict[str, Any]]:
        if method.n is None:
            return found[method.id]
        family = "cached" if method.n > NAIVE_RUN else method.family  # the same estimator, see NOTES
        return [value[str(method.n)] for value in found[family]]

    table = []
    for method in every:
        each = {m: stat([r[m] for r in repeats(method)]) for m in BETTER}
        table.append({**method.identity(), "metrics": each, "time": clock.get(method.id), "pareto": {}})
    mark_pareto(table, METRICS)
    theirs = f"cached-{max(run.profile.cached)}"
    default = found[ADJOINT.id][0]["estimator"]
    curves = {m: curve(table, m) for m in ("nll", "ece", "brier")}
    names = {
        ADJOINT.id: ESTIMATORS[default],
        NODES.id: ESTIMATORS["nodes"],
        HEAD_MANY.id: HEAD_MANY.label.removeprefix("adjoint, "),
        CONTROL: f"{max(run.profile.cached):,} fresh samples, the control",
    }

    def kept(of: str) -> list[Tensor]:
        return [torch.from_numpy(value["p"]) for value in found[of]]

    def worth(of: str) -> dict[str, Any]:
        value = {m: next(r for r in table if r["id"] == of)["metrics"][m]["mean"] for m in BETTER}
        return headline(TITLES[task], curves, value, BETTER, clock.get(of)) | {"ours": of, "estimator": names[of]}

    return {
        "task": task,
        "title": TITLES[task],
        "model": MODEL,
        "model_title": f"LeNet, {MODEL_TITLES[MODEL]}",
        "inputs": len(y),
        "repeats": run.profile.repeats,
        "time_inputs": min(run.profile.time_inputs, len(y)),
        "methods": table,
        "bootstrap": [
            test | {"estimator": estimator, "time": clock.get(theirs if own == CONTROL else own)}
            for own, estimator in names.items()
            for test in compared(kept(own), kept("cached"), y, theirs, run.profile.resamples, run.seed, own)
        ],
        "default_estimator": default,
        "headline": worth(ADJOINT.id),
        "other_headlines": [worth(HEAD_MANY.id)],
    }


def curve(table: Sequence[dict[str, Any]], metric: str) -> list[tuple[int, float]]:
    """Mean quality of n cached samples."""
    return [(r["n"], r["metrics"][metric]["mean"]) for r in table if r["family"] == "cached"]


def mark_pareto(table: list[dict[str, Any]], every: Sequence[dict[str, Any]]) -> None:
    """Set `pareto` of every timed row: no other method is both as fast and better."""
    timed = [row for row in table if row["time"] is not None]
    for metric in every:
        sign = -1 if metric["better"] == "higher" else 1
        bad = [
            abs(r["metrics"][metric["id"]]["mean"] - metric["target"])
            if metric["better"] == "target"
            else sign * r["metrics"][metric["id"]]["mean"]
            for r in timed
        ]
        flags = pareto([(r["time"]["seconds"], b) for r, b in zip(timed, bad, strict=True)])
        for row, flag in zip(timed, flags, strict=True):
            row["pareto"][metric["id"]] = flag


def compared(
    ours: list[Tensor], theirs: list[Tensor], y: Tensor, name: str, resamples: int, seed: int, own: str = "adjoint"
) -> list[dict[str, Any]]:
    """The bootstrap of all metrics that are means over inputs, and of the ECE."""
    hot = torch.nn.functional.one_hot(y, ours[0].shape[1])

    def per_input(metric: str, p: Tensor) -> Tensor:
        p = p.double()
        if metric == "nll":
            return -p.gather(1, y[:, None]).clamp_min(1e-30).log().squeeze(1)
        return (p - hot).square().sum(1) if metric == "brier" else (p.argmax(1) == y).double()

    found = []
    for metric in ("nll", "ece", "accuracy", "brier"):
        if metric == "ece":
            differences = bootstrap.ece(ours, theirs, y, resamples, seed)
            a, b = (float(np.mean([metrics.ece(p, y) for p in ps])) for ps in (ours, theirs))
        else:
            x, z = (torch.stack([per_input(metric, p) for p in ps]).mean(0) for ps in (ours, theirs))
            differences, a, b = bootstrap.means(x, z, resamples, seed), x.mean().item(), z.mean().item()
        found.append(bootstrap.verdict(metric, BETTER[metric], a, b, differences, ours=own, theirs=name))
    return found
