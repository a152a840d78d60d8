"""Posteriors that other libraries trained, as a model and a `favour.Posterior`; and deep ensembles."""

from .adapted import Adapted
from .bayesian_torch import from_bayesian_torch
from .dispatch import adapt
from .ensemble import Ensemble, mixture
from .ivon import from_ivon
from .laplace import from_laplace
from .pyro import from_pyro
from .swag import SWAG, from_swag
from .torchbnn import from_torchbnn

__all__ = [
    "SWAG",
    "Adapted",
    "Ensemble",
    "adapt",
    "from_bayesian_torch",
    "from_ivon",
    "from_laplace",
    "from_pyro",
    "from_swag",
    "from_torchbnn",
    "mixture",
]
