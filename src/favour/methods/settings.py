"""The keyword arguments of `favour.compile` that concern the method."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from favour.errors import InvalidType, InvalidValue

METHODS = ("auto", "adjoint", "dplr", "full", "diag")
ACTIVATIONS = ("price", "matched", "taylor")
PRECISIONS = (None, "tf32", "bf16")
TASKS = (None, "classification", "regression")


@dataclass(frozen=True)
class Settings:
    """See `favour.compile`."""

    method: str = "auto"
    rank: int | None = None
    iterations: int = 2
    activation: str = "price"
    weight_rank: int | None = None
    directions: Any = None
    precision: str | None = None
    start: Any = None
    seed: int = 0
    memory: int | None = None
    secant: bool | None = None
    pairs: int = 0
    task: str | None = None

    def asked(self) -> list[str]:
        """What differs from the defaults, in words.

        >>> Settings("dplr", rank=2).asked()
        ["method='dplr'", 'rank=2']
        """
        found = []
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                found.append(f"{f.name}=(tensor of shape {tuple(value.shape)})")
            elif value != f.default:
                found.append(f"{f.name}={value!r}")
        return found

    def validate(self) -> None:
        """Raise for values that make no sense."""
        if self.method not in METHODS:
            raise InvalidValue(f"`method` is {self.method!r}; choose one of {', '.join(METHODS)}.")
        if self.activation not in ACTIVATIONS:
            raise InvalidValue(f"`activation` is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}.")
        wholes = (("rank", 0), ("iterations", 0), ("weight_rank", 1), ("memory", 1), ("seed", 0), ("pairs", 0))
        for name, least in wholes:
            _check_whole(name, getattr(self, name), least, optional=name not in ("iterations", "seed", "pairs"))
        if self.pairs == 1:
            raise InvalidValue("`pairs` is 1; two groups of draws make the first pair. Choose 0, or 8.")
        if self.secant not in (None, True, False):
            raise InvalidType(
                f"`secant` is {self.secant!r}; choose True, False, or None to let `method='auto'` decide."
            )
        asked = [name for name in ("secant", "pairs") if getattr(self, name)]
        if asked and self.activation != "price":
            raise InvalidValue(
                f"`{asked[0]}` goes with the moments of activation='price'; `activation` is {self.activation!r}."
            )
        if asked and self.method not in ("auto", "adjoint"):
            raise InvalidValue(
                f"`{asked[0]}` belongs to the reverse sweep; `method` is {self.method!r}, not 'adjoint'."
            )
        if self.precision not in PRECISIONS:
            raise InvalidValue(f"`precision` is {self.precision!r}; choose None, 'tf32' or 'bf16'.")
        if self.task not in TASKS:
            raise InvalidValue(f"`task` is {self.task!r}; choose None, 'classification' or 'regression'.")
        named = self.start is None or (isinstance(self.start, str) and self.start in ("warm", "random"))
        if not named and not isinstance(self.start, Mapping):
            raise InvalidValue(
                f"`start` is {self.start!r}; choose None, 'warm', 'random' or a mapping from module name."
            )
        if self.directions is not None and not isinstance(self.directions, Tensor):
            _check_whole("directions", self.directions, 1, optional=True)
        if self.directions is not None and self.method not in ("auto", "adjoint"):
            raise InvalidValue(
                f"`directions` belongs to the reverse sweep; `method` is {self.method!r}, not 'adjoint'."
            )

    def held(self) -> str:
        """What the forward sweep of the reverse method keeps of a covariance, in words."""
        return f"variances and a factor of rank {self.rank}" if self.rank else "variances, entries independent"

    def describe(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """JSON-able settings, and the tensors among them."""
        plain: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor):
                tensors[field.name] = value
            elif isinstance(value, Mapping):
                plain[field.name] = {"keys": list(value)}
                tensors |= {f"{field.name}.{k}": v for k, v in value.items()}
            else:
                plain[field.name] = value
        return plain, tensors

    @classmethod
    def restore(cls, plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Settings:
        """The inverse of `describe`."""
        known: dict[str, Any] = dict(plain)
        for name, value in plain.items():
            if isinstance(value, dict):
                known[name] = {k: tensors[f"{name}.{k}"] for k in value["keys"]}
        known |= {k: v for k, v in tensors.items() if "." not in k}
        return cls(**known)


def _check_whole(name: str, value: Any, least: int, *, optional: bool) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"`{name}` is {value!r}; a whole number is needed.")
    if value < least:
        raise InvalidValue(f"`{name}` is {value}; it must be at least {least}.")
