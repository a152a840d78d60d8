"""What the report writes of methods and metrics: their names, their values, and how many samples they match."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from favour.pages import DASH, cell, count, number

_PERCENT = {"accuracy", "ece", "pavpu", "coverage95", "calibration_error"}
FAMILIES = {
    "plain": "plain inference",
    "naive": "samples, one forward pass each",
    "cached": "samples, deterministic trunk run once",
    "dplr": "Favour, dplr",
    "adjoint": "Favour, adjoint",
}
METRIC_NAMES = {
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier score",
    "rmse": "RMSE",
    "accuracy": "accuracy",
    "jsd": "AUROC of JSD",
    "auroc": "AUROC",
}


def metric_name(metric: str) -> str:
    return METRIC_NAMES.get(metric, metric.replace("_", " "))


def measured(metric: str, value: float | None) -> str:
    """One value of a metric, in per cent where that is usual."""
    if value is None:
        return DASH
    if metric in _PERCENT:
        return f"{100 * value:.2f}%"
    return f"{value:.4f}".replace("-", "−") if abs(value) < 10 else number(value, 4)


def spread(metric: str, stat: Mapping[str, Any] | None) -> str:
    """Mean ± standard deviation of a metric."""
    if stat is None or stat.get("mean") is None:
        return DASH
    mean, sd = measured(metric, stat["mean"]), stat.get("sd")
    if sd is None:
        return mean
    if metric in _PERCENT:
        return f"{mean[:-1]} ± {100 * sd:.2f}%"
    return f"{mean} ± {sd:.4f}" if abs(stat["mean"]) < 10 else f"{mean} ± {number(sd, 2)}"


def plural(shown: str) -> str:
    """`sample` or `samples` after a number."""
    return f"{shown} sample{'' if shown.endswith(' 1') or shown == '1' else 's'}"


def samples(value: float) -> str:
    """A number of samples, in words."""
    return plural(count(value))


def worth(equivalent: Mapping[str, Any] | None) -> str:
    """How many samples a pass matches, with ≥ and ≤ beyond the numbers that were run."""
    if not equivalent or equivalent.get("samples") is None:
        return DASH
    sign = "≥ " if equivalent.get("at_least") else "≤ " if equivalent.get("at_most") else ""
    return sign + count(equivalent["samples"])


def model_name(model: str) -> str:
    """`dropout10` as words."""
    share = model.removeprefix("dropout")
    return f"dropout {share}%" if share.isdigit() else "mean-field VI" if model == "vi" else model


def plus_minus(text: str, kind: str = "", bold: bool = False) -> str:
    """A cell with `mean ± sd`, the latter small."""
    mean, sign, sd = escape(text).partition(" ± ")
    shown = f"<b>{mean}</b>" if bold else mean
    return cell(f"{shown} <small>±{sd}</small>" if sign else shown, f"{kind} pm".strip(), markup=True)
