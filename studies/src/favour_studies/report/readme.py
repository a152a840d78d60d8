"""The table of a full run that the documentation takes."""

from __future__ import annotations

from favour.pages import DASH, count
from favour_studies.report.load import Results
from favour_studies.report.markup import metric_name
from favour_studies.report.verdicts import PRIMARY, TITLES, Json, Setting, method_name, settings, worth_of


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
