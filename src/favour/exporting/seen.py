"""What the data of an exported model are like: means and ranges of its inputs, and how its scores spread over them.

The try-it page draws inputs like them, and says of a score how many of them have less.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from favour.errors import InvalidValue
from favour.exporting.exported import Exported

ENTRIES = 1024  # of a row; beyond, one mean and range stand for all
STEPS = 100  # between quantiles
_ROWS = 256  # run at a time


def of_examples(model: Exported, examples: Any) -> dict[str, Any]:
    """Means, standard deviations and ranges by entry of each input, and quantiles of the scores, as plain JSON.

    Args:
        model: That will be written.
        examples: An array, a tuple of them or a dict by the inputs' names.
    """
    arguments, named = (examples, {}) if isinstance(examples, tuple) else ((examples,), {})
    if isinstance(examples, Mapping):
        arguments, named = (), dict(examples)
    arrays = model.check(*arguments, **named)
    rows = len(arrays[0])
    if rows < 2:
        raise InvalidValue(f"`examples` has {rows} rows; give some that the model was trained on, a hundred or more.")
    parts = [_scores(model(*(a[i : i + _ROWS] for a in arrays))) for i in range(0, rows, _ROWS)]
    steps = np.linspace(0, 1, STEPS + 1)
    scores = {name: np.quantile(np.concatenate([p[name] for p in parts]), steps) for name in parts[0]}
    return {
        "rows": rows,
        "inputs": [_spread(a, None in port.shape[1:]) for a, port in zip(arrays, model.inputs, strict=True)],
        "scores": {name: _listed(values) for name, values in scores.items()},
    }


def _scores(outputs: Mapping[str, npt.NDArray]) -> dict[str, npt.NDArray]:
    """By name, (rows,): of classes how far draws disagree and all uncertainty, of a regression its spread."""
    if "probabilities" not in outputs:
        spread = outputs["stddev"]
        return {"stddev": spread.reshape(len(spread), -1).mean(1)}
    p = outputs["probabilities"].reshape(len(outputs["probabilities"]), -1)
    entropy = -(p * np.log(np.maximum(p, np.finfo(p.dtype).tiny))).sum(1)
    return {"entropy": entropy} | ({"jsd": outputs["jsd"]} if "jsd" in outputs else {})


def _spread(array: npt.NDArray, varies: bool) -> dict[str, list[float]]:
    flat = array.reshape(len(array), -1).astype(np.float64)
    if varies or flat.shape[1] > ENTRIES:
        flat = flat.reshape(-1, 1)
    moments = {"mean": flat.mean(0), "stddev": flat.std(0), "low": flat.min(0), "high": flat.max(0)}
    return {name: _listed(values) for name, values in moments.items()}


def _listed(values: npt.NDArray) -> list[float]:
    return [float(f"{v:.5g}") for v in values]
