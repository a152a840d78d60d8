"""The sections on calibration: quality against time for classifiers and for regressions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from favour.pages import cell, count, details, figure, head, heading, listed, reading, row, row_head, seconds, table
from favour_studies.report import pictures
from favour_studies.report.load import Results
from favour_studies.report.markup import metric_name, plural, plus_minus, spread
from favour_studies.report.verdicts import (
    Setting,
    bootstrap_table,
    headline_words,
    medians,
    settings,
    tallies,
    verdict_words,
)

Json = Mapping[str, Any]
SHOWN = (1, 10, 100, 1000)  # numbers of samples in the short tables
FRONTIER = (
    "A filled marker and the dotted line are Pareto-optimal: nothing is as fast and better. Markers on the upper or "
    "lower edge lie beyond it. Point at a marker for its name and numbers."
)


def classification(results: Results) -> str:
    """A figure, a table and a reading for each data set."""
    file = results["classification"]
    own = [s for s in settings(results) if s.experiment == "classification"]
    parts = []
    for task, setting in zip(file["tasks"], own, strict=True):
        name = f"classification-{task['task']}-{task['model']}"
        charts = [(m, pictures.against_time(task, m)) for m in file["metrics"]]
        panels = [c.svg(f"{m['title']} against time, {task['title']}") for m, c in charts if c is not None]
        families = {m["family"] for m in task["methods"]}
        parts += [
            heading(setting.title),
            reading(
                [
                    *headline_words(setting.headline),
                    *(words for other in setting.others for words in headline_words(other)),
                    *_verdicts(setting),
                    *_frontier(task, file["metrics"], "nll"),
                ]
            ),
            figure(
                f"figure-{name}",
                panels,
                f"{task['title']}: quality against the time for a batch of {task['time_inputs']:,} inputs. {FRONTIER}",
                pictures.family_legend(sorted(families)),
            ),
            methods_table(name, task, file["metrics"]),
        ]
    caption = "Paired bootstrap over test inputs, adjoint against the largest number of samples"
    return "".join([*parts, bootstrap_table("classification-bootstrap", caption, own)])


def regression(results: Results) -> str:
    """NLL of all settings, then the other metrics and the tables of each data set."""
    file = results["regression"]
    own = [s for s in settings(results) if s.experiment == "regression"]
    tested = [s for s in own if s.part == "test"]
    metrics = {m["id"]: m for m in file["metrics"]}
    parts = [reading(_regression_words(tested))]
    families = sorted({m["family"] for t in file["tasks"] for m in t["methods"]})
    legend = pictures.family_legend(families)
    first = file["metrics"][1] if "nll" not in metrics else metrics["nll"]
    panels = []
    for task, setting in zip(file["tasks"], own, strict=True):
        chart = pictures.against_time(task, first, f"{task['title']}, {_short(task)}")
        if chart is not None and setting.part == "test":
            panels.append(chart.svg(f"{first['title']} against time, {setting.title}"))
    caption = f"{first['title']} on the test sets against time, every data set and network. {FRONTIER}"
    parts.append(figure("figure-regression-nll", panels, caption, legend))
    parts.append(summary_table(file["tasks"], file["metrics"]))
    for title in dict.fromkeys(t["title"] for t in file["tasks"]):
        tasks = [(t, s) for t, s in zip(file["tasks"], own, strict=True) if t["title"] == title]
        parts.append(details(f"{title}: all metrics against time, all methods", _one_set(tasks, file, legend)))
    caption = "Paired bootstrap over the rows of the test sets, adjoint against the largest number of samples"
    return "".join([*parts, bootstrap_table("regression-bootstrap", caption, [s for s in own if s.bootstrap])])


def _one_set(tasks: Sequence[tuple[Json, Setting]], file: Json, legend: str) -> str:
    panels, parts = [], []
    for metric in file["metrics"]:
        for task, setting in tasks:
            if metric["id"] == "nll" and setting.part == "test":
                continue  # in the figure of all settings
            chart = pictures.against_time(task, metric, f"{metric['title']}, {_short(task)}")
            if chart is not None:
                panels.append(chart.svg(f"{metric['title']} against time, {setting.title}"))
    first = tasks[0][0]
    caption = f"{first['title']}: quality against the time for a batch of {first['time_inputs']:,} rows. {FRONTIER}"
    parts.append(figure(f"figure-regression-{first['task']}", panels, caption, legend))
    for task, setting in tasks:
        parts.append(heading(setting.title) + reading(headline_words(setting.headline)))
        parts.append(_full_table(f"regression-{task['task']}-{task['model']}-{task.get('part', 'test')}", task, file))
    return "".join(parts)


def _short(task: Json) -> str:
    part = ", validation" if task.get("part", "test") != "test" else ""
    return str(task["model_title"]).removeprefix("MLP, ") + part


def _verdicts(setting: Setting) -> list[str]:
    return [verdict_words(b) for b in setting.bootstrap if b["metric"] in ("nll", "ece")]


def _frontier(task: Json, metrics: Sequence[Json], metric: str) -> list[str]:
    """Who stands on the frontier of one metric."""
    front = [m for m in task["methods"] if (m.get("pareto") or {}).get(metric) and m.get("time")]
    front = [m for m in front if (m["metrics"].get(metric) or {}).get("mean") is not None]
    if not front or metric not in {m["id"] for m in metrics}:
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


def _regression_words(tested: Sequence[Setting]) -> list[str]:
    if not tested:
        return []
    middle = medians(tested, "nll")
    lost = [s.title for s in tested if "nll" in (s.headline.get("sampling_wins") or [])]
    sentences = [
        f"Over {len(tested)} settings the median pass takes {middle['forwards']} forward passes, or the time of "
        f"{middle['cached']} cached samples, and matches {plural(middle['worth'])} in NLL.",
        f"Sampling wins in NLL at equal time in {len(lost)} of them: {'; '.join(lost)}."
        if lost
        else "In none of them does sampling of equal time have the better NLL.",
    ]
    return [*sentences, *tallies(tested, "nll"), *tallies(tested, "rmse")]


def _chosen(task: Json) -> list[Json]:
    """The rows of a short table: few samples, the fastest and the best dplr of the NLL's frontier, adjoint."""
    rows = []
    dplr = [m for m in task["methods"] if m["family"] == "dplr"]
    front = [m for m in dplr if (m.get("pareto") or {}).get("nll")] or dplr
    kept = {m["id"] for m in front[:1] + front[-1:]}
    largest = max((m["n"] for m in task["methods"] if m["family"] == "cached"), default=None)
    for m in task["methods"]:
        sampled = m["family"] in ("naive", "cached") and (m["n"] in SHOWN or m["n"] == largest)
        if sampled or m["family"] in ("plain", "adjoint") or m["id"] in kept:
            rows.append(m)
    return rows


def _method_row(m: Json, metrics: Sequence[Json]) -> str:
    time = m.get("time") or {}
    cells = [row_head(m["label"])]
    for metric in metrics:
        text = spread(metric["id"], m["metrics"].get(metric["id"]))
        optimal = (m.get("pareto") or {}).get(metric["id"])
        cells.append(plus_minus(text, bold=bool(optimal)))
    cells.append(cell(seconds(time.get("seconds")) + ("*" if time.get("extrapolated") else "")))
    cells += [cell(count(time.get(key))) for key in ("forwards", "cached_samples")]
    return row(cells, "ours" if m["family"] == "adjoint" else "")


def _header(metrics: Sequence[Json]) -> str:
    return head(["Method", *(m["title"] for m in metrics), "Time", "Forwards", "Cached samples"])


def methods_table(name: str, task: Json, metrics: Sequence[Json]) -> str:
    """The short table, and the full one folded away."""
    chosen = _chosen(task)
    caption = (
        f"{task['title']}, {task['model_title']}: {task['inputs']:,} inputs, mean ± sd of {task['repeats']} repeats. "
        "Bold: Pareto-optimal among all methods. * scaled up from fewer samples."
    )
    short = table(f"table-{name}", caption, _header(metrics), [_method_row(m, metrics) for m in chosen])
    if len(chosen) == len(task["methods"]):
        return short
    return short + details(f"All {len(task['methods'])} methods", _full_table(name, task, {"metrics": metrics}))


def _full_table(name: str, task: Json, file: Json) -> str:
    rows = [_method_row(m, file["metrics"]) for m in task["methods"]]
    caption = f"{task['title']}, {task['model_title']}: all methods. Bold: Pareto-optimal. * scaled up."
    return table(f"table-all-{name}", caption, _header(file["metrics"]), rows)


def summary_table(tasks: Sequence[Json], metrics: Sequence[Json]) -> str:
    """Plain inference, adjoint and the most samples side by side, for all settings."""
    body = []
    for task in tasks:
        part = " (validation)" if task.get("part", "test") != "test" else ""
        largest = max((m["n"] for m in task["methods"] if m["family"] == "cached"), default=None)
        rows = [
            m
            for m in task["methods"]
            if m["family"] in ("plain", "adjoint") or (m["family"] == "cached" and m["n"] == largest)
        ]
        for i, m in enumerate(rows):
            title = [row_head(f"{task['title']}{part}, {task['model_title']}", len(rows))] if i == 0 else []
            time = m.get("time") or {}
            cells = [*title, cell(m["label"], "left")]
            cells += [plus_minus(spread(metric["id"], m["metrics"].get(metric["id"]))) for metric in metrics]
            cells += [cell(seconds(time.get("seconds"))), cell(count(time.get("forwards")))]
            body.append(row(cells, " ".join((["first"] if i == 0 else []) + ["ours"] * (m["family"] == "adjoint"))))
    titles = ["Setting", "Method", *(m["title"] for m in metrics), "Time", "Forwards"]
    return table("table-regression", "Regression, mean ± sd over splits", head(titles, ["Method"]), body)
