"""`favour.Rotated`, the posterior of Kronecker-factored Laplace: against its definition, and against `Full`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import favour
from favour import Belief, Full, Kronecker, Posterior, Rotated
from favour.errors import InvalidType, InvalidValue, ShapeMismatch

F64 = torch.float64


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=F64)


def close(actual: object, expected: object, message: str) -> None:
    """To 1e-10 of the largest entry."""
    actual, expected = torch.as_tensor(actual, dtype=F64), torch.as_tensor(expected, dtype=F64)
    scale = expected.abs().max().item()
    assert_close(actual, expected, atol=1e-10 * scale, rtol=1e-10, msg=lambda m: f"{message}: {m}")


def rotated(m: int, n: int, k: int | None = None, l: int | None = None) -> Rotated:  # noqa: E741
    """With bases that are neither orthonormal nor square unless k = m, l = n."""
    k, l = m if k is None else k, n if l is None else l  # noqa: E741
    return Rotated(0.1 * torch.rand(k, l, dtype=F64), randn(n, l) / n**0.5, randn(m, k) / m**0.5)


def test_rotated_covariance_is_its_definition():
    gaussian = rotated(3, 2, 4, 5)
    S, Q, P = (t.numpy() for t in (gaussian.diag, gaussian.inputs, gaussian.outputs))
    expected = np.zeros((6, 6))
    for i in range(3):
        for j in range(2):
            for k in range(3):
                for l in range(2):  # noqa: E741
                    terms = [P[i, a] * P[k, a] * S[a, b] * Q[j, b] * Q[l, b] for a in range(4) for b in range(5)]
                    expected[2 * i + j, 2 * k + l] = sum(terms)
    close(gaussian.covariance(), expected, "covariance")
    close(gaussian.variance(), np.diag(expected).copy().reshape(3, 2), "variance")
    assert gaussian.shape == (3, 2)


def test_rotated_draws_have_its_covariance():
    gaussian, n = rotated(2, 3), 200_000
    draws = gaussian.sample(n, torch.Generator().manual_seed(0)).flatten(1)
    got, wanted = draws.T @ draws / n, gaussian.covariance()
    scale = (wanted.diagonal()[:, None] * wanted.diagonal() + wanted.square()).sqrt() / n**0.5  # of the estimate
    assert float(((got - wanted) / scale).abs().max()) < 5


def test_rotated_with_an_outer_product_is_kronecker():
    outputs, inputs = randn(3, 3), randn(2, 2)
    outputs, inputs = outputs @ outputs.T, inputs @ inputs.T
    (b, P), (a, Q) = torch.linalg.eigh(outputs), torch.linalg.eigh(inputs)
    close(Rotated(torch.outer(b, a), Q, P).covariance(), Kronecker(inputs, outputs).covariance(), "covariance")


class Positions(nn.Module):
    """A linear layer at several positions, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.twice = nn.Linear(3, 4), nn.Linear(4, 4)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.twice(self.first(x)).sum(1)
        return self.twice(h)


def convolution() -> nn.Sequential:
    net = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 2, groups=2), nn.Flatten())
    return net.append(nn.Linear(16, 3)).double()


NETWORKS = {
    "layers": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 2)).double(), (3,)),
    "joint": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), (3,)),
    "positions": (Positions, (6, 3)),
    "convolution": (convolution, (2, 6, 6)),
}


@pytest.mark.parametrize("uncertain", [False, True])
@pytest.mark.parametrize(
    "name, method, rank",
    [(name, method, rank) for name in NETWORKS for method, rank in (("adjoint", 0), ("adjoint", 6), ("dplr", 6))]
    + [("layers", "full", None), ("joint", "full", None)],
)
def test_rotated_predicts_what_a_full_covariance_does(name, method, rank, uncertain):
    torch.manual_seed(0)
    make, event = NETWORKS[name]
    net, x = make(), randn(2, *event)
    given = Belief(x, 0.1 * torch.rand_like(x), 0.1 * randn(1, *x.shape)) if uncertain else x
    weights = {n: p for n, p in net.named_parameters() if p.ndim > 1}
    if name == "joint":
        gaussians = {(n, n.replace("weight", "bias")): rotated(len(w), w[0].numel() + 1) for n, w in weights.items()}
    else:
        gaussians = {n: rotated(len(w), w[0].numel()) for n, w in weights.items()}
    dense = {key: Full(g.covariance(), g.shape) for key, g in gaussians.items()}
    with torch.no_grad():
        got, wanted = (
            favour.compile(net, x, posterior=Posterior(p), method=method, rank=rank)(given) for p in (gaussians, dense)
        )
    close(got.mean, wanted.mean, "mean")
    close(got.covariance_matrix, wanted.covariance_matrix, "covariance")


def test_rotated_is_differentiable_and_compiles():
    """Also where the input is zero and a noise vanishes."""
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double(), randn(2, 3)
    x[0] = 0
    predict = favour.compile(net, x, posterior={"0.weight": rotated(4, 3), "2.weight": rotated(2, 4)})

    def variance(t: Tensor) -> Tensor:
        return predict(t).covariance_matrix

    leaf = x.clone().requires_grad_(True)
    (slope,) = torch.autograd.grad(variance(leaf).sum(), leaf)
    step = 1e-6 * randn(2, 3)
    step[0] = 0
    with torch.no_grad():
        difference = (variance(x + step) - variance(x - step)).sum() / 2
        assert bool(slope.isfinite().all())
        assert_close((slope * step).sum(), difference, rtol=1e-5, atol=0)
        compiled = torch.compile(predict, fullgraph=True, backend="eager")
        close(compiled(x).covariance_matrix, variance(x), "compiled")


def test_rotated_errors():
    good = rotated(3, 2)
    with pytest.raises(ShapeMismatch, match=r"shapes \(3, 2\), \(3, 3\), \(2, 2\).*needs"):
        Posterior({"w": Rotated(good.diag, good.outputs, good.inputs)})
    with pytest.raises(InvalidType, match="floating-point"):
        Posterior({"w": Rotated(good.diag.long(), good.inputs, good.outputs)})
    with pytest.raises(InvalidValue, match="negative"):
        Posterior({"w": Rotated(-good.diag, good.inputs, good.outputs)}).validate({"w": torch.zeros(3, 2)})
    with pytest.raises(InvalidValue, match="NaN"):
        Posterior({"w": Rotated(good.diag, good.inputs * torch.nan, good.outputs)}).validate({"w": torch.zeros(3, 2)})
