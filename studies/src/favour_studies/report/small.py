"""The short sections: JSD concordance, the sine, the simplex."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from favour.pages import DASH, cell, details, figure, head, heading, number, row, row_head, table
from favour_studies.report import pictures
from favour_studies.report.load import Results
from favour_studies.report.markup import model_name

Json = Mapping[str, Any]


def _panels(file: Json) -> list[tuple[str, Json]]:
    named = [(f"Random Gaussians, {p['title']}", p) for p in file["panels"]]
    return named + [(f"{p.get('title') or p['task']}, {model_name(p['model'])}", p) for p in file.get("networks") or []]


def jsd(results: Results) -> str:
    """Scatter plots against samples, and the table of concordance."""
    every = _panels(results["jsd"])
    charts = [
        chart.svg(f"JSD of Favour against that of samples, {title}, {chart.title}")
        for title, panel in every
        for chart in pictures.concordance(panel)
    ]
    key = pictures.legend(
        [
            ("circle", "full c-adjoint", "closed form (the lemma)"),
            ("circle", "full c-dplr", "fixed nodes"),
            ("line", "dash thin c-truth", "equal"),
        ]
    )
    caption = "Each point is one Gaussian of logits: the divergence of n samples, and Favour's times 1 − 1/n."
    numbers = sorted({int(n) for _, p in every for n in p["sampled"]})
    kinds = ("lin", "pearson", "ratio")
    top = [("", 1)] + [(f"n = {n:,}", 3) for n in numbers]
    body = []
    for title, panel in every:
        for label, entry in (("closed form", "concordance"), ("nodes", "concordance_nodes")):
            if entry in panel:
                found = [panel[entry].get(str(n)) or {} for n in numbers]
                cells = [cell(number(f.get(k))) for f in found for k in kinds]
                body.append(row([row_head(f"{title}: {label}"), *cells]))
    second = head(["Logits", *(["Lin", "Pearson", "ratio"] * len(numbers))])
    errors = [row([row_head(t), *(cell(_percent(p["error"].get(k))) for k in _judged(numbers))]) for t, p in every]
    titles = ["Logits", "closed form", "nodes", *(f"{n:,} samples" for n in numbers)]
    largest = max(p["reference_n"] for _, p in every)
    judged = f"Mean error of the divergence against that of many samples (up to {largest:,})"
    concordance = table(
        "table-jsd",
        "Concordance with samples: Lin's coefficient (1 only on the diagonal), correlation, ratio of the means",
        head(top) + second,
        body,
    )
    return "".join(
        [
            figure("figure-jsd", charts, caption, key, says=_jsd_words(every)),
            table("table-jsd-error", judged, head(titles), errors),
            details("Concordance with samples", concordance),
        ]
    )


def _judged(numbers: Sequence[int]) -> list[str]:
    return ["lemma", "nodes", *map(str, numbers)]


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{number(100 * value, 2)}%"


def _jsd_words(every: Sequence[tuple[str, Json]]) -> str:
    """Between what the error lies, of the closed form and of the nodes."""
    said = []
    for name, key in (("the closed form", "lemma"), ("fixed nodes", "nodes")):
        found = sorted((p["error"][key], title) for title, p in every if p["error"].get(key) is not None)
        if found:
            (low, near), (high, far) = found[0], found[-1]
            span = f"between {_percent(low)} ({near}) and {_percent(high)} ({far})"
            said.append(f"{name} by {span if len(found) > 1 else _percent(low)}")
    return f"Off from the divergence of a great many samples: {'; '.join(said)}." if said else ""


def figures(results: Results) -> str:
    """The sine and the simplex."""
    file = results["figures"]
    wave, triangle = file["sine"], file["simplex"]
    key = pictures.legend(
        [
            ("circle", "full c-adjoint", "draws of Favour's Gaussian"),
            ("circle", "full c-cached", "dropout samples"),
            ("diamond", "full c-truth", "Favour's class probabilities"),
        ]
    )
    caption = "Three inputs of a classifier with three classes; a corner is certainty of one class."
    titles = ["Input", "Class probabilities", "Entropy", "JSD, closed form", "JSD, nodes", "JSD, samples"]
    body = [
        row(
            [
                row_head(p["title"]),
                cell(", ".join(f"{v:.2f}" for v in p["favour_mean"])),
                *(cell(number(p.get(k))) for k in ("entropy", "jsd", "jsd_nodes", "jsd_samples")),
            ]
        )
        for p in triangle["panels"]
    ]
    alt = f"Noisy sine: mean and band of Favour and of {wave['samples']['n']:,} samples, with the training data"
    return "".join(
        [
            heading("A noisy sine"),
            figure(
                "figure-sine",
                [pictures.sine(wave).svg(alt)],
                f"y = sin x + noise, {wave['model']}. The bands are of the network's output, without the noise.",
                pictures.legend(pictures.sine_legend(wave)),
                wide=True,
                says=_sine_words(wave),
            ),
            heading("Three predictions in the simplex"),
            figure(
                "figure-simplex",
                [c.svg(f"Simplex: {c.title}; draws of Favour and of samples") for c in pictures.simplex(triangle)],
                caption,
                key,
                says=_simplex_words(triangle),
            ),
            table("table-simplex", "The three inputs in numbers", head(titles), body),
        ]
    )


def _sine_words(wave: Json) -> str:
    low, high = min(wave["train_x"]), max(wave["train_x"])
    pairs = list(zip(wave["x"], wave["favour"]["stddev"], strict=True))
    inside = statistics.fmean(s for x, s in pairs if low <= x <= high)
    outside = [s for x, s in pairs if not low <= x <= high]
    sentences = []
    if wave.get("covariance_error") is not None:
        n = wave["samples"]["n"]
        sentences.append(f"Variances are off from those of {n:,} samples by {_percent(wave['covariance_error'])}.")
    if outside and inside > 0:
        factor = statistics.fmean(outside) / inside
        change = "as wide" if abs(factor - 1) < 0.05 else f"{number(factor, 2)} times as wide"
        sentences.append(f"Beyond the data the band is {change} on average.")
    return " ".join(sentences)


def _simplex_words(triangle: Json) -> str:
    most = max(triangle["panels"], key=lambda p: p["jsd_samples"])
    return f"The draws disagree most at: {most['title'].lower()}."
