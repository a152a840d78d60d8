"""Pictures of predictions: see `favour.inspect.plots`."""

from favour.inspect.plots import (
    band,
    check,
    histogram,
    reliability,
    risk_coverage,
    roc,
    simplex,
)

__all__ = [
    "band",
    "check",
    "histogram",
    "reliability",
    "risk_coverage",
    "roc",
    "simplex",
]
