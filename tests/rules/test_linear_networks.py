"""Networks without activations: `full`, `dplr` of full rank and `adjoint` equal the closed form to 1e-10.

Every step (affine, dropout, a layer with random weights) has an exact covariance, whatever the posterior, so
the whole network has: the draws of a layer are independent of its input.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import reference
import torch
from test_linear import BATCH, F64, KINDS, close, posterior, randn
from torch import Tensor, nn

import favour
from favour import Belief, Diagonal
from favour.posterior import Gaussian


class Net(nn.Module):
    """linear–norm–dropout–linear–dropout–linear."""

    def __init__(self, sizes: tuple[int, int, int, int] = (4, 5, 5, 3), rates: Any = (0.2, 0.4)) -> None:
        super().__init__()
        a, b, c, d = sizes
        self.first, self.norm, self.drop = nn.Linear(a, b), nn.BatchNorm1d(b), nn.Dropout(rates[0])
        self.second, self.again, self.last = nn.Linear(b, c), nn.Dropout(rates[1]), nn.Linear(c, d)
        self.double().eval()
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2.0)
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(self.second(self.drop(self.norm(self.first(x))))))


def closed_form(net: Net, draws: dict[str, dict[str, Any]], mean: np.ndarray, given: np.ndarray) -> tuple[Any, Any]:
    def layer(name: str) -> tuple[str, dict[str, Any]]:
        module = getattr(net, name)
        known = {"weight": module.weight.detach().numpy(), "bias": module.bias.detach().numpy()}
        return "linear", known | draws.get(name, {})

    norm = net.norm
    scale = (norm.weight / (norm.running_var + norm.eps).sqrt()).detach()
    shift = (norm.bias - norm.running_mean * scale).detach()
    layers = [
        layer("first"),
        ("affine", {"scale": scale.numpy(), "shift": shift.numpy()}),
        ("dropout", {"p": net.drop.p}),
        layer("second"),
        ("dropout", {"p": net.again.p}),
        layer("last"),
    ]
    return reference.network(layers, mean, given)


def draw(net: Net, kind: str, names: tuple[str, ...]) -> tuple[dict[Any, Gaussian], dict[str, dict[str, Any]]]:
    """Posteriors for the named layers, as favour and as the reference take them."""
    gaussians: dict[Any, Gaussian] = {}
    draws: dict[str, dict[str, Any]] = {}
    for name in names:
        m, n = getattr(net, name).weight.shape
        joint = kind.startswith("joint ")
        drawn = posterior(kind.removeprefix("joint "), m, n + joint, scale=0.1)
        if joint:
            gaussians[f"{name}.weight", f"{name}.bias"] = drawn.gaussian
            draws[name] = {"weight_covariance": drawn.covariance, "joint": True}
        else:
            spread = 0.1 * torch.rand(m, dtype=F64)
            gaussians |= {f"{name}.weight": drawn.gaussian, f"{name}.bias": Diagonal(spread)}
            draws[name] = {"weight_covariance": drawn.covariance, "bias_covariance": spread.diag().numpy()}
    return gaussians, draws


def compare(net: Net, predict: Any, x: Any, draws: dict[str, dict[str, Any]]) -> None:
    with torch.no_grad():
        got = predict(x)
    mean = x.mean if isinstance(x, Belief) else x
    n = mean.shape[1]
    given = x.covariance_matrix.numpy() if isinstance(x, Belief) else np.zeros((len(mean), n, n))
    for row in range(len(mean)):
        expected = closed_form(net, draws, mean[row].numpy(), given[row])
        close(got.mean[row], expected[0], f"mean of row {row}")
        close(got.covariance_matrix[row], expected[1], f"covariance of row {row}")
        close(got.variance[row], np.diag(expected[1]).copy(), f"variance of row {row}")


ALL = ("first", "second", "last")
EXACT = [("full", None), ("dplr", 5), ("dplr", 50), ("adjoint", 5)]
POSTERIORS = [None, *KINDS, *(f"joint {kind}" for kind in KINDS)]


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("method, rank", EXACT)
def test_network_without_activations_is_exact(method, rank, kind):
    net = Net()
    gaussians, draws = draw(net, kind, ALL) if kind else ({}, {})
    x = randn(BATCH, 4)
    compare(net, favour.compile(net, x, method=method, rank=rank, posterior=gaussians), x, draws)


@pytest.mark.parametrize("kind", POSTERIORS)
@pytest.mark.parametrize("method, rank", EXACT)
def test_network_with_an_uncertain_input_is_exact(method, rank, kind):
    net = Net()
    gaussians, draws = draw(net, kind, ALL) if kind else ({}, {})
    x = Belief(randn(BATCH, 4), 0.3 * torch.rand(BATCH, 4, dtype=F64), 0.5 * randn(2, BATCH, 4))
    compare(net, favour.compile(net, x.mean, method=method, rank=rank, posterior=gaussians), x, draws)


@pytest.mark.parametrize(
    "kind, names",
    [
        (None, ()),
        ("diagonal", ALL),
        ("joint diagonal", ALL),
        ("rows", ("first", "second")),
        ("joint rows", ("first", "second")),
        ("kronecker", ("second",)),
        ("full", ("second",)),
    ],
)
def test_adjoint_of_rank_0_is_exact_where_marginals_suffice(kind, names):
    """Its forward sweep knows variances only. They are right while the second layer's input is uncorrelated.

    Mean-field weights and dropout need no more. Correlated rows do: they may not meet the last layer's
    correlated input, and correlated outputs of the first layer would make the second layer's variances wrong.
    """
    net = Net()
    gaussians, draws = draw(net, kind, names) if kind else ({}, {})
    x = randn(BATCH, 4)
    compare(net, favour.compile(net, x, method="adjoint", rank=0, posterior=gaussians), x, draws)


@pytest.mark.parametrize("kind", ["rows", "kronecker", "full"])
def test_adjoint_of_rank_0_is_first_order_otherwise(kind):
    """The same comparison must fail where the noise needs more than marginals, or it compares nothing."""
    net = Net()
    gaussians, draws = draw(net, kind, ("last",))
    x = randn(BATCH, 4)
    with pytest.raises(AssertionError, match="covariance of row"):
        compare(net, favour.compile(net, x, method="adjoint", rank=0, posterior=gaussians), x, draws)


@pytest.mark.parametrize("method, rank", [("full", None), ("dplr", 40), ("adjoint", 40)])
def test_output_too_wide_to_be_kept_dense(method, rank):
    net = Net((4, 5, 5, 40))
    x = randn(BATCH, 4)
    compare(net, favour.compile(net, x, method=method, rank=rank), x, {})


@pytest.mark.parametrize("method, rank", EXACT)
def test_single_unit_layers(method, rank):
    net = Net((1, 1, 1, 1))
    gaussians, draws = draw(net, "full", ALL)
    x = randn(1, 1)
    compare(net, favour.compile(net, x, method=method, rank=rank, posterior=gaussians), x, draws)


class Branched(nn.Module):
    """linear–dropout, then something that reads the result more than once, then linear."""

    def __init__(self, join: Any, width: int) -> None:
        super().__init__()
        self.first, self.drop, self.join, self.last = (
            nn.Linear(4, 5),
            nn.Dropout(0.3),
            join,
            nn.Linear(width, 3),
        )
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.join(self.drop(self.first(x))))


def _one_piece(h: Tensor) -> Tensor:
    """One of several results, read twice."""
    piece = h.split([4, 1], 1)[0]
    return piece - piece.flip([1])


JOINS = {
    "piece": (_one_piece, 4),
    "twice": (lambda h: torch.cat([h, h], 1), 10),
    "stacked": (lambda h: torch.stack([h, h.flip([1])], -1).flatten(1), 10),
    "slice": (lambda h: torch.cat([h, 2 * h[:, :2]], 1), 7),
    "mirrored": (lambda h: h - h.flip([1]), 5),
    "outer": (lambda h: (h[:, :, None] + h[:, None, :]).flatten(1), 25),
    "split": (lambda h: torch.cat(h.split([2, 3], 1)[::-1], 1), 5),
    "unbind": (lambda h: torch.stack(h.unbind(1)[:3], 1), 3),
    "copies": (lambda h: h[:, None].expand(-1, 3, -1).flatten(1), 15),
}


@pytest.mark.parametrize("method, rank", [("full", None), ("dplr", 25), ("adjoint", 0), ("adjoint", 25)])
@pytest.mark.parametrize("name", JOINS)
def test_branches_of_one_tensor_stay_aligned(name, method, rank):
    join, width = JOINS[name]
    net = Branched(join, width)
    x = randn(BATCH, 4)
    got = favour.compile(net, x, method=method, rank=rank)(x)
    hidden = net.first(x).detach()
    for row in range(BATCH):
        after = reference.dense_matrix(lambda h: net.last(join(h)).detach(), hidden[row : row + 1]).numpy()
        _, inner = reference.dropout(hidden[row].numpy(), np.zeros((5, 5)), net.drop.p)
        close(got.covariance_matrix[row].detach(), after @ inner @ after.T, f"covariance of row {row}")
