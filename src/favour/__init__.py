"""Favour: honest error bars for a trained network's predictions, without sampling."""

from favour import nn, rules
from favour.belief import Belief
from favour.errors import (
    CaptureError,
    CorruptFile,
    FavourError,
    InvalidType,
    InvalidValue,
    NoDensity,
    ShapeMismatch,
    UnknownName,
    UnsupportedOperation,
)
from favour.posterior import Diagonal, Full, Kronecker, Posterior, Rows
from favour.predictor import Predictor, compile, load
from favour.rules import rule
from favour.surrogate import DenseNoise, DiagonalNoise, LinearMap, Noise, Surrogate, identity, scaling, structural
from favour.draws import sample

__version__ = "0.1.0"
