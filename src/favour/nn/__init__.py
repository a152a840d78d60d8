"""Layers with Gaussian weights and dropout with a rate per neuron.

Every layer keeps the means as the ordinary parameters `weight` and `bias`, draws one set of weights per
forward call in training mode, and uses the means in eval mode. `favour.compile` reads their spread through
`favour_posterior()`.
"""

from .conv import BayesConv2d
from .dropout import Dropout
from .layer import BayesLayer, MeanFieldLayer, StochasticLayer, kl, sampling
from .linear import BayesLinear, FullBayesLinear, RowBayesLinear

__all__ = [
    "BayesConv2d",
    "BayesLayer",
    "BayesLinear",
    "Dropout",
    "FullBayesLinear",
    "MeanFieldLayer",
    "RowBayesLinear",
    "StochasticLayer",
    "kl",
    "sampling",
]
