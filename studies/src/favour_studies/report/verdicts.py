"""What the numbers say, in words: worth and cost of a pass, and verdicts of the paired bootstrap.

Nothing here knows an outcome: every sentence is chosen by the numbers of the result files.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from favour.pages import DASH, cell, count, head, listed, number, row, row_head, signed, table
from favour_studies.report.load import Results
from favour_studies.report.markup import measured, metric_name, samples, worth

Json = Mapping[str, Any]
PRIMARY = {"classification": "nll", "regression": "nll", "ood": "jsd"}
TITLES = {"classification": "Classification", "regression": "Regression", "ood": "Unfamiliar inputs"}


@dataclass(frozen=True)
class Setting:
    """A task with its network: the headline and the bootstrap of one line of the report."""

    experiment: str
    title: str
    headline: Json
    bootstrap: Sequence[Json]
    part: str = "test"
    others: Sequence[Json] = ()  # headlines of other estimators

    def __post_init__(self) -> None:
        for each in (self.headline, *self.others):
            headline_words(each)  # a lookup that fails does so here, where the file is known
        for boot in self.bootstrap:
            verdict_words(boot)


def settings(results: Results) -> list[Setting]:
    """Of all experiments that have a headline."""
    found = []
    for name in ("classification", "regression"):
        if name in results:
            with results.reading(name):
                for task in results[name]["tasks"]:
                    part = task.get("part", "test")
                    title = f"{task['title']}, {task['model_title']}" + (", validation" if part != "test" else "")
                    others = task.get("other_headlines") or ()
                    found.append(Setting(name, title, task["headline"], task["bootstrap"], part, others))
    if "ood" in results:
        with results.reading("ood"):
            for pair in results["ood"]["pairs"]:
                for model in pair["models"]:
                    title = f"{pair['trained_on']} against {pair['unusual']}, {model['title']}"
                    others = model.get("other_headlines") or ()
                    found.append(Setting("ood", title, model["headline"], model["bootstrap"], "test", others))
    return found


def unmatched(headline: Json, metric: str) -> bool:
    """Whether no number of samples is the pass's equal: few score better, those of equal time or more score worse."""
    equivalent = headline["equivalent"].get(metric) or {}
    timed = headline.get("cached_samples") is not None
    return bool(equivalent.get("at_most")) and timed and metric not in (headline.get("sampling_wins") or [])


def worth_of(headline: Json, metric: str) -> str:
    """The cell for the number of samples a pass matches."""
    return worth(headline["equivalent"].get(metric)) + ("*" if unmatched(headline, metric) else "")


def gain(headline: Json, metric: str) -> str:
    """Samples matched for each sample's time spent."""
    equivalent, cost = headline["equivalent"].get(metric), headline.get("cached_samples")
    if unmatched(headline, metric) or not equivalent or equivalent.get("samples") is None or not cost:
        return DASH
    sign = "≥ " if equivalent.get("at_least") else "≤ " if equivalent.get("at_most") else ""
    return f"{sign}{count(equivalent['samples'] / cost)}×"


def worth_words(headline: Json, metric: str) -> str:
    name, equivalent = metric_name(metric), headline["equivalent"][metric]
    if unmatched(headline, metric):
        few = samples(equivalent["samples"])
        return f"no number of samples in {name} ({few} score as well or better, more of them worse)"
    if equivalent.get("samples") is None:
        return f"an unknown number of samples in {name}"
    if equivalent.get("at_most"):
        return f"no more than {samples(equivalent['samples'])} in {name}"
    at_least = "at least " if equivalent.get("at_least") else ""
    return f"{at_least}{samples(equivalent['samples'])} in {name}"


def cost_words(headline: Json) -> str:
    """What one pass costs."""
    parts = []
    if headline.get("forwards") is not None:
        parts.append(f"{count(headline['forwards'])} forward passes")
    if headline.get("cached_samples") is not None:
        cached = samples(headline["cached_samples"])
        parts.append(f"the time of {cached} from the sampler that runs the deterministic trunk once")
    if headline.get("naive_samples") is not None:
        parts.append(f"of {samples(headline['naive_samples'])} that run the whole network")
    return ", ".join(parts) if parts else "a time that was not measured"


def headline_words(headline: Json) -> list[str]:
    """Worth, cost, and where sampling wins."""
    matched = listed([worth_words(headline, m) for m, e in headline["equivalent"].items() if e])
    wins = headline.get("sampling_wins") or []
    how = f" with {headline['estimator']}" if headline.get("estimator") else ""
    sentences = [f"One adjoint pass{how} matches {matched}. It costs {cost_words(headline)}."]
    if headline.get("cached_samples") is None:
        sentences.append("Without times, nothing can be said about sampling of equal time.")
    elif wins:
        sentences.append(f"Sampling wins in {listed([metric_name(m) for m in wins])}: in the same time it does better.")
    else:
        names = listed([metric_name(m) for m in headline["equivalent"]])
        sentences.append(f"In the same time, sampling does not reach it in {names}.")
    return sentences


def measure_name(boot: Json) -> str:
    """The measure of a bootstrap, with the estimator it was computed by."""
    name = metric_name(boot["metric"] if boot.get("score") is None else "jsd")
    return f"{name} by {boot['estimator']}" if boot.get("estimator") else name


def is_control(boot: Json) -> bool:
    """Whether samples were compared with samples."""
    return "control" in (boot.get("ours"), *str(boot.get("score")).split("_"))


def verdict_words(boot: Json) -> str:
    """One verdict of the bootstrap as a sentence."""
    name = measure_name(boot)
    interval = f"{signed(boot['low'])} … {signed(boot['high'])}"
    theirs = method_name(boot["theirs"])
    if boot["verdict"] == "worse":
        return f"{name} is worse than that of {theirs} by {number(abs(boot['difference']), 2)} (95%: {interval})."
    if boot["verdict"] == "better":
        return f"{name} is better than that of {theirs} by {number(abs(boot['difference']), 2)} (95%: {interval})."
    return f"{name} is not worse than that of {theirs} (difference {signed(boot['difference'])}, 95%: {interval})."


def method_name(method: str) -> str:
    """`cached-1000` as words."""
    family, _, n = method.partition("-")
    return f"{int(n):,} samples" if family in ("cached", "naive") and n.isdigit() else method


@dataclass(frozen=True)
class Goal:
    """In how many settings a method was to be not worse; of every method where `ours` is None."""

    required: int
    ours: str | None = None


def goal(file: Json) -> Goal | None:
    """That of a result file, if it says so."""
    summary = file.get("summary") or {}
    return Goal(summary["required"], summary.get("ours")) if "required" in summary else None


def tallies(every: Sequence[Setting], metric: str, prefix: str = "", wanted: Goal | None = None) -> list[str]:
    """For each estimator: in how many settings it is not worse, where it is and by how much, and what it costs.

    The one that a goal is set for comes first, with whether it is met.
    """
    groups: dict[str, list[tuple[str, Json]]] = {}
    for setting in every:
        for boot in setting.bootstrap:
            if boot["metric"] == metric:
                groups.setdefault(str(boot.get("score") or boot["ours"]), []).append((setting.title, boot))
    own = wanted.ours if wanted is not None else None
    ordered = sorted(groups.values(), key=lambda judged: own is not None and judged[0][1]["ours"] != own)
    return [_tally(judged, prefix, wanted) for judged in ordered]


def _tally(judged: Sequence[tuple[str, Json]], prefix: str, wanted: Goal | None) -> str:
    first = judged[0][1]
    worse = [(title, b) for title, b in judged if b["verdict"] == "worse"]
    better = sum(b["verdict"] == "better" for _, b in judged)
    costs = [b["time"] for _, b in judged if b.get("time")]
    cost = ""
    if costs:
        forwards, cached = (statistics.median(c[k] for c in costs) for k in ("forwards", "cached_samples"))
        cost = f" (median cost {count(forwards)} forward passes or {samples(cached)})"
    text = f"{prefix}{measure_name(first)}{cost}: not worse than {method_name(first['theirs'])} "
    text += f"in {len(judged) - len(worse)} of {len(judged)} setting{'s' * (len(judged) > 1)}"
    text += f", {better} of them better." if better else "."
    held = wanted is not None and wanted.ours in (None, first["ours"]) and not is_control(first)
    if wanted is not None and held and len(judged) >= wanted.required:
        text += (
            f" The goal was {wanted.required}: {'met' if len(judged) - len(worse) >= wanted.required else 'not met'}."
        )
    if worse:
        each = [f"{title} (by {number(abs(b['difference']), 2)})" for title, b in worse]
        text += f" Worse: {'; '.join(each)}."
    return text


def bootstrap_table(name: str, caption: str, every: Sequence[Setting]) -> str:
    """All verdicts; the worse ones say by how much."""
    body = []
    for setting in every:
        for i, boot in enumerate(setting.bootstrap):
            metric = "jsd" if boot.get("score") else boot["metric"]
            word = boot["verdict"]
            if word == "worse":
                word += f" by {number(abs(boot['difference']), 2)}"
            kind = {"worse": "bad", "better": "good"}.get(boot["verdict"], "")
            body.append(
                row(
                    [
                        *([row_head(setting.title, len(setting.bootstrap))] if i == 0 else []),
                        cell(metric_name(metric), "left"),
                        cell(boot.get("estimator") or DASH, "left"),
                        cell(word, f"left {kind}".strip()),
                        cell(measured(boot["metric"], boot["ours_mean"])),
                        cell(measured(boot["metric"], boot["theirs_mean"])),
                        cell(signed(boot["difference"])),
                        cell(f"{signed(boot['low'])} … {signed(boot['high'])}"),
                        cell(count((boot.get("time") or {}).get("forwards"))),
                        cell(count((boot.get("time") or {}).get("cached_samples"))),
                    ],
                    "first" if i == 0 else "",
                )
            )
    if not body:
        return ""
    theirs = next(b["theirs"] for s in every for b in s.bootstrap)
    titles = ["Setting", "Measure", "Estimator", "Verdict", "ours", method_name(theirs), "Difference", "95% interval"]
    titles += ["Cost in forwards", "in cached samples"]
    return table(name, caption, head(titles, ["Measure", "Estimator", "Verdict"]), body)


def medians(every: Sequence[Setting], metric: str) -> dict[str, str]:
    """Median worth and cost over settings, as text."""
    found = [s.headline["equivalent"].get(metric) for s in every if not unmatched(s.headline, metric)]
    known = sorted((e for e in found if e and e.get("samples") is not None), key=lambda e: e["samples"])
    middle = known[(len(known) - 1) // 2] if known else None

    def cost(key: str) -> str:
        values = [s.headline[key] for s in every if s.headline.get(key) is not None]
        return count(statistics.median(values)) if values else DASH

    return {"worth": worth(middle), "cached": cost("cached_samples"), "forwards": cost("forwards")}
