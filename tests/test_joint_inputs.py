"""Beliefs across inputs: against closed forms where the network is linear, and draws of whole networks elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor, nn

import favour
from favour import Belief, Diagonal, Full, Kronecker, Posterior, Rows, scalar
from favour.scalar.between import hermite, remainder_between

F64 = torch.float64
DRAWS = 20_000


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def spread(*shape: int, seed: int = 0) -> Tensor:
    return 0.02 + 0.1 * torch.rand(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def blocks(joint: Belief) -> Tensor:
    """(group, n, group, n) of the only group."""
    q, n = joint.mean.shape[1], joint.mean[0, 0].numel()
    return joint.covariance_matrix[0].detach().reshape(q, n, q, n)


def close(a: Any, b: Any, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(torch.as_tensor(a), torch.as_tensor(b), rtol=tolerance, atol=tolerance)


# ---------------------------------------------------------------- closed forms


def linear_across(mean: np.ndarray, cov: np.ndarray, W: np.ndarray, b: np.ndarray, draws: np.ndarray, bias: np.ndarray):
    """y = Wx + b, one W for all inputs; mean (q, n), cov (q, n, q, n), draws Cov(W_ij, W_kl), bias its covariance."""
    q = len(mean)
    out = np.zeros((q, len(W), q, len(W)))
    for s in range(q):
        for t in range(q):
            second = cov[s, :, t] + np.outer(mean[s], mean[t])
            out[s, :, t] = W @ cov[s, :, t] @ W.T + np.einsum("ijkl,jl->ik", draws, second) + bias
    return mean @ W.T + b, out


def dropout_across(mean: np.ndarray, cov: np.ndarray, p: float, shared: bool):
    out = cov.copy()
    for s in range(len(mean)):
        for t in range(len(mean)):
            if s == t or shared:
                for i in range(mean.shape[1]):
                    out[s, i, t, i] += p / (1 - p) * (mean[s, i] * mean[t, i] + cov[s, i, t, i])
    return mean, out


def known(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    q, n = x.shape
    return x.numpy(), np.zeros((q, n, q, n))


@pytest.mark.parametrize("masks", ["shared", "independent"])
def test_mean_field_linear_network_equals_closed_form(masks: str) -> None:
    net = nn.Sequential(nn.Linear(3, 5), nn.Dropout(0.3), nn.Linear(5, 4), nn.Dropout(0.1), nn.Linear(4, 2)).double()
    posterior = {n: spread(*p.shape, seed=i) for i, (n, p) in enumerate(net.named_parameters())}
    x = randn(4, 3)
    joint = favour.compile(net, x, posterior=posterior).joint(x, masks=masks)
    state = known(x)
    for i, rate in ((0, 0.3), (2, 0.1), (4, None)):
        variance, bias = posterior[f"{i}.weight"], posterior[f"{i}.bias"]
        draws = np.diag(variance.numpy().ravel()).reshape(*variance.shape, *variance.shape)
        layer = net[i]
        state = linear_across(
            *state, layer.weight.detach().numpy(), layer.bias.detach().numpy(), draws, np.diag(bias.numpy())
        )
        state = state if rate is None else dropout_across(*state, rate, masks == "shared")
    close(joint.mean[0].detach(), state[0])
    close(blocks(joint), state[1])


def gaussian(kind: str, m: int, n: int) -> Any:
    if kind == "diagonal":
        return Diagonal(spread(m, n))
    if kind == "rows":
        return Rows(spread(m, n), 0.3 * randn(2, m, n))
    root = randn(m * n, m * n, seed=3) / 5
    if kind == "full":
        return Full(root @ root.mT, (m, n))
    A, B = randn(n, n, seed=1), randn(m, m, seed=2) / 4
    if kind == "kronecker":
        return Kronecker(inputs=A @ A.mT, outputs=B @ B.mT)
    return favour.Rotated(spread(m, n), inputs=A, outputs=B)


@pytest.mark.parametrize("kind", ["diagonal", "rows", "kronecker", "rotated", "full"])
@pytest.mark.parametrize("with_bias", [False, True])
def test_last_layer_posterior_equals_closed_form(kind: str, with_bias: bool) -> None:
    """With or without a bias in the same Gaussian, behind a known trunk."""
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    law = gaussian(kind, 2, 5 if with_bias else 4)
    key = ("2.weight", "2.bias") if with_bias else "2.weight"
    x = randn(3, 3)
    joint = favour.compile(net, x, posterior=Posterior({key: law})).joint(x)
    features = net[:2](x).detach()
    W, b = net[2].weight.detach().numpy(), net[2].bias.detach().numpy()
    if with_bias:
        features = torch.cat([features, torch.ones(3, 1, dtype=F64)], 1)
        W, b = np.concatenate([W, b[:, None]], 1), np.zeros(2)
    m, n = law.shape
    draws = law.covariance().numpy().reshape(m, n, m, n)
    mean, cov = linear_across(*known(features), W, b, draws, np.zeros((m, m)))
    close(joint.mean[0].detach(), mean)
    close(blocks(joint), cov)


@pytest.mark.parametrize("kind", ["kronecker", "rotated", "full"])
def test_coupled_weights_behind_dropout_equal_closed_form(kind: str) -> None:
    """Uncertain inputs of such a layer: exact where their covariance is diagonal, here dropout of known features."""
    net = nn.Sequential(nn.Dropout(0.3), nn.Linear(4, 2)).double()
    law, x = gaussian(kind, 2, 4), randn(3, 4)
    joint = favour.compile(net, x, posterior=Posterior({"1.weight": law})).joint(x)
    state = dropout_across(*known(x), 0.3, True)
    draws = law.covariance().numpy().reshape(2, 4, 2, 4)
    W, b = net[1].weight.detach().numpy(), net[1].bias.detach().numpy()
    close(blocks(joint), linear_across(*state, W, b, draws, np.zeros((2, 2)))[1])


def test_draws_shared_by_layers_and_linear_networks() -> None:
    """Latents move a layer and its bias together, the same for all inputs: (P_k x_a)(P_k x_b)ᵀ."""
    net = nn.Linear(3, 2).double()
    P, p = randn(4, 2, 3), randn(4, 2, seed=1)
    x = randn(3, 3, seed=2)
    joint = favour.compile(net, x, posterior=Posterior({}, latents={"weight": P, "bias": p})).joint(x)
    columns = torch.einsum("kmn,bn->kbm", P, x) + p[:, None]
    close(blocks(joint), torch.einsum("kam,kbn->ambn", columns, columns))


# ------------------------------------------------------- draws of whole networks


class OneMask(nn.Module):
    """Dropout with one mask for all inputs of a draw; inputs (draws, q, …)."""

    def __init__(self, p: float, channels: bool = False) -> None:
        super().__init__()
        self.p, self.channels = p, channels

    def forward(self, x: Tensor) -> Tensor:
        shape = (x.shape[0], 1, *x.shape[2:]) if not self.channels else (x.shape[0], 1, x.shape[2], 1, 1)
        return x * ((torch.rand(shape, dtype=x.dtype) >= self.p) / (1 - self.p))


def error(draws: Tensor, joint: Belief) -> tuple[float, float]:
    """Relative Frobenius error against draws (n, q, C), and what to expect of the draws alone (2 standard errors)."""
    flat = draws.flatten(1) - draws.flatten(1).mean(0)
    S = flat.mT @ flat / (len(flat) - 1)
    scale = S.norm()
    noise = ((flat.square().sum(1).square().mean() - scale.square()) / len(flat)).clamp_min(0).sqrt()
    found = (joint.covariance_matrix[0].detach() - S).norm() / scale
    return float(found), float(2 * noise / scale)


ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "gelu": nn.GELU}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_dropout_network_with_shared_masks(name: str) -> None:
    act = ACTIVATIONS[name]
    net = nn.Sequential(
        nn.Linear(3, 40), act(), nn.Dropout(0.2), nn.Linear(40, 40), act(), nn.Dropout(0.2), nn.Linear(40, 2)
    ).double()
    x = randn(4, 3)
    joint = favour.compile(net, x).joint(x)
    drawn = nn.Sequential(*[OneMask(m.p) if isinstance(m, nn.Dropout) else m for m in net])
    with torch.no_grad():
        draws = drawn(x.expand(DRAWS, -1, -1))
    found, noise = error(draws, joint)
    assert found < 0.03 + noise
    # Not so with the correlations between inputs left out.
    alone = favour.compile(net, x).joint(x, masks="independent")
    assert error(draws, alone)[0] > 0.3


def test_mean_field_network() -> None:
    net = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2)).double()
    posterior = {n: 0.1 * spread(*p.shape, seed=i) for i, (n, p) in enumerate(net.named_parameters())}
    x = randn(4, 3)
    joint = favour.compile(net, x, posterior=posterior).joint(x)
    draws = x.expand(DRAWS, -1, -1)
    with torch.no_grad():
        for i, layer in enumerate(net):
            if isinstance(layer, nn.Linear):
                W, b = (
                    t + posterior[f"{i}.{n}"].sqrt() * torch.randn(DRAWS, *t.shape, dtype=F64)
                    for n, t in layer.named_parameters()
                )
                draws = draws @ W.mT + b.unsqueeze(1)
            else:
                draws = layer(draws)
    found, noise = error(draws, joint)
    assert found < 0.05 + noise


def test_independent_masks_and_weights_agree_with_the_sampler() -> None:
    """`predict.sample` draws weights once for the batch and a mask for each input: that is `masks="independent"`."""
    net = nn.Sequential(nn.Linear(3, 30), nn.ReLU(), nn.Dropout(0.3), nn.Linear(30, 2)).double()
    x = randn(4, 3)
    predict = favour.compile(net, x, posterior={"3.weight": 0.5 * spread(2, 30)})
    draws = predict.sample(x, n=DRAWS, generator=torch.Generator().manual_seed(0))
    found, noise = error(draws, predict.joint(x, masks="independent"))
    assert found < 0.02 + noise
    assert error(draws, predict.joint(x))[0] > 0.1


class Conv(nn.Module):
    def __init__(self, drop: nn.Module) -> None:
        super().__init__()
        self.first, self.drop = nn.Conv2d(2, 6, 3, padding=1), drop
        self.second, self.head = nn.Conv2d(6, 6, 3), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.first(x)))
        return self.head(torch.relu(self.second(h)).mean((-2, -1)))


def test_convolutions_with_channel_dropout_and_a_posterior() -> None:
    net = Conv(nn.Dropout2d(0.2)).double()
    x = randn(3, 2, 5, 5)
    variance = 0.05 * spread(6, 6, 3, 3)
    joint = favour.compile(net, x, posterior={"second.weight": variance}).joint(x)
    n = 20_000
    with torch.no_grad():
        h = torch.relu(net.first(x)).expand(n, -1, -1, -1, -1)
        h = OneMask(0.2, channels=True)(h)
        kernels = net.second.weight + variance.sqrt() * torch.randn(n, 6, 6, 3, 3, dtype=F64)
        windows = nn.functional.unfold(h.flatten(0, 1), 3).reshape(n, 3, 54, 9)
        h = torch.einsum("ndw,nqwt->nqdt", kernels.flatten(2), windows) + net.second.bias[:, None]
        draws = net.head(torch.relu(h).mean(-1))
    found, noise = error(draws, joint)
    single = favour.compile(net, x, posterior={"second.weight": variance}).joint(x, group=1)
    assert found < 1.1 * max(error(draws[:, i : i + 1], single[i])[0] for i in range(3)) + noise
    assert found < 0.1 + noise


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.layer(torch.tanh(self.layer(x)))))


def test_weights_that_are_used_twice() -> None:
    net = Tied().double()
    x, variance = randn(3, 4), 0.3 * spread(4, 4)
    joint = favour.compile(net, x, posterior={"layer.weight": variance}).joint(x)
    with torch.no_grad():
        W = net.layer.weight + variance.sqrt() * torch.randn(DRAWS, 4, 4, dtype=F64)
        h = x.expand(DRAWS, -1, -1)
        draws = net.out(torch.tanh(torch.tanh(h @ W.mT) @ W.mT))
    found, noise = error(draws, joint)
    assert found < 0.04 + noise


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(5, 6), nn.LayerNorm(6), nn.Linear(6, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.table(tokens)).mean(1))


def test_embeddings_with_a_posterior_share_their_rows() -> None:
    net = Words().double()
    tokens = torch.tensor([[0, 1, 1], [1, 2, 3], [4, 4, 4]])
    variance = 0.3 * spread(5, 6)
    joint = favour.compile(net, tokens, posterior={"table.weight": variance}).joint(tokens)
    with torch.no_grad():
        tables = net.table.weight + variance.sqrt() * torch.randn(DRAWS, 5, 6, dtype=F64)
        draws = net.head(net.norm(tables[:, tokens]).mean(2))
    found, noise = error(draws, joint)
    assert found < 0.03 + noise
    assert blocks(joint)[0, :, 2].abs().max() < 1e-12  # no word in common


# -------------------------------------------------------------------- properties


def small(dropout: float = 0.2) -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, 10),
        nn.LayerNorm(10),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(10, 10),
        nn.ReLU(),
        nn.Linear(10, 2),
    ).double()


@pytest.mark.parametrize("masks", ["shared", "independent"])
def test_marginals_are_those_of_single_inputs(masks: str) -> None:
    net, x = small(), randn(5, 3)
    predict = favour.compile(net, x, posterior={"4.weight": 0.1 * spread(10, 10)}, method="adjoint")
    alone, joint = predict(x), predict.joint(x, masks=masks)
    close(joint.mean[0], alone.mean)
    for i in range(5):
        close(blocks(joint)[i, :, i], alone.covariance_matrix[i].detach(), 1e-12)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.drop, self.head = nn.GRU(3, 5, batch_first=True), nn.Dropout(0.2), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.cell(self.drop(x))[0][:, -1]))


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.3)
        self.pool, self.head = nn.MaxPool2d(2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.drop(torch.relu(self.norm(self.conv(x))))).mean((2, 3)) * 2)


ARCHITECTURES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], dict[str, tuple[int, ...]]]] = {
    "attention": (Attention, (4, 8), {"layer.linear1.weight": (16, 8)}),
    "recurrent": (Recurrent, (3, 3), {"head.weight": (2, 5)}),
    "tied": (Tied, (4,), {"layer.weight": (4, 4)}),
    "pooled": (Pooled, (2, 7, 7), {"conv.weight": (4, 2, 3, 3)}),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_keep_their_marginals(name: str) -> None:
    """Whatever is approximate between inputs: exact at a = b, positive semi-definite, and equal for equal inputs."""
    make, shape, variances = ARCHITECTURES[name]
    net = make().double().eval()
    x = randn(4, *shape)
    x[3] = x[0]
    posterior = {n: 0.1 * spread(*s) for n, s in variances.items()}
    predict = favour.compile(net, x, posterior=posterior, method="adjoint")
    alone, joint = predict(x), predict.joint(x)
    found = blocks(joint)
    for i in range(4):
        close(found[i, :, i], alone.covariance_matrix[i].detach(), 1e-9)
    close(found[0, :, 3], found[0, :, 0], 1e-9)
    values = torch.linalg.eigvalsh(joint.covariance_matrix[0])
    assert values.min() > -1e-12 * values.max()
    assert found[0, :, 1].abs().max() > 0.01 * found[0, :, 0].abs().max()


def test_the_same_input_twice_is_the_same_output() -> None:
    net, x = small(), randn(1, 3)
    joint = favour.compile(net, x).joint(x.expand(2, 3))
    found = blocks(joint)
    close(found[0, :, 1], found[0, :, 0], 1e-12)
    difference = torch.cat([torch.eye(2, dtype=F64), -torch.eye(2, dtype=F64)], 1)
    assert joint.linear(difference).variance.max() < 1e-12


def test_covariance_is_positive_semidefinite() -> None:
    net, x = small(0.5), randn(30, 3)
    predict = favour.compile(net, x, posterior={"4.weight": spread(10, 10)})
    values = torch.linalg.eigvalsh(predict.joint(x).covariance_matrix[0])
    assert values.min() > -1e-12 * values.max()


def test_groups_equal_looping() -> None:
    net, x = small(), randn(6, 3)
    predict = favour.compile(net, x, posterior={"4.weight": spread(10, 10)})
    together = predict.joint(x, group=2)
    assert together.mean.shape == (3, 2, 2)
    for i in range(3):
        one = predict.joint(x[2 * i : 2 * i + 2])
        close(together.mean[i].detach(), one.mean[0].detach())
        close(together.covariance_matrix[i].detach(), one.covariance_matrix[0].detach())


def test_single_input_and_known_network() -> None:
    net, x = small(0.0), randn(3, 3)
    joint = favour.compile(net, x).joint(x)
    assert joint.variance.max() == 0
    close(joint.mean[0].detach(), net(x).detach())
    predict = favour.compile(small(), x, method="adjoint")
    close(predict.joint(x[:1]).covariance_matrix.detach(), predict(x[:1]).covariance_matrix.detach())


def test_uncertain_inputs_are_independent() -> None:
    net = nn.Linear(3, 2).double()
    belief = Belief(randn(2, 3), diag=spread(2, 3), factor=randn(1, 2, 3))
    found = blocks(favour.compile(net, torch.zeros(2, 3, dtype=F64)).joint(belief))
    close(found[0, :, 1], torch.zeros(2, 2, dtype=F64))
    close(found[1, :, 1], belief.linear(net.weight).covariance_matrix[1].detach())


def test_differentiable_in_the_inputs() -> None:
    net, x = small(), randn(2, 3).requires_grad_()
    predict = favour.compile(net, x, posterior={"4.weight": 0.1 * spread(10, 10)})
    assert torch.autograd.gradcheck(lambda t: predict.joint(t).covariance_matrix, (x,), atol=1e-6)
    assert torch.autograd.gradcheck(lambda t: predict.joint(t, group=1).mean, (x,))


def test_gradients_are_finite_at_equal_inputs_and_dead_units() -> None:
    net = nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Dropout(0.2), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))
    with torch.no_grad():
        net[0].bias.sub_(50)  # nothing passes
    x = torch.randn(1, 2).repeat(3, 1).requires_grad_()
    joint = favour.compile(net, x.detach()).joint(x)
    (gradient,) = torch.autograd.grad(joint.covariance_matrix.sum() + joint.mean.sum(), x)
    assert gradient.isfinite().all()


def test_compiles_in_one_graph() -> None:
    net, x = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.ReLU(), nn.Linear(4, 1)).double(), randn(2, 3)
    predict = favour.compile(net, x, posterior={"3.weight": spread(1, 4)})
    eager = predict.joint(x).covariance_matrix
    compiled = torch.compile(lambda t: predict.joint(t).covariance_matrix, backend="eager", fullgraph=True)
    close(compiled(x).detach(), eager.detach())


def test_several_outputs_keep_their_structure() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.a, self.b = nn.Dropout(0.2), nn.Linear(3, 2), nn.Linear(3, 4)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.drop(x)
            return {"a": self.a(h), "b": self.b(h)}

    x = torch.randn(5, 3)
    joint = favour.compile(Heads(), x).joint(x)
    assert joint["a"].covariance_matrix.shape == (1, 10, 10)
    assert joint["b"].covariance_matrix.shape == (1, 20, 20)


def test_large_products_are_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = small(), randn(4, 3)
    predict = favour.compile(net, x, posterior={"4.weight": spread(10, 10)})
    whole = predict.joint(x, group=2).covariance_matrix
    monkeypatch.setattr("favour.methods.across.PIECE", 1)
    close(predict.joint(x, group=2).covariance_matrix.detach(), whole.detach(), 1e-12)


def test_refuses_what_it_cannot_do() -> None:
    predict = favour.compile(small(), randn(4, 3))
    with pytest.raises(favour.errors.InvalidValue, match="4 inputs do not make groups of 3"):
        predict.joint(randn(4, 3), group=3)
    with pytest.raises(favour.errors.InvalidType, match="whole number"):
        predict.joint(randn(4, 3), group=2.0)  # type: ignore[arg-type]
    with pytest.raises(favour.errors.InvalidValue, match="`masks` is 'same'"):
        predict.joint(randn(4, 3), masks="same")
    with pytest.raises(favour.errors.InvalidValue, match="there must be an input"):
        predict.joint(randn(0, 3))


# ------------------------------------------------- what activations leave over


def covariance_by_quadrature(f: Callable, mean: tuple, sd: tuple, rho: float) -> tuple[float, float]:
    """Cov(f(x_a), f(x_b)) and its first-order part for a bivariate Gaussian, on a fine product grid."""
    t = np.linspace(-8, 8, 4001)
    w = np.exp(-t * t / 2)
    w /= w.sum()
    fa, fb = f(mean[0] + sd[0] * t), None
    # E[f(x_b) | z_a] by Gauss–Hermite on a fine grid of the rest.
    s, v = special.roots_hermitenorm(200)
    v = v / v.sum()
    z = rho * t[:, None] + math.sqrt(1 - rho * rho) * s
    fb = f(mean[1] + sd[1] * z) @ v
    gb = f(mean[1] + sd[1] * t)
    whole = (w * fa * fb).sum() - (w * fa).sum() * (w * gb).sum()
    line = rho * (w * fa * t).sum() * (w * gb * t).sum()
    return whole - line, (w * gb**2).sum()


@pytest.mark.parametrize("name", ["relu", "tanh", "gelu", "sigmoid", "silu"])
@pytest.mark.parametrize("rho", [-0.7, 0.3, 0.9])
def test_remainder_between_inputs(name: str, rho: float) -> None:
    f = getattr(scalar, name)()
    value = {"relu": lambda x: np.maximum(x, 0)}.get(name, lambda x: f.value(torch.from_numpy(x)).numpy())
    mean, sd = torch.tensor([0.3, -0.8], dtype=F64), torch.tensor([0.9, 1.3], dtype=F64)
    variance = sd.square().unsqueeze(1)
    residual = f.moments(mean.unsqueeze(1), variance).residual
    c = torch.tensor([[1, rho], [rho, 1]], dtype=F64) * sd * sd[:, None]
    found = remainder_between(f, mean.unsqueeze(1), variance, residual, c.unsqueeze(-1)).squeeze(-1)
    close(found.diagonal(), residual.squeeze(1), 1e-12)
    want, _ = covariance_by_quadrature(value, tuple(mean.tolist()), tuple(sd.tolist()), rho)
    close(found[0, 1], found[1, 0])
    alphas = torch.stack(hermite(f, mean.unsqueeze(1), variance))
    rest = (residual - alphas.square().sum(0)).clamp_min(0)
    bound = 2 * abs(rho) ** 6 * rest.prod().sqrt().item()
    assert abs(found[0, 1].item() - want) < bound + 1e-3 * residual.max().item()
    assert bound < 0.12 * residual.max().item()
