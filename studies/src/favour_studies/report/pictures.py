"""The figures, from the result files. Each function returns charts; the page or a file of its own shows them.

A family of methods has one colour and one marker everywhere. In the charts of quality against time a filled marker is
Pareto-optimal: no method is as fast and better, or faster and as good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from favour.pages import Axis, Chart, around, fences, number, seconds, shape
from favour_studies.report.markup import FAMILIES, measured

Json = Mapping[str, Any]
MARKERS = {"plain": "cross", "naive": "square", "cached": "circle", "dplr": "triangle", "adjoint": "diamond"}


def legend(entries: Sequence[tuple[str, str, str]]) -> str:
    """(marker or `line`/`band`, classes, words) as a list."""
    items = []
    for marker, kind, words in entries:
        if marker == "line":
            drawn = f'<path class="line {kind}" d="M1 7h20"/>'
        elif marker == "band":
            drawn = f'<path class="band {kind}" d="M1 1h20v12h-20z"/>'
        else:
            drawn = f'<path class="mark {kind}" d="{shape(marker, 11, 7, 4)}"/>'
        items.append(f'<li><svg class="chart" viewBox="0 0 22 14" aria-hidden="true">{drawn}</svg>{escape(words)}</li>')
    return f'<ul class="legend">{"".join(items)}</ul>'


def family_legend(families: Sequence[str], pareto: bool = True) -> str:
    entries = [(MARKERS[f], f"full c-{f}", FAMILIES[f]) for f in MARKERS if f in families]
    if pareto:
        entries += [("circle", "full c-soft", "Pareto-optimal"), ("circle", "c-soft", "not")]
    return legend(entries)


def against_time(task: Json, metric: Json, title: str | None = None) -> Chart | None:
    """A metric of every method against the time it takes; None if nothing was timed."""
    name = metric["id"]
    rows = [m for m in task["methods"] if m.get("time") and m["metrics"].get(name)]
    rows = [m for m in rows if m["metrics"][name]["mean"] is not None and m["time"]["seconds"]]
    if not rows:
        return None

    def value(m: Json) -> float:
        return float(m["metrics"][name]["mean"])

    def time(m: Json) -> float:
        return float(m["time"]["seconds"])

    kept = [value(m) for m in rows if m["family"] in ("plain", "adjoint")]
    low, high = fences([value(m) for m in rows], kept)
    target = metric.get("target")
    if target is not None:
        low, high = min(low, target), max(high, target)
    chart = Chart(
        around([time(m) for m in rows], 0.05, log=True, label="time per batch", form=seconds_tick),
        around([low, high]),
        title or f"{metric['title']} ({_direction(metric)})",
    )
    if target is not None:
        chart.line([chart.x.low, chart.x.high], [target, target], "line dash thin c-truth")
    for family in ("naive", "cached"):
        own = sorted((m for m in rows if m["family"] == family), key=lambda m: m["n"] or 0)
        chart.line([time(m) for m in own], [value(m) for m in own], f"line thin c-{family}")
    front = sorted((m for m in rows if (m.get("pareto") or {}).get(name)), key=time)
    if front:
        chart.steps([time(m) for m in front], [value(m) for m in front], "frontier")
    order = list(MARKERS)
    for m in sorted(rows, key=lambda m: order.index(m["family"])):
        full = "full " if (m.get("pareto") or {}).get(name) else ""
        strong = "strong " if m["family"] in ("adjoint", "plain") else ""
        tip = f"{m['label']}: {measured(name, value(m))} in {seconds(time(m))}"
        radius = 4.6 if m["family"] == "adjoint" else 3.2
        chart.mark(time(m), value(m), MARKERS[m["family"]], f"{full}{strong}c-{m['family']}", tip, radius)
    return chart


def seconds_tick(value: float) -> str:
    """A tick of a time axis."""
    for limit, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if value >= limit * 0.999:
            return f"{value / limit:g} {unit}"
    return f"{value:g} s"


def _direction(metric: Json) -> str:
    if metric["better"] == "target":
        return f"goal {measured(metric['id'], metric['target'])}"
    return f"{metric['better']} is better"


EXPERIMENTS = {
    "classification": ("circle", "c-adjoint"),
    "regression": ("triangle", "c-dplr"),
    "ood": ("diamond", "c-cached"),
}


def worth_and_cost(points: Mapping[str, Sequence[tuple[str, Json, str]]]) -> tuple[Chart, int, int]:
    """Samples matched against samples that take as long, with how many settings are above the diagonal, of how many.

    Args:
        points: By experiment, title, headline and measure of each setting.
    """
    placed = []
    for name, own in points.items():
        for title, headline, metric in own:
            matched, cost = (headline["equivalent"].get(metric) or {}).get("samples"), headline.get("cached_samples")
            if matched and cost:
                placed.append((name, title, matched, cost))
    axis = around([v for _, _, matched, cost in placed for v in (matched, cost)] or [1.0, 10.0], 0.06, log=True)
    across = Axis(axis.low, axis.high, "samples that take as long", log=True)
    chart = Chart(across, axis, "samples that one pass matches", 440, 290)
    chart.line([axis.low, axis.high], [axis.low, axis.high], "line dash c-truth")
    for name, title, matched, cost in placed:
        marker, colour = EXPERIMENTS[name]
        tip = f"{title}: matches {number(matched, 2)} samples in the time of {number(cost, 2)}"
        chart.mark(cost, matched, marker, f"full {colour}", tip, 4)
    return chart, sum(matched > cost for _, _, matched, cost in placed), len(placed)


def samples_curve(model: Json, title: str) -> Chart | None:
    """AUROC of JSD against the number of samples; the adjoint pass stands at the number that takes as long."""
    curve = [(c["n"], c["auroc"]) for c in model.get("curve") or [] if c["auroc"] is not None]
    ours = next((r for r in model["rows"] if r["inference"] == "favour-adjoint"), None)
    area = (ours or {}).get("auroc", {}).get("jsd")
    if len(curve) < 2 or ours is None or area is None:
        return None
    cost = (ours.get("time") or {}).get("cached_samples")
    xs = [n for n, _ in curve] + ([max(cost, 0.3)] if cost else [])
    chart = Chart(
        around(xs, 0.04, log=True, label="samples, trunk run once"),
        around([100 * a for _, a in curve] + [100 * area["mean"]], 0.12),
        title,
        height=215,
    )
    chart.line([n for n, _ in curve], [100 * a for _, a in curve], "line c-cached")
    for n, a in curve:
        chart.mark(n, 100 * a, "circle", "full c-cached", f"{n} samples: {100 * a:.1f}", 2.8)
    chart.line([chart.x.low, chart.x.high], [100 * area["mean"]] * 2, "line dash c-adjoint")
    if cost:
        tip = f"adjoint: {100 * area['mean']:.1f} in the time of {number(cost, 2)} samples"
        chart.mark(max(cost, 0.3), 100 * area["mean"], "diamond", "full c-adjoint", tip, 4.6)
    return chart


def concordance(panel: Json) -> list[Chart]:
    """The divergence of n samples against that of Favour, by the lemma and by nodes, for each n."""
    name = panel.get("title") or panel.get("task", "")
    charts = []
    for n, sampled in sorted(panel["sampled"].items(), key=lambda item: int(item[0])):
        share = 1 - 1 / int(n)
        lemma = [share * v for v in panel["lemma"]]
        nodes = [share * v for v in panel.get("nodes") or []]
        high = max(fences(sampled + lemma)[1], max(sampled), 1e-9) * 1.05
        axis = Axis(0.0, high, label=f"JSD of {int(n):,} samples")
        chart = Chart(axis, Axis(0.0, high), f"{name}, n = {int(n):,}", height=300)
        chart.line([0, high], [0, high], "line dash thin c-truth")
        if nodes:
            chart.dots(sampled, nodes, "dots small c-dplr")
        chart.dots(sampled, lemma, "dots small c-adjoint")
        charts.append(chart)
    return charts


def sine(data: Json) -> Chart:
    """Mean and twice the standard deviation, of Favour and of samples; data, truth and single draws."""
    x = data["x"]
    ours, theirs = data["favour"], data["samples"]

    def edges(part: Json) -> tuple[list[float], list[float]]:
        pairs = list(zip(part["mean"], part["stddev"], strict=True))
        return [m - 2 * s for m, s in pairs], [m + 2 * s for m, s in pairs]

    low, high = edges(ours)
    below, above = edges(theirs)
    every = [*low, *high, *below, *above, *data["train_y"], *data["truth"]]
    chart = Chart(Axis(min(x), max(x), "x"), around(every), "", 680, 360)
    chart.band(x, low, high, "band c-adjoint")
    for curve in data.get("curves") or []:
        chart.line(x, curve, "line thin c-soft")
    chart.dots(data["train_x"], data["train_y"], "dots c-soft")
    chart.line(x, data["truth"], "line dash c-truth")
    for edge in (below, above):
        chart.line(x, edge, "line dash c-cached")
    chart.line(x, theirs["mean"], "line c-cached")
    chart.line(x, ours["mean"], "line c-adjoint")
    return chart


def sine_legend(data: Json) -> list[tuple[str, str, str]]:
    return [
        ("line", "c-adjoint", "Favour, mean"),
        ("band", "c-adjoint", "± 2 standard deviations"),
        ("line", "c-cached", f"{data['samples']['n']:,} samples, mean"),
        ("line", "dash c-cached", "± 2 standard deviations"),
        ("line", "thin c-soft", "single draws"),
        ("circle", "full c-soft", "training data"),
        ("line", "dash c-truth", "sin x"),
    ]


def simplex(data: Json) -> list[Chart]:
    """A triangle for each input: a point p lies at (p₂ + p₃/2, p₃ √3/2)."""
    root = 3**0.5 / 2

    def place(points: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
        return [p[1] + p[2] / 2 for p in points], [root * p[2] for p in points]

    charts = []
    for panel in data["panels"]:
        chart = Chart(Axis(-0.08, 1.08), Axis(-0.1, root + 0.1), panel["title"], 320, 300, frame=False)
        chart.line([0, 1, 0.5, 0], [0, 0, root, 0], "frame")
        chart.dots(*place(panel["sample_points"]), "dots c-cached")
        chart.dots(*place(panel["favour_points"]), "dots c-adjoint")
        (mx,), (my,) = place([panel["favour_mean"]])
        shown = ", ".join(f"{p:.2f}" for p in panel["favour_mean"])
        chart.mark(mx, my, "diamond", "full strong c-truth", f"Favour's class probabilities: {shown}", 4)
        for (cx, cy), label, dx, dy in zip(
            ((0, 0), (1, 0), (0.5, root)), data["classes"], (-10, 10, 0), (8, 8, -8), strict=True
        ):
            chart.text(cx, cy, label, "middle", dx, dy)
        charts.append(chart)
    return charts
