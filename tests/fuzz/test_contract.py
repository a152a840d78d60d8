"""Random networks keep the contract, with every method; `benchmarks/contract.py` tries thousands."""

import warnings

import pytest
import torch
from fuzz.architectures import draws, network
from fuzz.contract import violations

import favour

OPTIONS = [{"method": "adjoint"}, {"method": "adjoint", "secant": True}, {"method": "dplr"}, {"method": "diag"}]


def hold(seed, options):
    made = network(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.FavourWarning)
        predict = favour.compile(made.model, made.example, check=False, **options)
    found = violations(predict, made.example)
    assert not found, f"seed {seed} ({made.family}: {', '.join(made.words)}): {'; '.join(found)}"


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_keep_the_contract(seed):
    hold(seed, OPTIONS[seed % len(OPTIONS)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 540))
def test_many_random_networks_keep_the_contract(seed):
    for options in [*OPTIONS, {"method": "adjoint", "rank": 3}, {"method": "adjoint", "pairs": 8}]:
        hold(seed, options)


def test_a_network_is_a_function_of_its_seed():
    first, second = network(5), network(5)
    assert first.words == second.words
    for a, b in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(first.example, second.example)


def test_draws_are_the_models_own():
    """Against a loop over single draws in training mode; this network has no norm that training would change."""
    made = network(3)
    assert not any(isinstance(m, torch.nn.modules.batchnorm._BatchNorm) for m in made.model.modules())
    z = draws(made.model, made.example, 2000, 0)
    made.model.train()
    with torch.no_grad():
        slow = torch.stack([made.model(made.example) for _ in range(2000)])
    error = ((z.mean(0) - slow.mean(0)) / (z.var(0) / 1000).sqrt().clamp(min=1e-12)).abs()
    assert error.max() < 5
