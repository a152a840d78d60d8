"""The linearised network against its Jacobian by torch.func, written without masks, rules or sweeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import favour
from favour import methods
from favour.errors import InvalidValue

F64 = torch.float64
RATE = 0.3


class Perceptron(nn.Module):
    """Element-wise functions, a norm, and two dropouts."""

    masks = ((7,), (7,))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.drop, self.again = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(torch.tanh(self.norm(self.drop(F.gelu(self.first(x)))))))

    @staticmethod
    def reference(x: Tensor, w: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        h = a * F.gelu(F.linear(x, w["first.weight"], w["first.bias"]))
        h = b * torch.tanh(F.layer_norm(h, (7,), w["norm.weight"], w["norm.bias"]))
        return F.linear(h, w["last.weight"], w["last.bias"])


class Convolutional(nn.Module):
    """A kernel, maxima, and channels that drop together."""

    masks = ((3, 1, 1), (27,))

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(1, 3, 2), nn.Linear(27, 2)
        self.drop, self.again = nn.Dropout2d(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.again(F.max_pool2d(self.drop(F.silu(self.conv(x))), 2).flatten(1)))

    @staticmethod
    def reference(x: Tensor, w: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        h = F.max_pool2d(a * F.silu(F.conv2d(x, w["conv.weight"], w["conv.bias"])), 2)
        return F.linear(b * h.flatten(1), w["last.weight"], w["last.bias"])


class Attentive(nn.Module):
    """Products of what varies, and a softmax of them."""

    masks = ((4, 5), (4, 5))

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.last = nn.Linear(5, 15), nn.Linear(20, 2)
        self.drop, self.again = nn.Dropout(RATE), nn.Dropout(RATE)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.drop(x)).chunk(3, -1)
        return self.last(self.again((q @ k.mT).softmax(-1) @ v).flatten(1))

    @staticmethod
    def reference(x: Tensor, w: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        q, k, v = F.linear(a * x, w["mix.weight"], w["mix.bias"]).chunk(3, -1)
        h = torch.einsum("bij,bjd->bid", torch.softmax(torch.einsum("bid,bjd->bij", q, k), -1), v)
        return F.linear((b * h).flatten(1), w["last.weight"], w["last.bias"])


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "perceptron": (Perceptron, (4,)),
    "convolutional": (Convolutional, (1, 7, 7)),
    "attentive": (Attentive, (4, 5)),
}


def made(name: str) -> tuple[nn.Module, Tensor, dict[str, Tensor]]:
    torch.manual_seed(0)
    make, event = NETWORKS[name]
    model = make().double()
    generator = torch.Generator().manual_seed(1)
    variances = {
        n: 0.02 + 0.1 * torch.rand(p.shape, generator=generator, dtype=F64)
        for n, p in model.named_parameters()
        if n in ("first.weight", "first.bias", "conv.weight", "mix.weight", "last.weight", "last.bias")
    }
    return model, torch.randn(3, *event, generator=generator, dtype=F64), variances


def covariance(model: nn.Module, x: Tensor, variances: dict[str, Tensor], spread: Tensor | None = None) -> Tensor:
    """J Σ Jᵀ for each input, over weights, masks and, of variance `spread`, the input."""
    weights = {name: p.detach() for name, p in model.named_parameters()}
    found = []
    for row in x:
        ones = [torch.ones(1, *shape, dtype=F64) for shape in model.masks]

        def f(w: dict[str, Tensor], a: Tensor, b: Tensor, z: Tensor) -> Tensor:
            return model.reference(z, {**weights, **w}, a, b)[0]

        varied = {name: weights[name] for name in variances}
        J = torch.func.jacrev(f, argnums=(0, 1, 2, 3))(varied, *ones, row.unsqueeze(0))
        flat = [(J[0][name].flatten(1), v.flatten()) for name, v in variances.items()]
        flat += [(J[i].flatten(1), torch.full((J[i][0].numel(),), RATE / (1 - RATE), dtype=F64)) for i in (1, 2)]
        if spread is not None:
            flat.append((J[3].flatten(1), spread.flatten()))
        found.append(sum((jac * v) @ jac.T for jac, v in flat))
    return torch.stack(found)


@pytest.mark.parametrize("name", NETWORKS)
def test_covariance_is_that_of_the_jacobian(name: str) -> None:
    model, x, variances = made(name)
    predict = favour.compile(model, x, posterior=variances, method="linearised")
    with torch.no_grad():
        belief, plain = predict(x), model.eval()(x)
    torch.testing.assert_close(belief.mean, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(belief.covariance_matrix, covariance(model, x, variances), rtol=1e-8, atol=1e-12)


def test_uncertain_inputs_go_through_the_jacobian() -> None:
    model, x, variances = made("perceptron")
    spread = torch.rand(4, dtype=F64)
    predict = favour.compile(model, x, posterior=variances, method=methods.Linearised())
    given = favour.Belief(x, diag=spread.expand(x.shape))
    wanted = covariance(model, x, variances, spread)
    torch.testing.assert_close(predict(given).covariance_matrix, wanted, rtol=1e-8, atol=1e-12)


def test_attributions_add_up_and_are_of_the_jacobian() -> None:
    model, x, variances = made("perceptron")
    predict = favour.compile(model, x, posterior=variances, method="linearised")
    found = predict.attribute(x)
    only = {"last.weight": variances["last.weight"]}
    silent = covariance(model, x, only) - covariance(model, x, {})
    torch.testing.assert_close(found.covariances["last.weight"], silent, rtol=1e-8, atol=1e-12)
    torch.testing.assert_close(sum(found.covariances.values()), predict(x).covariance_matrix, rtol=1e-8, atol=1e-12)


def test_some_directions_are_those_of_the_whole() -> None:
    model, x, variances = made("perceptron")
    basis = torch.linalg.qr(torch.randn(3, 2, dtype=F64)).Q.T
    whole = favour.compile(model, x, posterior=variances, method="linearised")(x).covariance_matrix
    some = favour.compile(model, x, posterior=variances, method="linearised", directions=basis)(x).covariance_matrix
    torch.testing.assert_close(basis @ some @ basis.T, basis @ whole @ basis.T, rtol=1e-8, atol=1e-12)


def test_no_samples_are_held_against_it_and_it_compiles() -> None:
    model, x, variances = made("perceptron")
    predict = favour.compile(model, x, posterior=variances, method="linearised", check=True)
    assert "samples are of the network, not of its linearisation" in str(predict.checked)
    with torch.no_grad():
        torch.compiler.reset()
        fast = torch.compile(predict, fullgraph=True, backend="eager")(x)
        torch.compiler.reset()
        torch.testing.assert_close(fast.covariance_matrix, predict(x).covariance_matrix, rtol=1e-10, atol=1e-12)


def test_other_slopes_are_refused() -> None:
    model, x, _ = made("perceptron")
    with pytest.raises(InvalidValue, match="takes f′"):
        favour.compile(model, x, method="linearised", activation="matched")
