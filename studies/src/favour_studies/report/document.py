"""The whole page: one HTML file that needs nothing else, and the figures as files of their own.

Its content security policy allows no request at all, and no script but the one that sorts tables.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from html import escape
from pathlib import Path

from favour import pages
from favour.pages import CHART, Chart, sheet
from favour_studies.report import calibration, pictures, small, unfamiliar
from favour_studies.report.load import EXPERIMENTS, Results, load
from favour_studies.report.markup import FAMILIES
from favour_studies.report.overview import NAMES, headline, what_was_run
from favour_studies.report.style import WIDE

LEAD = (
    "How many samples of a network one pass of Favour matches, and how many fit into the time it needs. Every number "
    "and every sentence is computed from the result files beside this page; what is folded opens with a click, and a "
    "column's title sorts its table."
)
SECTIONS: dict[str, Callable[[Results], str]] = {
    "classification": partial(calibration.calibration, name="classification"),
    "regression": partial(calibration.calibration, name="regression"),
    "ood": unfamiliar.ood,
    "jsd": small.jsd,
    "figures": small.figures,
}
# Of the files; the page has fuller ones.
SINE_LEGEND = [
    ("diamond", "c-adjoint", "Favour: mean and ± 2 standard deviations"),
    ("circle", "c-cached", "samples: the same, dashed"),
    ("circle", "c-soft", "data, single draws"),
]
JSD_LEGEND = [("circle", "c-adjoint", "closed form"), ("circle", "c-dplr", "fixed nodes")]
SIMPLEX_LEGEND = [("circle", "c-adjoint", "draws of Favour's Gaussian"), ("circle", "c-cached", "dropout samples")]


def build(directory: str | Path, out: Path | None = None) -> Path:
    """Write the report of a folder of results.

    Args:
        directory: Folder that `favour reproduce` wrote.
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
        pages.write(out.parent / "figures" / f"{name}.svg", drawing)
    return pages.write(out, text)


def page(results: Results) -> str:
    """The HTML of the report."""
    top = headline(results)
    sections = [("headline", "In short", top)] if top else []
    sections += [(name, NAMES[name], _section(results, name)) for name in EXPERIMENTS]
    sections.append(("runs", "What was run", what_was_run(results)))
    when = max(str(f["environment"].get("when") or "") for f in results.files.values())
    written = escape(f"Results of {when}. " if when else "")
    footer = f"{written}Rebuilt with <code>favour report {escape(results.shown)}</code>."
    return pages.page("Favour: the paper’s experiments", LEAD, sections, footer, CHART + WIDE)


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
        content += pages.details("Notes", f'<div class="notes">{pages.bullets(notes)}</div>')
    return content


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
    return found
