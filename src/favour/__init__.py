"""Favour: the mean and covariance of a trained network's predictions, without sampling."""

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from favour import adapters, losses, metrics, nn, plots, rules, scores
from favour.belief import Belief
from favour.belief.joint import Joint
from favour.classify.calibration import Calibrated, calibrate
from favour.classify.conformal import ConformalInterval, ConformalSet
from favour.classify.predictive import fit_noise, probabilities
from favour.errors import (
    AmbiguousOutputs,
    CaptureError,
    ChangedModel,
    CorruptFile,
    DeprecatedName,
    DivergedFit,
    FailedPrediction,
    FavourError,
    FavourWarning,
    InvalidType,
    InvalidValue,
    MissingExtra,
    NoDensity,
    NotCalibrated,
    NothingUncertain,
    OutOfRange,
    ReducedCovariance,
    ShapeMismatch,
    SilencedDropout,
    StalePredictor,
    UncheckedFile,
    UnknownName,
    UnsupportedOperation,
    UntrustedBelief,
)
from favour.exporting import export
from favour.exporting.exported import Exported, load_exported
from favour.graph.traits import Draw, Traits
from favour.inspect.attribution import Attribution
from favour.inspect.check import Check, check
from favour.inspect.explain import Explanation
from favour.learn.fit import fit
from favour.learn.fitted import Fitted
from favour.learn.learner import Learner
from favour.posterior import Diagonal, Full, Kronecker, Posterior, Rotated, Rows
from favour.predictor.compilation import compile
from favour.predictor.draws import sample
from favour.predictor.predictor import Predictor
from favour.rules import rule
from favour.saving import load
from favour.surrogate import DenseNoise, DiagonalNoise, LinearMap, Noise, Surrogate, identity, scaling, structural

__version__ = "0.1.0"

if TYPE_CHECKING:
    from favour import rating, scale
else:

    def __getattr__(name: str) -> ModuleType:
        """Modules that `import favour` leaves for later: most programs rate no files."""
        if name in ("rating", "scale"):
            return import_module(f"favour.{name}")
        raise AttributeError(f"module 'favour' has no attribute {name!r}")
