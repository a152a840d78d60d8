"""`favour.sample`: Monte Carlo samples of any model's outputs, without touching the model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import InvalidValue
from favour.graph import capture, split_example
from favour.methods.engine import Settings
from favour.plan import configure
from favour.posterior import Posterior
from favour.predictor import Predictor

# Capturing takes a second or so; the weak reference lets the model go.
_captured: weakref.WeakKeyDictionary[nn.Module, dict[Any, Predictor]] = weakref.WeakKeyDictionary()


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
    if n < 1:
        raise InvalidValue(f"`n` is {n}; draw at least one sample.")
    args, kwargs = split_example(x)
    given = Posterior.wrap(posterior)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    given.validate(tensors)
    leaves, spec = pytree.tree_flatten((args, kwargs))
    key = (str(spec), tuple((tuple(t.shape[1:]), t.dtype) if isinstance(t, Tensor) else repr(t) for t in leaves))
    kept = _captured.setdefault(model, {})
    if key not in kept:
        kept[key] = Predictor(capture(model, x), Settings(), Posterior({}), None)
    graph = configure(kept[key].graph, dropout)
    return Predictor(graph, Settings(memory=memory), given, model).sample(*args, n=n, generator=generator, **kwargs)
