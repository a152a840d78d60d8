"""Intervals for observations, and why a predictor alone has none.

The spread of a network under dropout or random weights says how far its draws lie apart. An observation has noise of
its own and the network is wrong besides, so μ ∓ zσ with that σ holds far fewer observations than its level says: 29% at
90% on diabetes patients, 76% at 95% on UCI concrete. What held-out data say of both is needed:

    favour.calibrate         N(μ, cσ² + s²)          c and s² fitted; Gaussian errors
    predict.with_noise       N(μ, σ² + s²)           s² known, or from favour.fit_noise
    favour.ConformalInterval μ ∓ qσ                  q a quantile of held-out |y − μ|/σ; any errors
"""

from __future__ import annotations

from typing import Any

from favour.belief.confidence import check_level
from favour.errors import InvalidValue, NotCalibrated

LEVEL = 0.95


def with_level(predict: Any, args: tuple, level: float | None) -> tuple[tuple, float]:
    """A call's arguments less a level behind the model's: `interval(x, 0.9)` means `interval(x, level=0.9)`."""
    spec = getattr(getattr(predict, "graph", None), "in_spec", None)
    count = None if spec is None else spec.child(0).num_children
    last = args[-1] if len(args) > 1 else None
    behind = isinstance(last, float) and (len(args) == count + 1 if count is not None else True)
    if behind:
        if level is not None:
            raise InvalidValue(f"the level was given twice, {last} and {level}.")
        args, level = args[:-1], last
    level = LEVEL if level is None else level
    check_level(level)
    return args, level


def refuse() -> NotCalibrated:
    """What a bare predictor says when it is asked for an interval for observations."""
    return NotCalibrated(
        "this predictor knows the spread of its network, not how far observations lie from it: an interval of that "
        "spread alone holds far fewer than its level says. Fit what is missing to held-out data: "
        "`favour.calibrate(predict, (x, y)).interval(x_new, level)`, or "
        "`predict.with_noise(favour.fit_noise(predict(x), y)).interval(x_new, level)`, or, with a guarantee, "
        "`favour.ConformalInterval.fit(predict, (x, y), level).interval(x_new)`. The interval of the network's own "
        "spread is `predict(x_new).confidence_interval(level)`."
    )
