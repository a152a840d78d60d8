"""What shapes a result besides model and data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from favour.belief.confidence import check_level
from favour.errors import InvalidValue


@dataclass(frozen=True)
class Options:
    """What shapes the result besides model and data; `favour.rating.rate` says what each is."""

    columns: tuple[str, ...] | None = None
    id: str | None = None
    kind: str | None = None
    level: float | None = None
    size: tuple[int, int] | None = None
    channels: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    dtype: str | None = None
    batch_size: int | None = None
    part_rows: int | None = None
    every_class: bool = False
    header: bool | None = None

    def __post_init__(self) -> None:
        if self.level is not None:
            check_level(self.level)
        for name in ("batch_size", "part_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InvalidValue(f"`{name}` is {value}; at least 1 is required.")
        if self.std is not None and not all(s > 0 for s in self.std):
            raise InvalidValue(f"`std` is {self.std}; every channel's must be above 0.")


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name, sequences as tuples; unknown names are a `TypeError`, as of any function."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
