"""Telling unfamiliar inputs from familiar ones (paper, tables 1 to 3).

LeNet with dropout of 10%, 25% or 50%, or Gaussian weights, on its two top layers. A score is computed for the test
pictures of the set trained on and of another set; how well it tells them apart is the area under the ROC and under the
precision–recall curve, unusual pictures positive. Scores are those of `favour.scores`; JSD and KL need a distribution,
so plain inference has none. The Mahalanobis distance is fitted to the plain logits of training pictures.

The JSD of a Favour pass is estimated in four ways: by the paper's lemma (`jsd`), which holds for small covariances; by
fixed nodes of the Gaussian (`jsd_nodes`); and from fixed draws of the last layers with the mean and covariance of the
belief, which keep the skewness that strong dropout gives to logits: the default number (`jsd_head`) or many
(`jsd_head_many`). Each is timed from pictures to scores by itself.

As a control the same test is put to as many fresh samples (`jsd_control`): resampling inputs does not see the chance in
the draws themselves, so now and then samples are "worse" than samples.

Samples "at equal time" are as many as the cached sampler draws in the time of the adjoint pass, at least two.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

import favour
from favour import scores
from favour.errors import FavourError
from favour_studies.experiments import bootstrap, paper
from favour_studies.experiments.classification import chunks
from favour_studies.experiments.closed_form import closed_form
from favour_studies.experiments.data import Split, scaled
from favour_studies.experiments.headline import headline
from favour_studies.experiments.methods import (
    ADJOINT,
    HEAD,
    HEAD_MANY,
    MANY,
    NODES,
    PLAIN,
    Method,
    Subject,
    cached,
    dplr,
    generator,
    naive,
    times,
    timing,
)
from favour_studies.experiments.ood_scores import CHUNK, HEADS, areas, belief_based, draw_based, fitted, joined
from favour_studies.experiments.profiles import PAPER_EPOCHS
from favour_studies.experiments.record import digest, stat, write_json
from favour_studies.experiments.run import Job, Part, Run, by_name
from favour_studies.experiments.tasks import ALL_MODELS, TITLES, pictures

SCORES = [
    {"id": "jsd", "title": "JSD"},
    {"id": "max_probability", "title": "MaxP."},
    {"id": "entropy", "title": "Ent."},
    {"id": "mahalanobis", "title": "Maha."},
    {"id": "kl", "title": "KL"},
]
MODEL_TITLES = {"vi": "Bayes", "dropout10": "DO 10%", "dropout25": "DO 25%", "dropout50": "DO 50%"}
DPLR = dplr(2)
REQUIRED = 10  # settings in which the JSD is not to be worse than that of the most samples
JUDGED = "jsd_head_many"
NOTES = [
    "Areas are of ours as fractions, of the paper's in per cent, as printed there.",
    "Repeats are networks trained from different seeds; the paper repeats the inference of one network.",
    "Favour's JSD is the closed form of the paper's lemma, but for the rows with draws of the head: there it is that "
    "of fixed draws of the last layers. That of samples is their own divergence.",
    "Times are from a batch of pictures to its JSD, for plain inference to class probabilities.",
]
Pair = tuple[str, str]


def pairs(run: Run) -> list[Pair]:
    if run.source == "embedded":
        return [("digits07", "digits89")]
    return [("mnist07", "mnist89"), ("mnist", "fashion_mnist"), ("cifar10", "svhn"), ("cifar10", "cifar100")]


def seconds_of(subject: Subject, every: Sequence[Method], x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds from a batch of pictures to its JSD, of plain inference to probabilities."""

    def divergence(predict: favour.Predictor, method: Method, batch: Tensor) -> Tensor:
        if method in HEADS:
            return scores.jsd(predict.draws(batch, n=method.settings.get("draws")))
        return scores.jsd(predict(batch), **method.asked) if method.asked else closed_form(predict(batch))

    return timing(
        subject,
        every,
        scaled(x).to(subject.device),
        rounds,
        plain=lambda z: z.softmax(-1),
        drawn=scores.jsd,
        predicted=divergence,
    )


def ood(run: Run) -> dict[str, Any]:
    """Run the experiment; writes ood.json."""
    listed = pairs(run)
    names = [f"{a}-{b}" for a, b in listed]
    ids = [s["id"] for s in SCORES]
    tables = [
        {"id": "table2", "title": "Area under the ROC curve", "measure": "auroc", "pairs": names, "scores": ids},
        {
            "id": "table3",
            "title": "Area under the precision–recall curve",
            "measure": "aupr",
            "pairs": names,
            "scores": ids,
        },
    ]
    if "mnist-fashion_mnist" in names:
        title = "MNIST against Fashion-MNIST, area under the ROC curve"
        one = {"id": "table1", "title": title, "measure": "auroc", "pairs": ["mnist-fashion_mnist"], "scores": ids[:4]}
        tables.insert(0, one)
    body: dict[str, Any] = {"scores": SCORES, "tables": tables, "pairs": []}
    used = [(task, model) for task in dict.fromkeys(a for a, _ in listed) for model in ALL_MODELS]
    for pair in listed:
        entry, models = one_pair(run, pair)
        body["pairs"].append(entry | {"models": [m.finish(run.values("ood", m)) for m in models]})
        body["summary"] = summary(body["pairs"])
        content = run.envelope("ood", used, PAPER_EPOCHS["ood"], NOTES) | body
        content["complete"] = pair == listed[-1]
        write_json(run.out / "ood.json", content)
    return content


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many settings the JSD is not worse than that of the most samples, by estimator, and for fresh samples.

    `HEAD_MANY` is held to it: it has as many draws as there are samples.
    """
    judged = [(f"{p['id']} {m['model']}", boot) for p in done for m in p["models"] for boot in m["bootstrap"]]
    found = {
        score: {"estimator": next(b["estimator"] for _, b in judged if b["score"] == score)}
        | bootstrap.tally([(name, b) for name, b in judged if b["score"] == score])
        for score in dict.fromkeys(b["score"] for _, b in judged)
    }
    return {"ours": HEAD_MANY.id, "required": REQUIRED, **found.get(JUDGED, {}), "by_estimator": found}


def parts(run: Run) -> Iterator[Part]:
    """One for each pair and model."""
    for pair in pairs(run):
        yield from one_pair(run, pair)[1]


def one_pair(run: Run, pair: Pair) -> tuple[dict[str, Any], Iterable[Part]]:
    """What is said of a pair, and a part for each of its models."""
    task, other = pair
    head = {
        "id": f"{task}-{other}",
        "trained_on": TITLES[task],
        "unusual": TITLES[other],
        "repeats": run.profile.repeats,
    }
    limit = run.profile.test_inputs
    try:
        unusual = pictures(other, "test", "hub" if other == "cifar100" else run.source)[:limit]
    except FavourError as error:
        if other != "cifar100":
            raise
        why = f"CIFAR-100 is fetched from the hub, which could not be reached ({str(error)[:120]} …)."
        return head | {"available": False, "why": why, "inputs": None, "unusual_inputs": None}, ()
    usual = pictures(task, "test", run.source)[:limit]
    train = pictures(task, "train", run.source)[: run.profile.fit_inputs]
    models = (one_model(run, pair, model, usual, unusual, train) for model in ALL_MODELS)
    sizes = {"inputs": len(usual), "unusual_inputs": len(unusual)}
    return head | {"available": True, "why": None, **sizes}, models


def one_model(run: Run, pair: Pair, model: str, usual: Split, unusual: Split, train: Split) -> Part:
    task, other = pair
    profile = run.profile
    subject = run.subject(task, model)
    key = {"epochs": run.epochs(task, model)}
    timed = [PLAIN, naive(1), *map(cached, profile.cached), DPLR, ADJOINT, NODES, *HEADS]
    seconds = run.timed(
        "ood",
        subject,
        key | {"methods": digest([m.id for m in timed])},
        lambda own: seconds_of(own, timed, usual.x[: profile.time_inputs], profile.rounds),
    )
    clock = times(seconds, timed)
    largest = max(profile.cached)
    equal = {m: min(largest, max(2, int(clock[m]["cached_samples"] or 0))) for m in (ADJOINT.id, HEAD_MANY.id)}

    @torch.no_grad()
    def samples(repeat: int) -> dict[str, Any]:
        subject.load(repeat)
        rate = fitted(subject, train)
        whole = sorted({*equal.values(), largest})
        seeds = (run.seed + 1 + repeat + 1000 * i for i in range(2))
        (inside, low), (outside, high) = (
            draw_based(subject, s.x, rate, whole, profile.cached, seed)
            for s, seed in zip((usual, unusual), seeds, strict=True)
        )
        return {
            "areas": {str(n): areas(inside[n], outside[n]) for n in whole},
            "curve": {str(n): areas({"jsd": low[n]}, {"jsd": high[n]})["auroc"]["jsd"] for n in low},
            "usual": inside[largest]["jsd"],
            "unusual": outside[largest]["jsd"],
        }

    @torch.no_grad()
    def control(repeat: int) -> dict[str, Any]:
        subject.load(repeat)
        random = generator(subject.device, run.seed + 1_000_003 + repeat)
        inside, outside = (
            joined([{"jsd": scores.jsd(subject.draws(c, largest, random))} for c in chunks(s.x, subject.device, CHUNK)])
            for s in (usual, unusual)
        )
        return {"areas": areas(inside, outside), "usual": inside["jsd"], "unusual": outside["jsd"]}

    @torch.no_grad()
    def single(repeat: int, method: Method) -> dict[str, Any]:
        net = subject.load(repeat)
        rate = fitted(subject, train)
        inside, outside = (belief_based(subject, method, s.x, rate) for s in (usual, unusual))
        value: dict[str, Any] = {"areas": areas(inside, outside)}
        if method in (ADJOINT, *HEADS):
            value |= {"usual": inside["jsd"], "unusual": outside["jsd"]}
        if method is ADJOINT:
            value |= {"usual_nodes": inside["jsd_nodes"], "unusual_nodes": outside["jsd_nodes"]}
        if method is PLAIN:
            guesses = torch.cat([net(c).argmax(1).cpu() for c in chunks(usual.x, subject.device)])
            value["accuracy"] = (guesses == usual.y).double().mean().item()
        return value

    jobs = []
    for r in range(profile.repeats):
        name = (task, other, model, r)
        jobs += [Job((*name, m.id), key, partial(single, r, m)) for m in (PLAIN, DPLR, ADJOINT, *HEADS)]
        jobs.append(Job((*name, "samples"), key | {"equal": sorted(equal.values())}, partial(samples, r)))
        jobs.append(Job((*name, "control"), key, partial(control, r)))

    def finish(values: list[Any]) -> dict[str, Any]:
        return assembled(run, pair, model, by_name(jobs, values), clock, equal, largest)

    return Part(f"OOD, {TITLES[task]} and {TITLES[other]}, {MODEL_TITLES[model]}", jobs, finish)


def assembled(
    run: Run,
    pair: Pair,
    model: str,
    found: dict[str, list[dict[str, Any]]],
    clock: dict[str, dict[str, Any]],
    equal: dict[str, int],
    largest: int,
) -> dict[str, Any]:
    name = f"{pair[0]}-{pair[1]}"

    def sampled(n: int) -> list[dict[str, Any]]:
        return [f["areas"][str(n)] for f in found["samples"]]

    layout = [
        (PLAIN, "plain", "Freq.", "Freq.", [f["areas"] for f in found["plain"]]),
        (DPLR, "favour-dplr", "Favour, dplr", "Favour", [f["areas"] for f in found[DPLR.id]]),
        (ADJOINT, "favour-adjoint", "Favour, adjoint", "Favour", [f["areas"] for f in found["adjoint"]]),
        (HEAD, "favour-head", f"Favour, {HEAD.label}", "Favour", [f["areas"] for f in found[HEAD.id]]),
        (
            HEAD_MANY,
            "favour-head-many",
            f"Favour, {HEAD_MANY.label}",
            "Favour",
            [f["areas"] for f in found[HEAD_MANY.id]],
        ),
        *(
            (
                cached(n),
                "samples-equal-time" + ("" if m == ADJOINT.id else "-many"),
                f"MC, time of {'the closed form' if m == ADJOINT.id else f'{MANY:,} draws'} (n = {n})",
                "MC",
                sampled(n),
            )
            for m, n in equal.items()
        ),
        (cached(largest), "samples-1000", f"MC, n = {largest}", "MC", sampled(largest)),
    ]
    spent = {"samples-equal-time": clock[ADJOINT.id], "samples-equal-time-many": clock[HEAD_MANY.id]}
    rows = []
    for method, inference, title, printed, repeats in layout:
        row: dict[str, Any] = {**method.identity(), "inference": inference, "title": title}
        for measure in ("auroc", "aupr"):
            row[measure] = {s["id"]: None for s in SCORES} | {
                s: stat([r[measure][s] for r in repeats]) for s in repeats[0][measure]
            }
        row["time"] = spent.get(inference) or clock.get(method.id)
        row["paper"] = {"row": printed} | {m: paper.numbers(m, name, model, printed) for m in ("auroc", "aupr")}
        rows.append(row)
    by = {row["inference"]: row["auroc"] for row in rows}

    def kept(of: str, suffix: str = "") -> list[tuple[Tensor, Tensor]]:
        return [(torch.from_numpy(f["usual" + suffix]), torch.from_numpy(f["unusual" + suffix])) for f in found[of]]

    fresh = stat([f["areas"]["auroc"]["jsd"] for f in found["control"]])
    lemma, nodes = (by["favour-adjoint"][k] for k in ("jsd", "jsd_nodes"))
    draws, many = (m.label.removeprefix("adjoint, ") for m in HEADS)
    theirs = f"cached-{largest}"
    estimators = [
        ("jsd", ADJOINT.id, "closed form", kept("adjoint"), lemma),
        ("jsd_nodes", NODES.id, "nodes of the Gaussian", kept("adjoint", "_nodes"), nodes),
        ("jsd_head", HEAD.id, draws, kept(HEAD.id), by["favour-head"]["jsd"]),
        (JUDGED, HEAD_MANY.id, many, kept(HEAD_MANY.id), by["favour-head-many"]["jsd"]),
        ("jsd_control", theirs, f"{largest:,} fresh samples, the control", kept("control"), fresh),
    ]
    tests = []
    for score, own, estimator, ours, area in estimators:
        differences = bootstrap.auroc(ours, kept("samples"), run.profile.resamples, run.seed)
        names = {"score": score, "ours": own, "theirs": theirs, "estimator": estimator, "time": clock.get(own)}
        other = by["samples-1000"]["jsd"]["mean"]
        tests.append(bootstrap.verdict("auroc", "higher", area["mean"], other, differences, **names))
    numbers = [int(n) for n in found["samples"][0]["curve"]]
    curve = [(n, float(np.mean([f["curve"][str(n)] for f in found["samples"]]))) for n in numbers]
    title = f"{TITLES[pair[0]]} against {TITLES[pair[1]]}, {MODEL_TITLES[model]}"

    def worth(of: str) -> dict[str, Any]:
        test = next(t for t in tests if t["score"] == of)
        found = headline(title, {"jsd": curve}, {"jsd": test["ours_mean"]}, {"jsd": "higher"}, test["time"])
        return found | {"ours": test["ours"], "estimator": test["estimator"]}

    return {
        "model": model,
        "title": MODEL_TITLES[model],
        "rows": rows,
        "bootstrap": tests,
        "accuracy": stat([f["accuracy"] for f in found["plain"]]),
        "curve": [{"n": n, "auroc": v} for n, v in curve],
        "headline": worth("jsd"),
        "other_headlines": [worth("jsd_head"), worth("jsd_head_many")],
    }
