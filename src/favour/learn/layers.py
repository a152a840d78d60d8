"""A model's layers: which run, in what order and on what, and what their weights are called."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import FavourError, InvalidValue
from favour.learn import rates
from favour.learn.rows import size_of
from favour.posterior import Posterior
from favour.posterior.posterior import Key

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def scale(layer: nn.Module, parameter: Tensor | None = None) -> float:
    """The size of a layer's weights: their root mean square, or 1/√fan-in where that is 0."""
    weight = getattr(layer, "weight", parameter)
    weight = parameter if not isinstance(weight, Tensor) else weight
    assert weight is not None
    size = float(weight.detach().square().mean().sqrt())
    return size if size > 0 else 1 / math.sqrt(max(1, weight[0].numel() if weight.dim() > 1 else weight.numel()))


def prefixed(posterior: Posterior, add: str, remove: str = "") -> Posterior:
    """The posterior under other names."""

    def name(old: str) -> str:
        return add + old.removeprefix(remove)

    gaussians: dict[Key, Any] = {}
    for key, gaussian in posterior.gaussians.items():
        gaussians[name(key) if isinstance(key, str) else (name(key[0]), name(key[1]))] = gaussian
    return Posterior(
        gaussians,
        latents={name(n): f for n, f in posterior.latents.items()},
        means={name(n): m for n, m in posterior.means.items()},
    )


def called(function: Callable[..., Any], x: Any) -> Any:
    """The function of inputs: a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(x, dict):
        return function(**x)
    return function(*x) if isinstance(x, tuple) else function(x)


def calls_of(model: nn.Module, example: Any) -> dict[str, Tensor]:
    """The first input of every linear, convolutional and dropout layer that runs, by path and in the order they run."""
    paths, hooks = rates.names_of(model), []
    calls: dict[str, Tensor] = {}

    def note(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if inputs and isinstance(inputs[0], Tensor):
            calls.setdefault(paths[id(module)], inputs[0].detach())

    training = {m: m.training for m in model.modules()}
    try:
        hooks = [m.register_forward_pre_hook(note) for m in model.modules()]
        model.eval()
        size_of(example)
        with torch.no_grad():
            called(model, example)
    except FavourError:
        raise
    except Exception as error:
        tensors = [t for t in pytree.tree_leaves(example) if isinstance(t, Tensor)]
        listed = ", ".join(f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}" for t in tensors)
        raise InvalidValue(f"the model cannot be called with the inputs given, {listed}: {error}") from error
    finally:
        for hook in hooks:
            hook.remove()
        for module, flag in training.items():
            module.training = flag
    return calls


def units_of(model: nn.Module, calls: Mapping[str, Tensor]) -> dict[str, int]:
    return {p: rates.draws_of(m, calls[p]) for p, m in rates.dropouts(model).items() if p in calls}


def layers_of(model: nn.Module, calls: Mapping[str, Tensor], bayesian: set[str]) -> dict[str, nn.Module]:
    modules = dict(model.named_modules())
    seen: set[int] = set()
    layers: dict[str, nn.Module] = {}
    for path in calls:
        module = modules[path]
        if not isinstance(module, LAYERS) or f"{path}.weight".removeprefix(".") in bayesian:
            continue
        if id(module.weight) in seen:  # tied: one draw, under its first name
            continue
        seen.add(id(module.weight))
        layers[path] = module
    return layers


def below(model: nn.Module, path: str) -> list[str]:
    prefix = f"{path}." if path else ""
    return [prefix + name for name, _ in model.get_submodule(path).named_parameters(recurse=False)]


def within(path: str, module: str) -> bool:
    """Whether a layer is a module or lies in it."""
    return path == module or path.startswith(f"{module}.")
