"""Covariances of tensors that were made from one, against dense matrices and samples."""

from __future__ import annotations

import pytest
import torch
from cases import F64, rand, randn
from networks import moments, relative_error
from torch import nn

import favour
from favour.surrogate import Surrogate, Unavailable, identity, scaling
from favour.surrogate.attending import Scores, met
from favour.surrogate.matrices import Matrix, passing
from favour.surrogate.siblings import Siblings, covariance_at, meeting, paths_of
from favour.surrogate.value import Value


def origin(*shape):
    z = Value(randn(*shape), rand(shape))
    Siblings.origin(z)
    return z


def between(x, y, G, H):
    """Cov((Gx)_i, (Hy)_i), as far as is known."""
    common = meeting(x, y, G, H)
    return covariance_at(*common) if isinstance(common, tuple) else common


def made(z, *maps):
    """What maps make of a value, with the noise of an activation."""
    for G in maps:
        mean = G.apply(z.mean.unsqueeze(0)).squeeze(0)
        told = Siblings.after(Surrogate(mean, [(z, G)]))
        z = Value(mean, G.square(z.variance) + rand(mean.shape), carried=() if told is None else (told,))
    return z


def test_of_two_maps_of_one_value_it_is_that_of_their_matrices():
    torch.manual_seed(0)
    z = origin(3, 5)
    W, V, slope = randn(4, 5), randn(4, 5), randn(3, 4)
    x, y = made(z, Matrix(passing(W))), made(z, Matrix(passing(V)), scaling(slope))
    expected = torch.einsum("ij,bj,bi,ij->bi", W, z.variance, slope, V)
    torch.testing.assert_close(between(x, y, identity(), identity()), expected)
    G = scaling(randn(3, 4))
    torch.testing.assert_close(between(x, y, G, identity()), G.factor * expected)
    alone = made(origin(3, 5), Matrix(passing(V)))
    assert between(x, alone, identity(), identity()) is None


def test_the_latest_origin_counts_and_long_paths_end():
    torch.manual_seed(0)
    z = origin(3, 4)
    layers = [Matrix(passing(randn(4, 4))) for _ in range(3)]
    x = made(z, layers[0])
    Siblings.origin(x)
    y = made(x, layers[1])
    expected = layers[1].weight.diagonal() * x.variance
    torch.testing.assert_close(between(x, y, identity(), identity()), expected)
    assert len(paths_of(y)) == 2 and len(paths_of(made(y, layers[2]))) == 1
    refused = between(made(z, layers[0]), made(z, layers[0], layers[1]), identity(), identity())
    assert isinstance(refused, Unavailable) and refused.reason
    met_again = Siblings.after(Surrogate(x.mean, [(x, identity()), (y, identity())]))
    assert met_again is None


def test_attention_weights_and_values_against_loops():
    """E[Σ_j δs_ij δv_j] to first order, with one token and one head after the other."""
    torch.manual_seed(0)
    B, H, T, d, e = 2, 2, 3, 4, 5
    z = origin(B, T, d)
    weights = [randn(H * e, d) for _ in range(3)]

    def heads(W):
        x = made(z, Matrix(passing(W)))
        split = favour.rules.RULES[torch.ops.aten.unflatten.int].function(None, x, -1, [H, e])
        y = made(x, split.maps[0][1])
        turned = favour.rules.RULES[torch.ops.aten.transpose.int].function(None, y, 1, 2)
        return made(y, turned.maps[0][1])

    q, k, v = (heads(W) for W in weights)
    kT = made(k, favour.rules.RULES[torch.ops.aten.transpose.int].function(None, k, -2, -1).maps[0][1])
    s = (0.3 * q.mean @ kT.mean).softmax(-1)
    scores = Scores(q.mean, kT.mean, paths_of(q), paths_of(kT), 0.3, weights=True)
    got = met(Value(s, rand(s.shape), carried=(scores,)), v)
    Q, K, V = (W.reshape(H, e, d) for W in weights)
    expected = torch.zeros(B, H, T, e, dtype=F64)
    for b in range(B):
        for h in range(H):
            for i in range(T):
                p = s[b, h, i]
                J = p.diag() - torch.outer(p, p)
                for j in range(T):
                    S = z.variance[b, j].diag()
                    for n in range(T):
                        common = torch.zeros(d, dtype=F64)  # of δℓ_in with δz_j
                        if n == j:
                            common = common + K[h].T @ q.mean[b, h, i]
                        if i == j:
                            common = common + Q[h].T @ k.mean[b, h, n]
                        expected[b, h, i] += 0.3 * J[j, n] * V[h] @ S @ common
    torch.testing.assert_close(got, expected)


class Heads(nn.Module):
    def __init__(self, meet, wide=5):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 50), nn.ReLU(), nn.Dropout(0.3))
        self.a, self.b, self.meet = nn.Linear(50, wide), nn.Linear(50, wide), meet

    def forward(self, x):
        h = self.trunk(x)
        return self.meet(self.a(h), self.b(h))


class Attention(nn.Module):
    """By hand, or by torch."""

    def __init__(self, by_hand):
        super().__init__()
        self.drop, self.qkv, self.by_hand = nn.Dropout(0.2), nn.Linear(24, 72), by_hand

    def forward(self, x):
        q, k, v = self.qkv(self.drop(x)).chunk(3, -1)
        if self.by_hand:
            return ((q @ k.mT / 24**0.5).softmax(-1) @ v).mean(1)
        return nn.functional.scaled_dot_product_attention(q, k, v).mean(1)


def off(model, x):
    """Error of the mean in standard deviations."""
    predict = favour.compile(model, x, method="adjoint", check=False)
    mean, _ = moments(draws := predict.sample(x, n=4000, generator=torch.Generator().manual_seed(0)))
    return ((predict(x).mean - mean) / draws.std(0)).square().mean().sqrt().item()


@pytest.mark.parametrize("name", ["product", "quotient"])
def test_heads_of_one_trunk(name, monkeypatch):
    torch.manual_seed(0)
    meet = {
        "product": torch.mul,
        "quotient": lambda a, b: a / (2 + b),
    }[name]
    model, x = Heads(meet), torch.randn(6, 10)
    with_siblings = off(model, x)
    monkeypatch.setattr("favour.surrogate.siblings.Siblings.origin", lambda value: None)
    without = off(model, x)
    print(f"{name}: {without:.3f}, with siblings {with_siblings:.3f}")
    assert with_siblings < 0.06 and with_siblings < 0.6 * without


@pytest.mark.parametrize("by_hand", [True, False])
def test_attention_of_one_tensor(by_hand, monkeypatch):
    torch.manual_seed(0)
    model, x = Attention(by_hand), 1.5 * torch.randn(6, 8, 24)
    with_siblings = off(model, x)
    monkeypatch.setattr("favour.surrogate.siblings.Siblings.origin", lambda value: None)
    without = off(model, x)
    print(f"by hand {by_hand}: {without:.3f}, with siblings {with_siblings:.3f}")
    assert with_siblings < 0.8 * without


@pytest.mark.parametrize("name", ["product", "gate", "variance", "spread", "norm"])
def test_secants_through_what_bends_in_several_entries(name):
    """Dropout's skewness meets the second derivatives of products, variances and norms."""
    torch.manual_seed(0)
    meet = {
        "product": torch.mul,
        "gate": lambda a, b: a.sigmoid() * b,
        "variance": lambda a, b: a.var(-1, keepdim=True),
        "spread": lambda a, b: b.std(-1, keepdim=True),
        "norm": lambda a, b: nn.functional.layer_norm(a, (50,))[..., :4],
    }[name]
    wide = 50 if name in ("variance", "spread", "norm") else 5
    model, x = Heads(meet, wide), torch.randn(6, 10)
    predict = favour.compile(model, x, secant=True, check=False)
    draws = predict.sample(x, n=4000, generator=torch.Generator().manual_seed(0))
    matrix = moments(draws)[1]
    tangents = relative_error(favour.compile(model, x, effort="fast", check=False)(x).covariance_matrix, matrix)
    secants = relative_error(predict(x).covariance_matrix, matrix)
    print(f"{name}: tangents {tangents:.3f}, secants {secants:.3f}")
    assert secants < 0.15 and secants < tangents + 0.02
