"""Error against cost, log-log, one panel per network at one batch size.

The samplers are lines: n draws cost fixed + n·per draw and have the error c/√n. A method is a point, filled if
compiled; where the reference cannot tell its error from none, an arrow points down from what the reference can tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from favour.errors import InvalidValue

# Distinguishable with any kind of colour vision, and in grey.
COLOURS = ("#3b6ea5", "#d1662b", "#4f9d69", "#9467ad", "#8a6d3b")
LINES = {"naive": "-", "batched": "--", "cached": ":"}
TITLES = {"naive": "naive sampler", "batched": "batched sampler", "cached": "trunk-cached, compiled sampler"}
_GREY = {"naive": "#aaaaaa", "batched": "#777777", "cached": "#333333"}


def draw(record: Mapping[str, Any], path: str | Path, batch: int | None = None) -> Path:
    """Write the figure.

    Args:
        record: Of `favour bench`.
        path: Of the picture; the ending says which format.
        batch: Batch size; by default the largest that each network was measured at.
    """
    names = [n for n in record["networks"] if _baseline(record, n, batch) is not None]
    if not names:
        raise InvalidValue(f"no network was measured{'' if batch is None else f' at batch {batch}'}; nothing to draw.")
    import matplotlib.pyplot as plt

    columns = min(4, len(names))
    rows = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(max(3.4 * columns, 7) + 0.3, 3.1 * rows + 1.2), layout="constrained", squeeze=False
    )
    methods = list(dict.fromkeys(r["method"] for r in record["rows"]))
    handles: dict[str, Any] = {}
    for ax, name in zip(axes.flat, names, strict=False):
        _panel(ax, record, name, batch, methods, handles)
    for ax in axes.flat[len(names) :]:
        ax.set_visible(False)
    figure.legend(
        handles.values(),
        handles.keys(),
        loc="outside lower center",
        ncols=3 if columns < 4 else 5,
        frameon=False,
        fontsize=8,
    )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _baseline(record: Mapping[str, Any], network: str, batch: int | None) -> Mapping[str, Any] | None:
    found = [b for b in record["baselines"] if b["network"] == network and batch in (None, b["batch"])]
    return max(found, key=lambda b: b["batch"]) if found else None


def _panel(
    ax: Any, record: Mapping[str, Any], network: str, batch: int | None, methods: list[str], handles: dict[str, Any]
) -> None:
    base, about = _baseline(record, network, batch), record["networks"][network]
    assert base is not None
    forward, c = base["forward"]["seconds"], about["error of n samples times √n"]
    n = np.logspace(0, math.log10(about["reference samples"]), 60)
    for sampler, cost in base["samplers"].items():
        forwards = (cost["once"] + n * cost["seconds per draw"]) / forward
        (line,) = ax.plot(forwards, c / np.sqrt(n), LINES[sampler], color=_GREY[sampler], linewidth=1.3)
        handles.setdefault(TITLES[sampler], line)
    floor = c / math.sqrt(about["reference samples"])
    for row in record["rows"]:
        if (row["network"], row["batch"], row["device"]) != (network, base["batch"], base["device"]):
            continue
        colour, solid = COLOURS[methods.index(row["method"]) % len(COLOURS)], row["mode"] == "compiled"
        error = floor if row["capped"] else row["net"]
        point = ax.scatter(
            row["forwards"], error, s=34, zorder=3, edgecolors=colour, facecolors=colour if solid else "white"
        )
        if row["capped"]:
            ax.annotate(
                "",
                (row["forwards"], error / 1.6),
                (row["forwards"], error),
                arrowprops={"arrowstyle": "->", "color": colour},
            )
        handles.setdefault(f"{row['method']}, {row['mode']}", point)
    ax.set_ylim(bottom=floor / 2.5)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_title(f"{about['title']}, batch {base['batch']}", fontsize=9)
    ax.set_xlabel("cost, eager forward passes", fontsize=8)
    ax.set_ylabel("error of the covariance", fontsize=8)
    ax.tick_params(labelsize=7)
