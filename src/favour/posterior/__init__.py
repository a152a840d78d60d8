"""Gaussian distributions over a model's parameters."""

from .factored import Kronecker, Rotated
from .gaussian import Gaussian
from .gaussians import Diagonal, Full, Rows
from .image import Image
from .posterior import Key, Posterior

__all__ = ["Diagonal", "Full", "Gaussian", "Image", "Key", "Kronecker", "Posterior", "Rotated", "Rows"]
