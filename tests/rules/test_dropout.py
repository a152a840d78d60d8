"""Dropout through whole networks: rates, overrides, and where it stands, against total variance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import reference
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import favour
from favour import Belief
from favour.errors import InvalidValue, UnknownName
from favour.graph.traits import check_rate

F64 = torch.float64
METHODS = [("full", None), ("dplr", 6), ("adjoint", 0), ("adjoint", 6)]
every_method = pytest.mark.parametrize("method, rank", METHODS)
RATES = torch.tensor([0.0, 0.1, 0.35, 0.5, 0.9], dtype=F64)


def close(actual: Any, expected: Any, message: str) -> None:
    actual, expected = torch.as_tensor(actual, dtype=F64), torch.as_tensor(expected, dtype=F64)
    scale = expected.abs().max().item()
    assert_close(actual, expected, atol=1e-10 * scale, rtol=1e-10, msg=lambda m: f"{message}: {m}")


def linears(*sizes: int) -> list[nn.Linear]:
    return [nn.Linear(n, m).double() for n, m in pairwise(sizes)]


def compare(model: nn.Module, layers: list[Any], x: Any, method: str, rank: int | None, **settings: Any) -> Belief:
    """The prediction against a list of linear modules and dropout rates, in the order they act."""
    steps = [
        ("linear", {"weight": each.weight.detach().numpy(), "bias": each.bias.detach().numpy()})
        if isinstance(each, nn.Linear)
        else ("dropout", {"p": each.numpy() if isinstance(each, Tensor) else each})
        for each in layers
    ]
    mean = x.mean if isinstance(x, Belief) else x
    n = mean.shape[1]
    given = x.covariance_matrix.numpy() if isinstance(x, Belief) else np.zeros((len(mean), n, n))
    with torch.no_grad():
        got = favour.compile(model, mean, method=method, rank=rank, **settings)(x)
    for row in range(len(mean)):
        expected = reference.network(steps, mean[row].numpy(), given[row])
        close(got.mean[row], expected[0], f"mean of row {row}")
        close(got.covariance_matrix[row], expected[1], f"covariance of row {row}")
    return got


@pytest.fixture
def x() -> Tensor:
    return torch.randn(3, 4, dtype=F64)


@every_method
@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.95])
def test_dropout_of_one_rate(method, rank, p, x):
    a, b, c = linears(4, 5, 6, 3)
    compare(nn.Sequential(a, nn.Dropout(p), b, nn.Dropout(p), c), [a, p, b, p, c], x, method, rank)


@every_method
@pytest.mark.parametrize("learnable", [False, True])
def test_dropout_of_a_rate_per_neuron(method, rank, learnable, x):
    a, b = linears(4, 5, 3)
    rates = RATES.clamp(0.05) if learnable else RATES
    drop = favour.nn.Dropout(rates, learnable=learnable)
    compare(nn.Sequential(a, drop, b), [a, drop.p.detach(), b], x, method, rank)


@every_method
@pytest.mark.parametrize("override", [0.45, 0, RATES])
@pytest.mark.parametrize("module", [nn.Dropout(0.2), favour.nn.Dropout(RATES.flip(0))])
def test_dropout_override_by_module_name(method, rank, override, module, x):
    a, b, c = linears(4, 5, 5, 3)
    model = nn.Sequential(a, module, b, nn.Dropout(0.3), c)
    compare(model, [a, override, b, 0.3, c], x, method, rank, dropout={"1": override})


@every_method
def test_dropout_override_wakes_a_dead_module(method, rank, x):
    a, b = linears(4, 5, 3)
    compare(nn.Sequential(a, nn.Dropout(0.0), b), [a, 0.25, b], x, method, rank, dropout={"1": 0.25})


@every_method
def test_all_dropout_silenced_leaves_no_variance(method, rank, x):
    a, b = linears(4, 5, 3)
    model = nn.Sequential(a, nn.Dropout(0.5), b)
    got = compare(model, [a, b], x, method, rank, dropout={"1": 0.0})
    assert torch.count_nonzero(got.covariance_matrix) == 0


@every_method
@pytest.mark.parametrize("where", ["first", "last", "first and last", "everywhere", "twice", "thrice", "only"])
def test_dropout_anywhere(method, rank, where, x):
    if where == "everywhere" and rank == 0:
        pytest.skip("the last one's input is correlated, and its variances need more than those before it")
    a, b = linears(4, 5, 3)
    layers: list[Any] = {
        "first": [0.3, a, b],
        "last": [a, b, 0.3],
        "first and last": [0.3, a, 0.5],
        "everywhere": [0.3, a, 0.1, b, 0.5],
        "twice": [a, 0.3, 0.4, b],
        "thrice": [a, 0.3, 0.4, 0.2, b],
        "only": [0.3],
    }[where]
    model = nn.Sequential(*[each if isinstance(each, nn.Module) else nn.Dropout(each) for each in layers])
    compare(model, layers, x, method, rank)


@every_method
def test_dropout_called_twice_draws_twice(method, rank, x):
    """One module at two places: two draws, as in training."""
    a, b, c = linears(4, 5, 5, 3)
    drop = nn.Dropout(0.3)
    compare(nn.Sequential(a, drop, b, drop, c), [a, 0.3, b, 0.3, c], x, method, rank)


@pytest.mark.parametrize("method, rank", [("full", None), ("dplr", 6), ("adjoint", 6)])
@pytest.mark.parametrize("layers", [(0.3, "a", 0.2, "b"), ("a", 0.3, 0.4, "b"), (0.3,)])
def test_dropout_of_an_uncertain_input(method, rank, layers, x):
    """Correlated entries keep their covariance; the noise sees μ² + v."""
    a, b = linears(4, 5, 3)
    chosen = [{"a": a, "b": b}.get(each, each) for each in layers]
    model = nn.Sequential(*[each if isinstance(each, nn.Module) else nn.Dropout(each) for each in chosen])
    belief = Belief(x, 0.2 * torch.rand(3, 4, dtype=F64), 0.6 * torch.randn(2, 3, 4, dtype=F64))
    compare(model, chosen, belief, method, rank)


def test_dropout_of_zero_stays_zero():
    """Var[D·0] = 0: a dead neuron adds nothing."""
    model = nn.Dropout(0.5)
    x = torch.tensor([[0.0, 2.0]], dtype=F64)
    got = favour.compile(model, x, method="full")(x)
    close(got.covariance_matrix[0], torch.diag(torch.tensor([0.0, 4.0])), "covariance")


def test_the_model_keeps_its_rates_and_flags(x):
    a, b = linears(4, 5, 3)
    model = nn.Sequential(a, nn.Dropout(0.2), b).eval()
    favour.compile(model, x, dropout={"1": 0.7})(x)
    assert model[1].p == 0.2 and not any(module.training for module in model.modules())


# -------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    "p", [-0.1, 1.0, 1.5, float("nan"), torch.tensor([0.2, 1.0]), torch.tensor([0.2, float("nan")])]
)
def test_invalid_rates(p, x):
    with pytest.raises(InvalidValue, match=r"`drop`.*\[0, 1\)"):
        check_rate(p, "`drop`")
    a, b = linears(4, 2, 3)
    with pytest.raises(InvalidValue, match=r"`1`.*\[0, 1\)"):
        favour.compile(nn.Sequential(a, nn.Dropout(0.2), b), x, dropout={"1": p})


def test_a_module_that_drops_everything_is_refused(x):
    a, b = linears(4, 5, 3)
    with pytest.raises(InvalidValue, match=r"dropout probability.*1.*\[0, 1\); got 1"):
        favour.compile(nn.Sequential(a, nn.Dropout(1.0), b), x)


def test_an_override_of_no_dropout_module_is_refused(x):
    a, b = linears(4, 5, 3)
    with pytest.raises(UnknownName, match=r"\['2'\].*\['1'\]"):
        favour.compile(nn.Sequential(a, nn.Dropout(0.1), b), x, dropout={"2": 0.5})
