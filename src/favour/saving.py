"""Predictors in files and in pickles: see `favour.program.saving`."""

from favour.predictor.predictor import from_bytes, load, to_bytes

__all__ = ["from_bytes", "load", "to_bytes"]
