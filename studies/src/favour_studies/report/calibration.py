"""The sections on calibration: quality against time for classifiers and for regressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from favour.pages import cell, count, details, figure, head, heading, listed, reading, row, row_head, seconds, table
from favour_studies.report import pictures
from favour_studies.report.load import Results
from favour_studies.report.markup import metric_name, plus_minus, spread
from favour_studies.report.verdicts import (
    Goal,
    Setting,
    bootstrap_table,
    goal,
    headline_words,
    median_words,
    settings,
    tallies,
)

Json = Mapping[str, Any]
FRONTIER = (
    "A filled marker and the dotted line are Pareto-optimal: nothing is as fast and better. Markers on the upper or "
    "lower edge lie beyond it. Point at a marker for its name and numbers."
)


def calibration(results: Results, name: str) -> str:
    """The answer, NLL of all settings against time, and folded: the most samples beside, and each data set whole."""
    file = results[name]
    own = [s for s in settings(results) if s.experiment == name]
    tested = [s for s in own if s.part == "test"]
    metrics = {m["id"]: m for m in file["metrics"]}
    first = metrics.get("nll", file["metrics"][0])
    families = sorted({m["family"] for t in file["tasks"] for m in t["methods"]})
    legend = pictures.family_legend(families)
    panels = []
    for task, setting in zip(file["tasks"], own, strict=True):
        chart = pictures.against_time(task, first, f"{task['title']}, {_short(task)}")
        if chart is not None and setting.part == "test":
            panels.append(chart.svg(f"{first['title']} against time, {setting.title}"))
    caption = f"{first['title']} on the test sets against time, every data set and network. {FRONTIER}"
    says = median_words(tested, "nll") if tested else ""
    parts = [
        reading([t.words for m in ("nll", "ece", "rmse") for t in tallies(tested, m, _goal(file, m))[:1]]),
        figure(f"figure-{name}-nll", panels, caption, legend, says=says),
        details("Plain inference, one pass and the most samples, side by side", summary_table(name, file)),
    ]
    for title in dict.fromkeys(t["title"] for t in file["tasks"]):
        tasks = [(t, s) for t, s in zip(file["tasks"], own, strict=True) if t["title"] == title]
        parts.append(details(f"{title}: all metrics against time, all methods", _one_set(name, tasks, file, legend)))
    caption = "Paired bootstrap over test inputs, one pass against the largest number of samples"
    verdicts = bootstrap_table(f"{name}-bootstrap", caption, [s for s in own if s.bootstrap])
    return "".join([*parts, details("Every verdict of the paired bootstrap", verdicts) if verdicts else ""])


def _goal(file: Json, metric: str) -> Goal | None:
    """Goals are about likelihoods and calibration."""
    return None if metric == "rmse" else goal(file)


def _one_set(name: str, tasks: Sequence[tuple[Json, Setting]], file: Json, legend: str) -> str:
    panels, parts = [], []
    for metric in file["metrics"]:
        for task, setting in tasks:
            if metric["id"] == "nll" and setting.part == "test":
                continue  # in the figure of all settings
            chart = pictures.against_time(task, metric, f"{metric['title']}, {_short(task)}")
            if chart is not None:
                panels.append(chart.svg(f"{metric['title']} against time, {setting.title}"))
    first = tasks[0][0]
    caption = f"{first['title']}: quality against the time for a batch of {first['time_inputs']:,} inputs. {FRONTIER}"
    tested = [s for _, s in tasks if s.part == "test"]
    says = headline_words(tested[0].headline) if len(tested) == 1 else median_words(tested, "nll") if tested else ""
    parts.append(figure(f"figure-{name}-{first['task']}", panels, caption, legend, says=says))
    for task, setting in tasks:
        every = (setting.headline, *setting.others)
        parts.append(heading(setting.title) + reading([*map(headline_words, every), *_frontier(task, "nll")]))
        parts.append(_methods(f"{name}-{task['task']}-{task['model']}", task, file))
    return "".join(parts)


def _short(task: Json) -> str:
    part = ", validation" if task.get("part", "test") != "test" else ""
    return str(task["model_title"]).removeprefix("MLP, ") + part


def _frontier(task: Json, metric: str) -> list[str]:
    """Who stands on the frontier of one metric."""
    front = [m for m in task["methods"] if (m.get("pareto") or {}).get(metric) and m.get("time")]
    front = [m for m in front if (m["metrics"].get(metric) or {}).get("mean") is not None]
    if not front:
        return []
    front.sort(key=lambda m: m["time"]["seconds"])
    names = []
    for family in pictures.MARKERS:
        of = [m for m in front if m["family"] == family]
        if family in ("naive", "cached") and of:
            ns = sorted(m["n"] for m in of)
            kind = "naive" if family == "naive" else "cached"
            span = f"{ns[0]:,}" if len(ns) == 1 else f"{ns[0]:,} … {ns[-1]:,}"
            names.append(f"{kind} sampling with n = {span}")
        elif family == "dplr" and of:
            names.append(f"{len(of)} setting{'s' * (len(of) > 1)} of dplr")
        elif of:
            names.append("plain inference" if family == "plain" else family)
    best = min(front, key=lambda m: m["metrics"][metric]["mean"])
    return [
        f"Pareto-optimal in {metric_name(metric)} against time: {listed(names)}. The best is {best['label']}, "
        f"in {seconds(best['time']['seconds'])}."
    ]


def _cells(m: Json, metrics: Sequence[Json], bold: bool) -> list[str]:
    """The metrics of a method, its time, and that time in forward passes and in samples."""
    time = m.get("time") or {}
    cells = []
    for metric in metrics:
        optimal = bold and bool((m.get("pareto") or {}).get(metric["id"]))
        cells.append(plus_minus(spread(metric["id"], m["metrics"].get(metric["id"])), bold=optimal))
    cells.append(cell(seconds(time.get("seconds")) + ("*" if time.get("extrapolated") else "")))
    return cells + [cell(count(time.get(key))) for key in ("forwards", "cached_samples")]


def _columns(metrics: Sequence[Json]) -> list[str]:
    return [*(m["title"] for m in metrics), "Time", "Forwards", "Samples"]


def _methods(name: str, task: Json, file: Json) -> str:
    """Every method of one task."""
    part = task.get("part", "test")
    rows = [
        row(
            [row_head(m["label"]), *_cells(m, file["metrics"], bold=True)],
            "ours" if m["family"] == "adjoint" else "",
        )
        for m in task["methods"]
    ]
    caption = (
        f"{task['title']}, {task['model_title']}: {task['inputs']:,} inputs, mean ± sd of {task['repeats']} repeats, "
        "all methods. Bold: Pareto-optimal. * scaled up from fewer samples."
    )
    suffix = "" if part == "test" else f"-{part}"
    return table(f"table-all-{name}{suffix}", caption, head(["Method", *_columns(file["metrics"])]), rows)


def summary_table(name: str, file: Json) -> str:
    """Plain inference, adjoint and the most samples, for all settings."""
    body = []
    for task in file["tasks"]:
        part = " (validation)" if task.get("part", "test") != "test" else ""
        largest = max((m["n"] for m in task["methods"] if m["family"] == "cached"), default=None)
        rows = [
            m
            for m in task["methods"]
            if m["family"] in ("plain", "adjoint") or (m["family"] == "cached" and m["n"] == largest)
        ]
        for i, m in enumerate(rows):
            title = [row_head(f"{task['title']}{part}, {task['model_title']}", len(rows))] if i == 0 else []
            cells = [*title, cell(m["label"], "left tight"), *_cells(m, file["metrics"], bold=False)]
            body.append(row(cells, " ".join((["first"] if i == 0 else []) + ["ours"] * (m["family"] == "adjoint"))))
    titles = ["Setting", "Method", *_columns(file["metrics"])]
    return table(f"table-{name}", "Mean ± sd over networks or splits", head(titles, ["Method"]), body)
