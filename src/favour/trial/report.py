"""What a trial found: on a terminal, and on a page of one file. Both say the same sentences."""

from __future__ import annotations

import json
import time
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import favour
from favour import pages
from favour.extras import require
from favour.trial import figures
from favour.trial.measure import Trial

if TYPE_CHECKING:
    from rich.console import Console

MEANING = {
    "trust it": "Means, standard deviations and correlations agree with samples.",
    "trust the ranking only": "Inputs are in the right order of uncertainty; the numbers themselves are off.",
    "use more rank": "Means agree; correlations need another setting.",
    "don't": "Beliefs disagree with samples. Use samples for this model: `predict.sample(x, n=1000)`.",
    "take more draws": "No error is seen, but so few draws would not have shown one. Try a larger --samples.",
    "nothing to trust": "The model draws nothing at random, so there is no spread to predict.",
}
SIGMA = (
    "σ is the spread of the network's own predictions under its noise, not the error of its prediction: for that, "
    "`favour.calibrate(predict, (x, y))` on held-out data."
)
NO_NOISE = (
    "Give it noise: switch on the dropout it was trained with, hand over a posterior of its weights "
    "(`favour.compile(..., posterior=...)`, `favour.adapters`), or call the predictor with inputs that are Beliefs."
)


def samples(trial: Trial) -> str:
    """How many samples the belief is worth, in words."""
    matched, least = trial.check.samples_matched()
    shown = f"{float(f'{matched:.2g}'):,.0f}" if matched < 1e9 else "any number of"
    return f"at least {shown}" if least and matched < 1e9 else shown


def answer(trial: Trial) -> str:
    """The sentence to remember."""
    if trial.check.verdict == "nothing to trust":
        return "Nothing in this model is uncertain."
    if not trial.comparable:
        return "The belief varies where no sample does."
    cost = trial.costs.best / trial.costs.sample
    length = f"the time of {pages.count(cost)}" if cost > 1.05 else "less time than one takes"
    return f"The belief of {samples(trial)} samples in {length}."


def facts(trial: Trial) -> list[tuple[str, str]]:
    """Name and value, in the order in which one asks."""
    checked, costs = trial.check, trial.costs
    said = [
        ("verdict", checked.verdict),
        ("inputs, outputs", f"{trial.inputs:,}, {trial.outputs:,} each"),
        ("noise", trial.noise),
    ]
    if not trial.comparable:
        return said
    said += [
        ("mean off by", f"{checked.mean_error:.3f} standard deviations"),
        ("standard deviations", f"variances off by {checked.variance_error:.1%}"),
        ("correlations", f"covariances off by {checked.covariance_error:.1%}"),
        (f"{checked.n:,} samples", f"have a covariance off by {checked.sampling_error:.1%}"),
        ("samples of the same error", samples(trial)),
        ("one sample", f"{pages.count(costs.sample)} forward passes"),
        ("the belief, eager", f"{pages.count(costs.eager)} forward passes"),
    ]
    fast = f"{pages.count(costs.compiled)} forward passes" if costs.compiled is not None else costs.why or "not timed"
    said += [("the belief, compiled", fast), ("a forward pass", f"{pages.seconds(costs.forward)}, eager")]
    if checked.ranking is not None:
        said.append(("ranking of inputs", f"correlation {checked.ranking:.3f} with the samples'"))
    return said


def advice(trial: Trial) -> list[str]:
    """What to do now."""
    checked = trial.check
    if checked.verdict == "nothing to trust":
        return [NO_NOISE, *trial.warnings]
    said = [checked.reason] if checked.reason else []
    if not trial.comparable:
        return [*said, *trial.warnings]
    cost, matched = trial.costs.best / trial.costs.sample, checked.samples_matched()[0]
    if matched < 2 * cost:
        said.append(
            f"Here {pages.count(cost)} samples take as long and are about as good: sampling is the simpler choice."
        )
    return [*said, SIGMA, *trial.warnings]


def show(trial: Trial, console: Console) -> None:
    """Print the facts, the largest differences and what to do."""
    table = require("rich.table", "cli").Table(show_header=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts(trial):
        table.add_row(name, value)
    console.print(f"[bold]{trial.model}: {answer(trial)}[/bold]", highlight=False)
    console.print(table)
    console.print(MEANING[trial.check.verdict], markup=False)
    for sentence in advice(trial):
        console.print(sentence, markup=False)


def page(trial: Trial) -> str:
    """The HTML of the page."""
    checked, costs = trial.check, trial.costs
    tone = "good" if trial.passes else "muted" if checked.verdict == "nothing to trust" else "bad"
    cards = [pages.card("Verdict", checked.verdict.capitalize(), MEANING[checked.verdict], tone)]
    sections = []
    if trial.comparable:
        cards += [
            pages.card("Worth", f"{samples(trial)} samples", "with the same error of the covariance"),
            pages.card(
                "Cost",
                f"{pages.count(costs.best)} forward passes",
                f"the time of {pages.count(costs.best / costs.sample)} samples, measured on this machine",
            ),
        ]
        ours = {"Favour, eager": (costs.eager, _shown_error(trial))}
        if costs.compiled is not None:
            ours["Favour, compiled"] = (costs.compiled, _shown_error(trial))
        drawn = [figures.error_against_time((costs.sample, checked.sampling_error * checked.n**0.5), ours)]
        caption = (
            "Left: the line is samples, each ten times more taking ten times longer; the marks are Favour, and the "
            "dashed line ends at the samples of the same error. "
        )
        scatter = figures.spread(checked)
        if scatter:
            drawn.append(scatter)
            caption += "Right: every output at every input; in the grey band are differences that samples leave open."
        sections.append(("pictures", "Error against time", pages.figure("figure-error", drawn, caption)))
    cards.append(pages.card("Noise", str(trial.noise).split(":")[0], trial.noise.partition(": ")[2]))
    sections.insert(0, ("answer", answer(trial), f'<div class="cards">{"".join(cards)}</div>{_advice(trial)}'))
    sections.append(("numbers", "In numbers", _numbers(trial)))
    return pages.page(
        f"Favour on {trial.model}", _lead(trial), sections, f"favour {favour.__version__}", pages.CHART + _STYLE
    )


_STYLE = """
#pictures .panels{grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr))}
pre{overflow-x:auto;font:.8rem/1.45 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;background:var(--raised);
 padding:.8rem;border-radius:8px}
#numbers td{white-space:normal;text-align:left}
"""


def _lead(trial: Trial) -> str:
    return (
        f"The beliefs of {trial.model} about {trial.inputs:,} of its own inputs, beside {trial.check.n:,} samples of "
        "the network itself."
    )


def _advice(trial: Trial) -> str:
    return pages.reading(advice(trial), warning=not trial.passes)


def _shown_error(trial: Trial) -> float:
    """The error that the samples' count belongs to."""
    checked = trial.check
    return checked.covariance_bound if checked.samples_matched()[1] else checked.covariance_error


def _numbers(trial: Trial) -> str:
    body = [pages.row([pages.row_head(name), pages.cell(value.replace("`", ""))]) for name, value in facts(trial)]
    content = pages.table("table-facts", "What was measured", "", body)
    if trial.comparable:
        header = pages.head(("where", "what", "predicted", "sampled", "z"), ("where", "what"))
        rows = [
            pages.row(
                [
                    pages.row_head(f"input {w.row}, output {', '.join(map(str, w.output)) or '–'}"),
                    pages.cell(w.quantity, "left"),
                    pages.cell(f"{w.predicted:.4g}"),
                    pages.cell(f"{w.sampled:.4g}"),
                    pages.cell(f"{w.z:+.1f}"),
                ]
            )
            for w in trial.check.worst(10)
        ]
        caption = "The largest differences, in standard errors of the samples"
        content += pages.details("The ten largest differences", pages.table("table-worst", caption, header, rows))
    if trial.explanation:
        content += pages.details("Operation by operation", f"<pre>{escape(trial.explanation)}</pre>")
    return content


def write(trial: Trial, out: Path) -> Path:
    """Put the numbers into `out/check.json` and the page beside it; returns the page."""
    record: dict[str, Any] = {
        "model": trial.model,
        "answer": answer(trial),
        "facts": dict(facts(trial)),
        "advice": advice(trial),
        "verdict": trial.check.verdict,
        "samples matched": trial.check.samples_matched()[0] if trial.comparable else None,
        "forward passes": {k: getattr(trial.costs, k) for k in ("eager", "compiled", "sample")},
        "favour": favour.__version__,
        "torch": torch.__version__,
        "when": time.strftime("%Y-%m-%d"),
    }
    pages.write(out / "check.json", json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    return pages.write(out / "check.html", page(trial))
