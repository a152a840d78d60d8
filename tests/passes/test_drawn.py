"""Parameters with a posterior that are read as plain tensors, against samples of the parameters."""

from __future__ import annotations

import pytest
import torch
from networks import moments, relative_error
from torch import nn

import favour
from favour.errors import UnsupportedOperation

F64 = torch.float64


class Tokens(nn.Module):
    """A class token, two tables of positions, scales, and norms, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 16))
        self.places, self.table = nn.Parameter(0.3 * torch.randn(1, 7, 16)), nn.Parameter(0.3 * torch.randn(9, 16))
        self.scale, self.gain = nn.Parameter(torch.rand(16)), nn.Parameter(torch.tensor(0.7))
        self.embed, self.head, self.mix = nn.Linear(4, 16), nn.Linear(16, 3), nn.Linear(7, 7)
        self.norm, self.other = nn.LayerNorm(16), nn.RMSNorm(16)

    def forward(self, x):
        y = torch.cat([self.token.expand(x.shape[0], -1, -1), self.embed(x)], 1) + self.places
        y = y + self.table[: y.shape[1]].unsqueeze(0)
        y = y + self.scale * torch.tanh(self.norm(y))
        y = y + self.gain * self.mix(self.other(y).mT).mT + self.places
        return self.head(self.norm(y)[:, 0])


class Channels(nn.Module):
    """Norms over channels and a scale for each."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Conv2d(1, 6, 3), nn.Conv2d(6, 6, 3), nn.Linear(6, 3)
        self.batch, self.group, self.instance = nn.BatchNorm2d(6), nn.GroupNorm(2, 6), nn.InstanceNorm2d(6, affine=True)
        self.scale, self.logs = nn.Parameter(torch.randn(6, 1, 1)), nn.Parameter(torch.zeros(1, 6, 1, 1))

    def forward(self, x):
        y = self.group(self.second(torch.tanh(self.batch(self.first(x)))))
        return self.head((torch.relu(self.instance(y)) * self.scale * self.logs.exp() + y).mean((2, 3)))


INPUTS = {Tokens: (6, 4), Channels: (1, 7, 7)}
NAMES = {
    Tokens: ["token", "places", "table", "scale", "gain", "norm.weight", "norm.bias", "other.weight"],
    Channels: ["batch.weight", "batch.bias", "group.weight", "group.bias", "instance.bias", "scale", "logs"],
}
CASES = [(kind, [name]) for kind in NAMES for name in NAMES[kind]] + [(kind, NAMES[kind]) for kind in NAMES]


def built(kind, names, spread=0.05):
    torch.manual_seed(0)
    model = kind().double().eval().requires_grad_(False)
    posterior = {n: torch.full_like(p, spread**2) for n, p in model.named_parameters() if n in names}
    assert len(posterior) == len(names)
    return model, torch.randn(4, *INPUTS[kind], dtype=F64), posterior


@pytest.mark.parametrize("kind, names", CASES, ids=lambda v: v.__name__ if isinstance(v, type) else "+".join(v))
def test_parameter_against_sampling(kind, names):
    model, x, posterior = built(kind, names)
    predict = favour.compile(model, x, posterior=posterior, method="adjoint")
    draws = predict.sample(x, n=3000, generator=torch.Generator().manual_seed(1))
    mean, matrix = moments(draws)
    belief = predict(x)
    # 3,000 draws alone make 0.02 and about 0.03.
    assert ((belief.mean - mean).abs() / draws.std(0)).mean() < 0.1
    assert relative_error(belief.covariance_matrix, matrix) < 0.1


@pytest.mark.parametrize("kind", NAMES)
def test_no_variance_gives_the_model(kind):
    model, x, posterior = built(kind, NAMES[kind], spread=0.0)
    belief = favour.compile(model, x, posterior=posterior)(x)
    torch.testing.assert_close(belief.mean, model(x), atol=1e-10, rtol=1e-10)
    assert torch.count_nonzero(belief.variance) == 0


@pytest.mark.parametrize("method", ["dplr", "full", "diag"])
def test_other_methods_take_them(method):
    model, x, posterior = built(Tokens, ["token", "places", "norm.weight"])
    expected = favour.compile(model, x, posterior=posterior, method="adjoint")(x).variance
    got = favour.compile(model, x, posterior=posterior, method=method)(x).variance
    assert (got / expected - 1).abs().max() < (0.1 if method == "full" else 1.0)


def test_attribution_names_the_parameter():
    model, x, posterior = built(Tokens, ["token", "norm.weight"])
    sources = favour.compile(model, x, posterior=posterior, method="adjoint").attribute(x)
    assert {"token", "norm.weight"} <= set(sources.sources)


def test_a_use_without_a_rule_says_where():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return x * self.table.flip(0).sum(0)

    with pytest.raises(UnsupportedOperation, match=r"flip.*`table`, which has a posterior"):
        favour.compile(Odd(), torch.randn(2, 4), posterior={"table": torch.ones(3, 4)})
