"""Beliefs for numpy, for plots and for notebooks, and what a belief is not.

Gradients follow torch's own rule: a belief computed from weights that require them carries them, unless
`torch.no_grad()` is on or the input was a numpy array. `numpy()`, plots and notebooks leave them behind.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy.typing as npt
import torch
from torch import Tensor

from favour.errors import InvalidType, InvalidValue
from favour.pages.notebook import card

if TYPE_CHECKING:
    from favour.belief.belief import Belief

Array = Tensor | npt.NDArray  # a tensor or a numpy array
ROWS, COLUMNS = 8, 6  # of a table in a notebook


class Arrays(NamedTuple):
    """Mean and standard deviation of a belief as numpy arrays, (B, *event) each."""

    mean: npt.NDArray
    stddev: npt.NDArray


def array(t: Tensor) -> npt.NDArray:
    """A tensor's values, wherever it is and whatever it was computed from; bfloat16, which numpy lacks, as float32."""
    t = t.detach().cpu()
    return (t.float() if t.dtype == torch.bfloat16 else t).numpy()


def quantile(belief: Belief, q: float | Tensor) -> Tensor:
    """μ + σ Φ⁻¹(q), see `Belief.quantile`."""
    levels = torch.as_tensor(q, dtype=torch.float64, device=belief.device)
    if not bool(((levels > 0) & (levels < 1)).all()):
        raise InvalidValue(f"`q` is {q}; probabilities above 0 and below 1 are required.")
    z = torch.special.ndtri(levels).to(belief.dtype)
    return belief.mean + z.reshape(*z.shape, *[1] * belief.mean.dim()) * belief.stddev


def refused(what: str) -> InvalidType:
    """What a belief says when it is taken for a pair or an array."""
    return InvalidType(
        f"a belief cannot be {what}: it is one object with a mean and a covariance, for all inputs of a batch. Take "
        "`belief.mean, belief.variance`, or `mean, stddev = belief.numpy()` for arrays; `belief[i]` is the belief for "
        "input i, and `for i in range(len(belief))` goes through them."
    )


def html(belief: Belief) -> str:
    """A table of means and standard deviations, the first inputs and outputs of many."""
    mean, stddev = (t.reshape(belief.batch_size, -1) for t in belief.numpy())
    outputs = mean.shape[1]
    header = ["input", *(f"output {i}" if outputs > 1 else "output" for i in range(min(outputs, COLUMNS)))]
    rows = [
        [str(b), *(f"{m:.4g} ± {s:.2g}" for m, s in zip(mean[b, :COLUMNS], stddev[b, :COLUMNS], strict=True))]
        for b in range(min(belief.batch_size, ROWS))
    ]
    left = [
        f"{total - shown:,} more {name}"
        for total, shown, name in ((belief.batch_size, ROWS, "inputs"), (outputs, COLUMNS, "outputs"))
        if total > shown
    ]
    note = f"{'; '.join(left)}. " if left else ""
    return card(repr(belief), header, rows, escape(f"{note}Mean ± standard deviation of the network's output."))
