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

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

import favour
from favour import metrics, scores
from favour.errors import FavourError
from favour.experiments import bootstrap, paper
from favour.experiments.classification import chunks
from favour.experiments.data import Split, scaled
from favour.experiments.headline import headline
from favour.experiments.methods import (
    ADJOINT,
    HEAD,
    HEAD_MANY,
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
from favour.experiments.profiles import PAPER_EPOCHS
from favour.experiments.record import digest, stat, write_json
from favour.experiments.run import Run
from favour.experiments.tasks import ALL_MODELS, TITLES, pictures

SCORES = [
    {"id": "jsd", "title": "JSD"},
    {"id": "max_probability", "title": "MaxP."},
    {"id": "entropy", "title": "Ent."},
    {"id": "mahalanobis", "title": "Maha."},
    {"id": "kl", "title": "KL"},
]
MODEL_TITLES = {"vi": "Bayes", "dropout10": "DO 10%", "dropout25": "DO 25%", "dropout50": "DO 50%"}
DPLR = dplr(2)
HEADS = (HEAD, HEAD_MANY)
CHUNK = 500
REQUIRED = 10
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


def belief_scores(belief: favour.Belief, rate: scores.Mahalanobis, certain: bool) -> dict[str, Tensor]:
    """All scores of a belief; without JSD and KL if it is `certain`."""
    found = {
        "max_probability": scores.max_probability(belief),
        "entropy": scores.entropy(belief),
        "mahalanobis": rate.score(belief.mean if certain else belief),
    }
    if not certain:
        found |= {
            "jsd": scores.jsd(belief),
            "jsd_nodes": scores.jsd(belief, estimator="nodes"),
            "kl": scores.kl(belief),
        }
    return found


def draw_scores(z: Tensor, rate: scores.Mahalanobis) -> dict[str, Tensor]:
    """All scores of draws (n, B, C)."""
    return {
        "max_probability": scores.max_probability(z),
        "entropy": scores.entropy(z),
        "mahalanobis": rate.score(z),
        "jsd": scores.jsd(z),
        "kl": scores.kl(z),
    }


def _joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    return {k: torch.cat([p[k] for p in parts]).double().cpu().numpy() for k in parts[0]}


@torch.no_grad()
def belief_based(subject: Subject, method: Method, x: Tensor, rate: scores.Mahalanobis) -> dict[str, np.ndarray]:
    """Scores of pictures by plain inference or a predictor."""
    assert subject.net is not None
    parts = []
    for chunk in chunks(x, subject.device, CHUNK):
        if method.family == "plain":
            parts.append(belief_scores(favour.Belief.point(subject.net(chunk)), rate, True))
        elif method in HEADS:
            predict = subject.predictor(method.settings, chunk)
            parts.append(draw_scores(predict.draws(chunk, n=method.settings.get("draws")), rate))
        else:
            parts.append(belief_scores(subject.predictor(method.settings, chunk)(chunk), rate, False))
    return _joined(parts)


@torch.no_grad()
def draw_based(
    subject: Subject, x: Tensor, rate: scores.Mahalanobis, equal: int, numbers: Sequence[int], seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray], dict[int, np.ndarray]]:
    """Scores of pictures by samples at equal time and by the largest number, and the JSD of every number."""
    random = generator(subject.device, seed)
    few, many = [], []
    nested: dict[int, list[Tensor]] = {n: [] for n in numbers if n > 1}
    for chunk in chunks(x, subject.device, CHUNK):
        z = subject.draws(chunk, max(equal, *numbers), random)
        few.append(draw_scores(z[:equal], rate))
        many.append(draw_scores(z[: max(numbers)], rate))
        for n, part in nested.items():
            part.append(many[-1]["jsd"] if n == max(numbers) else scores.jsd(z[:n]))
    jsd = {n: torch.cat(part).double().cpu().numpy() for n, part in nested.items()}
    return _joined(few), _joined(many), jsd


def seconds_of(subject: Subject, every: Sequence[Method], x: Tensor, rounds: int) -> dict[str, float]:
    """Seconds from a batch of pictures to its JSD, of plain inference to probabilities."""

    def divergence(predict: favour.Predictor, method: Method, batch: Tensor) -> Tensor:
        if method in HEADS:
            return scores.jsd(predict.draws(batch, n=method.settings.get("draws")))
        return scores.jsd(predict(batch), **method.asked)

    return timing(
        subject,
        every,
        scaled(x).to(subject.device),
        rounds,
        plain=lambda z: z.softmax(-1),
        drawn=scores.jsd,
        predicted=divergence,
    )


def areas(usual: dict[str, np.ndarray], unusual: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Areas under both curves for every score."""
    found: dict[str, dict[str, float]] = {"auroc": {}, "aupr": {}}
    for score in usual:
        s = np.nan_to_num(np.concatenate([usual[score], unusual[score]]), posinf=np.finfo(np.float64).max)
        t = np.repeat([0, 1], [len(usual[score]), len(unusual[score])])
        found["auroc"][score] = metrics.auroc(s, t)
        found["aupr"][score] = metrics.aupr(s, t)
    return found


@torch.no_grad()
def fitted(run: Run, subject: Subject, train: Split) -> scores.Mahalanobis:
    """Class means and covariance of the plain logits of some training pictures."""
    assert subject.net is not None
    part = train[: run.profile.fit_inputs]
    logits = torch.cat([subject.net(chunk) for chunk in chunks(part.x, subject.device)])
    return scores.Mahalanobis().fit(logits, part.y.to(logits.device))


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
    for i, pair in enumerate(listed):
        body["pairs"].append(one_pair(run, pair))
        body["summary"] = summary(body["pairs"])
        content = run.envelope("ood", used, PAPER_EPOCHS["ood"], NOTES) | body
        content["complete"] = i + 1 == len(listed)
        write_json(run.out / "ood.json", content)
    return content


def summary(done: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """In how many settings the JSD is not worse than that of the most samples, by estimator, and for fresh samples."""
    judged = [(p["id"], m["model"], boot) for p in done for m in p["models"] for boot in m["bootstrap"]]
    found: dict[str, dict[str, Any]] = {}
    for pair, model, boot in judged:
        names = {"estimator": boot["estimator"], "settings": 0, "not_worse": 0}
        entry = found.setdefault(boot["score"], names | {"worse": [], "required": REQUIRED})
        entry["settings"] += 1
        entry["not_worse"] += boot["verdict"] != "worse"
        if boot["verdict"] == "worse":
            entry["worse"].append({"pair": pair, "model": model} | {k: boot[k] for k in ("difference", "low", "high")})
    return found.get("jsd", {}) | {"by_estimator": found}


def one_pair(run: Run, pair: Pair) -> dict[str, Any]:
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
        return head | {"available": False, "why": why, "inputs": None, "unusual_inputs": None, "models": []}
    usual = pictures(task, "test", run.source)[:limit]
    train = pictures(task, "train", run.source)[: run.profile.fit_inputs]
    models = [one_model(run, pair, model, usual, unusual, train) for model in ALL_MODELS]
    sizes = {"inputs": len(usual), "unusual_inputs": len(unusual)}
    return head | {"available": True, "why": None, **sizes, "models": models}


def one_model(run: Run, pair: Pair, model: str, usual: Split, unusual: Split, train: Split) -> dict[str, Any]:
    task, other = pair
    units, profile = run.units("ood"), run.profile
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
    equal = max(2, int(clock["adjoint"]["cached_samples"] or 0))
    equal = min(equal, max(profile.cached))
    largest = max(profile.cached)
    found: dict[str, list[dict[str, Any]]] = {}
    work = [(r, m) for r in range(profile.repeats) for m in (PLAIN, DPLR, ADJOINT, *HEADS, "samples", "control")]
    for repeat, method in run.track(work, f"OOD, {TITLES[task]} and {TITLES[other]}, {MODEL_TITLES[model]}"):

        def compute(repeat: int = repeat, method: Any = method) -> dict[str, Any]:
            net = subject.load(repeat)
            rate = fitted(run, subject, train)
            if method == "samples":
                both = [
                    draw_based(subject, s.x, rate, equal, profile.cached, run.seed + 1 + repeat + 1000 * i)
                    for i, s in enumerate((usual, unusual))
                ]
                curve = {n: areas({"jsd": both[0][2][n]}, {"jsd": both[1][2][n]})["auroc"]["jsd"] for n in both[0][2]}
                return {
                    "equal": areas(both[0][0], both[1][0]),
                    "most": areas(both[0][1], both[1][1]),
                    "curve": curve,
                    "usual": both[0][1]["jsd"],
                    "unusual": both[1][1]["jsd"],
                }
            if method == "control":
                random = generator(subject.device, run.seed + 1_000_003 + repeat)
                fresh = [
                    torch.cat(
                        [scores.jsd(subject.draws(c, largest, random)) for c in chunks(s.x, subject.device, CHUNK)]
                    )
                    for s in (usual, unusual)
                ]
                inside, outside = ({"jsd": f.double().cpu().numpy()} for f in fresh)
                return {"areas": areas(inside, outside), "usual": inside["jsd"], "unusual": outside["jsd"]}
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

        name = method if isinstance(method, str) else method.id
        own = key | ({"equal": equal} if name == "samples" else {})
        found.setdefault(name, []).append(units.get((task, other, model, repeat, name), own, compute))
    return assembled(run, pair, model, found, clock, equal, largest)


def assembled(
    run: Run,
    pair: Pair,
    model: str,
    found: dict[str, list[dict[str, Any]]],
    clock: dict[str, dict[str, Any]],
    equal: int,
    largest: int,
) -> dict[str, Any]:
    name = f"{pair[0]}-{pair[1]}"
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
        (
            cached(equal),
            "samples-equal-time",
            f"MC, equal time (n = {equal})",
            "MC",
            [f["equal"] for f in found["samples"]],
        ),
        (cached(largest), "samples-1000", f"MC, n = {largest}", "MC", [f["most"] for f in found["samples"]]),
    ]
    rows = []
    for method, inference, title, printed, repeats in layout:
        row: dict[str, Any] = {**method.identity(), "inference": inference, "title": title}
        for measure in ("auroc", "aupr"):
            row[measure] = {s["id"]: None for s in SCORES} | {
                s: stat([r[measure][s] for r in repeats]) for s in repeats[0][measure]
            }
        row["time"] = clock.get(method.id) or (clock["adjoint"] if inference == "samples-equal-time" else None)
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
        ("jsd_head_many", HEAD_MANY.id, many, kept(HEAD_MANY.id), by["favour-head-many"]["jsd"]),
        ("jsd_control", theirs, f"{largest:,} fresh samples, the control", kept("control"), fresh),
    ]
    tests = []
    for score, own, estimator, ours, area in estimators:
        differences = bootstrap.auroc(ours, kept("samples"), run.profile.resamples, run.seed)
        names = {"score": score, "ours": own, "theirs": theirs, "estimator": estimator, "time": clock.get(own)}
        other = by["samples-1000"]["jsd"]["mean"]
        tests.append(bootstrap.verdict("auroc", "higher", area["mean"], other, differences, **names))
    numbers = [int(n) for n in found["samples"][0]["curve"]]
    curve = [
        (n, float(np.mean([f["curve"].get(str(n), f["curve"].get(n)) for f in found["samples"]]))) for n in numbers
    ]
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
