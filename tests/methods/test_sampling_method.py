"""Sampling as a method: draws with the mean and covariance they have, taken wherever a predictor is."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import favour
from favour import methods, scores
from favour.errors import InvalidValue, UnsupportedOperation

F64 = torch.float64


def network(outputs: int = 3) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = (nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, outputs))
    return nn.Sequential(*layers).double(), torch.randn(6, 4, dtype=F64)


def by_masks(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance of the output, exactly: linear in the masks of the hidden units."""
    hidden = torch.tanh(model[0](x))
    J = model[3].weight * hidden.unsqueeze(1)  # (batch, outputs, units)
    return model[3](hidden), 0.3 / 0.7 * J @ J.mT


@pytest.mark.parametrize("outputs", [3, 40])
def test_moments_are_those_of_the_network_to_chance(outputs: int) -> None:
    model, x = network(outputs)
    n = 20_000 if outputs == 3 else 30  # a matrix, and columns
    with torch.no_grad():
        belief = favour.compile(model, x, method=methods.Sampling(n))(x)
        mean, matrix = by_masks(model, x)
    # z-scores of 6 · outputs numbers: beyond 5.5 by chance once in 10⁵ runs; they are Gaussian for n draws of 8 masks.
    z = (belief.mean - mean) / (matrix.diagonal(dim1=1, dim2=2) / n).sqrt()
    assert z.abs().max() < 5.5
    found = belief.covariance_matrix
    # E‖S − Σ‖² ≤ κ(‖Σ‖² + tr² Σ)/n, κ for draws that are sums over 8 masks of kurtosis at most 2; over 6 inputs.
    bound = 2 * (matrix.square().sum((1, 2)) + matrix.diagonal(dim1=1, dim2=2).sum(1).square()).sum() / n
    assert (found - matrix).square().sum() < 4 * bound


def test_it_is_the_sample_covariance_of_its_draws() -> None:
    for outputs in (3, 40):
        model, x = network(outputs)
        predict = favour.compile(model, x, method=methods.Sampling(25))
        with torch.no_grad():
            belief, draws = predict(x), predict.draws(x)
        for i in range(6):
            torch.testing.assert_close(belief.covariance_matrix[i], torch.cov(draws[:, i].T), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(belief.mean, draws.mean(0))


def test_the_same_seed_gives_the_same_draws() -> None:
    model, x = network()
    one, again, other = (favour.compile(model, x, method="sampling", seed=seed)(x).mean for seed in (0, 0, 1))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_uncertain_inputs_are_drawn_too() -> None:
    model = nn.Sequential(nn.Dropout(0.0), nn.Linear(3, 2)).double()
    x, factor = torch.randn(4, 3, dtype=F64), torch.randn(2, 4, 3, dtype=F64)
    given = favour.Belief(x, diag=torch.rand(4, 3, dtype=F64), factor=factor)
    n, W = 20_000, model[1].weight
    with pytest.warns(favour.NothingUncertain):
        predict = favour.compile(model, x, method=methods.Sampling(n))
    belief, wanted = predict(given), W @ given.covariance_matrix @ W.T
    size = (wanted.square().sum((1, 2)) + wanted.diagonal(dim1=1, dim2=2).sum(1).square()).sum() / n
    assert (belief.covariance_matrix - wanted).square().sum() < 4 * size  # E‖S − Σ‖² of Gaussian draws
    z = (belief.mean - model[1](x)) / (wanted.diagonal(dim1=1, dim2=2) / n).sqrt()
    assert z.abs().max() < 5.5


def test_class_probabilities_and_scores_are_of_its_draws() -> None:
    model, x = network()
    predict = favour.compile(model, x, method=methods.Sampling(50))
    with torch.no_grad():
        draws = predict.draws(x)
        torch.testing.assert_close(predict.probabilities(x), draws.softmax(-1).mean(0))
        torch.testing.assert_close(predict.jsd(x), scores.jsd(draws))
        assert predict.draws(x, n=80).shape == (80, 6, 3)


def test_whatever_takes_a_predictor_takes_it(tmp_path: Path) -> None:
    model, x = network()
    predict = favour.compile(model, x, method=methods.Sampling(400), memory=2**20)
    with torch.no_grad():
        assert favour.check(predict, x, 2000).verdict == "trust it"
        fitted = favour.calibrate(predict, (x, torch.tensor([0, 1, 2, 0, 1, 2])))
        assert fitted.probabilities(x).shape == (6, 3) and math.isfinite(fitted.after)
        assert predict.joint_outputs(x).sample((2,)).shape == (2, 6, 3)
        assert next(iter(predict.stream([x]))).mean.shape == (6, 3)
        predict.save(tmp_path / "saved.favour")
        assert torch.equal(favour.load(tmp_path / "saved.favour")(x).mean, predict(x).mean)
    assert predict.attribute(x).sources
    checked = favour.compile(model, x, method="sampling", check=True).checked
    assert checked.trusted and str(checked) == "not checked (its beliefs are samples themselves)"


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    model, x = network()
    predict = favour.compile(model, x, method="sampling")
    with pytest.raises(UnsupportedOperation, match="method='sampling' makes random numbers"):
        favour.export(predict, tmp_path / "net.pt2")
    with pytest.raises(UnsupportedOperation, match="no operations to explain"):
        predict.explain(x)
    with pytest.raises(InvalidValue, match="`n` is 1"):
        favour.compile(model, x, method=methods.Sampling(1))


def test_outputs_without_noise_are_certain() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return self.drop(x), x.exp(), x.argmax(-1)

    x = torch.randn(4, 3)
    noisy, plain, index = favour.compile(Two(), x, method="sampling")(x)
    assert noisy.variance.gt(0).all() and plain.variance.eq(0).all() and torch.equal(plain.mean, x.exp())
    assert torch.equal(index, x.argmax(-1))
