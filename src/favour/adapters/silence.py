"""Dropout in networks whose uncertainty is a posterior: silent, as the libraries that made the posterior have it.

A Laplace approximation, SWAG, IVON or variational layers predict with the network in eval mode, so that their Gaussian
is all the uncertainty there is. Favour counts dropout whatever the training flag says; for an adapted network it would
be counted on top. So adapters return a copy of the network's modules (tensors are shared) which are marked, and
capturing leaves marked modules in eval mode: layers, `functional.dropout` and stochastic depth alike.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from favour.errors import SilencedDropout
from favour.graph.silent import MARK
from favour.graph.taking import copied_structure


def without_dropout(model: nn.Module, keep: bool, library: str, stacklevel: int = 4) -> nn.Module:
    """The network to predict with: itself if dropout is kept or impossible, else a silent copy, with a warning."""
    dropouts = dropouts_of(model)
    if keep or not (dropouts or any(map(_of_others, model.modules()))):
        return model
    if dropouts:
        warn_of_silence(
            dropouts,
            f"{library} predicts with dropout switched off, and its posterior is all the uncertainty",
            "pass `keep_dropout=True` to the adapter to count dropout on top",
            stacklevel,
        )
    return silenced(model)


def silenced(model: nn.Module) -> nn.Module:
    """A copy that shares the network's tensors, in eval mode, in which capturing finds no dropout."""
    twin = copied_structure(model).eval()
    setattr(twin, MARK, tuple(paths_of(model)))
    return twin


def _of_others(module: nn.Module) -> bool:
    """Whether its forward pass may hold a `functional.dropout` that no attribute tells of."""
    return not type(module).__module__.startswith("torch.nn.")


def warn_of_silence(dropouts: Sequence[str], reason: str, remedy: str, stacklevel: int) -> None:
    """Name what is silenced, why, and how to keep it."""
    listed = ", ".join(dropouts[:4]) + (f" and {len(dropouts) - 4} more" if len(dropouts) > 4 else "")
    warnings.warn(f"silenced: {listed}. {reason}; {remedy}.", SilencedDropout, stacklevel=stacklevel)


def dropouts_of(model: nn.Module) -> list[str]:
    """The modules that drop, by path and rate, as far as their attributes tell."""
    return list(paths_of(model).values())


def paths_of(model: nn.Module) -> dict[str, str]:
    """The same by path."""
    places = {}
    for path, module in model.named_modules():
        named = "drop" in type(module).__name__.lower()
        rates = {
            name: value
            for name, value in vars(module).items()
            if ("drop" in name.lower() or (named and name == "p")) and _positive(value)
        }
        rates |= {
            name: p
            for name, p in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            if named and _positive(p)
        }
        if rates:
            rate = next(iter(rates.values()))
            written = f"{rate:g}" if isinstance(rate, (int, float)) else "rates"
            places[path] = f"`{path or type(module).__name__}` ({written})"
    return places


def _positive(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and bool((value > 0).any())
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1
