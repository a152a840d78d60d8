"""Gaussian distributions over a model's parameters."""

from favour.surrogate.gaussian import Gaussian, Image

from .factored import Kronecker, Rotated
from .gaussians import Diagonal, Full, Rows
from .posterior import Key, Posterior

__all__ = ["Diagonal", "Full", "Gaussian", "Image", "Key", "Kronecker", "Posterior", "Rotated", "Rows"]
