"""Conformal intervals and sets: a guarantee that does not depend on the network being right.

Split-conformal prediction needs no distribution at all. With n held-out scores e_1 … e_n exchangeable with that of a
new input, P(e ≤ e_(k)) ≥ level for k = ⌈(n + 1) level⌉, e_(k) the k-th smallest; and < level + 1/(n + 1) without ties.

    intervals      e = |y − μ|/σ            μ ∓ e_(k) σ      wide where the belief is
    sets           e = 1 − p_y              {c : 1 − p_c ≤ e_(k)}
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.confidence import check_level
from favour.belief.covariance import check_finite
from favour.belief.intervals import with_level
from favour.classify.targets import Array, checked_labels, fitting, pairs
from favour.errors import InvalidType, InvalidValue, NotCalibrated, ShapeMismatch


def _threshold(scores: Tensor, level: float) -> Tensor:
    """The ⌈(n + 1) level⌉-th smallest score along the first dimension."""
    check_level(level)
    n = scores.shape[0]  # NaN sorts last: refused before
    k = math.ceil((n + 1) * level - 1e-9)
    if k > n:
        need = math.ceil(level / (1 - level) - 1e-9)
        raise InvalidValue(f"{n} held-out inputs cannot give coverage {level}; at least {need} are required.")
    return scores.sort(0).values[k - 1]


class ConformalInterval:
    """Intervals μ ∓ qσ that hold at least `level` of new observations, whatever their distribution.

    The guarantee is on average over inputs, for each output separately, if held-out and new data are exchangeable.

    Args:
        belief: Predictions for held-out inputs, with σ > 0 (add noise with `belief.with_noise` if need be).
        y: Their targets, (B, *event).
        level: The coverage.

    Attributes:
        factor: q at that level, (*event).
        scores: The held-out |y − μ|/σ in ascending order, (B, *event).
        predict: What makes the beliefs, where `fit` was told.

    Example:
        >>> held = Belief(torch.zeros(99, 1), diag=torch.ones(99, 1))
        >>> conformal = ConformalInterval(held, torch.randn(99, 1), 0.9)
        >>> low, high = conformal(Belief(torch.zeros(1, 1), diag=torch.ones(1, 1)))
        >>> bool(low < high)
        True
    """

    factor: Tensor  # q, (*event)

    def __init__(self, belief: Belief, y: Tensor, level: float = 0.9):
        if not isinstance(belief, Belief):
            raise InvalidType(f"a Belief for held-out inputs is required, got {type(belief).__name__}.")
        y = fitting(y, belief.mean, "`y`")
        check_finite("predictions", belief.mean)
        if belief.batch_size and not bool((belief.variance > 0).all()):
            raise InvalidValue(
                "some predictions have no variance, and an interval of width 0 times anything covers nothing. Add "
                "observation noise with `belief.with_noise(variance)`."
            )
        self.level = level
        self.predict: Callable[..., Any] | None = None
        self.scores = ((y - belief.mean).abs() / belief.stddev).detach().sort(0).values
        self.factor = _threshold(self.scores, level)

    @classmethod
    def fit(cls, predict: Callable[..., Any], loader: Iterable[Any], level: float = 0.9) -> ConformalInterval:
        """Of a predictor and held-out pairs (x, y) in batches, or one such pair; `interval` then takes inputs.

        Args:
            predict: A predictor, calibrated or not, with one output and σ > 0 everywhere.
            loader: Data not trained on, nor used to calibrate; x as the predictor takes it.
            level: The coverage.
        """
        beliefs, targets = [], []
        with torch.no_grad():
            for x, y in pairs(loader):
                belief = predict(*(x if isinstance(x, tuple) else (x,)))
                if not isinstance(belief, Belief):
                    raise InvalidType(f"the predictor has outputs {type(belief).__name__}; one output is required.")
                targets.append(fitting(y, belief.mean))
                beliefs.append(Belief(belief.mean, belief.variance, validate=False))
        if not targets:
            raise InvalidValue("`loader` gave no data; held-out inputs and targets are required.")
        made = cls(Belief.cat(beliefs), torch.cat(targets), level)
        made.predict = predict
        return made

    def __call__(self, belief: Belief) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds, (B, *event) each."""
        return self._around(belief, self.factor)

    def interval(self, *args: Any, level: float | None = None, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Lower and upper bounds, (B, *event) each, for inputs or for a belief.

        Args:
            args, kwargs: The predictor's, where `fit` was given one; or a belief. A number behind them is the level.
            level: The coverage; that of the constructor by default.

        Raises:
            InvalidValue: There are too few held-out inputs for this level.
        """
        args, level = with_level(self.predict, args, level if level is not None or len(args) > 1 else self.level)
        argument = args[0] if len(args) == 1 and not kwargs else None
        if isinstance(argument, Belief):
            belief = argument
        elif self.predict is None:
            raise NotCalibrated(
                "this ConformalInterval has no predictor, only held-out scores: give it a belief, "
                "`conformal.interval(predict(x))`, or make it with `ConformalInterval.fit(predict, (x, y), level)`."
            )
        else:
            belief = self.predict(*args, **kwargs)
        return self._around(belief, self.factor if level == self.level else _threshold(self.scores, level))

    def _around(self, belief: Belief, factor: Tensor) -> tuple[Tensor, Tensor]:
        if not isinstance(belief, Belief):
            raise InvalidType(f"a Belief is required, got {type(belief).__name__}.")
        if belief.event_shape != factor.shape:
            raise ShapeMismatch(
                f"this belief has mean {tuple(belief.mean.shape)}; the held-out ones had events {tuple(factor.shape)}."
            )
        half = factor.to(belief.mean) * belief.stddev
        return belief.mean - half, belief.mean + half

    def __repr__(self) -> str:
        return f"ConformalInterval(level={self.level}, factor={[round(f, 4) for f in self.factor.flatten().tolist()]})"


class ConformalSet:
    """Sets of classes that hold the true one with probability `level` or more.

    Args:
        probabilities: Of held-out inputs, (N, C).
        labels: (N,).
        level: The coverage.

    Example:
        >>> p = torch.softmax(torch.randn(200, 3), 1)
        >>> sets = ConformalSet(p, torch.multinomial(p, 1).squeeze(1), 0.9)
        >>> sets(p[:5]).shape
        torch.Size([5, 3])
    """

    def __init__(self, probabilities: Array, labels: Array, level: float = 0.9):
        p, y = checked_labels(probabilities, labels)
        self.level, self.classes = level, p.shape[1]
        self.threshold = _threshold(1 - p.gather(1, y[:, None]).squeeze(1), level).item()

    def __call__(self, probabilities: Tensor) -> Tensor:
        """Which classes are in the set, (B, C), True or False; a set may be empty."""
        if probabilities.dim() != 2 or probabilities.shape[1] != self.classes:
            raise ShapeMismatch(
                f"probabilities have shape {tuple(probabilities.shape)}; (B, {self.classes}) is required, the classes "
                "of the held-out ones."
            )
        check_finite("probabilities", probabilities, nonnegative=True)
        if probabilities.numel() and float((probabilities.detach().sum(1) - 1).abs().max()) > 0.01:
            raise InvalidValue("rows do not sum to one; class probabilities are required, as of the held-out inputs.")
        return 1 - probabilities.double() <= self.threshold

    def __repr__(self) -> str:
        return f"ConformalSet(level={self.level}, threshold={self.threshold:.4g})"
