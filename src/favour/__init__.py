"""Favour: honest error bars for a trained network's predictions, without sampling."""

from favour import metrics, nn, plots, rules, scores
from favour.attribution import Attribution
from favour.belief import Belief
from favour.calibration import Calibrated, ConformalInterval, ConformalSet, calibrate
from favour.check import Check, check
from favour.compilation import compile
from favour.draws import sample
from favour.errors import (
    CaptureError,
    CorruptFile,
    FavourError,
    InvalidType,
    InvalidValue,
    MissingExtra,
    NoDensity,
    ShapeMismatch,
    UnknownName,
    UnsupportedOperation,
)
from favour.joint import Joint
from favour.posterior import Diagonal, Full, Kronecker, Posterior, Rotated, Rows
from favour.predictive import probabilities
from favour.predictor import Predictor
from favour.rules import rule
from favour.saving import load
from favour.surrogate import (
    DenseNoise,
    DiagonalNoise,
    LinearMap,
    Noise,
    Surrogate,
    identity,
    scaling,
    structural,
)

__version__ = "0.1.0"
