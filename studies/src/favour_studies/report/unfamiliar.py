"""The section on unfamiliar inputs: the paper's tables 1 to 3 with its own numbers beside ours."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from favour.pages import DASH, cell, details, figure, group_row, listed, number, reading, row, row_head, table
from favour_studies.report import pictures
from favour_studies.report.load import Results
from favour_studies.report.markup import plus_minus
from favour_studies.report.verdicts import bootstrap_table, goal, median_words, settings, tallies

Json = Mapping[str, Any]


def ood(results: Results) -> str:
    """Reading, figure, tables and verdicts."""
    file = results["ood"]
    own = [s for s in settings(results) if s.experiment == "ood"]
    panels = []
    for pair in file["pairs"]:
        for model in pair["models"]:
            title = f"{pair['trained_on']} / {pair['unusual']}, {model['title']}"
            chart = pictures.samples_curve(model, title)
            if chart is not None:
                panels.append(chart.svg(f"AUROC of JSD against the number of samples, {title}"))
    key = pictures.legend(
        [("circle", "full c-cached", "samples"), ("diamond", "full c-adjoint", "Favour, adjoint, at the time it takes")]
    )
    caption = (
        "Area under the ROC curve of JSD, in per cent, against the number of cached samples. The diamond stands at the "
        "number of samples that take as long as one adjoint pass; where the curve crosses its dashed line, that many "
        "samples are as good."
    )
    parts = [reading(_words(file, own))]
    if panels:
        parts.append(figure("figure-ood", panels, caption, key, says=median_words(own, "jsd")))
    for layout in file["tables"]:
        parts.append(details(f"{_title(layout)}, with the paper's numbers", _table(file, layout)))
    caption = "Paired bootstrap over test inputs: AUROC of JSD, one pass against the largest number of samples"
    verdicts = bootstrap_table("ood-bootstrap", caption, own)
    return "".join([*parts, details("Every verdict of the paired bootstrap", verdicts) if verdicts else ""])


def _title(layout: Json) -> str:
    return f"{layout['id'].replace('table', 'Table ')}: {layout['title']}"


def _words(file: Json, own: Sequence[Any]) -> list[str]:
    sentences = [t.words for t in tallies(own, "auroc", goal(file))[:1]]
    sentences += [_best_score(file), _against_paper(file)]
    sentences += [
        f"{p['trained_on']} against {p['unusual']} was not run: {p.get('why') or 'no reason was recorded'}"
        for p in file["pairs"]
        if not p.get("available", True)
    ]
    return [s for s in sentences if s]


def _rows(file: Json) -> Iterator[tuple[Json, Json, Json]]:
    for pair in file["pairs"]:
        for model in pair["models"]:
            for each in model["rows"]:
                yield pair, model, each


def _best_score(file: Json) -> str:
    """Which score tells unfamiliar inputs best with Favour, on average over settings."""
    means = {}
    for score in file["scores"]:
        areas = [
            r["auroc"][score["id"]]["mean"]
            for _, _, r in _rows(file)
            if r["inference"] == "favour-adjoint" and r["auroc"].get(score["id"])
        ]
        if areas:
            means[score["title"]] = 100 * statistics.fmean(areas)
    if not means:
        return ""
    ordered = sorted(means.items(), key=lambda item: -item[1])
    return (
        "Mean AUROC of the adjoint pass over settings, by score: " + listed([f"{n} {a:.1f}" for n, a in ordered]) + "."
    )


def _against_paper(file: Json) -> str:
    """How far our areas are from the paper's, where both exist."""
    gaps = []
    for _, _, r in _rows(file):
        if r["inference"] not in ("plain", "favour-adjoint", "samples-1000"):
            continue
        for score in file["scores"]:
            ours, paper = r["auroc"].get(score["id"]), (r["paper"].get("auroc") or {}).get(score["id"])
            if ours and paper:
                gaps.append(100 * ours["mean"] - paper["mean"])
    if not gaps:
        return ""
    above = sum(g > 0 for g in gaps)
    return (
        f"Of {len(gaps)} areas under the ROC curve that the paper prints too, ours are above its in {above}; the "
        f"median distance is {number(statistics.median(abs(g) for g in gaps), 2)} points. The networks are not the "
        "paper's: see the trainings."
    )


def _area(stat: Json | None) -> str:
    if not stat or stat.get("mean") is None:
        return DASH
    sd = stat.get("sd")
    return f"{100 * stat['mean']:.1f}" + ("" if sd is None else f" ± {100 * sd:.1f}")


def _printed(paper: Json | None) -> str:
    return DASH if not paper else f"{paper['mean']:.1f} ± {paper['sd']:.1f}"


def _table(file: Json, layout: Json) -> str:
    titles = {s["id"]: s["title"] for s in file["scores"]}
    measure, names = layout["measure"], layout["scores"]
    columns = 2 + 2 * len(names)
    top = '<th scope="col" rowspan="2">Network</th><th scope="col" rowspan="2" class="left">Inference</th>'
    top += "".join(f'<th scope="colgroup" colspan="2">{escape(titles[n])}</th>' for n in names)
    second = '<th scope="col">ours</th><th scope="col" class="paper">paper</th>' * len(names)
    pairs = {p["id"]: p for p in file["pairs"]}
    body = []
    for pair in (pairs[name] for name in layout["pairs"] if name in pairs):
        sizes = f" ({pair['inputs']:,} and {pair['unusual_inputs']:,} inputs)" if pair.get("inputs") else ""
        body.append(group_row(f"Trained on {pair['trained_on']}, unfamiliar: {pair['unusual']}{sizes}", columns))
        if not pair.get("available", True):
            why = pair.get("why") or "no reason was recorded"
            body.append(f'<tr><td class="left wrap" colspan="{columns}">Not run: {escape(why)}</td></tr>')
        for model in pair["models"]:
            body += _model_rows(model, measure, names)
    caption = f"{_title(layout)}, in per cent, mean ± sd. Bold: the highest of ours for a network and score."
    number_of = layout["id"].removeprefix("table")
    return table(f"table-ood-{number_of}", caption, f"<tr>{top}</tr><tr>{second}</tr>", body)


def _model_rows(model: Json, measure: str, names: Sequence[str]) -> list[str]:
    rows = model["rows"]
    best = {n: max((round(r[measure][n]["mean"], 3) for r in rows if r[measure].get(n)), default=None) for n in names}
    found = []
    for i, r in enumerate(rows):
        cells = [row_head(model["title"], len(rows))] if i == 0 else []
        cells.append(cell(r["title"], "left"))
        for n in names:
            stat, text = r[measure].get(n), _area(r[measure].get(n))
            top = stat is not None and stat.get("mean") is not None and round(stat["mean"], 3) == best[n]
            cells.append(plus_minus(text, bold=top))
            cells.append(plus_minus(_printed((r["paper"].get(measure) or {}).get(n)), "paper"))
        kinds = ["first"] * (i == 0) + ["ours"] * (r["inference"] == "favour-adjoint")
        found.append(row(cells, " ".join(kinds)))
    return found
