"""Dropout rates that are trained: every dropout module of a copy of the model gets its rate as a parameter.

A belief depends on the rate p of a unit through the variance x²p/(1 − p), so its gradient in p is exact where a sampler
would need a relaxed mask. Channels are dropped by multiplying them with a mask of their own.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from favour.nn import Dropout

LEAST, MOST = 1e-3, 0.95
CHANNELS: dict[type[nn.Module], int] = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}


class ChannelDropout(nn.Module):
    """Drops whole channels of (B, C, *positions) with a rate that is trained."""

    def __init__(self, p: float, units: int) -> None:
        super().__init__()
        self.mask = Dropout(p, learnable=True, units=units)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, *positions) → the same."""
        return x * self.mask(x.new_ones(x.shape[0], x.shape[1], *[1] * (x.dim() - 2)))


def dropouts(model: nn.Module) -> dict[str, nn.Module]:
    """The modules whose rates can be trained, by path; those that are switched off (p = 0) are not among them."""
    modules: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if isinstance(module, Dropout):
            if module.learnable or bool((module.p > 0).all()):
                modules[path] = module
        elif type(module) in (nn.Dropout, *CHANNELS) and 0 < float(module.p) < 1:
            modules[path] = module
    return modules


def make_learnable(model: nn.Module, units: dict[str, int]) -> dict[str, Dropout]:
    """Replace dropout modules in place; `units` says how many draws each makes for one input.

    Returns:
        The modules that hold the rates, by path.
    """
    made: dict[str, Dropout] = {}
    for path, module in dropouts(model).items():
        if path not in units:  # never called
            continue
        if isinstance(module, Dropout):
            new: nn.Module = module if module.learnable else Dropout(module.p, learnable=True, units=units[path])
            made[path] = new  # type: ignore[assignment]
        else:
            p = min(max(float(module.p), LEAST), MOST)  # type: ignore[arg-type]
            if type(module) is nn.Dropout:
                new = made[path] = Dropout(p, learnable=True, units=units[path])
            else:
                new = ChannelDropout(p, units[path])
                made[path] = new.mask
        new.train(module.training)
        parent, _, name = path.rpartition(".")
        if path:
            setattr(model.get_submodule(parent), name, new)
    reference = next((p for p in model.parameters() if p.is_floating_point()), None)
    if reference is not None:
        for layer in made.values():
            layer.to(reference.device, reference.dtype)
    return made


def with_rate(original: nn.Module, p: Tensor) -> nn.Module:
    """A dropout module of the user's kind with the rate that was learned."""
    if isinstance(original, Dropout):
        return Dropout(p.clone()).train(original.training)
    module = copy.copy(original)
    module.p = float(p)  # type: ignore[assignment]
    return module


def draws_of(module: nn.Module, x: Tensor) -> int:
    """How many draws a dropout module makes for one input."""
    if type(module) in CHANNELS:
        return x.shape[1] if x.dim() > 2 else 1
    return x[0].numel()


def names_of(model: nn.Module) -> dict[int, str]:
    """Paths by module identity."""
    return {id(module): path for path, module in model.named_modules()}


def clamp(rates: dict[str, Dropout]) -> None:
    """Keep rates where their logits still have a gradient."""
    with torch.no_grad():
        for layer in rates.values():
            if layer.logits is not None:
                layer.logits.clamp_(-7.0, 3.0)
