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
from favour_studies.report.markup import measured, metric_name, plural, samples, worth

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
            verdict(boot)


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
        return f"no number of samples in {name}"
    if equivalent.get("samples") is None:
        return f"an unknown number of samples in {name}"
    if equivalent.get("at_most"):
        return f"no more than {samples(equivalent['samples'])} in {name}"
    at_least = "at least " if equivalent.get("at_least") else ""
    return f"{at_least}{samples(equivalent['samples'])} in {name}"


def headline_words(headline: Json) -> str:
    """What one pass matches and what it needs, in a line."""
    matched = listed([worth_words(headline, m) for m, e in headline["equivalent"].items() if e])
    how = f" with {headline['estimator']}" if headline.get("estimator") else ""
    time = "a time that was not measured"
    if headline.get("cached_samples") is not None:
        time = f"the time of {samples(headline['cached_samples'])}"
    return f"One pass{how} needs {time} and matches {matched}."


def median_words(every: Sequence[Setting], metric: str) -> str:
    """What the median pass matches and needs, and where samples of equal time are better."""
    middle = medians(every, metric)
    lost = [s.title for s in every if metric in (s.headline.get("sampling_wins") or [])]
    name, own = metric_name(metric), f"{len(every)} setting{'s' * (len(every) > 1)}"
    text = (
        f"The median pass needs the time of {plural(middle['cached'])} and matches {plural(middle['worth'])} in {name}"
    )
    return f"{text}; " + (
        f"in {len(lost)} of {own} samples of equal time are better ({'; '.join(lost)})."
        if lost
        else f"in none of {own} are samples of equal time better."
    )


def measure_name(boot: Json) -> str:
    """The measure of a bootstrap, with the estimator it was computed by."""
    name = metric_name(boot["metric"] if boot.get("score") is None else "jsd")
    return f"{name} by {boot['estimator']}" if boot.get("estimator") else name


def is_control(boot: Json) -> bool:
    """Whether samples were compared with samples."""
    return "control" in (boot.get("ours"), *str(boot.get("score")).split("_"))


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


@dataclass(frozen=True)
class Tally:
    """One measure by one estimator, over all settings of an experiment: where it is not worse, and what it costs."""

    experiment: str
    boots: Sequence[tuple[str, Json]]  # titles of settings, and their bootstrap
    goal: Goal | None = None

    @property
    def shares(self) -> tuple[int, int, int]:
        """In how many settings it is not worse, in how many of them better, and how many there are."""
        verdicts = [b["verdict"] for _, b in self.boots]
        return len(verdicts) - verdicts.count("worse"), verdicts.count("better"), len(verdicts)

    @property
    def wanted(self) -> str:
        """The goal, if one is set for it, and whether it is met."""
        first, (held, _, every) = self.boots[0][1], self.shares
        if self.goal is None or self.goal.ours not in (None, first["ours"]) or is_control(first):
            return ""
        if every < self.goal.required:
            return ""
        return f"{self.goal.required}: {'met' if held >= self.goal.required else 'not met'}"

    @property
    def words(self) -> str:
        """In a sentence."""
        (held, better, every), first = self.shares, self.boots[0][1]
        text = f"{measure_name(first)}: not worse than {method_name(first['theirs'])} in {held} of {every} "
        text += f"setting{'s' * (every > 1)}" + (f", {better} of them better." if better else ".")
        return text + (f" The goal was {self.wanted}." if self.wanted else "")

    def row(self) -> str:
        """Of the table of tallies."""
        (held, better, every), first = self.shares, self.boots[0][1]
        worse = [(abs(b["difference"]), title) for title, b in self.boots if b["verdict"] == "worse"]
        most = f"{number(max(worse)[0], 2)} ({max(worse)[1]})" if worse else DASH
        costs = [b["time"] for _, b in self.boots if b.get("time")]
        middle = [
            count(statistics.median(c[k] for c in costs)) if costs else DASH for k in ("forwards", "cached_samples")
        ]
        name = metric_name("jsd" if first.get("score") else first["metric"])
        return row(
            [
                row_head(f"{TITLES[self.experiment]}: {name}"),
                cell(first.get("estimator") or DASH, "left tight"),
                cell(f"{held} of {every}", "bad" if held < every else "good"),
                cell(str(better)),
                cell(most, "left tight"),
                cell(self.wanted or DASH, "left tight"),
                *map(cell, middle),
            ]
        )


def tallies(every: Sequence[Setting], metric: str, wanted: Goal | None = None) -> list[Tally]:
    """One for each estimator; that which a goal is set for comes first."""
    groups: dict[str, list[tuple[str, Json]]] = {}
    for setting in every:
        for boot in setting.bootstrap:
            if boot["metric"] == metric:
                groups.setdefault(str(boot.get("score") or boot["ours"]), []).append((setting.title, boot))
    own = wanted.ours if wanted is not None else None
    ordered = sorted(groups.values(), key=lambda judged: own is not None and judged[0][1]["ours"] != own)
    return [Tally(every[0].experiment, judged, wanted) for judged in ordered]


def tally_table(found: Sequence[Tally]) -> str:
    """All of them; the last columns are medians."""
    if not found:
        return ""
    theirs = method_name(found[0].boots[0][1]["theirs"])
    titles = ["Measure", "Estimator", "Not worse", "Better", "Worst, by", "Goal", "Needs forwards", "Needs samples"]
    caption = f"One pass beside {theirs}, paired bootstrap over test inputs, 95% intervals; medians of what it needs"
    return table("tallies-table", caption, head(titles, ["Estimator", "Worst, by", "Goal"]), [t.row() for t in found])


def verdict(boot: Json) -> str:
    """That of a bootstrap; a worse one says by how much."""
    by = f" by {number(abs(boot['difference']), 2)}" if boot["verdict"] == "worse" else ""
    return str(boot["verdict"]) + by


def bootstrap_table(name: str, caption: str, every: Sequence[Setting]) -> str:
    """All verdicts; the worse ones say by how much."""
    body = []
    for setting in every:
        for i, boot in enumerate(setting.bootstrap):
            metric = "jsd" if boot.get("score") else boot["metric"]
            kind = {"worse": "bad", "better": "good"}.get(boot["verdict"], "")
            time = boot.get("time") or {}
            body.append(
                row(
                    [
                        *([row_head(setting.title, len(setting.bootstrap))] if i == 0 else []),
                        cell(metric_name(metric), "left tight"),
                        cell(boot.get("estimator") or DASH, "left tight"),
                        cell(verdict(boot), f"left tight {kind}".strip()),
                        cell(measured(boot["metric"], boot["ours_mean"])),
                        cell(measured(boot["metric"], boot["theirs_mean"])),
                        cell(f"{signed(boot['difference'])} ({signed(boot['low'])} … {signed(boot['high'])})", "tight"),
                        cell(count(time.get("forwards"))),
                        cell(count(time.get("cached_samples"))),
                    ],
                    "first" if i == 0 else "",
                )
            )
    if not body:
        return ""
    theirs = next(b["theirs"] for s in every for b in s.bootstrap)
    titles = ["Setting", "Measure", "Estimator", "Verdict", "Ours", method_name(theirs), "Difference (95%)"]
    titles += ["Needs forwards", "Needs samples"]
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
