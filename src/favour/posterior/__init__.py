"""Gaussian distributions over a model's parameters."""

from .gaussians import Diagonal, Full, Gaussian, Kronecker, Rotated, Rows
from .posterior import Key, Posterior

__all__ = ["Diagonal", "Full", "Gaussian", "Key", "Kronecker", "Posterior", "Rotated", "Rows"]
