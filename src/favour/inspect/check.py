"""`favour.check`: the belief against fresh samples of the network itself, on the user's own inputs.

`favour.inspect.agreement` says how errors are measured, with the samples' own error subtracted. Beside them

    ranking              Spearman's correlation over inputs of tr Σ with tr S

What the linear part of the network is known to do at each draw is taken off (`favour.methods.control`): errors are told
from none with far fewer draws, and are those of the belief whatever the linear part got wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.covariance import flatten_event
from favour.belief.pictures import GREY, array, axes
from favour.errors import InvalidValue
from favour.graph.example import split_example
from favour.inspect.agreement import OUTPUTS, Tally
from favour.inspect.live import live_difference
from favour.pages.notebook import card
from favour.program.propagator import Propagator
from favour.program.refine import chosen, controlled, slices

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# What counts as small: a mean off by .15 standard deviations, a covariance as good as that of some 200 samples.
MEAN_ERROR, COVARIANCE_ERROR, RANKING = 0.15, 0.15, 0.9

APART = 5.0  # a z-score beyond this is no accident, even among thousands

_HELD = 2**23  # draws times outputs held at once


@dataclass(frozen=True)
class Worst:
    """One entry of the ranked list: an input, an output, what is off there, and by how much."""

    row: int
    output: tuple[int, ...]
    quantity: str  # "mean" or "stddev"
    predicted: float
    sampled: float
    z: float

    def __str__(self) -> str:
        where = f"input {self.row}, output {', '.join(map(str, self.output)) or '–'}"
        return f"{where}: {self.quantity} {self.predicted:.4g}, samples {self.sampled:.4g} (z = {self.z:+.1f})"


@dataclass(frozen=True, repr=False)
class Check:
    """What `favour.check` found. Print it, or read its fields.

    Attributes:
        verdict: One of `"trust it"`, `"trust the ranking only"`, `"use more rank"`, `"don't"`, where `n` is too small
            to tell `"take more draws"` and, where nothing is uncertain, `"nothing to trust"`.
        reason: Why, in a sentence.
        n: Number of draws.
        mean, stddev: The belief's, (B, *event).
        sampled_mean, sampled_stddev: The draws', (B, *event).
        mean_z, variance_z: z-scores, (B, *event).
        mean_error, variance_error, covariance_error: Sizes of the errors, sampling error subtracted; see the module.
        covariance_errors: The last for each input, (B,).
        sampling_error: Error of the covariance of n draws, as `covariance_error` is measured.
        covariance_bound: `covariance_error` and two standard errors of its square over inputs.
        ranking: Correlation over inputs of predicted and sampled total variance; None for fewer than five inputs.
        worth: How many plain samples know the covariance as well, since what is linear was taken off these.
    """

    verdict: str
    reason: str
    n: int
    mean: Tensor = field(repr=False)
    stddev: Tensor = field(repr=False)
    sampled_mean: Tensor = field(repr=False)
    sampled_stddev: Tensor = field(repr=False)
    mean_z: Tensor = field(repr=False)
    variance_z: Tensor = field(repr=False)
    mean_error: float
    variance_error: float
    covariance_error: float
    covariance_errors: Tensor = field(repr=False)
    sampling_error: float
    covariance_bound: float
    ranking: float | None
    worth: float = 0.0

    def worst(self, k: int = 5) -> list[Worst]:
        """The k largest |z|, of means and standard deviations together, largest first."""
        z = torch.stack([self.mean_z, self.variance_z]).flatten(1)  # (2, B·event)
        order = z.abs().flatten().argsort(descending=True)[:k]
        extremes = []
        for i in order.tolist():
            kind, place = divmod(i, z.shape[1])
            index = tuple(int(j) for j in torch.unravel_index(torch.tensor(place), self.mean_z.shape))
            pair = (self.stddev, self.sampled_stddev) if kind else (self.mean, self.sampled_mean)
            name = "stddev" if kind else "mean"
            predicted, sampled = (t[index].item() for t in pair)
            extremes.append(Worst(index[0], index[1:], name, predicted, sampled, z[kind, place].item()))
        return extremes

    def worst_inputs(self, k: int = 5) -> list[int]:
        """The inputs with the largest covariance error, largest first."""
        return self.covariance_errors.argsort(descending=True)[:k].tolist()

    def samples_matched(self) -> tuple[float, bool]:
        """How many samples have a covariance with the belief's error, and whether that is a lower bound only.

        The error of m samples is `sampling_error` √(n/m). Where the belief's own error cannot be told from none, the
        number belongs to the largest error that it may have.
        """
        least = self.covariance_bound**2 > 2 * self.covariance_error**2
        error = self.covariance_bound if least else self.covariance_error
        return self.n * (self.sampling_error / error) ** 2 if error else math.inf, least

    def __repr__(self) -> str:
        ranking = "" if self.ranking is None else f"; ranking of inputs by variance: correlation {self.ranking:.3f}"
        linear = f" (worth {self.worth:,.0f}, what is linear taken off)" if self.worth > 1.5 * self.n else ""
        lines = [
            f"Verdict: {self.verdict}. {self.reason}",
            f"Against {self.n} samples of {len(self.mean)} inputs{linear}: mean off by {self.mean_error:.3f} "
            f"standard deviations, variances by {self.variance_error:.1%}, covariances by {self.covariance_error:.1%}"
            f"{ranking}.",
            "Largest differences:",
            *(f"  {entry}" for entry in self.worst()),
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = [
            ["mean off by", f"{self.mean_error:.3f} standard deviations"],
            ["variances off by", f"{self.variance_error:.1%}"],
            ["covariances off by", f"{self.covariance_error:.1%}"],
        ]
        if self.ranking is not None:
            rows.append(["ranking of inputs by variance", f"correlation {self.ranking:.3f}"])
        note = f"{self.reason} Against {self.n} samples of {len(self.mean)} inputs."
        return card(f"Verdict: {self.verdict}", [], rows, escape(note))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Predicted against sampled standard deviations of every output, with what n samples leave open.

        Args:
            ax: Axes to draw into; new ones by default.
        """
        ax = axes(ax, 4.8, 4.4)
        sampled, predicted = (array(t).reshape(-1) for t in (self.sampled_stddev, self.stddev))
        z = np.abs(array(torch.maximum(self.mean_z.abs(), self.variance_z.abs())).reshape(-1))
        shown = (sampled > 0) & (predicted > 0)
        if not shown.any():
            raise InvalidValue("no output varies, neither in the belief nor in the samples; there is nothing to draw.")
        points = ax.scatter(
            sampled[shown], predicted[shown], c=z[shown], s=10, cmap="viridis", vmin=0, vmax=6, linewidths=0, zorder=3
        )
        low, high = (f(np.concatenate([sampled[shown], predicted[shown]])) for f in (np.min, np.max))
        line = np.geomspace(low * 0.9, high * 1.1, 50)
        slack = 2 / math.sqrt(2 * self.n)  # two standard errors of a Gaussian's standard deviation
        ax.fill_between(line, line * (1 - slack), line * (1 + slack), color=GREY, alpha=0.25, linewidth=0)
        ax.plot(line, line, color=GREY, linewidth=1, linestyle="--")
        ax.set(xscale="log", yscale="log", xlabel=f"standard deviation of {self.n} samples", ylabel="predicted")
        ax.set_title(f"Verdict: {self.verdict}", fontsize="medium", loc="left")
        ax.figure.colorbar(points, ax=ax, label="larger |z| of mean and variance", extend="max")
        return ax


def check(
    predict: Propagator, x: Any, n: int = 1000, generator: torch.Generator | None = None, output: int | None = None
) -> Check:
    """Compare a predictor's belief with n fresh samples of its network.

    Args:
        predict: From `favour.compile`.
        x: Inputs as for `favour.compile`: a tensor, a tuple of arguments or a dict of keyword arguments.
        n: Number of draws, at least 10. What the belief says of them is taken off, so that 100 know the covariance of
            an MLP as well as 3,000 plain ones would; errors below about √(2/`worth`) of a variance are invisible.
        generator: Makes the draws reproducible.
        output: Which output to check, where the model has several (counted after flattening its structure).

    Returns:
        A `Check`; print it.

    Example:
        >>> from torch import nn
        >>> import favour
        >>> model = nn.Sequential(nn.Dropout(0.5), nn.Linear(50, 2))
        >>> predict = favour.compile(model, torch.randn(4, 50))
        >>> favour.check(predict, torch.randn(8, 50), n=500).verdict
        'trust it'
    """
    if n < 10:
        raise InvalidValue(f"`n` is {n}; at least 10 draws are required for a z-score, and 1000 are better.")
    args, kwargs = split_example(x)
    with torch.no_grad():
        difference = live_difference(predict, args, kwargs) if hasattr(predict, "graph") else None
        leaves = _leaves(predict(*args, **kwargs))
        place = _chosen(leaves, output)
        belief: Belief = leaves[place]
        if belief.batch_size == 0:
            raise InvalidValue("`x` is an empty batch; there is nothing to compare.")
        parts = list(_statistics(predict, belief, args, kwargs, n, generator, place))
    statistics = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return _judged(predict, belief, n, statistics, difference)


def _statistics(
    predict: Propagator, belief: Belief, args: tuple, kwargs: dict, n: int, generator: Any, place: int
) -> Iterator[dict[str, Tensor]]:
    """Of all rows, some at a time: with a control variate where there is one, else by plain samples."""
    outputs = max(1, belief.event_shape.numel())
    if isinstance(predict, Propagator) and outputs <= OUTPUTS:
        program, first = predict.program, 0
        for leaves in slices(program, program.inputs(args, kwargs), n, place):
            sampled = controlled(program, leaves, n, generator, place)
            tally = Tally(belief[first : first + sampled.draws.shape[1]])
            tally.add(sampled.draws)
            first += sampled.draws.shape[1]
            yield tally.corrected(sampled.draws, sampled.line, sampled.known)
        return
    rows = max(1, _HELD // (n * min(outputs, OUTPUTS)))
    for first in range(0, belief.batch_size, rows):
        part = slice(first, first + rows)
        some_args, some_kwargs = pytree.tree_map(lambda t, part=part: _rows(t, part, belief), (args, kwargs))
        tally = Tally(belief[part])
        together = max(1, _HELD // (outputs * tally.belief.batch_size))
        while tally.n < n:
            count = min(together, n - tally.n)
            tally.add(_leaves(predict.sample(*some_args, n=count, generator=generator, **some_kwargs))[place])
        yield tally.statistics()


def _rows(t: Any, part: slice, belief: Belief) -> Any:
    return t[part] if isinstance(t, Tensor) and t.ndim and t.shape[0] == belief.batch_size else t


def _leaves(result: Any) -> list[Any]:
    return pytree.tree_leaves(result, is_leaf=lambda t: isinstance(t, Belief))


def _chosen(leaves: list[Any], output: int | None) -> int:
    return chosen([i for i, leaf in enumerate(leaves) if isinstance(leaf, Belief)], output)


def _judged(
    predict: Propagator, belief: Belief, n: int, statistics: dict[str, Tensor], difference: str | None = None
) -> Check:
    variance = statistics["sampled_stddev"].square()
    live = variance > 0
    excess = (statistics.pop("mean_gap") / torch.where(live, variance, 1))[live]
    mean_error = _root(excess.mean()) if len(excess) else 0.0
    relative = (statistics.pop("variance_gap") / variance.square())[live]
    variance_error = _root(relative.mean()) if len(relative) else 0.0
    size = statistics.pop("covariance_size")
    noise, plain = statistics.pop("covariance_noise"), statistics.pop("plain_noise")
    divisor = torch.where(size > 0, size, 1)
    share = torch.where(size > 0, (statistics.pop("covariance_gap") - noise) / divisor, 0)
    covariance_error, sampling_error = _root(share.mean()), _root((plain / divisor).mean())
    worth = n * float(plain.sum() / noise.sum()) if noise.sum() > 0 else float(n)
    doubt = share.std() / len(share) ** 0.5 if len(share) > 1 else noise.sum() / divisor.sum()
    bound = _root(share.mean().clamp(min=0) + 2 * doubt)
    totals = [flatten_event(statistics[name], 1).square().sum(-1) for name in ("stddev", "sampled_stddev")]
    ranking = _spearman(*totals) if len(share) >= 5 else None

    # Outputs that never vary in the samples have no relative error; the belief must be silent about them too.
    silent = ~live & ((statistics["stddev"] > 0) | (statistics["mean_z"].abs() > 10))
    small = mean_error <= MEAN_ERROR and covariance_error <= COVARIANCE_ERROR
    ranked = ranking is not None and ranking >= RANKING
    method = predict.method
    if difference is not None:
        verdict = "don't"
        reason = (
            f"The predictor does not describe the model: {difference}. Call `predict.refresh()`, or compile the model "
            "again; what follows is about the graph that was captured."
        )
    elif not live.any() and not silent.any():
        verdict = "nothing to trust"
        reason = (
            "Nothing is uncertain: neither belief nor samples vary at these inputs, so every standard deviation is 0. "
            "Give the model dropout that is not 0, a `posterior`, or inputs that are Beliefs."
        )
    elif small and not silent.any() and bound > 2 * COVARIANCE_ERROR:
        verdict = "take more draws"
        reason = (
            f"No error is seen, but {n} draws would not have shown one: covariances may be off by {bound:.0%}. "
            f"Try `n={10 * n}`."
        )
    elif small and not silent.any():
        verdict, reason = "trust it", _agreement(statistics, live)
    elif mean_error <= MEAN_ERROR and (method.partial or belief.directions is not None):
        verdict = "use more rank"
        lost = "more `directions`" if belief.directions is not None else "a larger `rank`, or method='adjoint'"
        order = " The ranking of inputs holds." if ranked else ""
        reason = (
            f"Means are close, covariances are not, and method {method.name!r} forgets correlations: compile with "
            f"{lost}.{order}"
        )
    elif ranked:
        verdict = "trust the ranking only"
        reason = "The numbers are off, but inputs are in the right order of uncertainty."
    else:
        verdict = "don't"
        reason = "The belief does not describe this network's samples; use `predict.sample` instead."
    fields = {name: t.to(belief.dtype) for name, t in statistics.items()}
    return Check(
        verdict,
        reason,
        n,
        **fields,
        mean_error=mean_error,
        variance_error=variance_error,
        covariance_error=covariance_error,
        covariance_errors=share.clamp(min=0).sqrt().to(belief.dtype),
        sampling_error=sampling_error,
        covariance_bound=bound,
        ranking=ranking,
        worth=worth,
    )


def _agreement(statistics: dict[str, Tensor], live: Tensor) -> str:
    """Why a belief can be trusted: errors are small, whether or not so many samples can tell them from none."""
    apart = [int((statistics[name][live].abs() > APART).sum()) for name in ("mean_z", "variance_z")]
    limits = f"limits {MEAN_ERROR} standard deviations and {COVARIANCE_ERROR:.0%}"
    if not any(apart):
        return f"No difference from the samples is beyond chance (|z| > {APART:g}) at any input or output."
    return (
        f"Differences are small ({limits}), though not all are chance: {apart[0]} means and {apart[1]} variances of "
        f"{int(live.sum())} differ by more than {APART:g} standard errors."
    )


def _root(x: Tensor) -> float:
    return x.clamp(min=0).sqrt().item()


def _spearman(a: Tensor, b: Tensor) -> float:
    """Correlation of ranks, tied values sharing their mean rank."""

    def ranks(t: Tensor) -> Tensor:
        _, group, size = t.unique(return_inverse=True, return_counts=True)
        last = size.cumsum(0).double()
        return (last - (size - 1) / 2)[group]

    ra, rb = (ranks(t) - (len(t) + 1) / 2 for t in (a, b))
    norm = (ra.square().sum() * rb.square().sum()).sqrt()
    return float((ra * rb).sum() / norm) if norm > 0 else 0.0
