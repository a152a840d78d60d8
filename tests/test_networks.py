"""Whole trained networks against 20,000 samples (the sampler is tested by itself in test_sampling.py)."""

import itertools
from functools import cache

import pytest
import torch
from networks import NETWORKS, digits, moments, relative_error, sampling_error, trained
from torch import Tensor

import favour

SAMPLES = 20_000


@cache
def reference(name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """64 test inputs, the sampled mean and covariance, and the sampled standard deviations."""
    x = digits()[2][:64].double()
    draws = favour.sample(trained(name), x, SAMPLES, generator=torch.Generator().manual_seed(1))
    mean, covariance = moments(draws)
    return x, mean, covariance, draws.std(0)


@cache
def error(name: str, **settings: object) -> float:
    x, _, covariance, _ = reference(name)
    with torch.no_grad():
        belief = favour.compile(trained(name), x[:2], **settings)(x)
    return relative_error(belief.covariance_matrix, covariance)


@pytest.mark.parametrize("name", NETWORKS)
def test_network_full_covariance(name: str) -> None:
    assert error(name, method="full") <= 0.06


@pytest.mark.parametrize("name", NETWORKS)
def test_network_adjoint_covariance(name: str) -> None:
    assert error(name, method="adjoint") <= 0.06


@pytest.mark.parametrize("name", NETWORKS)
def test_network_mean_within_sampling_error(name: str) -> None:
    x, mean, _, spread = reference(name)
    with torch.no_grad():
        belief = favour.compile(trained(name), x[:2], method="adjoint")(x)
    z = (belief.mean - mean) / spread
    # An unbiased mean would have |z| near 1/√n = .007; we allow a bias of .03 standard deviations on top.
    assert z.abs().mean() <= 0.03 + SAMPLES**-0.5


@pytest.mark.parametrize("name", NETWORKS)
def test_network_dplr_falls_with_rank(name: str) -> None:
    errors = [error(name, method="dplr", rank=rank, iterations=20) for rank in (1, 2, 4, 8)]
    for worse, better in itertools.pairwise(errors):
        assert better <= 1.02 * worse
    full = error(name, method="full")
    assert error(name, method="dplr", rank=100) == pytest.approx(full, rel=1e-6)
    assert error(name, method="diag") > 1.3 * errors[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_network_dplr_full_rank_equals_full(name: str) -> None:
    x = digits()[2][:8].double()
    with torch.no_grad():
        a = favour.compile(trained(name), x[:2], method="dplr", rank=100)(x)
        b = favour.compile(trained(name), x[:2], method="full")(x)
    torch.testing.assert_close(a.mean, b.mean, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(a.covariance_matrix, b.covariance_matrix, rtol=1e-8, atol=1e-10)


def test_network_price_beats_taylor() -> None:
    assert error("dropout", method="full") < error("dropout", method="full", activation="taylor")


def test_network_error_is_near_the_reference_error() -> None:
    """What is left of the error is mostly the 20,000 samples' own: the bound below is theirs plus .02."""
    _, _, covariance, _ = reference("dropout")
    assert error("dropout", method="full") <= sampling_error(covariance, SAMPLES) + 0.02


def test_treating_tied_uses_as_independent_would_fail() -> None:
    """The test can fail: two separate layers with the same posterior have another covariance."""
    x, _, covariance, _ = reference("layer used in parallel")
    model = trained("layer used in parallel")

    class Untied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            import copy

            self.first, self.head, self.drop = model.first, model.head, model.drop
            self.a, self.b = model.shared, copy.deepcopy(model.shared)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.first(x))
            return self.head(torch.relu(self.a(self.drop(h))) + torch.tanh(self.b(self.drop(0.5 * h))))

    with torch.no_grad():
        belief = favour.compile(Untied(), x[:2], method="full")(x)
    assert relative_error(belief.covariance_matrix, covariance) > 0.1
