"""Losses of uncertain outputs: see `favour.learn.losses`, `favour.learn.divergence` and `favour.learn.likelihoods`."""

from favour.learn.categorical import Categorical
from favour.learn.divergence import kl, prior_std
from favour.learn.likelihoods import Bernoulli, Gaussian, Heteroscedastic, Likelihood, Poisson, StudentT
from favour.learn.losses import dropout_kl, evidence_bound, expected_nll, predictive_nll

__all__ = [
    "Bernoulli",
    "Categorical",
    "Gaussian",
    "Heteroscedastic",
    "Likelihood",
    "Poisson",
    "StudentT",
    "dropout_kl",
    "evidence_bound",
    "expected_nll",
    "kl",
    "predictive_nll",
    "prior_std",
]
