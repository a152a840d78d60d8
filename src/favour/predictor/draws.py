"""`favour.sample`: Monte Carlo samples of any model's outputs, without touching the model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import InvalidType
from favour.graph.example import split_example
from favour.graph.node import Graph
from favour.methods import Auto, Numerics
from favour.methods.sampling import check_count
from favour.passes.capture import capture
from favour.passes.plan.steps import configure
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor
from favour.program.following import Structure
from favour.program.program import Program
from favour.program.tensors import named_tensors

# Capturing takes a second or so; the weak reference lets the model go.
_captured: weakref.WeakKeyDictionary[nn.Module, tuple[Structure, Any, dict[Any, Graph]]] = weakref.WeakKeyDictionary()


def _ties(model: nn.Module) -> list[tuple[str, str]]:
    """Which tensors are the same, by the first of their names."""
    first: dict[int, str] = {}
    return [(name, first.setdefault(id(tensor), name)) for name, tensor in named_tensors(model).items()]


def _capture_once(model: nn.Module, x: Any, leaves: list[Any], spec: Any) -> Graph:
    ties = _ties(model)
    structure, known, graphs = _captured.get(model, (None, None, {}))
    if structure is None or not structure.same() or known != ties:
        graphs = {}
        _captured[model] = (Structure(model), ties, graphs)
    key = (
        str(spec),
        tuple((tuple(t.shape[1:]), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves),
    )
    if key not in graphs:
        graphs[key] = capture(model, x)
    return graphs[key]


def sample(
    model: nn.Module,
    x: Any,
    n: int,
    posterior: Posterior | Mapping[Any, Any] | None = None,
    generator: torch.Generator | None = None,
    *,
    dropout: Mapping[str, Any] | None = None,
    memory: int | None = None,
) -> Any:
    """Draw n outputs of a network with live dropout and random weights.

    Args:
        model: The network; neither it nor its training flags are touched.
        x: A tensor, a tuple of arguments or a dict of keyword arguments.
        n: Number of draws.
        posterior: Gaussians over parameters, besides those of the model's own Bayesian layers.
        generator: Makes the draws reproducible; without one they follow torch's global seed.
        dropout: Rates by module name that replace the model's own.
        memory: Budget in bytes for the activations of one chunk of draws.

    Returns:
        Draws of shape (n, batch, *outputs), in the structure of the model's output.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))
        >>> draws = sample(model, torch.ones(5, 3), 100, generator=torch.Generator().manual_seed(0))
        >>> draws.shape
        torch.Size([100, 5, 2])
    """
    check_count(n)
    numerics = Numerics(memory=memory)
    numerics.validate()
    if not isinstance(model, nn.Module):
        raise InvalidType(f"`model` is a {type(model).__name__}; favour.sample takes a torch.nn.Module.")
    args, kwargs = split_example(x)
    weight_posterior = Posterior.wrap(posterior)
    weight_posterior.validate(named_tensors(model))
    graph = configure(_capture_once(model, x, *pytree.tree_flatten((args, kwargs))), dropout)
    return Predictor(Program(graph, Auto(), weight_posterior, model, numerics)).sample(
        *args, n=n, generator=generator, **kwargs
    )
