"""A BoTorch model: see `favour.integrations.botorch`."""

from favour.integrations.botorch import FavourModel

__all__ = ["FavourModel"]
