"""A seeded grammar of what is hard for a Gaussian: maxima over draws of two values, norms behind them, second order.

    maxima   = affine | tokens | pointwise | alpha | channels | monotone
    norms    = token masks | channel masks | few entries a group | batch norm
    second   = distances | norm | spread | power mean | entropy | recurrence | pairs of tokens | Gram matrix | product

`relative(kind, seed)` is a function of both alone and leaves torch's global random state as it was; `network(seed)`
goes through the kinds in turn. Widths, rates (.05–.5), activations, kernels and the statistics of norms are drawn.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from fuzz.architectures import BATCH, Distances, Function, Network
from torch import Tensor, nn

ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.ReLU, nn.GELU, nn.SiLU, nn.ELU, nn.Tanh, nn.LeakyReLU)


class Draws:
    """What a seed chooses."""

    def __init__(self, kind: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, *kind.encode()])
        self.words: list[str] = []

    def one(self, *choices):
        return choices[int(self.rng.integers(len(choices)))]

    def says(self, word: str) -> None:
        self.words.append(word)

    def rate(self) -> float:
        p = self.one(0.05, 0.1, 0.2, 0.3, 0.5)
        self.says(str(p))
        return p

    def width(self, *choices: int) -> int:
        n = self.one(*(choices or (4, 8, 12, 16)))
        self.says(f"width {n}")
        return n

    def activation(self) -> nn.Module:
        made = self.one(*ACTIVATIONS)()
        self.says(type(made).__name__)
        return made

    def batch_norm(self, norm: nn.Module) -> nn.Module:
        with torch.no_grad():
            for tensor, low, high in (
                (norm.running_mean, -0.5, 0.5),
                (norm.running_var, 0.5, 2.0),
                (norm.weight, 0.5, 1.5),
                (norm.bias, -0.5, 0.5),
            ):
                tensor.copy_(torch.from_numpy(self.rng.uniform(low, high, tensor.shape)))
        return norm

    def pictures(self) -> Tensor:
        side = self.one(6, 8, 10)
        return torch.from_numpy(self.rng.standard_normal((BATCH, 3, side, side)))

    def vectors(self, width: int = 10) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal((BATCH, width)))

    def tokens(self, length: int, width: int) -> Tensor:
        return torch.from_numpy(self.rng.standard_normal((BATCH, length, width)))


class Beside(nn.Module):
    """x and another function of it, one behind the other in dimension 1."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.other(x)], 1)


class Masked(nn.Module):
    """A draw for every token, written by hand."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return x * F.dropout(torch.ones_like(x[:, :, :1]), self.p)


class States(nn.Module):
    """All states of a recurrence."""

    def __init__(self, cell: nn.RNNBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Product(nn.Module):
    """The product of two heads."""

    def __init__(self, width: int, outer: int, squash: bool) -> None:
        super().__init__()
        self.a, self.b, self.squash = nn.Linear(width, outer), nn.Linear(width, outer), squash

    def forward(self, x: Tensor) -> Tensor:
        b = self.b(x)
        return self.a(x) * (b.sigmoid() if self.squash else b)


def _global_max(d: Draws, width: int) -> list[nn.Module]:
    n = d.one(1, 1, 2)
    return [nn.AdaptiveMaxPool2d(n), nn.Flatten(), nn.Linear(width * n * n, 3)]


def max_affine(d: Draws) -> tuple[nn.Module, Tensor]:
    n, k = d.width(4, 8, 16), d.one(1, 3)
    x = d.pictures()
    way = d.one("BatchNorm", "2x+1", "-x", "concat", "upsample", "GroupNorm", "InstanceNorm")
    d.says(way)
    layers: list[nn.Module] = [nn.Conv2d(3, n, k, padding=k // 2), nn.Dropout(d.rate())]
    wide = n
    if way == "BatchNorm":
        layers.append(d.batch_norm(nn.BatchNorm2d(n)))
    elif way == "2x+1":
        layers.append(Function("2x+1", lambda x: x * 2 + 1))
    elif way == "-x":
        layers.append(Function("1-x", lambda x: 1 - 0.7 * x))
    elif way == "concat":
        layers.append(Beside(nn.Sequential(d.batch_norm(nn.BatchNorm2d(n)))))
        wide = 2 * n
    elif way == "upsample":
        layers.append(nn.Upsample(scale_factor=2, mode=d.one("nearest", "bilinear")))
    elif way == "GroupNorm":
        layers.append(nn.GroupNorm(d.one(1, 2), n))
    else:
        layers.append(nn.InstanceNorm2d(n))
    layers += [d.activation(), *_global_max(d, wide)]
    return nn.Sequential(*layers), x


def max_tokens(d: Draws) -> tuple[nn.Module, Tensor]:
    n, length = d.width(8, 16), d.one(5, 12)
    layers = [nn.Linear(8, n), d.activation(), nn.Dropout(d.rate())]
    if d.one(True, False):
        d.says("LayerNorm")
        layers.append(nn.LayerNorm(n))
    dim = d.one(1, 1, 2)
    layers += [Function("amax", lambda x: x.amax(dim)), nn.Linear(n if dim == 1 else length, 3)]
    return nn.Sequential(*layers), d.tokens(length, 8)


def max_pointwise(d: Draws) -> tuple[nn.Module, Tensor]:
    n, m = d.width(4, 8, 16), d.width(4, 8)
    drop = d.one(nn.Dropout, nn.Dropout, nn.Dropout2d)
    d.says(drop.__name__)
    layers = [nn.Conv2d(3, n, 3, padding=1), d.activation(), drop(d.rate()), nn.Conv2d(n, m, 1)]
    if d.one(True, False):
        layers.append(d.activation())
    if d.one(True, False):
        d.says("MaxPool2d(2)")
        x = d.pictures()
        return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)), x
    return nn.Sequential(*layers, *_global_max(d, m)), d.pictures()


def max_alpha(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(4, 8)
    drop = d.one(nn.AlphaDropout, nn.FeatureAlphaDropout)
    d.says(drop.__name__)
    layers = [nn.Conv2d(3, n, 3, padding=1), nn.SELU(), drop(d.rate())]
    if d.one(True, False):
        d.says("BatchNorm")
        layers.append(d.batch_norm(nn.BatchNorm2d(n)))
    return nn.Sequential(*layers, *_global_max(d, n)), d.pictures()


def max_channels(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width()
    layers = [nn.Conv2d(3, n, 3, padding=1), d.activation(), nn.Dropout2d(d.rate())]
    if d.one(True, True, False):
        d.says("BatchNorm")
        layers.append(d.batch_norm(nn.BatchNorm2d(n)))
        if d.one(True, False):
            layers.append(d.activation())
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)), d.pictures()


def max_monotone(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width()
    layers = [nn.Dropout(d.rate()), nn.Conv2d(3, n, 3, padding=1), d.batch_norm(nn.BatchNorm2d(n))]
    layers.append(d.one(nn.ELU, nn.Softplus, nn.Tanh, nn.SELU, nn.Hardtanh)())
    d.says(type(layers[-1]).__name__)
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.LazyLinear(3)), d.pictures()


def norm_tokens(d: Draws) -> tuple[nn.Module, Tensor]:
    n, m, length = d.width(8, 16), d.width(8, 16, 32), d.one(4, 8, 12)
    if d.one(True, False):
        d.says("embedding")
        layers: list[nn.Module] = [nn.Embedding(50, n)]
        x = torch.from_numpy(d.rng.integers(0, 50, (BATCH, length)))
    else:
        layers, x = [nn.Linear(6, n)], d.tokens(length, 6)
    p = d.rate()
    layers += [d.one(nn.Dropout1d(p), Masked(p)), nn.Linear(n, m, bias=d.one(True, False))]
    d.says(type(layers[-2]).__name__)
    if d.one(True, False):
        layers.append(d.activation())
    norm = d.one("LayerNorm", "RMSNorm", "two LayerNorms")
    d.says(norm)
    layers += [nn.RMSNorm(m)] if norm == "RMSNorm" else [nn.LayerNorm(m)]
    if norm == "two LayerNorms":
        layers += [nn.Linear(m, m), d.activation(), nn.LayerNorm(m)]
    return nn.Sequential(*layers, Function("mean(1)", lambda x: x.mean(1)), nn.Linear(m, 3)), x


def norm_channels(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(8, 16)
    norm = d.one("InstanceNorm", "GroupNorm", "LayerNorm")
    d.says(norm)
    x = d.pictures()
    made = {
        "InstanceNorm": nn.InstanceNorm2d(n, affine=d.one(True, False)),
        "GroupNorm": nn.GroupNorm(d.one(1, 2, 4), n),
        "LayerNorm": nn.LayerNorm([n, *x.shape[2:]]),
    }[norm]
    layers = [nn.Conv2d(3, n, 3, padding=1), d.activation(), nn.Dropout2d(d.rate()), made]
    layers += [nn.Conv2d(n, 8, 3, padding=1), d.activation(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers), x


def norm_groups(d: Draws) -> tuple[nn.Module, Tensor]:
    n, k = 48, d.one(2, 3, 4, 8)
    d.says(f"{k} a group")
    layers = [nn.Linear(10, 48), d.activation(), nn.Dropout(d.rate()), nn.Linear(48, n), nn.GroupNorm(n // k, n)]
    if d.one(True, False):
        layers += [d.activation()]
    return nn.Sequential(*layers, nn.Linear(n, 3)), d.vectors()


def norm_batch(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width()
    drop = d.one(nn.Dropout, nn.Dropout2d)
    d.says(drop.__name__)
    layers: list[nn.Module] = []
    wide = 3
    for _ in range(d.one(1, 2)):
        layers += [nn.Conv2d(wide, n, 3, padding=1), drop(d.rate()), d.batch_norm(nn.BatchNorm2d(n)), d.activation()]
        wide = n
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(n, 3)), d.pictures()


def _trunk(d: Draws) -> tuple[list[nn.Module], int]:
    n, m = d.width(20, 50), d.width(20, 50)
    return [nn.Linear(10, n), d.activation(), nn.Dropout(d.rate()), nn.Linear(n, m)], m


def second_distances(d: Draws) -> tuple[nn.Module, Tensor]:
    layers, m = _trunk(d)
    return nn.Sequential(*layers, Distances(m, d.one(3, 10))), d.vectors()


def second_norm(d: Draws) -> tuple[nn.Module, Tensor]:
    layers, _ = _trunk(d)
    return nn.Sequential(*layers, Function("norm", lambda x: x.norm(dim=-1, keepdim=True))), d.vectors()


def second_spread(d: Draws) -> tuple[nn.Module, Tensor]:
    layers, _ = _trunk(d)
    std = d.one(True, False)
    d.says("std" if std else "var")
    spread = Function("spread", lambda x: x.std(-1, keepdim=True) if std else x.var(-1, keepdim=True))
    return nn.Sequential(*layers, spread), d.vectors()


def second_power_mean(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(4, 8)
    layers = [nn.Conv2d(3, n, 3, padding=1), nn.ReLU(), d.one(nn.Dropout, nn.Dropout2d)(d.rate())]
    d.says(type(layers[-1]).__name__)
    if d.one(True, False):
        layers += [nn.Conv2d(n, n, 3, padding=1), nn.ReLU()]
    power = Function("GeM", lambda x: x.clamp(1e-3).pow(3).mean((2, 3)).pow(1 / 3))
    return nn.Sequential(*layers, power, nn.Linear(n, 3)), d.pictures()


def second_entropy(d: Draws) -> tuple[nn.Module, Tensor]:
    layers, m = _trunk(d)
    entropy = Function("entropy", lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True))
    return nn.Sequential(*layers, *d.one([], [nn.Linear(m, 5)]), entropy), d.vectors()


def second_recurrence(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(8, 16)
    cell = d.one(nn.GRU, nn.LSTM)(12, n, batch_first=True)
    reader = d.one("std", "mean", "last")
    d.says(f"{type(cell).__name__} {reader}")
    read = {"std": lambda x: x.std(1), "mean": lambda x: x.mean(1), "last": lambda x: x[:, -1]}[reader]
    return nn.Sequential(nn.Dropout(d.rate()), States(cell), Function(reader, read)), d.tokens(6, 12)


def second_pairs(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(8, 16)
    layers = [nn.Linear(8, n), d.activation(), nn.Dropout(d.rate()), nn.Linear(n, n)]
    cdist = d.one(True, False)
    d.says("cdist" if cdist else "Gram")
    pairs = Function("pairs", lambda x: torch.cdist(x, x) if cdist else x @ x.mT)
    return nn.Sequential(*layers, pairs, nn.Flatten(), nn.LazyLinear(3)), d.tokens(5, 8)


def second_gram(d: Draws) -> tuple[nn.Module, Tensor]:
    n = d.width(4, 8)
    drop = d.one(nn.Dropout, nn.Dropout2d)(d.rate())
    d.says(type(drop).__name__)
    gram = Function("Gram", lambda x: x.flatten(2) @ x.flatten(2).mT / x[0, 0].numel())
    layers = [nn.Conv2d(3, n, 3, padding=1), d.activation(), drop, nn.Conv2d(n, n, 3, padding=1), gram, nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(n * n, 3)), d.pictures()


def second_product(d: Draws) -> tuple[nn.Module, Tensor]:
    layers, m = _trunk(d)
    squash = d.one(True, False)
    d.says("gate" if squash else "product")
    return nn.Sequential(*layers, Product(m, 8, squash), nn.Linear(8, 3)), d.vectors()


KINDS: dict[str, Callable[[Draws], tuple[nn.Module, Tensor]]] = {
    f.__name__: f
    for f in (
        max_affine,
        max_tokens,
        max_pointwise,
        max_alpha,
        max_channels,
        max_monotone,
        norm_tokens,
        norm_channels,
        norm_groups,
        norm_batch,
        second_distances,
        second_norm,
        second_spread,
        second_power_mean,
        second_entropy,
        second_recurrence,
        second_pairs,
        second_gram,
        second_product,
    )
}


def relative(kind: str, seed: int) -> Network:
    """A network of one kind, in double precision."""
    d = Draws(kind, seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, x = KINDS[kind](d)
        model = model.double().eval()
        model(x)  # lazy layers take their shapes
    return Network(seed, kind, model, x, d.words)


def network(seed: int) -> Network:
    """The kinds in turn, each with seeds of its own."""
    kinds = list(KINDS)
    return relative(kinds[seed % len(kinds)], seed // len(kinds))
