"""Pictures of predictions: see `favour.inspect.plots`."""

from favour.inspect.plots import (
    band,
    belief,
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
