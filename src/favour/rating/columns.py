"""From outputs of a model to the columns of the result.

| column | classifier | regression |
|---|---|---|
| `source`, `row` | file, and number of the row in it (images: 0) | the same |
| `id` | the id column of the data, if one was named | the same |
| `prediction` | likeliest class, and `label` its name where the model has names | mean |
| `probability` | of that class | |
| `stddev` | of that class's logit | of the mean |
| `low`, `high` | | interval μ ∓ zσ |
| `jsd` | disagreement of draws in nats, at most ln C | |
| `entropy` | H(p) in nats | |
| `max_probability` | max p | |
| `least_confidence` | 1 − max p | |

Scores grow with strangeness, as in `favour.scores`. Several outputs of a regression, and the questions of a
multilabel classifier, have columns of their own: `prediction_0`, `prediction_1`, ….
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.reading import Bad, Chunk

LEVEL = 0.95


def rated_columns(
    outputs: Mapping[str, npt.NDArray],
    kind: str,
    level: float | None = None,
    labels: Sequence[str] | None = None,
    every_class: bool = False,
) -> dict[str, npt.NDArray]:
    """Columns of arrays (n,) by name.

    >>> p = np.array([[0.25, 0.75]])
    >>> columns = rated_columns({"mean": np.log(p), "variance": np.ones((1, 2)), "probabilities": p}, "softmax")
    >>> {name: float(values[0].round(4)) for name, values in columns.items()}
    {'prediction': 1.0, 'probability': 0.75, 'stddev': 1.0, 'entropy': 0.5623, 'max_probability': 0.75, \
'least_confidence': 0.25}
    """
    mean = np.asarray(outputs["mean"]).reshape(len(outputs["mean"]), -1)
    deviation = np.sqrt(np.asarray(outputs["variance"]).reshape(mean.shape))
    if kind == "regression":
        return _regression(outputs, mean, deviation, level)
    p = np.asarray(outputs["probabilities"]).reshape(len(mean), -1)
    if kind == "multilabel":
        return _multilabel(p, deviation)
    every = np.arange(len(p))
    top = p.argmax(1) if len(p) else np.zeros(0, np.int64)
    columns: dict[str, npt.NDArray] = {"prediction": top.astype(np.int64)}
    if labels is not None:
        columns["label"] = np.array([labels[i] for i in top], object)
    # A binary classifier has one logit, an ordinal one of K classes K − 1.
    logit = np.minimum(top, mean.shape[1] - 1)
    others = p.copy()
    others[every, top] = 0
    columns |= {"probability": p[every, top], "stddev": deviation[every, logit]}
    if "jsd" in outputs:
        columns["jsd"] = np.asarray(outputs["jsd"])
    columns |= {"entropy": _entropy(p).sum(1), "max_probability": p[every, top], "least_confidence": others.sum(1)}
    if every_class:
        columns |= {f"probability_{k}": p[:, k] for k in range(p.shape[1])}
    return columns


def _entropy(p: npt.NDArray) -> npt.NDArray:
    return -p * np.log(np.where(p > 0, p, 1))


def _regression(
    outputs: Mapping[str, npt.NDArray], mean: npt.NDArray, deviation: npt.NDArray, level: float | None
) -> dict[str, npt.NDArray]:
    if level is None and "lower" in outputs:
        low, high = (np.asarray(outputs[name]).reshape(mean.shape) for name in ("lower", "upper"))
    else:
        z = -float(torch.special.ndtri(torch.tensor(0.5 * (1 - (level or LEVEL)), dtype=torch.float64)))
        low, high = mean - mean.dtype.type(z) * deviation, mean + mean.dtype.type(z) * deviation
    named = {"prediction": mean, "stddev": deviation, "low": low, "high": high}
    if mean.shape[1] == 1:
        return {name: values[:, 0] for name, values in named.items()}
    return {f"{name}_{k}": values[:, k] for k in range(mean.shape[1]) for name, values in named.items()}


def _multilabel(p: npt.NDArray, deviation: npt.NDArray) -> dict[str, npt.NDArray]:
    columns: dict[str, npt.NDArray] = {}
    for k in range(p.shape[1]):
        q = p[:, k]
        columns |= {f"prediction_{k}": (q >= 0.5).astype(np.int64), f"probability_{k}": q}
        columns |= {f"stddev_{k}": deviation[:, k], f"entropy_{k}": _entropy(q) + _entropy(1 - q)}
    return columns


def sound(columns: Mapping[str, npt.NDArray]) -> npt.NDArray[np.bool_]:
    """Which rows have finite numbers only, (n,)."""
    numbers = [values for values in columns.values() if values.dtype.kind == "f"]
    return np.logical_and.reduce([np.isfinite(values) for values in numbers])


# ---- Arrow


def schema(columns: Mapping[str, npt.NDArray], id_type: Any = None, metadata: Mapping[str, str] | None = None) -> Any:
    """The result's Arrow schema."""
    pa = require("pyarrow", "rate")
    fields = [("source", pa.string()), ("row", pa.int64())] + ([("id", id_type)] if id_type is not None else [])
    fields += [
        (name, pa.string() if values.dtype.kind == "O" else pa.from_numpy_dtype(values.dtype))
        for name, values in columns.items()
    ]
    return pa.schema(fields, metadata=dict(metadata) if metadata else None)


def text_type(id_type: Any) -> Any:
    """What ids become in a text file: numbers and text stay, all else is written out."""
    pa = require("pyarrow", "rate")
    types = pa.types
    if id_type is None or types.is_integer(id_type) or types.is_floating(id_type) or types.is_boolean(id_type):
        return id_type
    if types.is_nested(id_type) or types.is_binary(id_type) or types.is_large_binary(id_type):
        raise InvalidValue(f"the ids hold {id_type}, which has no form in a text file; write a .parquet file.")
    return pa.string()


def bad_schema() -> Any:
    """The schema of the file of bad rows."""
    pa = require("pyarrow", "rate")
    names = ("id", "reason", "content")
    return pa.schema([("source", pa.string()), ("row", pa.int64()), *((name, pa.string()) for name in names)])


def table(chunk: Chunk, columns: Mapping[str, npt.NDArray], wanted: Any) -> Any:
    """Rated rows as an Arrow table of the schema."""
    pa = require("pyarrow", "rate")
    arrays: dict[str, Any] = {"source": pa.array(chunk.sources, pa.string()), "row": pa.array(chunk.rows, pa.int64())}
    if "id" in wanted.names:
        arrays["id"] = chunk.ids.cast(wanted.field("id").type)
    arrays |= {name: pa.array(values) for name, values in columns.items()}
    return pa.table([arrays[name] for name in wanted.names], schema=wanted)


def bad_table(bad: Sequence[Bad]) -> Any:
    """Bad rows as an Arrow table."""
    pa = require("pyarrow", "rate")
    wanted = bad_schema()
    return pa.table({name: [getattr(b, name) for b in bad] for name in wanted.names}, schema=wanted)
