"""Random networks and every operation keep the contract with every method; `benchmarks/contract.py` tries thousands."""

import warnings

import pytest
import torch
from fuzz.architectures import draws, network
from fuzz.contract import broken_rules, violations
from fuzz.families import KINDS, relative
from fuzz.probes import Ordinary, name, probes
from hostile import first_of_each

import favour
from favour.graph.traits import set_traits
from favour.rules.registry import RULES
from favour.surrogate import Generic, LatentNoise, Surrogate

OPTIONS = [{"method": "adjoint"}, {"method": "adjoint", "secant": True}, {"method": "dplr"}, {"method": "diag"}]
PROBES = probes()
WAYS = ("dropout", "layer", "belief")
FIRST = [(case, WAYS[i % 3]) for i, case in enumerate(first_of_each([case for case, way in PROBES if way == "belief"]))]
FIRST = [each for each in FIRST if each in PROBES]


def hold(seed, options):
    made = network(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.FavourWarning)
        predict = favour.compile(made.model, made.example, check=False, **options)
    found = violations(predict, made.example) + broken_rules(predict, made.example)
    assert not found, f"seed {seed} ({made.family}: {', '.join(made.words)}): {'; '.join(found)}"


def probe(case, way, options):
    made = Ordinary(case, way)
    if not made.answers:
        pytest.skip("the network's own draws are not finite")
    for option in options:
        predict = made.predictor(option)
        found = violations(predict, *made.args) + broken_rules(predict, *made.args)
        assert not found, f"{option}: {'; '.join(found)}"


@pytest.mark.parametrize("seed", range(40))
def test_random_networks_keep_the_contract(seed):
    hold(seed, OPTIONS[seed % len(OPTIONS)])


@pytest.mark.parametrize("case, way", FIRST, ids=[name(*each) for each in FIRST])
def test_operations_keep_the_contract(case, way):
    probe(case, way, ["secant"])


@pytest.mark.slow
@pytest.mark.parametrize("case, way", PROBES, ids=[name(*each) for each in PROBES])
def test_all_operations_keep_the_contract(case, way):
    probe(case, way, ["secant", "pairs", "rank", "dplr", "diag"])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 540))
def test_many_random_networks_keep_the_contract(seed):
    for options in [*OPTIONS, {"method": "adjoint", "rank": 3}, {"method": "adjoint", "pairs": 8}]:
        hold(seed, options)


def test_a_wrong_map_and_a_wrong_noise_are_found():
    """A rule whose transpose is off by a factor, and one whose noise is not its diagonal."""
    overload = torch.ops.aten.tanh.default
    known = RULES[overload]

    def wrong(ctx, x):
        G = Generic(lambda d: 2 * d, lambda g: 3 * g, lambda v: 4 * v, one_per_column=True)
        noise = LatentNoise(lambda z: z, lambda g: g, 2 * torch.ones_like(x.mean), tuple(x.mean.shape[1:]))
        return Surrogate(2 * x.mean, [(x, G)], [noise])

    case, way = next(each for each in PROBES if each[0].overload == "aten.tanh.default" and each[1] == "belief")
    made = Ordinary(case, way)
    favour.rule(overload, override=True)(wrong)
    try:
        found = broken_rules(made.predictor("adjoint"), *made.args)
    finally:
        RULES[overload] = known
        set_traits(overload, known.traits)
    assert any("transpose" in what for what in found) and any("diagonal" in what for what in found)


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


@pytest.mark.parametrize("kind", KINDS)
def test_families_are_networks(kind):
    """What `benchmarks/campaigns/beliefs.py --grammar families` measures: noisy, finite, functions of the seed."""
    made, again = relative(kind, 3), relative(kind, 3)
    z = draws(made.model, made.example, 2, 0)
    assert torch.isfinite(z).all() and not torch.equal(z[0], z[1])
    assert torch.equal(made.example, again.example) and made.words == again.words
    assert all(torch.equal(a, b) for a, b in zip(made.model.parameters(), again.model.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["max_pointwise", "norm_groups", "second_norm"])
def test_families_hold(kind):
    made = relative(kind, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", favour.FavourWarning)
        predict = favour.compile(made.model, made.example, check=False)
    broken = violations(predict, made.example) + broken_rules(predict, made.example)
    assert not broken, f"{kind} ({', '.join(made.words)}): {'; '.join(broken)}"
