"""What `favour demo` prints, and its page and record; all three say the same."""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import favour
from favour import pages
from favour.demo import figures
from favour.demo.story import GROUPS, SAMPLES, Bin, Case, Story
from favour.extras import require
from favour.trial import report
from favour.trial.figures import error_against_time

if TYPE_CHECKING:
    from rich.console import Console

NETWORK = "64-100-100-10, ReLU, dropout 0.2"
TITLES = {"sure": "Sure", "torn": "Torn between two", "not a digit": "Not a digit at all"}
TRY = "favour check your_module:your_function your_inputs.npy"


def rows(story: Story) -> list[tuple[str, float, float]]:
    """Way to get the covariance, its error, and its time in forward passes."""
    measured, costs = story.trial.check, story.trial.costs
    unit = measured.sampling_error * measured.n**0.5
    ways = [(f"{m:,} samples", unit / m**0.5, m * costs.sample) for m in SAMPLES]
    matched, least = measured.samples_matched()
    error = measured.covariance_bound if least else measured.covariance_error
    ways.append((f"{report.samples(story.trial)} samples", error, matched * costs.sample))
    ways.append(("Favour, eager", error, costs.eager))
    if costs.compiled is not None:
        ways.append(("Favour, compiled", error, costs.compiled))
    return ways


def headline(story: Story) -> str:
    """The sentence to remember."""
    return report.answer(story.trial)


def show(story: Story, console: Console) -> None:
    """Print the story."""
    tables = require("rich.table", "cli")
    console.print(f"\n[bold]{headline(story)}[/bold]", highlight=False)
    table = tables.Table(title="How far off is the covariance, and how long does it take?")
    table.add_column("way")
    table.add_column("error", justify="right")
    table.add_column("forward passes", justify="right")
    for name, error, cost in rows(story):
        table.add_row(name, f"{error:.1%}", pages.count(cost), style="bold" if name.startswith("Favour") else "")
    console.print(table)
    for group in GROUPS:
        console.print(f"[bold]{TITLES[group]}[/bold]", highlight=False)
        for case in story.cases:
            if case.group == group:
                console.print(f"  {case.name:13} {_bar(case)}  {case.said()}", highlight=False, soft_wrap=True)
    table = tables.Table(title="When it says it is so sure, how often is it right?")
    for column in ("images", "says", "is right"):
        table.add_column(column, justify="right")
    for one in story.reliability["Favour"]:
        table.add_row(f"{one.count}", f"{one.confidence:.1%}", f"{one.right:.1%}")
    console.print(table)


def _bar(case: Case) -> str:
    """The ten probabilities as blocks, classes 0 to 9."""
    return "".join(" ▁▂▃▄▅▆▇█"[round(8 * float(p))] for p in case.probabilities)


def write(story: Story, training: dict[str, Any], out: Path) -> Path:
    """Put the numbers into `out/demo.json` and the page beside it; returns the page."""
    record = {
        "favour": favour.__version__,
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d"),
        "network": NETWORK,
        "training": training,
        "answer": headline(story),
        "rows": [{"way": name, "error": error, "forward passes": cost} for name, error, cost in rows(story)],
        "cases": [_recorded(case) for case in story.cases],
        "reliability": {name: [vars(b) for b in bins] for name, bins in story.reliability.items()},
        "accuracy, NLL, ECE": story.scores,
        "threads": story.threads,
    }
    pages.write(out / "demo.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return pages.write(out / "report.html", page(story, training))


def _recorded(case: Case) -> dict[str, Any]:
    """A case with what its picture is drawn from."""
    numbers = {name: getattr(case, name) for name in ("picture", "probabilities", "spread")}
    rounded = {name: (1000 * t).round().div(1000).tolist() for name, t in numbers.items()}
    return {"group": case.group, "name": case.name, "said": case.said(), **rounded}


def page(story: Story, training: dict[str, Any]) -> str:
    """The HTML of the page."""
    measured, costs = story.trial.check, story.trial.costs
    cards = [
        pages.card("Worth", f"{report.samples(story.trial)} samples", "with the same error of the covariance"),
        pages.card("Takes", f"{pages.count(costs.best / costs.sample)} samples’ time", "on this machine"),
        pages.card("Right about itself", measured.verdict.capitalize(), report.MEANING[measured.verdict]),
    ]
    ways = rows(story)
    ours = {name: (cost, error) for name, error, cost in ways if name.startswith("Favour")}
    drawn = error_against_time((costs.sample, measured.sampling_error * measured.n**0.5), ours)
    caption = (
        "The line is samples of the network, ten times more in ten times the time; the marks are Favour. The dashed "
        "line ends at the samples of the same error."
    )
    body = [
        pages.row(
            [pages.row_head(name), pages.cell(f"{error:.1%}"), pages.cell(pages.count(cost))],
            "ours" if name.startswith("Favour") else "",
        )
        for name, error, cost in ways
    ]
    header = pages.head(("way", "error of the covariance", "forward passes"), ("way",))
    heading = f"{story.trial.inputs} test images, {story.threads} thread(s)"
    time_ = pages.figure("figure-time", [drawn], caption, wide=True) + pages.details(
        "The same in numbers", pages.table("table-time", heading, header, body)
    )
    groups = "".join(
        f"<h3>{escape(TITLES[group])}</h3><div class='cases'>"
        + "".join(_case(c) for c in story.cases if c.group == group)
        + "</div>"
        for group in GROUPS
    )
    reading = pages.paragraph(
        "Bars are the probabilities of the classes 0 to 9, whiskers their standard deviation over draws of the network."
    )
    counts = (
        "Diamonds are Favour, circles plain inference, one for each range of confidence; on the dashed line it is "
        "right as often as it says. The number beside a diamond: how many images are in its range."
    )
    diagram = pages.figure("figure-reliability", [_reliability(story)], counts, wide=True)
    trained = f"{NETWORK}, {training['epochs']} epochs of Adam on {training['inputs']:,} of scikit-learn's digits. "
    numbers = "; ".join(f"{n}: accuracy {a:.1%}, NLL {b:.4f}, ECE {c:.4f}" for n, (a, b, c) in story.scores.items())
    sections = [
        ("answer", headline(story), f'<div class="cards">{"".join(cards)}</div>{time_}'),
        ("digits", "What it is sure of, and what not", reading + groups),
        ("reliability", "When it says it is sure, is it right?", diagram + pages.paragraph(f"{numbers}.")),
        ("yours", "On your own model", f"<p><code>{TRY}</code></p>" + pages.paragraph(report.SIGMA)),
        ("network", "The network", pages.paragraph(trained)),
    ]
    return pages.page(
        "Favour: handwritten digits",
        LEAD,
        sections,
        f"favour {favour.__version__}",
        pages.CHART + figures.STYLE + LAYOUT,
    )


LEAD = "The mean and covariance of what a network with dropout predicts, without sampling, beside samples of it."
LAYOUT = """
.cases{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,15rem),1fr));gap:.8rem}
.case{background:var(--raised);border-radius:8px;padding:.7rem .9rem;margin:0}
.case svg{width:100%;height:auto;display:block}.case figcaption{margin-top:.3rem}
"""


def _case(case: Case) -> str:
    inner = figures.case(case.picture.tolist(), case.probabilities.tolist(), case.spread.tolist())
    label = escape(f"{case.name}: {case.said()}", quote=True)
    box = f"0 0 {figures.WIDTH} {figures.HEIGHT}"
    words = f"<figcaption><b>{escape(case.name)}</b>: {escape(case.said())}</figcaption>"
    return f'<figure class="case"><svg viewBox="{box}" role="img" aria-label="{label}">{inner}</svg>{words}</figure>'


def _reliability(story: Story) -> str:
    points = [v for bins in story.reliability.values() for b in bins for v in (b.confidence, b.right)]
    low = min(points) - 0.04
    axis = pages.Axis(low, 1.08, "confidence", form=lambda v: f"{v:.0%}")
    chart = pages.Chart(axis, pages.Axis(low, 1.08, form=lambda v: f"{v:.0%}"), "share right", width=420, height=280)
    chart.line([low, 1.0], [low, 1.0], "line thin dash c-soft")
    for (name, bins), (marker, kind) in zip(
        story.reliability.items(), (("circle", "c-plain"), ("diamond", "c-adjoint full")), strict=True
    ):
        chart.line([b.confidence for b in bins], [b.right for b in bins], f"line thin {kind.split()[0]}")
        for b in bins:
            chart.mark(b.confidence, b.right, marker, kind, _told(name, b))
            if name == "Favour":
                last = b is bins[-1]  # the surest stand close together: above, and to the left below
                chart.text(b.confidence, b.right, f"{b.count:,}", *(("middle", 0, -9) if last else ("end", -6, 13)))
    words = "; ".join(_told("Favour", b) for b in story.reliability["Favour"])
    return chart.svg(f"Reliability: circles are plain inference, diamonds Favour. {words}.")


def _told(name: str, group: Bin) -> str:
    return f"{name}: {group.count} images, says {group.confidence:.1%}, right {group.right:.1%}"
