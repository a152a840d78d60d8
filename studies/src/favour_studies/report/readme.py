"""The part of the README that a full run generates: the main table, and two figures as SVG files."""

from __future__ import annotations

from pathlib import Path

from favour.pages import DASH, count
from favour_studies.report.document import drawings
from favour_studies.report.load import Results, load
from favour_studies.report.markup import metric_name
from favour_studies.report.verdicts import PRIMARY, TITLES, Json, Setting, method_name, settings, worth_of

FIGURES = {
    "classification-nll": "NLL against time: plain inference, sampling and Favour",
    "sine": "A noisy sine: Favour's band and that of 1000 samples",
}


def section(directory: str | Path, figures: Path, prefix: str) -> str:
    """Write the figures and return Markdown.

    Args:
        directory: Folder of results.
        figures: Where the SVG files go.
        prefix: The figures' folder as the README links it, such as `results/figures`.
    """
    results = load(directory)
    drawn = drawings(results)
    parts = [main_table(results)]
    figures.mkdir(parents=True, exist_ok=True)
    for name, alt in FIGURES.items():
        if name in drawn:
            (figures / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
            parts.append(f"![{alt}]({prefix}/{name}.svg)")
    return "\n\n".join(parts)


def main_table(results: Results) -> str:
    """Worth and cost of one adjoint pass by setting, and the verdict against the most samples, as Markdown.

    The last columns are of the estimator with the most draws of the head, where there is one.
    """
    every = [s for s in settings(results) if s.part == "test"]
    many = next((s.others[-1]["estimator"] for s in every if s.others), "more draws")
    titles = ["task", "measure", "samples matched", "cost in samples (trunk once)", "in forward passes", "verdict"]
    titles += [f"{many}: matched", "cost in samples", "verdict"]
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    for setting in every:
        metric = PRIMARY[setting.experiment]
        cells = [f"{TITLES[setting.experiment]}: {setting.title}", metric_name(metric)]
        cells += _cells(setting, setting.headline, metric)
        last = _cells(setting, setting.others[-1], metric) if setting.others else []
        cells += [*last[:2], last[-1]] if last else [DASH] * 3
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(setting: Setting, headline: Json, metric: str) -> list[str]:
    """Worth, cost in samples and in forward passes, verdict."""
    same = [b for b in setting.bootstrap if b.get("estimator") == headline.get("estimator")]
    same = [b for b in same if ("jsd" if b.get("score") else b["metric"]) == metric]
    verdict = f"{same[0]['verdict']} than {method_name(same[0]['theirs'])}" if same else DASH
    if metric in (headline.get("sampling_wins") or []):
        verdict += "; sampling of equal time wins"
    cost = (count(headline.get(key)) for key in ("cached_samples", "forwards"))
    return [worth_of(headline, metric), *cost, verdict]
