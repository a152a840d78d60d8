"""Results of the studies of learning: where they were made, and numbers by their mean."""

from __future__ import annotations

import statistics

from favour_studies.experiments.record import environment
from favour_studies.experiments.record import write_json as write

__all__ = ["environment", "summary", "write"]


def summary(values: list[float]) -> dict[str, float | None]:
    """Mean, standard error (None of a single value) and count.

    >>> summary([1.0, 3.0])
    {'mean': 2.0, 'se': 1.0, 'n': 2}
    """
    se = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": statistics.fmean(values), "se": se, "n": len(values)}
