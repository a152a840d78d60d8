"""The part of the README that a full run generates: the main table, and two figures as SVG files."""

from __future__ import annotations

from pathlib import Path

from favour.report.document import drawings
from favour.report.load import Results, load
from favour.report.markup import count, metric_name
from favour.report.verdicts import PRIMARY, TITLES, method_name, settings, worth_of

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
    """Worth and cost of one adjoint pass by setting, and the verdict against the most samples, as Markdown."""
    lines = [
        "| task | measure | samples matched | cost in samples (trunk once) | cost in forward passes | verdict |",
        "|---|---|---|---|---|---|",
    ]
    for setting in settings(results):
        if setting.part != "test":
            continue
        metric, h = PRIMARY[setting.experiment], setting.headline
        judged = [b for b in setting.bootstrap if (b.get("score") or b["metric"]) == metric]
        verdict = f"{judged[0]['verdict']} than {method_name(judged[0]['theirs'])}" if judged else "–"
        if metric in (h.get("sampling_wins") or []):
            verdict += "; sampling of equal time wins"
        cells = [
            f"{TITLES[setting.experiment]}: {setting.title}",
            metric_name(metric),
            worth_of(h, metric),
            count(h.get("cached_samples")),
            count(h.get("forwards")),
            verdict,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
