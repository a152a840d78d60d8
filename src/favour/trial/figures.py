"""Figures of a belief beside samples, as SVG in the page's colours."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from favour import pages
from favour.inspect.check import Check

POINTS = 1500  # drawn of many


def error_against_time(
    samples: tuple[float, float], ours: Mapping[str, tuple[float, float]], label: str = "error of the covariance"
) -> str:
    """Samples as a line, Favour as points, both axes logarithmic.

    Args:
        samples: Forward passes of one sample, and the error of the covariance of one sample: m have it over √m.
        ours: Name to (forward passes, error).
        label: Of the vertical axis.
    """
    each, unit = samples
    best = min(error for _, error in ours.values())
    last = max(1000.0, 2 * (unit / best) ** 2)
    counts = [10.0, 100.0, 1000.0, 10_000.0, 100_000.0]
    marks = [m for m in counts if m <= last]
    xs = [each * m for m in (3.0, last)]
    ys = [unit / m**0.5 for m in (3.0, last)]
    across = pages.around([*xs, *(cost for cost, _ in ours.values())], 0.08, log=True, label="time in forward passes")
    up = pages.around([*ys, *(error for _, error in ours.values())], 0.1, log=True)
    chart = pages.Chart(across, up, label, width=420, height=280)
    chart.line(xs, ys, "line c-cached")
    for m in marks:
        x, y = each * m, unit / m**0.5
        chart.mark(x, y, "circle", "c-cached full", f"{m:,.0f} samples: {y:.3g} in {x:,.0f} forward passes", 2.6)
        chart.text(x, y, f"{m:,.0f}", dx=5, dy=-5)
    for (name, (cost, error)), marker in zip(ours.items(), ("diamond", "square"), strict=False):
        equal = each * (unit / error) ** 2
        if equal > cost:
            chart.line([cost, equal], [error, error], "line thin dash c-adjoint")
        chart.mark(cost, error, marker, "c-adjoint full", f"{name}: {error:.3g} in {cost:.1f} forward passes", 4)
    words = "; ".join(f"{name}: error {error:.3g} in {cost:.1f} forward passes" for name, (cost, error) in ours.items())
    return chart.svg(f"Error against time. {words}.")


def spread(checked: Check) -> str:
    """Predicted against sampled standard deviations of every output at every input."""
    predicted, sampled = (t.double().flatten() for t in (checked.stddev, checked.sampled_stddev))
    live = (predicted > 0) & (sampled > 0)
    predicted, sampled = predicted[live], sampled[live]
    if not len(predicted):
        return ""
    if len(predicted) > POINTS:
        chosen = torch.linspace(0, len(predicted) - 1, POINTS).round().long()
        predicted, sampled = predicted[chosen], sampled[chosen]
    both = [*predicted.tolist(), *sampled.tolist()]
    label = f"standard deviation of {checked.n:,} samples"
    axis, up = pages.around(both, 0.05, log=True, label=label), pages.around(both, 0.05, log=True)
    chart = pages.Chart(axis, up, "standard deviation predicted", width=420, height=280)
    ends = [axis.low, axis.high]
    slack = 1 + 2 / (2 * checked.n) ** 0.5  # two standard errors of a Gaussian's standard deviation
    chart.band(ends, [v / slack for v in ends], [v * slack for v in ends], "band c-soft")
    chart.line(ends, ends, "line thin dash c-soft")
    chart.dots(sampled.tolist(), predicted.tolist(), "dots small c-adjoint")
    return chart.svg("Predicted against sampled standard deviations; on the dashed line they agree.")
