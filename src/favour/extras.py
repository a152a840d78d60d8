"""Optional packages: imported when they are first needed, with an error that names the extra that brings them."""

from __future__ import annotations

import importlib
from types import ModuleType

from favour.errors import MissingExtra

__all__ = ["require"]


def require(module: str, extra: str) -> ModuleType:
    """Import an optional module, or raise `MissingExtra` naming the extra that installs it.

    >>> require("math", "any").sqrt(4.0)
    2.0
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f'This needs `{module}`, and the package `{error.name}` is not installed: pip install "favour[{extra}]"'
        ) from error
