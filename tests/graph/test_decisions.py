"""Draws that decide which code runs, blocks, caches, lengths: captured as what they mean, or refused on one screen."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import favour
from favour.errors import CaptureError, FavourError, UnsupportedOperation

DRAWS = 2000


class Layers(nn.Module):
    """Layers of which each is left out at some rate, the way `kind` writes it."""

    def __init__(self, kind: str, rate: float) -> None:
        super().__init__()
        self.kind, self.rate = kind, rate
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3))
        self.drop, self.last = nn.Dropout(0.2), nn.Linear(4, 2)

    def leaves_out(self) -> bool | Tensor:
        if self.kind == "torch":
            return torch.rand([]) < self.rate
        if self.kind == "item":
            return torch.rand(1).item() < self.rate
        return (random.random() if self.kind == "python" else np.random.uniform(0, 1)) < self.rate

    def forward(self, x: Tensor) -> Tensor:
        y = x
        for layer in self.layers:
            if self.training and self.leaves_out():
                continue
            y = layer(y)
        return self.last(self.drop(y))


KINDS = ["torch", "item", "python", "numpy"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_draw_that_cannot_matter_is_a_constant(kind: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    for rate in (0.0, 1.0):
        model = Layers(kind, rate)
        predict = favour.compile(model, x, check=False)
        assert [n.target for n in predict.graph.calls].count(torch.ops.aten.tanh.default) == (0 if rate else 3)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_left_out_at_random_agree_with_samples(kind: str) -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, x = Layers(kind, 0.2), torch.randn(3, 4)
    belief = favour.compile(model, x, check=False, method="adjoint", rank=4)(x)
    with torch.no_grad():
        samples = torch.stack([model.train()(x) for _ in range(DRAWS)])
    deviation = samples.std(0)
    assert bool(((belief.mean - samples.mean(0)).abs() < (0.3 + 5 * DRAWS**-0.5) * deviation).all())
    torch.testing.assert_close(belief.variance.sum(), samples.var(0).sum(), rtol=0.1 + 5 * (2 / DRAWS) ** 0.5, atol=0)


class Attention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.unsqueeze(1)
        mask = torch.zeros(1, 1)
        return x + nn.functional.scaled_dot_product_attention(y, y, y, attn_mask=mask, dropout_p=0.0).squeeze(1)


def test_layers_that_attend_are_left_out_too() -> None:
    """Whether leaving one out is all that happens is tried without the dropout that attention may be asked for."""
    model = Layers("torch", 0.2)
    model.layers[1].append(Attention())
    assert favour.compile(model, torch.randn(3, 4), check=False)(torch.randn(3, 4)).variance.min() > 0


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))


def test_residual_layers_left_out_at_random_agree_with_samples_without_columns() -> None:
    """What a layer adds is all that a draw drops: its input, which would count twice, goes."""
    torch.manual_seed(0)
    model, x = Layers("torch", 0.2), torch.randn(3, 4)
    model.layers = nn.ModuleList(Residual() for _ in range(2))
    predict = favour.compile(model, x, check=False)
    assert torch.ops.aten.sub.Tensor not in [n.target for n in predict.graph.calls]
    belief = predict(x)
    with torch.no_grad():
        samples = torch.stack([model.train()(x) for _ in range(DRAWS)])
    torch.testing.assert_close(belief.variance.sum(), samples.var(0).sum(), rtol=0.1 + 5 * (2 / DRAWS) ** 0.5, atol=0)


class Elsewhere(nn.Module):
    """The draw decides more than whether a layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = -x if self.training and torch.rand([]) < 0.1 else self.layer(x)
        return self.drop(y)


class Augmented(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layer(x)) * torch.as_tensor(np.random.permutation(4) > 0, dtype=x.dtype)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.layer(x))
        return y if y.sum() > 0 else -y


class Looping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(torch.cond(x.sum() > 0, lambda t: t + 1, lambda t: t - 1, (x,)), 0.2)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Elsewhere, "LayerDrop at 0.1"),
        (Augmented, "numpy's random numbers while training"),
        (Branching, "test_decisions.py"),
        (Looping, "control flow"),
    ],
)
def test_what_cannot_be_captured_is_refused_on_one_screen(model: type[nn.Module], words: str, capfd) -> None:
    with pytest.raises(FavourError, match=words) as found:
        favour.compile(model(), torch.randn(3, 4))
    assert isinstance(found.value, (CaptureError, UnsupportedOperation))
    assert len(str(found.value)) < 2000
    assert str(found.value).count("\n") < 24
    printed = capfd.readouterr()
    assert printed.out + printed.err == ""


class Blocks(nn.Module):
    """Gradients off, autocast off, a cache that starts empty and is returned, a length as a number."""

    class RunningCache:
        def __init__(self) -> None:
            self.seen = torch.zeros(0)

        def update(self, x: Tensor) -> Tensor:
            self.seen = torch.cat([self.seen, x], dim=-2)
            return self.seen

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 4), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> dict[str, object]:
        cache = self.RunningCache()
        with torch.no_grad():
            scale = x.abs().mean((1, 2), keepdim=True)
        with torch.autocast("cpu", enabled=False):
            y = cache.update(self.drop(self.layer(x / scale)))
        return {"y": y.reshape(len(y), -1), "cache": cache}


def test_blocks_caches_and_lengths_are_captured() -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(3, 5, 4)
    predict = favour.compile(model, x, check=False)
    belief = predict(x)["y"]
    assert predict(x)["cache"] is None
    torch.testing.assert_close(belief.mean, model.eval()(x)["y"])
    torch.testing.assert_close(belief.variance, 0.25 * belief.mean**2, rtol=1e-4, atol=1e-6)
