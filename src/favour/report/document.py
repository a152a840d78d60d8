"""The whole page: one HTML file that needs nothing else, and the figures as files of their own.

The page has no script, and its content security policy allows no request at all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from favour.report import calibration, pictures, small, unfamiliar
from favour.report.chart import Chart, sheet
from favour.report.load import EXPERIMENTS, Results, load
from favour.report.markup import FAMILIES, bullets, paragraph
from favour.report.overview import NAMES, headline, what_was_run
from favour.report.style import CHART, PAGE, PALETTE

SECTIONS: dict[str, Callable[[Results], str]] = {
    "classification": calibration.classification,
    "regression": calibration.regression,
    "ood": unfamiliar.ood,
    "jsd": small.jsd,
    "figures": small.figures,
    "demo": small.demo,
}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# Of the files; the page has fuller ones.
SINE_LEGEND = [
    ("diamond", "c-adjoint", "Favour: mean and ± 2 standard deviations"),
    ("circle", "c-cached", "samples: the same, dashed"),
    ("circle", "c-soft", "data, single draws"),
]
JSD_LEGEND = [("circle", "c-adjoint", "closed form"), ("circle", "c-dplr", "fixed nodes")]
SIMPLEX_LEGEND = [("circle", "c-adjoint", "draws of Favour's Gaussian"), ("circle", "c-cached", "dropout samples")]
Section = tuple[str, str, str]  # id, title, content


def build(directory: str | Path, out: Path | None = None) -> Path:
    """Write the report of a folder of results.

    Args:
        directory: Folder that `favour reproduce` or `favour demo` wrote.
        out: The file to write, `directory/report.html` by default. The figures go to `figures/` beside it.

    Returns:
        The file written.

    Raises:
        InvalidValue: The folder is missing or has no results.
        CorruptFile: A result file is damaged; the message names it.
    """
    results = load(directory)
    out = Path(directory) / "report.html" if out is None else Path(out)
    text = page(results)
    out.parent.mkdir(parents=True, exist_ok=True)
    for name, drawing in drawings(results).items():
        _write(out.parent / "figures" / f"{name}.svg", drawing)
    return _write(out, text)


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
    return path


def page(results: Results) -> str:
    """The HTML of the report."""
    sections: list[Section] = []
    top = headline(results)
    if top:
        sections.append(("headline", "Headline", top))
    runs = ("runs", "What was run", what_was_run(results))
    if not results.only_demo:
        sections.append(runs)
    missing = [name for name in EXPERIMENTS if name not in results and name != "demo"]
    names = ["demo"] if results.only_demo else [n for n in EXPERIMENTS if n != "demo" or n in results]
    for name in names:
        sections.append((name, NAMES[name], _section(results, name)))
    if results.only_demo:
        sections.append(runs)
        commands = [f"{NAMES[n]}: {results.command(n)}" for n in missing]
        text = paragraph("The paper's experiments were not run here. They are run by:") + bullets(commands)
        sections.append(("not-run", "Not run", text))
    return _document(results, sections)


def _section(results: Results, name: str) -> str:
    if name not in results:
        return (
            '<div class="reading warning"><p>This was not run. It is run by:</p>'
            f"<p><code>{escape(results.command(name))}</code></p></div>"
        )
    with results.reading(name):
        content = SECTIONS[name](results)
    notes = results[name].get("notes") or []
    if notes:
        content += f'<div class="notes"><p>Notes</p>{bullets(notes)}</div>'
    return content


def _document(results: Results, sections: Sequence[Section]) -> str:
    title = "Favour: handwritten digits" if results.only_demo else "Favour: the paper’s experiments"
    lead = (
        "Mean and covariance of a network’s output under dropout or Gaussian weights, without sampling, against plain "
        "inference and sampling. Every number and every sentence below is computed from the result files beside "
        "this page."
    )
    contents = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for name, words, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(words)}</h2>{content}'
        "</section>\n"
        for name, words, content in sections
    )
    when = max(str(f["environment"].get("when") or "") for f in results.files.values())
    written = escape(f"Results of {when}. " if when else "")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{PALETTE}{CHART}{PAGE}</style>
</head>
<body>
<div class="shell">
<nav aria-label="Contents"><strong>Contents</strong><ol>{contents}</ol></nav>
<main>
<header><h1>{escape(title)}</h1>{paragraph(lead, "lead")}</header>
{body}</main>
<footer>{written}Rebuilt with <code>favour report {escape(results.shown)}</code>.</footer>
</div>
</body>
</html>
"""


def drawings(results: Results) -> dict[str, str]:
    """The figures as SVG files that follow the viewer's light or dark preference, by name."""
    found: dict[str, str] = {}
    entries = [(pictures.MARKERS[f], f"c-{f}", FAMILIES[f]) for f in pictures.MARKERS]
    if "classification" in results:
        with results.reading("classification"):
            file = results["classification"]
            for metric in file["metrics"]:
                drawn = [pictures.against_time(t, metric, f"{t['title']}: {metric['title']}") for t in file["tasks"]]
                charts = [c for c in drawn if c is not None]
                if charts:
                    alt = f"{metric['title']} against time for a batch"
                    found[f"classification-{metric['id']}"] = sheet(charts, alt, legend=entries)
    if "jsd" in results:
        with results.reading("jsd"):
            panels = [*results["jsd"]["panels"], *(results["jsd"].get("networks") or [])]
            every: list[Chart] = [c for p in panels for c in pictures.concordance(p)]
            found["jsd"] = sheet(every, "JSD of Favour against that of samples", legend=JSD_LEGEND)
    if "figures" in results:
        with results.reading("figures"):
            wave = results["figures"]["sine"]
            waves, triangles = [pictures.sine(wave)], pictures.simplex(results["figures"]["simplex"])
            found["sine"] = sheet(waves, "A noisy sine: Favour's band and that of samples", legend=SINE_LEGEND)
            found["simplex"] = sheet(triangles, "Three predictions in the simplex", legend=SIMPLEX_LEGEND)
    if "demo" in results and results["demo"].get("reliability"):
        with results.reading("demo"):
            found["reliability"] = sheet([pictures.reliability(results["demo"]["reliability"])], "Reliability diagram")
    return found
