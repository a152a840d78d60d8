"""The short sections: JSD concordance, the sine, the simplex."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from favour.pages import DASH, cell, figure, head, heading, number, reading, row, row_head, table
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
    return "".join(
        [
            reading([_jsd_words(title, panel) for title, panel in every]),
            figure("figure-jsd", charts, caption, key),
            table(
                "table-jsd",
                "Concordance with samples: Lin's coefficient (1 only on the diagonal), correlation, ratio of the means",
                head(top) + second,
                body,
            ),
            table("table-jsd-error", judged, head(titles), errors),
        ]
    )


def _judged(numbers: Sequence[int]) -> list[str]:
    return ["lemma", "nodes", *map(str, numbers)]


def _percent(value: float | None) -> str:
    return DASH if value is None else f"{number(100 * value, 2)}%"


def _jsd_words(title: str, panel: Json) -> str:
    n = max(panel["concordance"], key=int)
    found, error = panel["concordance"][n], panel["error"]
    ratio = found["ratio"]
    way = "as large as" if abs(ratio - 1) < 0.02 else f"{number(ratio)} times"
    text = f"{title}: against {int(n):,} samples Lin's concordance is {number(found['lin'])}; the closed form is on "
    text += f"average {way} theirs. Its error against a great many samples is {_percent(error['lemma'])}"
    if error.get("nodes") is not None:
        text += f", that of the nodes {_percent(error['nodes'])}"
    beaten = [int(k) for k, v in error.items() if k.isdigit() and v is not None and v > error["lemma"]]
    text += f"; {max(beaten):,} samples are farther off than the closed form" if beaten else ""
    closer = [int(k) for k, v in error.items() if k.isdigit() and v is not None and v <= error["lemma"]]
    return text + (f"; {min(closer):,} samples are closer." if closer else ".")


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
            reading(_sine_words(wave)),
            figure(
                "figure-sine",
                [pictures.sine(wave).svg(alt)],
                f"y = sin x + noise, {wave['model']}. The bands are of the network's output, without the noise.",
                pictures.legend(pictures.sine_legend(wave)),
                wide=True,
            ),
            heading("Three predictions in the simplex"),
            reading(_simplex_words(triangle)),
            figure(
                "figure-simplex",
                [c.svg(f"Simplex: {c.title}; draws of Favour and of samples") for c in pictures.simplex(triangle)],
                caption,
                key,
            ),
            table("table-simplex", "The three inputs in numbers", head(titles), body),
        ]
    )


def _sine_words(wave: Json) -> list[str]:
    low, high = min(wave["train_x"]), max(wave["train_x"])
    pairs = list(zip(wave["x"], wave["favour"]["stddev"], strict=True))
    inside = statistics.fmean(s for x, s in pairs if low <= x <= high)
    outside = [s for x, s in pairs if not low <= x <= high]
    sentences = []
    if wave.get("covariance_error") is not None:
        n = wave["samples"]["n"]
        sentences.append(
            f"Favour's variance differs from that of {n:,} samples by {_percent(wave['covariance_error'])}."
        )
    if outside and inside > 0:
        factor = statistics.fmean(outside) / inside
        change = "the same" if abs(factor - 1) < 0.05 else f"{number(factor, 2)} times that"
        sentences.append(
            f"Where there are data the standard deviation is {number(inside, 2)} on average, beyond them {change}."
        )
    return sentences


def _simplex_words(triangle: Json) -> list[str]:
    sentences = []
    for p in triangle["panels"]:
        top = max(range(3), key=lambda i: p["favour_mean"][i])
        sentences.append(
            f"{p['title']}: {triangle['classes'][top]} with probability {p['favour_mean'][top]:.2f}; the divergence of "
            f"the draws is {number(p['jsd_samples'], 2)}, by the closed form {number(p['jsd'], 2)}"
            + (f", by nodes {number(p['jsd_nodes'], 2)}." if p.get("jsd_nodes") is not None else ".")
        )
    most = max(triangle["panels"], key=lambda p: p["jsd_samples"])
    sentences.append(f"The draws disagree most at: {most['title'].lower()}.")
    return sentences
