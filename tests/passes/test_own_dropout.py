"""A new kind of dropout: everything about it is in this file's `Ring`, and every part of favour takes part in it."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import favour
from favour.graph.traits import _TABLE
from favour.rules.registry import RULES
from favour.surrogate import DiagonalNoise, Surrogate, identity
from favour.surrogate.value import Value, mean_of

LIBRARY = torch.library.Library("own_dropout", "FRAGMENT")
LIBRARY.define("gaussian(Tensor x, float strength, bool live) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
LIBRARY.impl(
    "gaussian",
    lambda x, strength, live: x * (1 + strength**0.5 * torch.randn_like(x)) if live else x.clone(),
    "CompositeExplicitAutograd",
)


class Gaussian(nn.Module):
    """y = x∘(1 + √α·z), z ~ N(0, 1): the kind's module, operation, rule and draw."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.own_dropout.gaussian(x, self.strength, self.training)


@pytest.fixture
def gaussian() -> Iterator[None]:
    overload = torch.ops.own_dropout.gaussian.default

    def any_strength(strength, where):
        if strength < 0:
            raise favour.errors.InvalidValue(f"the strength at {where} is {strength}; it must not be negative.")

    draw = favour.Draw(
        sample=lambda random, shape, strength, dtype: 1 + strength**0.5 * random.normal(shape, dtype),
        check=any_strength,
    )

    @favour.rule(overload, exactness="exact", traits=favour.Traits(draws=draw, elementwise=True))
    def rule(ctx, x, strength, live):
        mean = mean_of(x)
        second = mean.square() + (x.variance if isinstance(x, Value) else 0.0)
        maps = [(x, identity())] if isinstance(x, Value) else []
        return Surrogate(mean, maps, [DiagonalNoise(second * strength, ctx.module)])

    yield
    RULES.pop(overload)
    _TABLE.pop(overload)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), Gaussian(0.3), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2)).double()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64)


def test_belief_agrees_with_the_samplers_draws(gaussian: None, x: Tensor) -> None:
    model = network()
    belief = favour.compile(model, x)(x)
    n = 40_000
    draws = favour.sample(model, x, n, generator=torch.Generator().manual_seed(3))
    bound = 5 * (belief.variance / n).sqrt()
    assert ((draws.mean(0) - belief.mean).abs() < bound + 0.02 * belief.stddev).all()
    torch.testing.assert_close(draws.var(0), belief.variance, rtol=0.1, atol=0)


def test_sampler_draws_what_torch_draws(gaussian: None, x: Tensor) -> None:
    """The same two moments from the module itself: the kind's operation and its `Draw` say the same."""
    model = Gaussian(0.7)
    n = 40_000
    ours = favour.sample(model, x, n, generator=torch.Generator().manual_seed(1))
    theirs = torch.stack([model(x) for _ in range(2_000)])
    torch.testing.assert_close(ours.var(0), 0.7 * x.square(), rtol=5 * (2 / n) ** 0.5, atol=0)
    torch.testing.assert_close(theirs.var(0), 0.7 * x.square(), rtol=5 * (2 / 2_000) ** 0.5, atol=0)


def test_rate_override_and_silence(gaussian: None, x: Tensor) -> None:
    model = network()
    quiet = favour.compile(model, x, dropout={"1": 0})(x)
    only = favour.compile(nn.Sequential(model[0], *model[2:]), x)(x)
    torch.testing.assert_close(quiet.covariance_matrix, only.covariance_matrix)
    more = favour.compile(model, x, dropout={"1": 2.5})(x)  # no probability, and this kind takes it
    model[1].strength = 2.5
    torch.testing.assert_close(more.covariance_matrix, favour.compile(model, x)(x).covariance_matrix)
    with pytest.raises(favour.errors.InvalidValue, match=r"the strength at `1` is -1"):
        favour.compile(model, x, dropout={"1": -1.0})


def test_check_trusts_it(gaussian: None, x: Tensor) -> None:
    assert favour.check(favour.compile(network(), x), x, n=4000).verdict == "trust it"


def test_saved_predictors_hold_it(gaussian: None, x: Tensor, tmp_path) -> None:
    predict = favour.compile(network(), x)
    predict.save(tmp_path / "own.favour")
    again = favour.load(tmp_path / "own.favour")
    torch.testing.assert_close(again(x).covariance_matrix, predict(x).covariance_matrix)


def test_across_inputs_each_draws_its_own(gaussian: None, x: Tensor) -> None:
    joint = favour.compile(network(), x).joint(x, masks="independent")
    blocks = joint.covariance_matrix.reshape(5, 2, 5, 2)
    assert blocks[0, :, 0].abs().max() > 1e-3
    assert blocks[0, :, 1].abs().max() < 1e-12
