"""Trained convolutional networks against 10,000 samples, and the methods against each other."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from cases import F64, randn
from networks import moments, relative_error
from networks_vision import NETWORKS, compiles_whole, images, trained
from torch import Tensor, nn

import favour

SAMPLES = 10_000
# Largest relative Frobenius error of the covariance; 10,000 samples have one of about 0.02 themselves.
BOUNDS = {
    "dropout in the top layers": 0.06,
    "channel dropout everywhere": 0.1,
    "channel dropout before max pooling": 0.1,
    "dropout before max pooling": 0.08,
    "dropout before and behind max pooling": 0.08,
    "residual": 0.1,
    "Gaussian kernels": 0.08,
}


@cache
def reference(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """8 test images, the sampled mean, covariance and standard deviations."""
    x = images()[1][:8].double()
    draws = favour.sample(trained(name), x, SAMPLES, generator=torch.Generator().manual_seed(1))
    mean, covariance = moments(draws)
    return x, mean, covariance, draws.std(0)


@pytest.mark.parametrize("name", NETWORKS)
def test_vision_network_against_sampling(name):
    x, mean, covariance, spread = reference(name)
    with torch.no_grad():
        belief = favour.compile(trained(name), x[:2], method="adjoint")(x)
    error = relative_error(belief.covariance_matrix, covariance)
    assert error <= BOUNDS[name], f"{error:.3f}"
    off = ((belief.mean - mean) / spread).abs().mean()
    assert off <= 0.1, f"{off:.3f}"


@pytest.mark.parametrize("name", ["channel dropout everywhere", "Gaussian kernels"])
def test_forgetting_correlation_would_fail(name):
    x, _, covariance, _ = reference(name)
    with torch.no_grad():
        belief = favour.compile(trained(name), x[:2], method="diag")(x)
    assert relative_error(belief.covariance_matrix, covariance) > 0.2


def test_max_pooling_by_probabilities_beats_the_winner():
    """Independent draws right before the maximum: `"price"` against following the entry with the largest mean."""
    name = "dropout before max pooling"
    x, _, covariance, _ = reference(name)
    with torch.no_grad():
        price, winner = (
            favour.compile(trained(name), x[:2], method="adjoint", activation=mode)(x) for mode in ("price", "taylor")
        )
    assert relative_error(price.covariance_matrix, covariance) < 0.2 * relative_error(
        winner.covariance_matrix, covariance
    )


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout2d(0.2),
        nn.Conv2d(2, 3, 2),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.AvgPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(3, 2),
    ).double()


@pytest.mark.parametrize("bayesian", [False, True])
def test_adjoint_equals_full_when_forward_is_exact(bayesian):
    model, x = tiny(), randn(3, 1, 6, 6)
    posterior = {k: 0.02 * torch.rand(w.shape, dtype=F64) for k, w in model.named_parameters()} if bayesian else None
    with torch.no_grad():
        full = favour.compile(model, x, method="full", posterior=posterior)(x)
        for settings in ({"method": "adjoint", "rank": 200}, {"method": "dplr", "rank": 200}):
            got = favour.compile(model, x, posterior=posterior, **settings)(x)
            torch.testing.assert_close(got.mean, full.mean, rtol=1e-9, atol=1e-9)
            torch.testing.assert_close(got.covariance_matrix, full.covariance_matrix, rtol=1e-9, atol=1e-11)


def test_vision_network_compiles_whole():
    model, x = tiny().float(), torch.randn(3, 1, 6, 6)
    compiles_whole(model, x)
