"""Covariance structures: Λ + UUᵀ, a stored Σ, and QCQᵀ + PDP."""

from .base import Covariance, flatten_event
from .checks import check_batched, check_finite
from .dense import Dense
from .diagonal_plus_factor import DiagonalPlusFactor
from .directional import Directional
from .precision import square_root

__all__ = [
    "Covariance",
    "Dense",
    "DiagonalPlusFactor",
    "Directional",
    "check_batched",
    "check_finite",
    "flatten_event",
    "square_root",
]
