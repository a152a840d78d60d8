"""Experiments: one file each, with its data, its model and its training.

They need more than the library does; `require` names the extra when a package is missing.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from favour.errors import FavourError


class MissingExtra(FavourError, ImportError):
    """An optional package is not installed; the message says which extra brings it."""


def require(module: str, extra: str = "experiments") -> ModuleType:
    """Import an optional module, or raise `MissingExtra` naming the extra that installs it.

    >>> require("math").sqrt(4.0)
    2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"This needs `{module}`, and the package `{error.name}` is not installed: "
            f'pip install "favour[{extra}]"'
        ) from error
