"""What a result was made from: model, data, options and versions; and what follows from those of an earlier run.

An unfinished run is continued, and a result returned, only where all of it is the same: rows of two models, of two
states of the data or of two versions are never in one result.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch

import favour
from favour.errors import InvalidValue
from favour.rating.models import Rater
from favour.rating.sources import Data
from favour.rating.store import Standing, Store


class Step(Enum):
    """What is to be done."""

    ready = "the result is there"
    go_on = "continue an unfinished run"
    begin = "begin anew"


def identity_of(rater: Rater, data: Data, options: Any) -> dict[str, Any]:
    """Of a rating that is asked for, in values that JSON keeps."""
    return {
        "model": rater.digest(),
        "data": data.fingerprint(),
        "options": {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()},
        "versions": versions(rater, data.kind),
    }


def versions(rater: Rater, kind: str = "") -> dict[str, str]:
    """Of what computes the numbers."""
    releases = {"favour": favour.__version__, "torch": torch.__version__.split("+")[0]}
    used = {"onnxruntime": rater.runtime == "onnx", "pillow": kind == "images"}
    for name in (name for name, needed in used.items() if needed):
        try:
            releases[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a build of another name, such as onnxruntime-gpu
            releases[name] = "unknown"
    return releases


def next_step(store: Store, standing: Standing, identity: Mapping[str, Any], overwrite: bool) -> Step:
    """What is to be done, or an error that says why nothing is."""
    final, begun = standing.final, standing.begun
    continues = begun is not None and begun["identity"] == identity
    if overwrite:
        return Step.go_on if continues else Step.begin
    if final is not None:
        if final["identity"] != identity:
            raise InvalidValue(_differences(store, final["identity"], identity, "a rating", continues))
        lost = [str(store.out / name) for name in final.get("lost", ())]
        if store.single and final["bad"] and not os.path.lexists(store.bad_out):
            lost = [str(store.bad_out)]
        if lost:
            raise InvalidValue(
                f"`{store.out}` is this rating, and lacks `{lost[0]}`"
                + (f" and {len(lost) - 1} more" if lost[1:] else "")
                + "; allow overwriting to make it again."
            )
        return Step.ready
    if begun is None:
        return Step.begin
    if not continues:
        raise InvalidValue(_differences(store, begun["identity"], identity, "an unfinished rating", False))
    return Step.go_on


def _differences(
    store: Store, known: Mapping[str, Any], identity: Mapping[str, Any], state: str, continues: bool
) -> str:
    parts = [name for name in ("model", "data") if known.get(name) != identity[name]]
    for group, form in (("options", "`{}`"), ("versions", "version of {}")):
        before, now = known.get(group, {}), identity[group]
        parts += [
            f"{form.format(name)} (was {before.get(name)}, is {now.get(name)})"
            for name in dict.fromkeys([*now, *before])
            if before.get(name) != now.get(name)
        ]
    going = " (it continues the unfinished run that would replace it)" if continues else ""
    hint = ""
    if "model" in parts:
        hint = " A function that draws its weights anew makes another model each time: give `weights`, or a seed."
    return (
        f"`{store.out}` is {state} with other arguments; these changed: {', '.join(parts)}. "
        f"Give another name, the former arguments, or allow overwriting{going}.{hint}"
    )
