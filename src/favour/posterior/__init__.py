"""Gaussian distributions over a model's parameters."""

from .gaussians import Diagonal, Full, Gaussian, Kronecker, Rows
from .posterior import Key, Posterior

__all__ = ["Diagonal", "Full", "Gaussian", "Key", "Kronecker", "Posterior", "Rows"]
