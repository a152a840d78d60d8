"""A model of the zoo: an unmodified model of some package, an example of its input, and what is uncertain in it.

A specimen is a function without arguments, registered under its package's name; it imports the package itself, so that
this folder can be read where the package is missing. The reference draws its samples by torch alone: the model's own
dropout, switched on, and normal weights of its own making.
"""

from __future__ import annotations

import copy
import importlib.util
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

SPREAD = 0.1  # standard deviation of an uncertain weight, in multiples of the tensor's mean absolute value
REPEATS = 20  # draws in one batch
SPECIMENS: dict[str, Callable[[], Specimen]] = {}


@dataclass
class Specimen:
    """A model with an example batch.

    Attributes:
        model: As its package makes it, untrained.
        example: What `favour.compile` takes: a tensor, a tuple or a dict.
        uncertain: Endings of the names of parameters that get a mean-field posterior, beside the model's own dropout.
        options: For `favour.compile`.
    """

    model: nn.Module
    example: Any
    uncertain: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def posterior(self) -> dict[str, Tensor]:
        """Variances by parameter name."""
        return {
            name: (SPREAD * p.detach().abs().mean()).square().expand(p.shape).clone()
            for name, p in self.model.named_parameters()
            if self.uncertain and name.endswith(self.uncertain)
        }


def made(name: str, seed: int = 0) -> Specimen:
    """The specimen of that name, settled and in evaluation mode."""
    torch.manual_seed(seed)
    found = SPECIMENS[name]()
    found.model.eval()
    settle(found)
    return found


def specimen(package: str) -> Callable[[Callable[[], Specimen]], Callable[[], Specimen]]:
    """Register a specimen as `package/function`."""

    def register(build: Callable[[], Specimen]) -> Callable[[], Specimen]:
        SPECIMENS[f"{package}/{build.__name__}"] = build
        return build

    return register


def without_compiled_operators() -> None:
    """Let torchvision load where its compiled operators do not (they want the GPU build of torch): no model here calls
    them, but its Python code wants to know their names."""
    found = importlib.util.find_spec("torchvision")
    if found is None or found.origin is None:
        return
    text = (Path(found.origin).parent / "_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in re.findall(r'register_fake\("torchvision::(\w+)"\)', text):
        if not hasattr(torch.ops.torchvision, name):
            library.define(f"{name}(Tensor x) -> Tensor")
    globals()["_KEPT"] = library  # names go with their library


def first_output(result: Any, kinds: tuple[type, ...] = (Tensor,)) -> Any:
    """The first floating tensor, or belief, of a model's result."""
    leaves = pytree.tree_leaves(result, is_leaf=lambda t: isinstance(t, kinds))
    return next(t for t in leaves if isinstance(t, kinds) and (not isinstance(t, Tensor) or t.is_floating_point()))


def settle(found: Specimen) -> None:
    """Stand in for training, where an untrained model says nothing: running statistics are those of inputs like the
    example, and a weight matrix that starts as zeros is drawn.
    """
    with torch.no_grad():
        for p in found.model.parameters():
            if p.ndim > 1 and not p.any():
                p.normal_(std=0.1)
        norms = [m for m in found.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        moments = [m.momentum for m in norms]
        for norm in norms:
            norm.momentum = None  # the plain average of the batches
            norm.train()
        for _ in range(4 if norms else 0):
            _call(found.model, pytree.tree_map(_like, found.example))
        for norm, momentum in zip(norms, moments, strict=True):
            norm.momentum = momentum
            norm.eval()


def _like(t: Any) -> Any:
    """Numbers with some noise on them; indices as they are."""
    if not isinstance(t, Tensor) or not t.is_floating_point() or not t.ndim or (t == t.round()).any():
        return t
    return t + 0.3 * t.std() * torch.randn_like(t)


def _live(model: nn.Module) -> nn.Module:
    """A copy that draws: training mode, norms with running statistics as in prediction."""
    model = copy.deepcopy(model)
    for module in model.modules():
        module.training = not hasattr(module, "running_mean")
    return model


def _call(model: nn.Module, example: Any) -> Tensor:
    if isinstance(example, dict):
        return first_output(model(**example))
    return first_output(model(*example) if isinstance(example, tuple) else model(example))


def draws(found: Specimen, n: int, seed: int = 1) -> Iterator[Tensor]:
    """Draws of the model, (k, batch, *event) at a time, n in all: anew for every input, weights for every k."""
    torch.manual_seed(seed)
    posterior, model = found.posterior(), _live(found.model)
    leaves = [t for t in pytree.tree_leaves(found.example) if isinstance(t, Tensor) and t.ndim]
    batch = leaves[0].shape[0]
    whole = found.options.get("batched") is False
    repeats = 1 if whole or posterior else REPEATS

    def repeated(t: Any) -> Any:
        return t.repeat(repeats, *[1] * (t.ndim - 1)) if isinstance(t, Tensor) and t.ndim and len(t) == batch else t

    example = pytree.tree_map(repeated, found.example) if repeats > 1 else found.example
    weights = {name: p.detach().clone() for name, p in model.named_parameters() if name in posterior}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for _ in range(n // repeats):
            for name, mean in weights.items():
                parameters[name].copy_(mean + posterior[name].sqrt() * torch.randn_like(mean))
            y = _call(model, example)
            yield y[None, None] if whole else y.unflatten(0, (repeats, -1))
