"""What `favour demo` prints, and its page and record: the table, what it says, and reliability diagrams."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

import favour
from favour import pages, plots
from favour.demo.comparison import Comparison, Row
from favour.demo.digits import Data
from favour.extras import require

if TYPE_CHECKING:
    from rich.console import Console

TITLES = ("Method", "Accuracy", "NLL", "ECE", "Covariance error", "Forwards to logits", "Forwards in all")
LEAD = (
    "Mean and covariance of a network’s output under dropout, without sampling, against plain inference and sampling. "
    "Every number and every sentence below is computed from demo.json beside this page."
)


def show(comparison: Comparison, console: Console) -> None:
    """Print the table and what it means."""
    table = require("rich.table", "cli").Table(
        title=f"Handwritten digits, {comparison.inputs} test images",
        caption=f"times in forward passes, on {comparison.threads} CPU thread(s)",
    )
    table.add_column("method", no_wrap=True)
    for heading in ("accuracy", "NLL", "ECE", "covariance error", "to logits", "in all"):
        table.add_column(heading, justify="right")
    for row in comparison.rows:
        error = "–" if row.covariance_error is None else f"{row.covariance_error:.1%}"
        table.add_row(
            row.method,
            f"{row.accuracy:.1%}",
            f"{row.nll:.4f}",
            f"{row.ece:.4f}",
            error,
            f"{row.logit_forwards:.1f}",
            f"{row.forwards:.1f}",
        )
    console.print(table)
    console.print(
        "NLL and ECE (lower is better) say how far the stated probabilities can be trusted; the covariance "
        f"error is the distance from the covariance of {comparison.draws:,} samples, itself uncertain "
        f"by about {comparison.reference_error:.1%}; times are in forward passes on the same images, to the "
        "distribution of the logits and on to the class probabilities."
    )


@torch.no_grad()
def write(comparison: Comparison, model: nn.Module, data: Data, epochs: int, seed: int, out: Path) -> Path:
    """Put the comparison into `out/demo.json` and its page beside it; returns the page."""
    x, y = data.test_x, data.test_y
    record = {
        "favour": favour.__version__,
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d"),
        "network": "64-100-100-10, ReLU, dropout 0.2",
        "training": {"epochs": epochs, "inputs": len(data.train_x), "seed": seed},
        **vars(comparison),
        "rows": [vars(row) for row in comparison.rows],
    }
    pages.write(out / "demo.json", json.dumps(record, indent=1) + "\n")
    found = {"plain": model(x).softmax(-1), "Favour": favour.compile(model, x[:2]).probabilities(x)}
    return pages.write(out / "report.html", page(comparison, found, y, epochs))


def page(comparison: Comparison, found: Mapping[str, Tensor], labels: Tensor, epochs: int) -> str:
    """The HTML of the page.

    Args:
        comparison: The table.
        found: Class probabilities by method, (inputs, classes) each, for the reliability diagrams.
        labels: True classes, (inputs,).
        epochs: Of the training.
    """
    caption = (
        f"Handwritten digits, {comparison.inputs:,} test images, {comparison.threads} thread(s). The covariance error "
        f"is the distance from the covariance of {comparison.draws:,} samples, itself uncertain by about "
        f"{comparison.reference_error:.1%}."
    )
    body = [pages.row(_cells(row), "ours" if row.method == "Favour" else "") for row in comparison.rows]
    shown = "How often the chosen class is right against the stated confidence. On the dashed line the two agree."
    content = (
        pages.reading(sentences(comparison))
        + pages.table("table-demo", caption, pages.head(TITLES), body)
        + pages.figure("figure-reliability", [diagrams(found, labels)], shown, wide=True)
    )
    trained = f"64-100-100-10, ReLU, dropout 0.2, {epochs} epochs of Adam on scikit-learn's 8 × 8 digits."
    sections = [("demo", "Three ways to predict", content), ("network", "The network", pages.paragraph(trained))]
    return pages.page("Favour: handwritten digits", LEAD, sections, f"{favour.__name__} {favour.__version__}")


def _cells(row: Row) -> list[str]:
    error = pages.DASH if row.covariance_error is None else f"{row.covariance_error:.1%}"
    shown = [f"{row.accuracy:.1%}", f"{row.nll:.4f}", f"{row.ece:.4f}", error]
    shown += [pages.count(row.logit_forwards), pages.count(row.forwards)]
    return [pages.row_head(row.method), *map(pages.cell, shown)]


def diagrams(found: Mapping[str, Tensor], labels: Tensor) -> str:
    """One reliability diagram per method, side by side, as SVG."""
    matplotlib, figures = require("matplotlib", "demo"), require("matplotlib.figure", "demo")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "favour"}):
        figure = figures.Figure(figsize=(4 * len(found), 3.8), layout="constrained")
        for ax, (name, p) in zip(figure.subplots(1, len(found)), found.items(), strict=True):
            plots.reliability(p, labels, bins=10, ax=ax).set_title(name)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
    drawing = file.getvalue()
    alt = "Reliability diagrams of " + " and ".join(found)
    return drawing[drawing.index("<svg") :].replace("<svg", f'<svg class="chart" role="img" aria-label="{alt}"', 1)


def sentences(comparison: Comparison) -> list[str]:
    """What the table says, in words."""
    rows = {row.method: row for row in comparison.rows}
    ours = rows["Favour"]
    said = [
        f"Favour takes {pages.count(ours.forwards)} forward passes, from the images to class probabilities, and "
        f"{pages.count(ours.logit_forwards)} to the mean and covariance of the logits."
    ]
    for name, other in rows.items():
        if other is ours:
            continue
        nll, ece = _compared("NLL", other.nll, ours.nll), _compared("ECE", other.ece, ours.ece)
        label = "Plain inference has" if name == "plain" else f"{name} have"
        said.append(f"{label} {nll} and {ece}, in {pages.number(other.forwards / ours.forwards, 2)} times the time.")
    error, own = ours.covariance_error, comparison.reference_error
    if error is not None:
        judged = "cannot be told from" if error <= own else f"is {pages.number(error / own, 2)} times"
        said.append(f"Its covariance error, {error:.1%}, {judged} the reference's own error, {own:.1%}.")
    return said


def _compared(metric: str, other: float, ours: float) -> str:
    if f"{other:.4f}" == f"{ours:.4f}":
        return f"the same {metric}"
    return f"a {'lower' if other < ours else 'higher'} {metric} ({other:.4f})"
