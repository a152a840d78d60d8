"""Draws that decide which code runs: LayerDrop, `if torch.rand([]) < p: skip this layer`.

Let r be uniform on [0, 1). A comparison of r with p is true with a probability q that is known. Where q is 0 or 1 the
outcome cannot matter and is a constant. Otherwise the code has two paths, and the one that is likelier is followed; if
the other one does no more than leave out the module that is called next, then with z = 1 where it runs,

    y = h + z·(layer(h) − h),        P(z = 1) = max(q, 1 − q) = 1 − p,

which is stochastic depth without its scale, written as (1 − p)·dropout of the whole of layer(h) − h. Whether leaving it
out is all that happens is tried (`skips_modules`): with every decision taken the other way, and every other draw left
out, the model has to compute what it computes with those modules as the identity. A model for which that is not so is
refused.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from favour.errors import UnsupportedOperation

_BELOW = {"lt", "le", "__lt__", "__le__", "less", "less_equal"}
_ABOVE = {"gt", "ge", "__gt__", "__ge__", "greater", "greater_equal"}
_DROPOUTS = {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"}


@dataclass
class Decisions:
    """What was decided in one run of a model.

    Attributes:
        other: Whether to take the outcome that is less likely.
        silent: Whether to leave out dropouts, for comparisons.
        rates: Of every decision that can matter: the probability of the less likely outcome.
        unclaimed: The rate of a decision whose module has not been called yet.
        batch: How many inputs the model was given; a symbol, or 1 in the capture of one input.
    """

    other: bool = False
    silent: bool = False
    rates: list[float] = field(default_factory=list)
    unclaimed: float | None = None
    batch: Any = 1

    def outcome(self, q: float) -> bool:
        """Of a comparison that is true with probability q."""
        if q <= 0 or q >= 1:
            return q >= 1
        self.unclaimed = min(q, 1 - q)
        self.rates.append(self.unclaimed)
        return (q > 0.5) is not self.other


class Uniform:
    """A uniform number of Python's or numpy's, of which nothing is known but its comparisons with numbers."""

    def __init__(self, decisions: Decisions) -> None:
        self._decisions = decisions

    def __lt__(self, p: float) -> bool:
        return self._decisions.outcome(float(p))

    def __gt__(self, p: float) -> bool:
        return self._decisions.outcome(1 - float(p))

    __le__, __ge__ = __lt__, __gt__

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedOperation(
            f"the model computes with a random number of Python's or numpy's (`{name}` of it), which a capture cannot "
            "follow: draw with torch, or leave it out while predicting."
        )


class _Watching(TorchFunctionMode):
    """Sees uniform numbers, comparisons of them, and code that asks for the outcome."""

    def __init__(self, decisions: Decisions) -> None:
        super().__init__()
        self.decisions = decisions
        self.kept: list[Tensor] = []  # alive, so that no other tensor gets their id
        self.uniform: set[int] = set()
        self.chances: dict[int, float] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        first = args[0] if args else None
        if id(first) in self.chances and name in ("__bool__", "item"):
            return self.decisions.outcome(self.chances[id(first)])
        if id(first) in self.uniform and name in ("item", "__float__"):
            return Uniform(self.decisions)
        if self.decisions.silent and name in _DROPOUTS:
            return first if first is not None else kwargs["input"]
        if self.decisions.silent and name == "scaled_dot_product_attention":
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = {k: v for k, v in kwargs.items() if k != "dropout_p"}
        result = func(*args, **kwargs)
        if name == "rand" and isinstance(result, Tensor) and result.numel() == 1:
            self._keep(result)
            self.uniform.add(id(result))
        elif id(first) in self.uniform and name in _BELOW | _ABOVE and isinstance(args[1], (int, float)):
            self._keep(result)
            self.chances[id(result)] = float(args[1]) if name in _BELOW else 1 - float(args[1])
        return result

    def _keep(self, tensor: Tensor) -> None:
        self.kept.append(tensor)


@contextmanager
def deciding(decisions: Decisions) -> Iterator[None]:
    """Take decisions from `decisions`, those by numbers of Python's and numpy's generators too."""
    places = [(random, "random"), (np.random, "random"), (np.random, "rand"), (np.random, "uniform")]
    before = [getattr(place, name) for place, name in places]

    thread = threading.get_ident()

    def drawing(original: Callable[..., Any]) -> Callable[..., Any]:
        def draw(*args: Any, **kwargs: Any) -> Any:
            standard = not kwargs and args in ((), (0, 1)) and threading.get_ident() == thread
            return Uniform(decisions) if standard else original(*args, **kwargs)

        return draw

    try:
        for (place, name), original in zip(places, before, strict=True):
            setattr(place, name, drawing(original))
        with _Watching(decisions):
            yield
    finally:
        for (place, name), original in zip(places, before, strict=True):
            setattr(place, name, original)


Replaced = Callable[[Tensor, Tensor, float, Any], Tensor]


def claim_layers(model: nn.Module, decisions: Decisions, replaced: Replaced) -> None:
    """Have the module that is called behind a decision give `replaced(h, layer(h), rate, batch)`.

    Args:
        model: A private copy.
        decisions: That it takes.
        replaced: Of what the module is given, what it returned, the probability that it does not run, and the batch.
    """
    claimed: list[tuple[nn.Module, Tensor, float]] = []

    def before(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if module is model and tensors and tensors[0].ndim:
            decisions.batch = tensors[0].shape[0]
        if decisions.unclaimed is not None and tensors:
            claimed.append((module, tensors[0], decisions.unclaimed))
            decisions.unclaimed = None

    def after(module: nn.Module, args: tuple, result: Any) -> Any:
        if not claimed or claimed[-1][0] is not module:
            return None
        _, h, rate = claimed.pop()
        leaves, spec = pytree.tree_flatten(result)
        if not isinstance(leaves[0], Tensor) or leaves[0].shape != h.shape:
            raise UnsupportedOperation(_refusal(module, rate, "it returns a tensor of another shape"))
        return pytree.tree_unflatten([replaced(h, leaves[0], rate, decisions.batch), *leaves[1:]], spec)

    for module in model.modules():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after)


def skipped_at_random(h: Tensor, y: Tensor, rate: float, batch: Any) -> Tensor:
    """h + z·(y − h) with z = 0 at this rate, one draw for each input."""
    symbolic = isinstance(batch, torch.SymInt)
    if symbolic and str(h.shape[0]) != str(batch):
        raise UnsupportedOperation(_refusal(None, rate, "its layers have the batch elsewhere than in front"))
    change = (y - h).reshape(batch if symbolic else 1, 1, -1)
    kept = (1 - rate) * torch.feature_dropout(change, rate, True)
    return h + kept.reshape(h.shape)


def check_skips(make: Callable[[], nn.Module], args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise unless the other outcome of every decision does no more than leave out the module called next.

    Args:
        make: A new private copy of the model, flags set for capture.
        args, kwargs: What to call it with.
    """
    outputs = []
    for other in (True, False):
        decisions, model = Decisions(other=other, silent=True), make()
        if not other:
            claim_layers(model, decisions, lambda h, y, rate, batch: h)
        with torch.no_grad(), torch.random.fork_rng(devices=[]), deciding(decisions):
            torch.manual_seed(0)
            outputs.append([t for t in pytree.tree_leaves(model(*args, **kwargs)) if isinstance(t, Tensor)])
        rate = max(decisions.rates, default=0.0)
    same = len(outputs[0]) == len(outputs[1]) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(*outputs, strict=True)
    )
    if not same:
        raise UnsupportedOperation(_refusal(None, rate, "more depends on the draw than whether the next layer runs"))


def _refusal(module: nn.Module | None, rate: float, why: str) -> str:
    where = "" if module is None else f" before a {type(module).__name__}"
    return (
        f"the model draws a random number{where} that decides which code runs (LayerDrop at {rate:g}), and {why}, so "
        "that it is no stochastic depth. Set the rate to 0 (`layerdrop` in most configurations), or write y = h + "
        "z·(layer(h) − h) with z drawn by torch."
    )
