"""Pyro: an `AutoNormal` guide of a model, one Gaussian θ_site ~ N(loc, diag(scale²)) for every latent site.

The model is any Pyro program: a `PyroModule` with `PyroSample` weights, or a forward pass with `pyro.sample` in it. It
becomes a plain network whose *parameters* are the values of the sites: they live under `sites`, by their names, and the
program runs under a handler that gives each site its parameter. Observations are not drawn, and
`pyro.param` neither reads nor writes the parameter store.

A guide draws a constrained site, such as a noise scale σ > 0, as a Gaussian before a transform: not Gaussian itself.
Where the output does not depend on it, as a noise scale has no influence on the mean, it is held at the guide's median;
where it does, the model is refused. The example that the guide was set up with decides, by automatic differentiation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.adapters.adapted import Adapted
from favour.adapters.silence import without_dropout
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.extras import require
from favour.posterior import Posterior


class Program(nn.Module):
    """A Pyro program with known values of its latent sites.

    Args:
        program: The model; called as it is.
        values: Site name to a tensor, which becomes a parameter under `sites`.
        held: Site name to a tensor, which becomes a buffer under `held`.
    """

    def __init__(self, program: nn.Module, values: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.program = program
        self.sites, self.held = nn.Module(), nn.Module()
        self._free, self._fixed = tuple(values), tuple(held)
        for name, value in values.items():
            owner, last = _owner(self.sites, name)
            owner.register_parameter(last, nn.Parameter(value))
        for name, value in held.items():
            owner, last = _owner(self.held, name)
            owner.register_buffer(last, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        pyro = require("pyro", "peers")
        values = {name: attrgetter(name)(self.sites) for name in self._free}
        values |= {name: attrgetter(name)(self.held) for name in self._fixed}
        # Pyro's checks of values are decisions that depend on data, which a capture cannot follow.
        with pyro.validation_enabled(False), _given(pyro, values):
            return self.program(*args, **kwargs)


def _owner(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    *path, last = name.split(".")
    for part in path:
        if not hasattr(root, part):
            root.add_module(part, nn.Module())
        root = getattr(root, part)
    return root, last


def _given(pyro: Any, values: Mapping[str, Tensor]) -> Any:
    """A handler that answers every site: latent ones with their value, observations with their mean."""

    class Given(pyro.poutine.messenger.Messenger):
        def _pyro_sample(self, msg: Any) -> None:
            if msg["done"] or type(msg["fn"]).__name__ == "_Subsample":  # the indices of a plate
                return
            if msg["name"] in values:
                msg["value"] = values[msg["name"]]
            elif msg["value"] is None:
                msg["value"] = _standin(msg["fn"])
            msg["done"] = msg["stop"] = True

        def _pyro_param(self, msg: Any) -> None:
            value = msg["args"][1] if len(msg["args"]) > 1 else msg["kwargs"].get("init_tensor")
            if value is not None:
                msg["value"] = value() if callable(value) else value
                msg["done"] = msg["stop"] = True

    return Given()


def _standin(distribution: Any) -> Tensor:
    """What an observation that nobody made is taken to be; the network's output should not depend on it."""
    return torch.zeros(tuple(distribution.batch_shape) + tuple(distribution.event_shape))


def is_auto_normal(obj: Any) -> bool:
    """Whether `obj` is a guide that keeps a location and a scale for every site."""
    return hasattr(obj, "prototype_trace") and callable(getattr(type(obj), "_get_loc_and_scale", None))


def from_pyro(guide: Any, model: nn.Module, *, keep_dropout: bool = False) -> Adapted:
    """A trained `AutoNormal` guide as a network and its posterior.

    Args:
        guide: A `pyro.infer.autoguide.AutoNormal`. Not modified.
        model: The model it is a guide of, a `PyroModule` or another module with `pyro.sample` in its forward pass,
            whose return value is the network's output. Not modified.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as it is under
            `pyro.infer.Predictive` for a model in eval mode (in training mode Predictive draws it).

    Returns:
        A `Program`, which takes the model's arguments, and the mean-field posterior over its `sites`.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidType: Not such a guide, or `model` is no module.
        InvalidValue: The guide has never been run.
        UnsupportedOperation: The output depends on a constrained site.
    """
    if not is_auto_normal(guide):
        raise InvalidType(
            f"`guide` is a {type(guide).__name__}; pass a `pyro.infer.autoguide.AutoNormal`, which keeps a mean and a "
            "deviation for every site."
        )
    if guide.prototype_trace is None:
        raise InvalidValue("this guide has never been run; train it with `pyro.infer.SVI` first.")
    if not isinstance(model, nn.Module):
        raise InvalidType(f"`model` is a {type(model).__name__}; pass the PyroModule that the guide was made for.")
    biject_to: Callable[..., Any] = torch.distributions.biject_to
    values, held, variances = {}, {}, {}
    with torch.no_grad():
        for name, site in guide.prototype_trace.iter_stochastic_nodes():
            loc, scale = guide._get_loc_and_scale(name)
            transform = biject_to(site["fn"].support)
            if _is_identity(transform):
                values[name] = loc.detach().clone()
                variances[f"sites.{name}"] = scale.detach().square()
            else:
                held[name] = transform(loc).detach().clone()
    program = Program(copy.deepcopy(model), values, held).train(model.training)
    used = _influential(program, guide.prototype_trace) if held else []
    if used:
        raise UnsupportedOperation(
            f"the output of this {type(model).__name__} depends on the sites {', '.join(f'`{n}`' for n in used)}, "
            "whose support is constrained, so that they are not Gaussian under the guide; return the mean of the "
            "observations from the model's forward pass, and give weights a prior over all real numbers."
        )
    return Adapted(without_dropout(program, keep_dropout, "Pyro in eval mode"), Posterior(variances))


def _is_identity(transform: Any) -> bool:
    while hasattr(transform, "base_transform"):
        transform = transform.base_transform
    parts = getattr(transform, "parts", None)
    return not parts if parts is not None else False


def _influential(program: Program, trace: Any) -> list[str]:
    """The held sites that the output depends on, for the arguments of the guide's first run."""
    call = trace.nodes["_INPUT"]
    buffers = [attrgetter(name)(program.held) for name in program._fixed]
    try:
        for buffer in buffers:
            buffer.requires_grad_(True)
        with torch.enable_grad():
            outputs = program(*call["args"], **call["kwargs"])
            total = sum(y.sum() for y in pytree.tree_leaves(outputs) if isinstance(y, Tensor) and y.requires_grad)
            if not isinstance(total, Tensor):
                return []
            slopes = torch.autograd.grad(total, buffers, allow_unused=True)
    finally:
        for buffer in buffers:
            buffer.requires_grad_(False)
    return [name for name, slope in zip(program._fixed, slopes, strict=True) if slope is not None]
