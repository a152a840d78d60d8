"""From the keywords of `favour.compile` to a method, and from what files of earlier versions say.

A name and keywords say the same as an object: `method="dplr", rank=2` is `DPLR(rank=2)`. `effort` stands for keywords
that are not given: those of `EFFORT` for a method by name, a choice by cost for `"auto"` (`favour.methods.auto`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from favour.errors import InvalidType, InvalidValue
from favour.methods.adjoint import Adjoint
from favour.methods.auto import EFFORTS, PAIRS, Auto
from favour.methods.method import METHODS, Method, Numerics, describe, parameters, restored

# What `auto` may be told, and so what `favour.compile` takes.
DEFAULTS: dict[str, Any] = {name: getattr(Auto(), name) for name in parameters(Auto)}

EFFORT: dict[str, dict[str, Any]] = {
    "fast": {"secant": False, "pairs": 0},
    "balanced": {},
    "best": {"secant": True, "pairs": PAIRS},
}

# Say how to compress, and what outputs are: nothing to a method that does not compress, or does not choose.
UNUSED = ("rank", "iterations", "weight_rank", "start", "task")


def method_of(method: str | Method, **keywords: Any) -> Method:
    """The method that is asked for.

    Args:
        method: A name, or an object that has its parameters already.
        keywords: Of `Auto`, at their defaults where the user gave none.

    Raises:
        InvalidValue: No such name, a keyword that the method does not have, or keywords beside an object.
    """
    settings = {name: value for name, value in keywords.items() if not _default(name, value)}
    if isinstance(method, Method):
        if settings:
            listed = ", ".join(f"`{name}`" for name in settings)
            raise InvalidValue(
                f"{listed} beside method={method!r}: an object has its parameters already. Give it these, or give "
                f"method={method.name!r} by name and these as keywords."
            )
        return method
    if not isinstance(method, str):
        raise InvalidType(f"`method` is a {type(method).__name__}; give a name or an object of `favour.methods`.")
    if method not in METHODS:
        raise InvalidValue(f"`method` is {method!r}; choose one of {', '.join(sorted(METHODS))}, or an object.")
    if method == Auto.name:
        return Auto(**settings)
    return _named(METHODS[method], settings)


def _named(cls: type[Method], settings: dict[str, Any]) -> Method:
    known = parameters(cls)
    effort = settings.pop("effort", "balanced")
    if effort not in EFFORTS:
        raise InvalidValue(f"`effort` is {effort!r}; choose one of {', '.join(EFFORTS)}.")
    foreign = [name for name, value in settings.items() if name not in known and name not in UNUSED and value]
    if not set(EFFORT[effort]) <= set(known):
        foreign.append("effort")
    if foreign:
        where = "the reverse sweep" if foreign[0] in parameters(Adjoint) or foreign[0] == "effort" else "method='auto'"
        raise InvalidValue(f"`{foreign[0]}` belongs to {where}; `method` is {cls.name!r}, not 'adjoint'.")
    return cls(**{**EFFORT[effort], **{name: value for name, value in settings.items() if name in known}})


def _default(name: str, value: Any) -> bool:
    return not isinstance(value, Tensor) and not isinstance(value, Mapping) and value == DEFAULTS[name]


def written(method: Method, numerics: Numerics) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON-able settings of a predictor, and the tensors among them."""
    plain, tensors = describe(method)
    return {"method": {"name": method.name, **plain}, "numerics": describe(numerics)[0]}, tensors


def read(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> tuple[Method, Numerics]:
    """The inverse of `written`; also of what was written before methods were objects, one flat mapping."""
    if isinstance(plain["method"], str):
        flat = restored(plain, tensors)
        numerics = Numerics(**{name: flat.pop(name) for name in describe(Numerics())[0] if name in flat})
        return method_of(**flat), numerics
    settings = dict(plain["method"])
    cls = METHODS[settings.pop("name")]
    return cls(**restored(settings, tensors)), Numerics(**plain["numerics"])
