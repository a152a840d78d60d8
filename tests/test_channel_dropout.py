"""Dropout of channels and alpha dropout, by enumerating the masks."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from calls import close, covariance
from cases import F64, randn
from torch import Tensor, nn

import favour
from favour import Belief
from favour.errors import ShapeMismatch
from favour.rules import RULES
from favour.surrogate import Surrogate
from favour.surrogate.value import Context, Value

aten = torch.ops.aten
OPS = ("feature_dropout", "alpha_dropout", "feature_alpha_dropout")
# torch.nn.functional.selu at −∞, which alpha dropout puts for what it drops
SATURATED = -1.0507009873554805 * 1.6732632423543772
INPUTS = ("certain", "diagonal", "factor", "diagonal and factor")


def enumerated(op: str, mean: Tensor, spread: Tensor, p: Any) -> tuple[Tensor, Tensor]:
    """Mean and covariance over all masks of one input (C, *space): E and Cov of y = a(Mx + α′(1 − M)) + b.

    Given a mask y is affine in x, so Cov[y] = E[A Σ Aᵀ] + Cov[A μ + c], summed over 2^draws masks.
    """
    channels, n = mean.shape[0], mean.numel()
    feature = op.startswith("feature")
    draws = channels if feature else n
    rates = torch.as_tensor(p, dtype=F64).expand(mean.shape).flatten()
    first, second = torch.zeros(n, dtype=F64), torch.zeros(n, n, dtype=F64)
    for bits in itertools.product([0.0, 1.0], repeat=draws):
        mask = torch.tensor(bits, dtype=F64)
        each = rates.reshape(channels, -1)[:, 0] if feature else rates
        weight = torch.where(mask > 0, 1 - each, each).prod()
        mask = mask.repeat_interleave(n // channels) if feature else mask
        if "alpha" in op:
            a = ((1 - rates) * (1 + rates * SATURATED**2)) ** -0.5
            gain, shift = a * mask, a * SATURATED * (1 - mask) - a * SATURATED * rates
        else:
            gain, shift = mask / (1 - rates), torch.zeros(n, dtype=F64)
        y = gain * mean.flatten() + shift
        first += weight * y
        second += weight * (y[:, None] * y + gain[:, None] * spread * gain)
    return first, second - first[:, None] * first


def uncertain(kind: str, *event: int) -> tuple[Any, Tensor, Tensor]:
    mean = randn(2, *event)
    n = mean[0].numel()
    if kind == "certain":
        return mean, mean, torch.zeros(2, n, n, dtype=F64)
    diag = torch.rand(mean.shape, dtype=F64) if "diagonal" in kind else None
    blocks = {"a": randn(1, *mean.shape), "b": randn(2, *mean.shape)} if "factor" in kind else {}
    spread = torch.zeros(2, n, n, dtype=F64) if diag is None else diag.flatten(1).diag_embed()
    for block in blocks.values():
        spread = spread + torch.einsum("kbi,kbj->bij", block.flatten(2), block.flatten(2))
    return Value(mean, diag, blocks), mean, spread


def total(surrogate: Surrogate, spread: Tensor) -> Tensor:
    """G Σ Gᵀ + Σ_s N_s, (batch, n, n)."""
    shape = surrogate.mean.shape
    n = shape[1:].numel()
    result = torch.zeros(2, n, n, dtype=F64)
    for x, G in surrogate.maps:
        eye = torch.eye(n, dtype=F64).reshape(n, 1, *shape[1:]).expand(n, *shape)
        J = G.apply(eye).reshape(n, 2, n).permute(1, 2, 0)
        assert x.mean.shape == shape
        result = result + J @ spread @ J.mT
    for noise in surrogate.noises:
        N = covariance(noise, shape)
        columns = noise.columns().flatten(2)
        close(torch.einsum("kbi,kbj->bij", columns, columns), N, "columns of a noise")
        close(noise.diag().flatten(1), N.diagonal(dim1=1, dim2=2), "diag of a noise")
        result = result + N
    return result


@pytest.mark.parametrize("given_as", INPUTS)
@pytest.mark.parametrize("rate", ["one", "per channel"])
@pytest.mark.parametrize("op", OPS)
def test_dropout_against_all_masks(op, rate, given_as):
    x, mean, spread = uncertain(given_as, 2, 3, 1)
    p = 0.3 if rate == "one" else torch.tensor([0.1, 0.6], dtype=F64).reshape(2, 1, 1)
    surrogate = RULES[getattr(aten, op).default].function(Context(), x, p, True)
    got = total(surrogate, spread)
    for row in range(2):
        expected = enumerated(op, mean[row], spread[row], p)
        close(surrogate.mean[row].flatten(), expected[0], f"mean of row {row}")
        close(got[row], expected[1], f"covariance of row {row}")


@pytest.mark.parametrize("op", OPS)
def test_dropout_that_is_not_live_does_nothing(op):
    x, mean, spread = uncertain("diagonal and factor", 2, 3)
    for p, live in ((0.3, False), (0.0, True)):
        surrogate = RULES[getattr(aten, op).default].function(Context(), x, p, live)
        close(surrogate.mean, mean)
        close(total(surrogate, spread), spread)


@pytest.mark.parametrize("op", ["feature_dropout", "feature_alpha_dropout"])
def test_rates_within_a_channel_are_refused(op):
    with pytest.raises(ShapeMismatch, match=r"head.*\(2, 3, 4\).*\(3, 1\).*\(4,\)"):
        rates = torch.rand(4, dtype=F64)
        RULES[getattr(aten, op).default].function(Context(place="head"), randn(2, 3, 4), rates, True)


MODULES = {
    "Dropout1d": (nn.Dropout1d, (3, 4)),
    "Dropout2d": (nn.Dropout2d, (3, 2, 2)),
    "Dropout3d": (nn.Dropout3d, (2, 2, 1, 2)),
    "AlphaDropout": (nn.AlphaDropout, (3, 2)),
    "FeatureAlphaDropout": (nn.FeatureAlphaDropout, (3, 2)),
}


@pytest.mark.parametrize("name", MODULES)
def test_sampler_draws_what_torch_draws(name):
    """Mean and second moments of 20,000 draws, within 5 standard errors, of ours and of the module in training."""
    module, event = MODULES[name]
    n = 20_000
    model, x = module(0.3), randn(2, *event)
    ours = favour.sample(model, x, n, generator=torch.Generator().manual_seed(0)).flatten(2)
    theirs = model.train()(x.expand(n, 2, *event).reshape(2 * n, *event)).reshape(n, 2, -1)
    with torch.no_grad():
        belief = favour.compile(model, x, method="full")(x)
    expected = belief.covariance_matrix + torch.einsum("bi,bj->bij", *[belief.mean.flatten(1)] * 2)
    for draws in (ours, theirs):
        products = draws.unsqueeze(-1) * draws.unsqueeze(-2)
        assert ((draws.mean(0) - belief.mean.flatten(1)).abs() <= 5 * draws.std(0) / n**0.5).all()
        assert ((products.mean(0) - expected).abs() <= 5 * products.std(0) / n**0.5 + 1e-12).all()
    assert len(ours[:, 0, 0].unique()) == 2


@pytest.mark.parametrize("method, rank", [("full", None), ("dplr", 30), ("adjoint", 30)])
def test_channel_dropout_through_a_network(method, rank):
    """Conv, channels dropped, conv, all linear: the law of total covariance over the masks, layer by layer."""
    first, second = nn.Conv1d(1, 2, 2).double(), nn.Conv1d(2, 2, 2).double()
    drop = nn.Dropout1d(0.3)
    model = nn.Sequential(first, drop, second, drop, nn.Flatten())
    x = randn(1, 1, 4)
    with torch.no_grad():
        got = favour.compile(model, x, method=method, rank=rank)(x)
        mean, spread = enumerated("feature_dropout", first(x)[0], torch.zeros(6, 6, dtype=F64), 0.3)
        J = torch.stack([second(e.reshape(1, 2, 3)).flatten() for e in torch.eye(6, dtype=F64)], 1)
        J = J - second(torch.zeros(1, 2, 3, dtype=F64)).flatten()[:, None]
        mean, spread = enumerated("feature_dropout", second(mean.reshape(1, 2, 3))[0], J @ spread @ J.T, 0.3)
    close(got.mean[0], mean, "mean")
    close(got.covariance_matrix[0], spread, "covariance")


def test_channel_dropout_of_a_belief_and_by_rates():
    model = nn.Sequential(nn.Dropout2d(0.5), nn.Flatten())
    mean, spread = randn(1, 2, 2, 1), randn(4, 4)
    spread = spread @ spread.T
    factor = torch.linalg.cholesky(spread).T.reshape(4, 1, 2, 2, 1)
    rates = torch.tensor([0.2, 0.4], dtype=F64).reshape(2, 1, 1)
    predict = favour.compile(model, mean, method="full", dropout={"0": rates})
    with torch.no_grad():
        got = predict(Belief(mean, torch.zeros_like(mean), factor))
    expected = enumerated("feature_dropout", mean[0], spread, rates)
    close(got.mean[0], expected[0], "mean")
    close(got.covariance_matrix[0], expected[1], "covariance")


def test_batches_of_nothing():
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Dropout1d(0.3), nn.MaxPool1d(2), nn.Flatten()).double()
    predict = favour.compile(model, randn(2, 1, 5), method="adjoint")
    assert predict(randn(0, 1, 5)).covariance_matrix.shape == (0, 4, 4)
