"""Draws pooled by what a sweep of variances says, against draws by themselves and against loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import favour
from favour.errors import InvalidValue, UnsupportedOperation
from favour.methods import Pooled
from favour.methods.pooled import pooled, widening
from favour.methods.sampling import MaskSource


class Picture(nn.Module):
    """Down, up and across: a small UNet."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2, padding=1)
        self.up, self.c = nn.ConvTranspose2d(8, 6, 2, stride=2), nn.Conv2d(12, 6, 3, padding=1)
        self.out, self.drop, self.channels = nn.Conv2d(6, 2, 1), nn.Dropout(0.2), nn.Dropout2d(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.a(x)))
        low = self.channels(torch.relu(self.b(h)))
        return self.out(self.drop(torch.relu(self.c(torch.cat([h, self.up(low)], 1)))))


def error(a: Tensor, b: Tensor) -> float:
    return float(((a - b).norm() / b.norm()).detach())


def test_variances_are_nearer_than_those_of_equally_dear_samples() -> None:
    model, x = Picture().eval(), torch.randn(2, 1, 16, 16)
    predict = favour.compile(model, x, method=Pooled(16), check=False)
    draws = favour.sample(model, x, 4000, generator=torch.Generator().manual_seed(0))
    mean, truth = draws.mean(0), draws.var(0)
    with torch.no_grad():
        belief = predict(x)
    # A sweep costs a few draws; 24 by themselves are off by √(2/24) and the 4,000 by .02.
    assert error(belief.variance, truth) < 2 / 3 * (2 / 24) ** 0.5
    assert ((belief.mean - mean).square().sum() / truth.sum()).sqrt() < (1 / 24) ** 0.5


def test_the_pool_against_loops() -> None:
    """One channel of four pixels: each pixel, its neighbourhood, and all of them."""
    torch.manual_seed(0)
    draws, d = torch.rand(5, 1, 1, 4, dtype=torch.float64), torch.rand(1, 1, 4, dtype=torch.float64) + 0.1

    def row(t: Tensor) -> list[float]:
        return t.flatten().tolist()

    def blur(v: list[float]) -> list[float]:
        return [v[i] / 2 + ((v[i - 1] if i else 0) + (v[i + 1] if i < 3 else 0)) / 4 for i in range(4)]

    weights, fields = row(d), []
    for t in draws:
        one = row(t)
        each = [a / b for a, b in zip(one, weights, strict=True)]
        around = [a / b for a, b in zip(blur(one), blur(weights), strict=True)]
        # The average of all is that of the blurred ones: entries at the rim count for less.
        whole = [sum(blur(one)) / sum(blur(weights))] * 4
        zeros = [0.0] * 4
        fields.append([[p - q for p, q in zip(a, b, strict=True)] for a, b in
                       ((each, around), (around, whole), (whole, whole), (whole, zeros))])  # fmt: skip
    expected = [0.0] * 4
    for level in range(4):
        steps = [field[level] for field in fields]
        mean = [sum(s[i] for s in steps) / 5 for i in range(4)]
        noise = sum(w * w * sum((s[i] - mean[i]) ** 2 for s in steps) / 20 for i, w in enumerate(weights))
        energy = sum(w * w * mean[i] ** 2 for i, w in enumerate(weights))
        kept = max(0.0, 1 - noise / energy) if energy else 0.0
        expected = [e + kept * m for e, m in zip(expected, mean, strict=True)]
    torch.testing.assert_close(pooled(draws, d, widening(d.shape), d.square()).flatten().tolist(), expected)


def test_where_the_sweep_is_right_little_noise_is_added() -> None:
    """Dropout before the last linear map: variances are exact, and draws of sixteen have .35."""
    model, x = nn.Sequential(nn.Dropout(0.2), nn.Conv2d(3, 2, 3, padding=1)).eval(), torch.randn(2, 3, 20, 20)
    exact = favour.compile(model, x, method="diag", check=False)(x)
    belief = favour.compile(model, x, method=Pooled(16), check=False)(x)
    assert error(belief.variance, exact.variance) < 0.08
    assert ((belief.mean - exact.mean).square() / exact.variance).mean().detach().sqrt() < 0.08


def test_an_answer_does_not_depend_on_the_rest_of_the_batch() -> None:
    model, x = Picture().eval(), torch.randn(5, 1, 8, 8)
    predict = favour.compile(model, x, method="pooled", check=False)
    with torch.no_grad():
        whole, some = predict(x), predict(x[2:4])
    torch.testing.assert_close(some.variance, whole.variance[2:4], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(some.mean, whole.mean[2:4], rtol=1e-4, atol=1e-6)
    other = favour.compile(model, x, method="pooled", seed=1, check=False)
    assert not torch.equal(other(x[:1]).variance, predict(x[:1]).variance)


def test_correlations_are_the_draws_and_the_diagonal_is_positive() -> None:
    """All pixels share one number: the covariance is of rank one, and draws know it."""
    model, x = (
        nn.Sequential(nn.Dropout(0.3), nn.Linear(1, 400, bias=False), nn.Unflatten(1, (20, 20))),
        torch.ones(1, 1),
    )
    belief = favour.compile(model.eval(), x, method=Pooled(20), check=False)(x)
    correlation = belief.covariance_matrix[0] / belief.stddev.flatten().outer(belief.stddev.flatten())
    assert (correlation.abs() - torch.eye(400)).max() <= 1
    assert correlation.abs().mean() > 0.9 and belief.diag.min() > 0


def test_gradients_are_those_of_the_sweep_scaled() -> None:
    model, x = Picture().double().eval(), torch.randn(1, 1, 8, 8, dtype=torch.float64)
    sweep = favour.compile(model, x, method="diag", check=False)
    predict = favour.compile(model, x, method="pooled", check=False)
    point = x.clone().requires_grad_()
    belief, plain = predict(point), sweep(point)
    ratio = (belief.variance / plain.variance).detach()
    (got,) = torch.autograd.grad(belief.variance.sum(), point)
    (wanted,) = torch.autograd.grad((ratio * sweep(point).variance).sum(), point)
    torch.testing.assert_close(got, wanted)


def test_balanced_masks_fall_as_often_as_they_should() -> None:
    random = MaskSource(torch.Generator().manual_seed(0), torch.device("cpu"), balanced=True)
    rate = torch.tensor([0.1, 0.25, 0.5])
    fallen = (random.scaled_mask((20, 3), rate, torch.float64) == 0).sum(0).tolist()
    assert fallen == [2, 5, 10]
    counts = [(random.scaled_mask((10, 1), 0.25, torch.float64) == 0).sum().item() for _ in range(400)]
    assert set(counts) == {2, 3} and abs(sum(counts) / 400 - 2.5) < 0.1


def test_outputs_of_all_shapes() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.a = nn.Dropout(0.5), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            h = self.a(self.drop(x))
            return h, h.unflatten(1, (2, 3)), h.sum(1), x

    x = torch.randn(3, 6)
    vector, matrix, number, certain = favour.compile(Several().eval(), x, method=Pooled(200), check=False)(x)
    exact = favour.compile(Several().eval(), x, method="diag", check=False)(x)
    assert vector.variance.shape == (3, 6) and matrix.variance.shape == (3, 2, 3) and number.variance.shape == (3,)
    assert not certain.variance.any() and len(exact) == 4


def test_refusals() -> None:
    model, x = Picture().eval(), torch.randn(2, 1, 8, 8)
    with pytest.raises(InvalidValue, match="`n` is 2; it must be at least 3"):
        favour.compile(model, x, method=Pooled(2))
    predict = favour.compile(model, x, method="pooled", check=False)
    with pytest.raises((UnsupportedOperation, torch._dynamo.exc.TorchRuntimeError, RuntimeError)):
        torch.compile(predict, fullgraph=True, backend="eager")(x)
    assert "draws of the network correct" in str(predict.explain(x))


def test_half_precision_is_pooled_in_single() -> None:
    model, x = Picture().eval(), torch.randn(2, 1, 8, 8)
    wide = favour.compile(model, x, method="pooled", check=False)(x)
    small = favour.compile(Picture().eval().half(), x.half(), method="pooled", check=False)(x.half())
    assert small.mean.dtype is small.variance.dtype is torch.float16
    assert error(small.variance.float(), wide.variance) < 0.02
