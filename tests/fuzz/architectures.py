"""A seeded grammar of networks: what people write, with its parts drawn at random and weights that need not be kind.

    network  = vectors | pictures | tokens
    vectors  = (linear | residual | gate)+ head
    pictures = (convolution norm? activation dropout? pool?)+ global-pool head
    tokens   = (embedding | linear) noise (attention block | recurrence | linear norm)+ token-pool head
    head     = linear | linear activation linear | distances | norm | deviation | softmax entropy | log-sum-exp

`network(seed)` is a function of its seed alone and leaves torch's global random state as it was. Gains are drawn
between .5 and 2, batch norms have random statistics, and rates lie between .05 and .5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.GELU,
    nn.SiLU,
    nn.Tanh,
    nn.ELU,
    nn.LeakyReLU,
    nn.Softplus,
    nn.Sigmoid,
)
BATCH = 4


class Function(nn.Module):
    """A function of one tensor, with a name to print."""

    def __init__(self, name: str, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.name, self.function = name, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)

    def extra_repr(self) -> str:
        return self.name


class Residual(nn.Module):
    """x + f(x)."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Gate(nn.Module):
    """value(x) · σ(gate(x))."""

    def __init__(self, value: nn.Module, gate: nn.Module) -> None:
        super().__init__()
        self.value, self.gate = value, gate

    def forward(self, x: Tensor) -> Tensor:
        return self.value(x) * self.gate(x).sigmoid()


class Distances(nn.Module):
    """Minus the squared distances to prototypes."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.randn(count, width))

    def forward(self, x: Tensor) -> Tensor:
        return -(x[:, None] - self.prototypes).square().sum(-1)


class Attention(nn.Module):
    """Self-attention with torch's own module."""

    def __init__(self, width: int, heads: int, p: float) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, heads, dropout=p, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


class Recurrence(nn.Module):
    """All states of a GRU or LSTM."""

    def __init__(self, kind: type[nn.RNNBase], width: int, hidden: int) -> None:
        super().__init__()
        self.cell = kind(width, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


@dataclass
class Network:
    """A network of the grammar, its inputs, and the words it was made of."""

    seed: int
    family: str
    model: nn.Module
    example: Tensor
    words: list[str] = field(default_factory=list)


class _Grammar:
    """Draws of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.words: list[str] = []

    def one(self, choices: Sequence, weights: Sequence[float] | None = None):
        p = None if weights is None else np.asarray(weights) / sum(weights)
        return choices[int(self.rng.choice(len(choices), p=p))]

    def says(self, word: str) -> str:
        self.words.append(word)
        return word

    def rate(self) -> float:
        return float(self.one((0.05, 0.1, 0.2, 0.3, 0.5)))

    def gained(self, layer: nn.Module) -> nn.Module:
        gain = float(np.exp(self.rng.uniform(np.log(0.5), np.log(2.0))))
        with torch.no_grad():
            for p in layer.parameters():
                if p.ndim > 1:
                    p *= gain
        return layer

    def activation(self) -> nn.Module:
        made = self.one(ACTIVATIONS, (6, 2, 1, 1, 1, 1, 0.5, 0.5))()
        self.says(type(made).__name__)
        return made

    def linear(self, inner: int, outer: int) -> nn.Module:
        return self.gained(nn.Linear(inner, outer))

    def dropout(self, kinds: Sequence[type[nn.Module]]) -> nn.Module:
        kind, p = self.one(kinds), self.rate()
        self.says(f"{kind.__name__}({p})")
        return kind(p)

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

    # ---------------------------------------------------------------------------------------------------- families

    def vectors(self) -> tuple[nn.Module, Tensor]:
        inner = width = int(self.rng.integers(6, 33))
        layers: list[nn.Module] = []
        for _ in range(int(self.rng.integers(1, 5))):
            kind = self.says(self.one(("linear", "residual", "gate"), (6, 2, 1)))
            if kind == "linear":
                outer = int(self.rng.integers(6, 65))
                layers.append(self.linear(width, outer))
                width = outer
            elif kind == "residual":
                layers.append(Residual(nn.Sequential(self.linear(width, width), self.activation(), self.noise())))
            else:
                layers.append(Gate(self.linear(width, width), self.linear(width, width)))
            norm = self.one((None, "LayerNorm", "BatchNorm", "GroupNorm"), (6, 2, 1, 1))
            if norm == "GroupNorm" and width % 4:
                norm = None
            if norm is not None:
                self.says(norm)
                made = {
                    "LayerNorm": lambda w=width: nn.LayerNorm(w),
                    "BatchNorm": lambda w=width: self.batch_norm(nn.BatchNorm1d(w)),
                    "GroupNorm": lambda w=width: nn.GroupNorm(w // 4, w),
                }[norm]()
                layers.append(made)
            layers += [self.activation(), self.noise()]
        return nn.Sequential(*layers, self.head(width)), torch.from_numpy(self.rng.standard_normal((BATCH, inner)))

    def noise(self) -> nn.Module:
        return self.dropout((nn.Dropout,)) if self.rng.random() < 0.8 else nn.Identity()

    def pictures(self) -> tuple[nn.Module, Tensor]:
        side, width = int(self.one((8, 10, 12))), 3
        layers: list[nn.Module] = []
        size = side
        for _ in range(int(self.rng.integers(1, 4))):
            outer = int(self.one((4, 6, 8, 12)))
            kernel = int(self.one((1, 3)))
            layers.append(self.gained(nn.Conv2d(width, outer, kernel, padding=kernel // 2)))
            width = outer
            parts: list[nn.Module] = []
            if self.rng.random() < 0.4:
                self.says("BatchNorm2d")
                parts.append(self.batch_norm(nn.BatchNorm2d(width)))
            parts.append(self.activation())
            if self.rng.random() < 0.7:
                parts.append(self.dropout((nn.Dropout, nn.Dropout, nn.Dropout2d)))
            self.rng.shuffle(parts)
            layers += parts
            if size >= 4 and self.rng.random() < 0.6:
                pool = self.one((nn.MaxPool2d, nn.AvgPool2d))
                self.says(pool.__name__)
                layers.append(pool(2))
                size //= 2
        pool = self.one((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), (3, 1))
        self.says(pool.__name__)
        layers += [pool(1), nn.Flatten()]
        return nn.Sequential(*layers, self.head(width)), torch.from_numpy(
            self.rng.standard_normal((BATCH, 3, side, side))
        )

    def tokens(self) -> tuple[nn.Module, Tensor]:
        length, width = int(self.one((5, 8, 12))), int(self.one((8, 16, 24)))
        layers: list[nn.Module]
        if self.rng.random() < 0.5:
            self.says("embedding")
            layers = [nn.Embedding(30, width)]
            example = torch.from_numpy(self.rng.integers(0, 30, (BATCH, length)))
        else:
            layers = [self.linear(6, width)]
            example = torch.from_numpy(self.rng.standard_normal((BATCH, length, 6)))
        if self.rng.random() < 0.6:
            layers.append(self.dropout((nn.Dropout, nn.Dropout, nn.Dropout1d)))
        for _ in range(int(self.rng.integers(1, 3))):
            kind = self.says(self.one(("encoder", "attention", "recurrence", "linear"), (2, 2, 1, 2)))
            if kind == "encoder":
                first = bool(self.rng.random() < 0.5)
                p = self.rate()
                self.says(f"{'pre' if first else 'post'}-norm {p}")
                layers.append(nn.TransformerEncoderLayer(width, 2, 2 * width, p, batch_first=True, norm_first=first))
            elif kind == "attention":
                layers += [Residual(Attention(width, 2, self.rate())), nn.LayerNorm(width)]
            elif kind == "recurrence":
                cell = self.one((nn.GRU, nn.LSTM))
                self.says(cell.__name__)
                layers += [Recurrence(cell, width, width), self.noise()]
            else:
                layers += [self.linear(width, width), self.activation(), nn.LayerNorm(width), self.noise()]
        pool = self.says(self.one(("mean", "amax", "last"), (3, 1, 1)))
        layers.append(
            {
                "mean": Function("mean(1)", lambda x: x.mean(1)),
                "amax": Function("amax(1)", lambda x: x.amax(1)),
                "last": Function("[:, -1]", lambda x: x[:, -1]),
            }[pool]
        )
        return nn.Sequential(*layers, self.head(width)), example

    def head(self, width: int) -> nn.Module:
        kinds = ("linear", "mlp", "distances", "norm", "deviation", "entropy", "logsumexp")
        kind = self.says(self.one(kinds, (10, 4, 1, 0.7, 0.7, 0.7, 0.7)))
        outer = int(self.rng.integers(1, 11))
        if kind == "linear":
            return self.linear(width, outer)
        if kind == "mlp":
            return nn.Sequential(self.linear(width, 16), self.activation(), self.noise(), self.linear(16, outer))
        if kind == "distances":
            return Distances(width, outer)
        if kind == "norm":
            return Function("norm", lambda x: x.norm(dim=-1, keepdim=True))
        if kind == "deviation":
            return Function("var", lambda x: x.var(-1, keepdim=True))
        if kind == "entropy":
            entropy = Function("entropy", lambda z: -(z.softmax(-1) * z.log_softmax(-1)).sum(-1, keepdim=True))
            return nn.Sequential(self.linear(width, 5), entropy)
        return Function("logsumexp", lambda x: x.logsumexp(-1, keepdim=True))


def network(seed: int) -> Network:
    """The network of a seed, in double precision."""
    grammar = _Grammar(seed)
    family = grammar.one(("vectors", "pictures", "tokens"), (4, 3, 3))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model, example = getattr(grammar, family)()
    return Network(seed, family, model.double().eval(), example, grammar.words)


def draws(model: nn.Module, x: Tensor, n: int, seed: int) -> Tensor:
    """n outputs with live dropout, (n, B, C), by torch alone: the batch repeated, norms in evaluation mode."""
    live = (nn.modules.dropout._DropoutNd, nn.MultiheadAttention, nn.TransformerEncoderLayer)
    flags = [(m, m.training) for m in model.modules()]
    try:
        for m in model.modules():
            m.training = isinstance(m, live)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            z = model(x.repeat(n, *[1] * (x.ndim - 1)))
    finally:
        for m, flag in flags:
            m.training = flag
    return z.unflatten(0, (n, len(x)))
