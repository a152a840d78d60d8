"""Pictures of predictions: see `favour.inspect.plots`."""

from favour.belief.pictures import band, belief
from favour.inspect.plots import (
    check,
    histogram,
    reliability,
    risk_coverage,
    roc,
    simplex,
)

__all__ = [
    "band",
    "belief",
    "check",
    "histogram",
    "reliability",
    "risk_coverage",
    "roc",
    "simplex",
]
