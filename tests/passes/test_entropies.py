"""Entropies of a softmax as one operation: the same function, its derivatives, and beliefs against samples."""

from __future__ import annotations

import pytest
import torch
from networks import moments, relative_error
from torch import nn

import favour
from favour.rules.attention import negative_entropy
from favour.surrogate.value import Context, Value

F64 = torch.float64

WAYS = {
    "log-softmax": lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True),
    "log of softmax": lambda z: (z.softmax(-1) * z.softmax(-1).log()).sum(-1, keepdim=True),
    "log in front": lambda z: (z.log_softmax(1) * z.softmax(1)).sum(1, keepdim=True),
    "one softmax": lambda z: -((p := z.softmax(-1)) * p.log()).sum(-1, keepdim=True),
}


class Entropy(nn.Module):
    def __init__(self, way):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Dropout(0.3), nn.Linear(50, 5))
        self.way = way

    def forward(self, x):
        return self.way(self.trunk(x))


@pytest.mark.parametrize("name", WAYS)
def test_however_it_is_written(name):
    torch.manual_seed(0)
    model, x = Entropy(WAYS[name]).double(), torch.randn(6, 10, dtype=F64)
    predict = favour.compile(model, x, secant=True, check=False)
    silent = favour.compile(model, x, dropout={"trunk.2": 0.0}, check=False)
    torch.testing.assert_close(silent(x).mean, model.eval()(x))
    mean, matrix = moments(draws := predict.sample(x, n=4000, generator=torch.Generator().manual_seed(0)))
    off = ((predict(x).mean - mean) / draws.std(0)).square().mean().sqrt().item()
    relative = relative_error(predict(x).covariance_matrix, matrix)
    print(f"{name}: mean {off:.3f}, covariance {relative:.3f}")
    assert off < 0.1 and relative < 0.15


def test_derivatives_are_those_of_autograd():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, dtype=F64)

    def plain(t):
        return (t.softmax(1) * t.log_softmax(1)).sum(1)

    made = negative_entropy(Context(), Value(x), 1, False)
    torch.testing.assert_close(made.mean, plain(x))
    g = torch.randn(1, 2, 5, dtype=F64)
    ((_, G),) = made.maps
    t = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((plain(t) * g[0]).sum(), t)
    torch.testing.assert_close(G.transpose(g)[0], slope)
    H = torch.autograd.functional.hessian(lambda t: (plain(t) * g[0]).sum(), x).reshape(2, 15, 2, 15)
    H = torch.stack([H[0, :, 0], H[1, :, 1]])
    torch.testing.assert_close(made.second.diagonal(g)[0].flatten(1), H.diagonal(dim1=1, dim2=2))
    u = torch.randn(2, 2, 3, 5, dtype=F64)
    torch.testing.assert_close(
        made.second.forms(g, u)[:, 0], torch.einsum("pbi,bij,qbj->bpq", u.flatten(2), H, u.flatten(2))
    )


def test_mean_and_variance_of_its_second_order():
    """For a Gaussian x of small variance."""
    torch.manual_seed(0)
    x, v = torch.randn(3, 4, dtype=F64), 0.01 * torch.rand(3, 4, dtype=F64)
    made = negative_entropy(Context(), Value(x, v), 1, True)
    for row in range(3):
        H = torch.autograd.functional.hessian(lambda t: (t.softmax(0) * t.log_softmax(0)).sum(), x[row])
        S = v[row].diag()
        plain = (x[row].softmax(0) * x[row].log_softmax(0)).sum()
        torch.testing.assert_close(made.mean[row, 0], plain + 0.5 * (H @ S).trace(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(made.noises[0].diag()[row, 0], 0.5 * (H @ S @ H @ S).trace(), rtol=0.05, atol=1e-7)
