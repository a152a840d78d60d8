"""Draws of two values through what stays within their units, against all masks one by one."""

import itertools

import pytest
import torch
from fuzz.architectures import Function
from torch import nn

import favour

P = 0.3


def mean(dim):
    return Function(f"mean({dim})", lambda x: x.mean(dim))


def largest(*dims):
    return Function(f"amax{dims}", lambda x: x.amax(dims))


class Masked(nn.Module):
    """A mask for each token, made by hand."""

    def __init__(self, p):
        super().__init__()
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x * self.drop(torch.ones_like(x[:, :, :1]))


class Drawn(nn.Module):
    """The dropout of a kind with the draws of `keep`, which broadcast to its input."""

    def __init__(self, kind, keep):
        super().__init__()
        self.kind, self.keep = kind, keep

    def forward(self, x):
        q = 1 - P
        if not issubclass(self.kind, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            return x * self.keep / q
        low = -1.0507009873554805 * 1.6732632423543772
        a = (q * (1 + P * low**2)) ** -0.5
        return a * torch.where(self.keep > 0, x, low) - a * P * low


def batch_norm(width, kind=nn.BatchNorm2d):
    norm = kind(width)
    for tensor, low in ((norm.running_mean, -0.5), (norm.running_var, 0.5), (norm.weight.data, -1.0)):
        tensor.uniform_(low, 1.0)
    norm.bias.data.uniform_(-0.5, 0.5)
    return norm


# What is drawn for, the kind of dropout, what follows it, and the shape of the input; layers behind it are linear.
def tokens(kind, *layers, dim=4):
    return (2, 3, dim), (1, 3, 1), kind, layers


def channels(kind, *layers):
    return (2, 3, 2, 2), (1, 3, 1, 1), kind, layers


def entries(kind, *layers, shape=(2, 2, 2, 2)):
    return shape, (1, *shape[1:]), kind, layers


CASES = {
    "token, norm": lambda: tokens(nn.Dropout1d, nn.Linear(4, 6), nn.LayerNorm(6), mean(1)),
    "token, ReLU, norm": lambda: tokens(nn.Dropout1d, nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), mean(1)),
    "token by hand": lambda: tokens(Masked, nn.Linear(4, 6), nn.GELU(), nn.LayerNorm(6), mean(1)),
    "token, softmax": lambda: tokens(nn.Dropout1d, nn.Linear(4, 6), nn.Softmax(-1), mean(1)),
    "token, saturated": lambda: tokens(nn.FeatureAlphaDropout, nn.Linear(4, 6), nn.ReLU(), nn.LayerNorm(6), mean(1)),
    "channel, instance norm": lambda: channels(nn.Dropout2d, nn.InstanceNorm2d(3, affine=True), mean((2, 3))),
    "channel, a group each": lambda: channels(nn.Dropout2d, nn.GroupNorm(3, 3), nn.Tanh(), mean((2, 3))),
    "channel, norm, maximum": lambda: channels(nn.Dropout2d, batch_norm(3), nn.MaxPool2d(2), nn.Flatten()),
    "entry, norm": lambda: entries(nn.Dropout, batch_norm(2), nn.ReLU(), mean((2, 3))),
    "entry, saturated": lambda: entries(nn.AlphaDropout, batch_norm(2), nn.ELU(), mean((2, 3))),
    "entry, gate by hand": lambda: entries(
        nn.Dropout, Function("swish", lambda x: (x - 1) * x.sigmoid()), mean((2, 3))
    ),
    "entry, norm, maximum": lambda: entries(
        nn.Dropout, batch_norm(2), nn.ReLU(), nn.AdaptiveMaxPool2d(1), nn.Flatten()
    ),
    "entry, affine, maximum": lambda: entries(nn.Dropout, Function("2x+1", lambda x: 2 * x + 1), largest(2, 3)),
    "saturated, maximum": lambda: entries(nn.AlphaDropout, nn.AdaptiveMaxPool2d(1), nn.Flatten()),
    "maximum over tokens": lambda: entries(nn.Dropout, largest(1), shape=(2, 4, 2)),
    "norm, maximum over tokens": lambda: entries(nn.Dropout, nn.Hardtanh(), largest(1), shape=(2, 4, 2)),
}


def enumerated(x, masks, kind, layers):
    """Exact mean and covariance of the outputs."""
    found, weights = [], []
    count = masks[1:].numel()
    for bits in itertools.product((0.0, 1.0), repeat=count):
        keep = torch.tensor(bits, dtype=x.dtype).reshape(masks)
        y = nn.Sequential(Drawn(kind, keep), *layers)(x)
        found.append(y)
        weights.append((1 - P) ** sum(bits) * P ** (count - sum(bits)))
    y, w = torch.stack(found), torch.tensor(weights, dtype=x.dtype)
    m = torch.einsum("n,nbi->bi", w, y)
    return m, torch.einsum("n,nbi,nbj->bij", w, y - m, y - m)


@pytest.mark.parametrize("name", CASES)
def test_two_outcomes_are_exact_where_units_stay_apart(name):
    torch.manual_seed(0)
    shape, masks, kind, layers = CASES[name]()
    head = nn.Linear(nn.Sequential(*layers)(torch.randn(shape)).shape[1], 2)
    layers = [m.double().eval() for m in (*layers, head)]
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        mean, matrix = enumerated(x, torch.Size(masks), kind, layers)
    model = nn.Sequential(kind(P), *layers)
    belief = favour.compile(model, x, method="adjoint", check=False)(x)
    torch.testing.assert_close(belief.mean, mean, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(belief.covariance_matrix, matrix, rtol=1e-7, atol=1e-9)


def test_a_reader_on_the_way_keeps_its_draws():
    """The dropped tensor is read twice: nothing may be moved past one of its readers."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.drop, self.norm = nn.Dropout(P), batch_norm(2)

        def forward(self, x):
            d = self.drop(x)
            return (self.norm(d) - d).mean((2, 3))

    torch.manual_seed(0)
    model = Twice().double().eval()
    x = torch.randn(2, 2, 2, 2, dtype=torch.float64)
    rest = Function("rest", lambda d: (model.norm(d) - d).mean((2, 3)))
    with torch.no_grad():
        mean, matrix = enumerated(x, torch.Size((1, 2, 2, 2)), nn.Dropout, [rest])
    belief = favour.compile(model, x, method="adjoint", check=False)(x)
    torch.testing.assert_close(belief.mean, mean)
    torch.testing.assert_close(belief.covariance_matrix, matrix)
