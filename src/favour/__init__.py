"""Favour: the mean and covariance of a trained network's predictions, without sampling."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from favour import adapters, errors, losses, methods, metrics, nn, plots, scores
from favour.belief import Belief
from favour.belief.joint import Joint
from favour.classify.calibration import Calibrated, calibrate
from favour.classify.conformal import ConformalInterval, ConformalSet
from favour.classify.predictive import fit_noise, probabilities
from favour.errors import DeprecatedName, FavourError, FavourWarning, NothingUncertain, UntrustedBelief
from favour.exporting import export
from favour.exporting.exported import Exported, load_exported
from favour.graph.traits import Draw, Traits
from favour.inspect.attribution import Attribution
from favour.inspect.check import Check, check
from favour.inspect.explain import Explanation
from favour.learn.fit import fit
from favour.learn.fitted import Fitted
from favour.learn.learner import Learner
from favour.posterior import Diagonal, Full, Gaussian, Kronecker, Posterior, Rotated, Rows
from favour.predictor.compilation import compile
from favour.predictor.draws import sample
from favour.predictor.predictor import Predictor
from favour.predictor.tune import tune
from favour.rules import rule
from favour.saving import load
from favour.surrogate import DenseNoise, DiagonalNoise, LinearMap, Noise, Surrogate, identity, scaling, structural

__version__ = "0.1.0"

__all__ = [
    "Attribution",
    "Belief",
    "Calibrated",
    "Check",
    "ConformalInterval",
    "ConformalSet",
    "DenseNoise",
    "Diagonal",
    "DiagonalNoise",
    "Draw",
    "Explanation",
    "Exported",
    "FavourError",
    "FavourWarning",
    "Fitted",
    "Full",
    "Joint",
    "Kronecker",
    "Learner",
    "LinearMap",
    "Noise",
    "NothingUncertain",
    "Posterior",
    "Predictor",
    "Rotated",
    "Rows",
    "Surrogate",
    "Traits",
    "UntrustedBelief",
    "adapters",
    "calibrate",
    "check",
    "compile",
    "errors",
    "export",
    "fit",
    "fit_noise",
    "identity",
    "load",
    "load_exported",
    "losses",
    "methods",
    "metrics",
    "nn",
    "plots",
    "probabilities",
    "rule",
    "sample",
    "scaling",
    "scores",
    "structural",
    "tune",
]

# Modules that `import favour` leaves for later: most programs rate no files, and some need an extra.
_LATER = ("botorch", "rating", "scale", "sklearn")


def __dir__() -> list[str]:
    return [*__all__, *_LATER, "__version__"]


if TYPE_CHECKING:
    from favour import botorch, rating, scale, sklearn
else:

    def __getattr__(name: str) -> object:
        """Modules on demand, and names that have moved."""
        if name in _LATER:
            return import_module(f"favour.{name}")
        if isinstance(getattr(errors, name, None), type):
            warnings.warn(
                f"`favour.{name}` is now `favour.errors.{name}`; the former will go with version 0.3.",
                DeprecatedName,
                stacklevel=2,
            )
            return getattr(errors, name)
        raise AttributeError(f"module 'favour' has no attribute {name!r}")
