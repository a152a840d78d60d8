"""What every adapter returns, and how flat vectors over a model's parameters become tensors by name.

Libraries that treat all parameters as one vector θ ∈ ℝᴾ concatenate them in the order of `model.parameters()`, each
flattened row-major; so do the functions here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from favour.errors import ShapeMismatch, UnknownName
from favour.posterior import Full, Gaussian, Key, Posterior

# Up to here a dense covariance over all parameters is taken apart into as many columns as there are parameters.
COLUMNS = 4096


class Adapted(NamedTuple):
    """A model and a Gaussian over its parameters, for `favour.compile(model, x, posterior=posterior)`.

    Attributes:
        model: The network, with plain layers.
        posterior: Over the network's parameters.
    """

    model: nn.Module
    posterior: Posterior


def comes_from(obj: Any, package: str) -> bool:
    """Whether the class of `obj`, or one it derives from, is defined in `package`; nothing is imported."""
    return any(cls.__module__.partition(".")[0] == package for cls in type(obj).__mro__)


def names_of(model: nn.Module, parameters: Iterable[Tensor], where: str) -> list[str]:
    """The name of each parameter in `model`, found by identity.

    Raises:
        UnknownName: Some are not parameters of `model`; `where` says whose they are.
    """
    known = {id(p): name for name, p in model.named_parameters()}
    members = list(parameters)
    strange = [tuple(p.shape) for p in members if id(p) not in known]
    if strange:
        shapes = ", ".join(map(str, strange[:4])) + (", …" if len(strange) > 4 else "")
        raise UnknownName(
            f"{where} holds {len(strange)} parameters (of shapes {shapes}) that this {type(model).__name__} does not "
            "have; pass the very model it was made for, not a copy."
        )
    return [known[id(p)] for p in members]


def split(vector: Tensor, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
    """A vector (P,), or rows of them (K, P), as tensors (*shape,) or (K, *shape) by name; copies, detached."""
    sizes = [shape.numel() for shape in shapes.values()]
    if vector.shape[-1] != sum(sizes):
        raise ShapeMismatch(
            f"a vector of shape {tuple(vector.shape)} was given for {sum(sizes)} parameters; its last size must agree."
        )
    parts = vector.detach().split(sizes, -1)
    lead = vector.shape[:-1]
    pairs = zip(shapes.items(), parts, strict=True)
    return {name: part.reshape(*lead, *shape).clone() for (name, shape), part in pairs}


def dense(
    root: Tensor, shapes: Mapping[str, torch.Size], means: Mapping[str, Tensor], linearised: bool = False
) -> Posterior:
    """The posterior of covariance RRᵀ over all parameters, for a root R (P, K).

    One parameter, or the matrix and bias of one layer, hold it as a `Full` Gaussian, exactly. Several layers are
    coupled: then the K columns of R are latents that all of them share.
    """
    names = list(shapes)
    if len(names) == 1:
        (name,) = names
        only = {name: Full(root @ root.mT, tuple(shapes[name]))}
        return Posterior(only, means=means, linearised=linearised)
    if len(names) == 2 and len(shapes[names[0]]) >= 2 and shapes[names[1]] == shapes[names[0]][:1]:
        key: Key = (names[0], names[1])
        joint: dict[Key, Gaussian] = {key: _layer(root, shapes[names[0]])}
        return Posterior(joint, means=means, linearised=linearised)
    return Posterior({}, latents=split(root.mT.contiguous(), shapes), means=means, linearised=linearised)


def _layer(root: Tensor, shape: Sequence[int]) -> Full:
    """[W | b] row by row from (W, b) one behind the other."""
    m = shape[0]
    n = (root.shape[0] - m) // m
    order = torch.arange(m * n, device=root.device).reshape(m, n)
    bias = torch.arange(m * n, m * n + m, device=root.device).reshape(m, 1)
    rows = root[torch.cat([order, bias], 1).flatten()]
    return Full(rows @ rows.mT, (m, n + 1))
