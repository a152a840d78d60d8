"""Experiments: one file each, with its data, its model and its training.

They need more than the library does; `require` names the extra when a package is missing.
"""

from favour.errors import MissingExtra
from favour.extras import require

__all__ = ["MissingExtra", "require"]
