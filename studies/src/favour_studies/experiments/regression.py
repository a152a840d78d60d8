"""Calibration of regressions against the time they take (paper, figures 4 to 8).

A perceptron with dropout of 10% or 50% on its hidden layers, or Gaussian weights, on each UCI set. A method gives a
mean μ and a variance σ² of the network's output; the samplers through a Gaussian fitted to their cloud, as the paper
does. With s² the variance of the observations' noise, fitted to the validation rows for each method by itself,

    y ~ N(μ, σ² + s²)

is judged by RMSE, NLL, calibration error and coverage of the 95% interval, in the target's own unit. A fifth of the
usual training rows validate. Where the test set is small, Energy and Boston, the validation rows are judged too; the
noise of each half of them is then fitted to the other half.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import favour
from favour import metrics
from favour_studies.experiments import bootstrap
from favour_studies.experiments.classification import curve, mark_pareto
from favour_studies.experiments.headline import headline
from favour_studies.experiments.methods import (
    ADJOINT_TABLE,
    NAIVE_RUN,
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
from favour_studies.experiments.run import Job, Part, Run
from favour_studies.experiments.tasks import TABLE_MODELS, TITLES, Table, table

METRICS: list[dict[str, Any]] = [
    {"id": "rmse", "title": "RMSE", "better": "lower"},
    {"id": "nll", "title": "Gaussian NLL", "better": "lower"},
    {"id": "calibration_error", "title": "Calibration error", "better": "lower"},
    {"id": "coverage95", "title": "Coverage at 95%", "better": "target", "target": 0.95},
]
VALIDATED = ("energy", "boston", "diabetes")
NOTES = [
    "Repeats are the usual 90/10 splits, a network trained for each; a fifth of the training rows validate.",
    "Samples are scored through a Gaussian fitted to their cloud, as the paper does.",
    "`adjoint` takes secants and 16 groups of pairs (`secant` and `pairs` of `favour.compile`); with secants alone, "
    "and with neither, it has rows of its own.",
    "The observations' noise is fitted to validation rows, for every method by itself; where validation rows are "
    "judged, each half with the noise of the other.",
]

Moments = tuple[Tensor, Tensor]  # mean and variance, (N,)


def tasks(run: Run) -> tuple[str, ...]:
    return ("diabetes",) if run.source == "embedded" else ("concrete", "power", "energy", "boston", "kin8nm")


def moments(draws: Tensor) -> Moments:
    """Of draws (n, N, 1)."""
    z = draws.squeeze(-1).double()
    variance = z.var(0) if len(z) > 1 else torch.zeros_like(z[0])
    return z.mean(0).cpu(), variance.cpu()


def predictions(subject: Subject, method: Method, x: Tensor, profile_n: Sequence[int], seed: int) -> dict[str, Moments]:
    """Mean and variance of the output by a method, or by all numbers of samples of a family: id → moments."""
    assert subject.net is not None
    x = x.to(subject.device)
    if method.family == "plain":
        mean = subject.net(x).squeeze(-1).double().cpu()
        return {method.id: (mean, torch.zeros_like(mean))}
    if method.family in ("naive", "cached"):
        torch.manual_seed(seed)
        largest = max(profile_n)
        if method.family == "naive":
            z = torch.stack(list(subject.naive_draws(x, largest)))
        else:
            z = subject.draws(x, largest, generator(subject.device, seed))
        return {f"{method.family}-{n}": moments(z[:n]) for n in profile_n}
    belief = subject.predictor(method.settings, x)(x)
    return {method.id: (belief.mean.squeeze(-1).double().cpu(), belief.variance.squeeze(-1).double().cpu())}


def noise(found: Moments, y: Tensor) -> float:
    """The variance of the observations' noise; not below 1e-6 of the target's."""
    belief = favour.Belief(found[0].unsqueeze(1), diag=found[1].unsqueeze(1), validate=False)
    return max(1e-6, float(favour.fit_noise(belief, y.double().unsqueeze(1))))


def validated(found: Moments, y: Tensor) -> Tensor:
    """Variances of validation rows, the noise of each half fitted to the other half."""
    half = len(y) // 2
    variance = torch.empty_like(y)
    for part, other in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        variance[part] = found[1][part] + noise((found[0][other], found[1][other]), y[other])
    return variance


def scored(mean: Tensor, stddev: Tensor, y: Tensor, scale: float) -> dict[str, float]:
    """All metrics, in the target's unit."""
    half = 1.959963984540054 * stddev
    return {
        "rmse": (mean - y).square().mean().sqrt().item() * scale,
        "nll": metrics.gaussian_nll(mean, stddev, y) + math.log(scale),
        "calibration_error": metrics.regression_calibration_error(mean, stddev, y),
        "coverage95": metrics.coverage(mean - half, mean + half, y),
    }


def judged(validation: Moments, test: Moments, rows: Table) -> dict[str, Any]:
    """Metrics on both parts, and each test row's NLL and squared error."""
    held, y = rows.validation.y.double(), rows.test.y.double()
    s2 = noise(validation, held)
    stddev = (test[1] + s2).sqrt()
    u = (y - test[0]) / stddev
    nll = 0.5 * (u.square() + math.log(2 * math.pi)) + stddev.log() + math.log(rows.scale)
    return {
        "test": scored(test[0], stddev, y, rows.scale),
        "validation": scored(validation[0], validated(validation, held).sqrt(), held, rows.scale),
        "noise": s2 * rows.scale**2,
        "row_nll": nll.numpy(),
        "row_square": ((y - test[0]) * rows.scale).square().numpy(),
    }


def seconds_of(subject: Subject, every: Sequence[Method], x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds from a batch of rows to mean and standard deviation."""

    def believed(predict: favour.Predictor, method: Method, batch: Tensor) -> tuple[Tensor, Tensor]:
        belief = predict(batch)
        return belief.mean, belief.stddev

    return timing(
        subject,
        every,
        x.to(subject.device),
        rounds,
        plain=lambda z: z,
        drawn=lambda z: (z.mean(0), z.std(0, correction=min(1, len(z) - 1))),
        predicted=believed,
    )


@torch.no_grad()
def regression(run: Run) -> dict[str, Any]:
    """Run the experiment; writes regression.json."""
    body: dict[str, Any] = {"metrics": METRICS, "tasks": []}
    pairs = [(task, model) for task in tasks(run) for model in TABLE_MODELS]
    for i, part in enumerate(parts(run)):
        body["tasks"] += part.finish(run.values("regression", part))
        body["summary"] = summary(body["tasks"])
        content = run.envelope("regression", pairs, PAPER_EPOCHS["regression"], NOTES) | body
        content["notes"] += kl_notes(content["training"])
        content["complete"] = i + 1 == len(pairs)
        write_json(run.out / "regression.json", content)
    return content


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many settings the NLL is not worse than that of the most samples."""
    judged = [(f"{t['task']} {t['model']}", b) for t in done for b in t["bootstrap"] if b["metric"] == "nll"]
    return {"ours": ADJOINT_TABLE.id, "required": len(judged), "nll": bootstrap.tally(judged)}


def parts(run: Run) -> Iterator[Part]:
    """One for each task and model."""
    for task in tasks(run):
        for model in TABLE_MODELS:
            yield one_task(run, task, model)


def kl_notes(trainings: Sequence[dict[str, Any]]) -> list[str]:
    """What the KL term of VI counted, as the networks' files say."""
    weights = sorted({t["kl_weight"] for t in trainings if t.get("kl_weight") is not None})
    if not weights:
        return []
    shown = ", ".join(f"{w:g}" for w in weights)
    return [
        f"VI is trained with {shown} times the KL term, chosen on validation rows "
        "(`favour_studies.experiments.selection`)."
    ]


def one_task(run: Run, task: str, model: str) -> Part:
    profile = run.profile
    every = methods(profile, pictures=False)
    subject = run.subject(task, model)
    key = {"epochs": run.epochs(task, model)}
    tables = [table(task, split, run.source) for split in range(profile.splits)]
    batch = torch.cat([tables[0].test.x, tables[0].validation.x, tables[0].train.x])[: profile.time_inputs]
    seconds = run.timed(
        "regression",
        subject,
        key | {"methods": digest([m.id for m in every])},
        lambda own: seconds_of(own, every, batch, profile.rounds),
    )
    families = {"naive": [n for n in profile.naive if n <= NAIVE_RUN], "cached": list(profile.cached)}
    first = {f: next(m for m in every if m.family == f) for f in families}
    alone = [m for m in every if m.family in ("plain", "dplr", "adjoint")]
    kept = (ADJOINT_TABLE.id, f"cached-{max(profile.cached)}")  # whose rows are compared

    @torch.no_grad()
    def compute(split: int, method: Method) -> dict[str, Any]:
        subject.load(split)
        rows = tables[split]
        numbers = families.get(method.family, [])
        x = torch.cat([rows.validation.x, rows.test.x])
        cut = len(rows.validation)
        value: dict[str, Any] = {}
        for name, (mean, variance) in predictions(subject, method, x, numbers, run.seed + 1 + split).items():
            each = judged((mean[:cut], variance[:cut]), (mean[cut:], variance[cut:]), rows)
            arrays = {f"{name}/{k}": each.pop(k) for k in ("row_nll", "row_square")}
            value[name] = each
            if name in kept:
                value |= arrays
        return value

    work = [(split, m) for split in range(profile.splits) for m in (*first.values(), *alone)]
    names = [m.family if m.family in families else m.id for _, m in work]
    jobs = [
        Job((task, model, split, name), key, partial(compute, split, m))
        for (split, m), name in zip(work, names, strict=True)
    ]

    def finish(values: list[Any]) -> list[dict[str, Any]]:
        found: dict[str, list[dict[str, Any]]] = {m.id: [] for m in every}
        for name, value in zip(names, values, strict=True):
            for other in every:
                if other.id in value:
                    rows = {k: value[f"{other.id}/{k}"] for k in ("row_nll", "row_square") if other.id in kept}
                    found[other.id].append(value[other.id] | rows)
                elif name == "cached" and other.family == "naive" and other.n and other.n > NAIVE_RUN:
                    found[other.id].append(value[f"cached-{other.n}"])  # the same estimator
        clock = times(seconds, every)
        shown = ("test", "validation") if task in VALIDATED else ("test",)
        return [assembled(run, task, model, part, every, found, clock, tables, len(batch)) for part in shown]

    return Part(f"regression, {TITLES[task]}, {MODEL_TITLES[model]}", jobs, finish)


def assembled(
    run: Run,
    task: str,
    model: str,
    part: str,
    every: Sequence[Method],
    found: dict[str, list[dict[str, Any]]],
    clock: dict[str, dict[str, Any]],
    tables: Sequence[Table],
    time_inputs: int,
) -> dict[str, Any]:
    rows = []
    for method in every:
        if found[method.id]:
            each = {m["id"]: stat([f[part][m["id"]] for f in found[method.id]]) for m in METRICS}
            rows.append({**method.identity(), "metrics": each, "time": clock.get(method.id), "pareto": {}})
    mark_pareto(rows, METRICS)
    own = next(r for r in rows if r["id"] == "adjoint")["metrics"]
    value = {m: own[m]["mean"] for m in ("nll", "rmse")}
    title = f"{TITLES[task]}, {MODEL_TITLES[model]}"
    theirs = f"cached-{max(run.profile.cached)}"
    return {
        "task": task,
        "title": TITLES[task],
        "model": model,
        "model_title": f"MLP, {MODEL_TITLES[model]}",
        "part": part,
        "inputs": sum(len(t.test if part == "test" else t.validation) for t in tables),
        "repeats": len(tables),
        "time_inputs": time_inputs,
        "methods": rows,
        "bootstrap": compared(found["adjoint"], found[theirs], theirs, run) if part == "test" else [],
        "headline": headline(
            title, {m: curve(rows, m) for m in value}, value, dict.fromkeys(value, "lower"), clock.get("adjoint")
        ),
    }


def compared(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], name: str, run: Run) -> list[dict[str, Any]]:
    """Bootstrap over the rows of each split: NLL pooled over splits, RMSE averaged over them."""
    resamples, seed = run.profile.resamples, run.seed
    total = sum(len(o["row_nll"]) for o in ours)
    nll = torch.zeros(resamples, dtype=torch.float64)
    rmse = torch.zeros(resamples, dtype=torch.float64)
    a, b = (np.concatenate([f["row_nll"] for f in fs]).mean() for fs in (ours, theirs))
    c, d = (float(np.mean([math.sqrt(f["row_square"].mean()) for f in fs])) for fs in (ours, theirs))
    for split, (o, t) in enumerate(zip(ours, theirs, strict=True)):
        x, y = (torch.from_numpy(np.asarray(f["row_nll"])) for f in (o, t))
        nll += bootstrap.means(x, y, resamples, seed + split) * len(x) / total
        x, y = (torch.from_numpy(np.asarray(f["row_square"])) for f in (o, t))
        parts = bootstrap.counts(len(x), resamples, torch.Generator().manual_seed(seed + split))
        rmse += torch.cat([(n @ x / len(x)).sqrt() - (n @ y / len(x)).sqrt() for n in parts]) / len(ours)
    names = {"ours": "adjoint", "theirs": name}
    return [
        bootstrap.verdict("nll", "lower", float(a), float(b), nll, **names),
        bootstrap.verdict("rmse", "lower", c, d, rmse, **names),
    ]
