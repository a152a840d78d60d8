"""Pictures of a belief, and what all pictures share. Every function draws into `ax` (new axes by default).

    band      mean and intervals of a regression with one input
    belief    a mean and its interval, whatever the shape

Matplotlib is imported when the first picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.belief.arrays import Array
from favour.errors import ShapeMismatch
from favour.extras import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from favour.belief.belief import Belief

# Distinguishable with any kind of colour vision, and in grey.
COLOURS = ("#3b6ea5", "#d1662b", "#4f9d69", "#9467ad", "#8a6d3b")
GREY = "#777777"


def axes(ax: Axes | None, width: float = 4.8, height: float = 3.8) -> Axes:
    if ax is None:
        _, ax = require("matplotlib.pyplot", "plots").subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def array(t: Any) -> npt.NDArray:
    return torch.as_tensor(t).detach().cpu().double().numpy()


def band(
    x: Array,
    belief: Belief,
    noise: float | Tensor = 0.0,
    data: tuple[Array, Array] | None = None,
    truth: Array | None = None,
    levels: Sequence[float] = (0.5, 0.95),
    ax: Axes | None = None,
) -> Axes:
    """The prediction of a regression with one input: mean, intervals and, if given, data and truth.

    Args:
        x: (B,) or (B, 1); need not be sorted.
        belief: Event () or (1,).
        noise: Observation-noise variance; if any, the outer dotted lines include it.
        data: Training inputs and targets.
        truth: The noiseless function at x.
        levels: Of the bands.
        ax: Axes to draw into.
    """
    ax = axes(ax, 6.4, 3.8)
    at = array(x).reshape(-1)
    if tuple(belief.event_shape) not in ((), (1,)) or len(at) != belief.batch_size:
        raise ShapeMismatch(
            f"`x` has shape {np.shape(x)} and the belief mean {tuple(belief.mean.shape)}; one number per input is "
            "required of both."
        )
    order = np.argsort(at)
    at = at[order]

    def line(t: Tensor) -> npt.NDArray:
        return array(t).reshape(-1)[order]

    for level in sorted(levels, reverse=True):
        low, high = belief.confidence_interval(level)
        ax.fill_between(at, line(low), line(high), color=COLOURS[0], alpha=0.22, linewidth=0, label=f"{level:.0%}")
    if isinstance(noise, Tensor) or noise > 0:
        low, high = belief.with_noise(noise).confidence_interval(max(levels))
        ax.plot(at, line(low), color=COLOURS[0], linewidth=1, linestyle=":", label=f"{max(levels):.0%} with noise")
        ax.plot(at, line(high), color=COLOURS[0], linewidth=1, linestyle=":")
    if truth is not None:
        ax.plot(at, array(truth).reshape(-1)[order], color="black", linewidth=1, linestyle="--", label="truth")
    ax.plot(at, line(belief.mean), color=COLOURS[0], linewidth=1.8, label="mean")
    if data is not None:
        seen, targets = (array(t).reshape(-1) for t in data)
        ax.scatter(seen, targets, s=9, color=COLOURS[1], linewidths=0, label="data", zorder=4)
    ax.set(xlabel="x", ylabel="y", xlim=(at[0], at[-1]))
    ax.legend(frameon=False, fontsize="small")
    return ax


def belief(
    found: Belief,
    x: Array | None = None,
    row: int = 0,
    names: Sequence[str] | None = None,
    ax: Axes | None = None,
) -> Axes:
    """A belief at a glance: mean and 95% interval of the network's output (not of observations).

    Where an output is one number: a band over `x`, or, without it, an error bar for each input. Where it is several: a
    bar for each output of one input.

    Args:
        found: The belief.
        x: For one number per input, what to draw over, (B,) or (B, 1).
        row: Which input, for several outputs.
        names: Of the outputs.
        ax: Axes to draw into.
    """
    one = found.event_shape.numel() == 1
    if x is not None:
        return band(x, found, levels=(0.95,), ax=ax)
    shown = found if one else found[row]
    mean, half = (array(t).reshape(-1) for t in (shown.mean, 1.96 * shown.stddev))
    names = [str(i) for i in range(len(mean))] if names is None else list(names)
    if len(names) != len(mean):
        raise ShapeMismatch(f"`names` has {len(names)} entries; there are {len(mean)} bars.")
    ax = axes(ax, min(12, 2 + 0.4 * len(mean)))
    at = np.arange(len(mean))
    if one:
        ax.errorbar(at, mean, half, fmt="o", color=COLOURS[0], ecolor=COLOURS[0], capsize=3, markersize=4)
    else:
        ax.bar(at, mean, color=COLOURS[0], alpha=0.75)
        ax.errorbar(at, mean, half, fmt="none", ecolor="black", elinewidth=1, capsize=3)
    every = -(-len(at) // 25)  # so many names fit
    ax.set_xticks(at[::every], names[::every])
    ax.set(xlabel="input" if one else "output", ylabel="mean and 95% of the network's output")
    return ax
