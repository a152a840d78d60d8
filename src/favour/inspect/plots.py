"""Pictures of predictions. Every function draws into `ax` (new axes by default) and returns the axes.

    reliability      confidence in bins against the fraction that was right
    simplex          draws of three class probabilities in a triangle: the corner (1, 0, 0) at the bottom left,
                     (0, 1, 0) at the bottom right, (0, 0, 1) on top; a point p lies at (p₂ + p₃/2, p₃ √3/2)
    band             mean and intervals of a regression with one input
    histogram, roc   a score of usual and of unusual inputs
    risk_coverage    mean loss of the inputs that are answered
    check            predicted against sampled standard deviations
    belief           a mean and its interval, whatever the shape

Matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.pictures import COLOURS, GREY, array, axes
from favour.classify.predictive import node_outputs
from favour.errors import InvalidValue, ShapeMismatch
from favour.extras import require
from favour.inspect import metrics
from favour.inspect.check import Check

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def reliability(probabilities: metrics.Array, labels: metrics.Array, bins: int = 15, ax: Axes | None = None) -> Axes:
    """The reliability diagram: how often the chosen class is right, for inputs of like confidence.

    Bars below the diagonal mean overconfidence. Whiskers are 95% intervals of a fraction (Wilson), long where a bin
    has few inputs.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,).
        bins: Number of bins of equal width.
        ax: Axes to draw into.
    """
    ax = axes(ax, 4.4, 4.2)
    error = metrics.ece(probabilities, labels, bins)  # checks both
    p, y = torch.as_tensor(probabilities).detach().cpu().double(), torch.as_tensor(labels).detach().cpu()
    confidence, guess = p.max(1)
    which = torch.bucketize(confidence, torch.arange(1, bins, dtype=torch.float64) / bins, right=True)
    count = torch.bincount(which, minlength=bins).numpy()
    right = torch.bincount(which, weights=(guess == y).double(), minlength=bins).numpy()
    used = count > 0
    n, hit = count[used], right[used] / count[used]
    left = np.arange(bins)[used] / bins
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--", zorder=3)
    ax.bar(left, hit, 1 / bins, align="edge", color=COLOURS[0], alpha=0.75, edgecolor="white", linewidth=0.5)
    z2 = 1.96**2
    middle = (hit + z2 / (2 * n)) / (1 + z2 / n)
    half = np.sqrt(z2 * hit * (1 - hit) / n + z2**2 / (4 * n**2)) / (1 + z2 / n)
    bounds = np.abs(np.stack([middle - half - hit, middle + half - hit]))
    ax.errorbar(left + 0.5 / bins, hit, bounds, fmt="none", ecolor="black", elinewidth=1, capsize=2, zorder=4)
    note = f"ECE {error:.3f}\naccuracy {metrics.accuracy(p, y):.3f}"
    backing = {"facecolor": "white", "alpha": 0.8, "linewidth": 0}
    ax.text(0.03, 0.96, note, va="top", transform=ax.transAxes, bbox=backing, zorder=6)
    ax.set(xlim=(0, 1), ylim=(0, 1.02), xlabel="confidence", ylabel="fraction right", aspect="equal")
    return ax


def simplex(
    sources: Mapping[str, Belief | Tensor],
    classes: Sequence[str] = ("1", "2", "3"),
    draws: int = 400,
    ax: Axes | None = None,
) -> Axes:
    """Class probabilities of a few inputs in the triangle of three classes (paper, figure 1).

    A confident input is a tight cloud in a corner, an ambiguous one a tight cloud on an edge or in the middle, an
    unseen one is spread out.

    Args:
        sources: Name to a belief over three logits with a batch of one, or to draws of the logits, (n, 3).
        classes: Names of the three corners.
        draws: Points for each belief.
        ax: Axes to draw into.
    """
    ax = axes(ax, 5.0, 4.2)
    corners = np.array([[0, 0], [1, 0], [0.5, math.sqrt(3) / 2]])
    outline = np.concatenate([corners, corners[:1]])
    for part in np.arange(0.2, 1, 0.2):  # lines of equal probability of one class
        for i in range(3):
            a, b, c = np.roll(corners, -i, axis=0)
            ax.plot(*np.stack([part * a + (1 - part) * b, part * a + (1 - part) * c]).T, color="#dddddd", linewidth=0.6)
    ax.plot(*outline.T, color="black", linewidth=1)
    if len(classes) != 3:
        raise InvalidValue(f"`classes` has {len(classes)} names; a triangle has three corners.")
    for (x, y), name, (dx, dy), side in zip(
        corners, classes, [(-0.02, -0.03), (0.02, -0.03), (0, 0.02)], ["right", "left", "center"], strict=True
    ):
        ax.text(x + dx, y + dy, name, ha=side, va="bottom" if y else "top")
    for (name, source), colour in zip(sources.items(), COLOURS * (1 + len(sources) // len(COLOURS)), strict=False):
        logits = node_outputs(source, 2 * (draws // 2)).flatten(1) if isinstance(source, Belief) else source
        if logits.ndim != 2 or logits.shape[1] != 3:
            raise ShapeMismatch(
                f"{name!r} gives logits of shape {tuple(logits.shape)}; one input and three classes are required, a "
                "belief with mean (1, 3) or draws (n, 3)."
            )
        points = array(logits.double().softmax(-1)) @ corners
        ax.scatter(points[:, 0], points[:, 1], s=7, color=colour, alpha=0.35, linewidths=0)
        x, y = points.mean(0)
        ax.scatter(x, y, s=60, label=name, color=colour, edgecolors="black", linewidths=0.8, marker="D", zorder=5)
    ax.set(xlim=(-0.12, 1.12), ylim=(-0.1, 0.95), aspect="equal")
    ax.set_axis_off()
    ax.legend(loc="upper right", frameon=False)
    return ax


def histogram(usual: metrics.Array, unusual: metrics.Array, bins: int = 40, ax: Axes | None = None) -> Axes:
    """How a score is distributed over usual and over unusual inputs, each with total area one.

    On a logarithmic axis if all scores are positive and span more than a factor of a hundred.

    Args:
        usual, unusual: Scores, (N,) and (M,).
        bins: Number of bins.
        ax: Axes to draw into.
    """
    ax = axes(ax)
    inside, outside = (array(metrics.checked_vector(name, v)) for name, v in (("usual", usual), ("unusual", unusual)))
    both = np.concatenate([inside, outside])
    wide = both.min() > 0 and both.max() > 100 * both.min()
    edges = (np.geomspace if wide else np.linspace)(both.min(), max(both.max(), both.min() + 1e-12), bins + 1)
    for values, name, colour in ((inside, "usual", COLOURS[0]), (outside, "unusual", COLOURS[1])):
        weights = np.full(len(values), 1 / len(values))
        label = f"{name} ({len(values)})"
        ax.hist(
            values,
            edges.tolist(),
            weights=weights,
            color=colour,
            alpha=0.55,
            label=label,
            edgecolor="white",
            linewidth=0.3,
        )
    if wide:
        ax.set_xscale("log")
    ax.set(xlabel="score", ylabel="fraction of inputs")
    ax.legend(frameon=False, title=f"AUROC {metrics.auroc(both, _kinds(inside, outside)):.3f}")
    return ax


def roc(scores: Mapping[str, tuple[metrics.Array, metrics.Array]], ax: Axes | None = None) -> Axes:
    """The ROC curves of one or several scores, with their areas.

    Args:
        scores: Name to (scores of usual inputs, scores of unusual inputs).
        ax: Axes to draw into.
    """
    ax = axes(ax, 4.4, 4.2)
    ax.plot([0, 1], [0, 1], color=GREY, linewidth=1, linestyle="--")
    curve = require("sklearn.metrics", "sklearn").roc_curve
    for (name, pair), colour in zip(scores.items(), COLOURS * (1 + len(scores) // len(COLOURS)), strict=False):
        inside, outside = (array(metrics.checked_vector(name, v)) for v in pair)
        both, kinds = np.concatenate([inside, outside]), _kinds(inside, outside)
        false, true, _ = curve(kinds, both)
        ax.plot(false, true, color=colour, linewidth=1.6, label=f"{name}, {metrics.auroc(both, kinds):.3f}")
    ax.set(xlim=(-0.01, 1), ylim=(0, 1.01), aspect="equal")
    ax.set(xlabel="usual inputs flagged", ylabel="unusual inputs flagged")
    ax.legend(frameon=False, loc="lower right", title="area", alignment="left")
    return ax


def _kinds(inside: npt.NDArray, outside: npt.NDArray) -> npt.NDArray:
    return np.concatenate([np.zeros(len(inside)), np.ones(len(outside))])


def risk_coverage(
    uncertainties: Mapping[str, metrics.Array], losses: metrics.Array, best: bool = True, ax: Axes | None = None
) -> Axes:
    """The risk when only the most certain inputs are answered, against the fraction answered.

    Args:
        uncertainties: Name to uncertainty, (N,) each.
        losses: (N,), such as 0 for right and 1 for wrong; one for all of them.
        best: Also draw the order by the loss itself, which nothing can beat.
        ax: Axes to draw into.
    """
    ax = axes(ax)
    for (name, u), colour in zip(
        uncertainties.items(), COLOURS * (1 + len(uncertainties) // len(COLOURS)), strict=False
    ):
        covered, risk = metrics.risk_coverage(u, losses)
        label = f"{name}, {metrics.aurc(u, losses):.4f}"
        ax.plot(covered, risk, color=colour, linewidth=1.6, label=label)
    if best:
        covered, risk = metrics.risk_coverage(losses, losses)
        label = f"best possible, {metrics.aurc(losses, losses):.4f}"
        ax.plot(covered, risk, color=GREY, linewidth=1, linestyle="--", label=label)
    ax.set(xlim=(0, 1), xlabel="coverage", ylabel="risk")
    ax.set_ylim(bottom=0)
    ax.legend(frameon=False, loc="upper left", title="area (AURC)", alignment="left")
    return ax


def check(result: Check, ax: Axes | None = None) -> Axes:
    """Predicted against sampled standard deviations of every output: `Check.plot`."""
    return result.plot(ax)
