"""`favour.compile`: from a trained network to a predictor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.capture.dynamic import Dynamic
from favour.capture.graph import capture, split_example
from favour.capture.node import Node
from favour.head import find_head
from favour.methods.settings import Settings
from favour.plan import configure, truncate
from favour.posterior import Posterior
from favour.predictor import Predictor
from favour.progress import Progress
from favour.tensors import matched


def compile(
    model: nn.Module,
    example: Any,
    *,
    method: str = "auto",
    rank: int | None = None,
    iterations: int = 2,
    activation: str = "price",
    weight_rank: int | None = None,
    posterior: Posterior | Mapping[Any, Any] | None = None,
    dropout: Mapping[str, Any] | None = None,
    directions: Any = None,
    at: str | None = None,
    precision: str | None = None,
    start: Any = None,
    seed: int = 0,
    memory: int | None = None,
    secant: bool | None = None,
    pairs: int = 0,
    dynamic: Dynamic = None,
) -> Predictor:
    """Turn a trained network into a predictor of means and covariances.

    Args:
        model: Any module `torch.export` can take. Never modified.
        example: A tensor, a tuple of arguments or a dict of keyword arguments, of any batch size.
        method: `"adjoint"`, `"dplr"`, `"full"`, `"diag"` or `"auto"`.
        rank: Of the low-rank part that forward sweeps keep; None for the method's default.
        iterations: K of Algorithm 1.
        activation: `"price"`, `"matched"` or `"taylor"`.
        weight_rank: q of the rank-q weights used in Algorithm 1's products.
        posterior: A `Posterior`, or a mapping from parameter name to a variance tensor.
        dropout: Dropout rates by module name that replace the model's own; 0 silences one.
        directions: Output directions of the reverse sweep; None for all.
        at: Name of a module whose output to predict instead of the model's.
        precision: Of the variance and reverse sweeps: None (the model's own), `"bf16"`, or `"tf32"` (linear
            layers on a GPU, eager code; inside `torch.compile` use `torch.set_float32_matmul_precision`).
        start: Of Algorithm 1: None (warm), `"random"`, or a mapping from module name to columns.
        seed: Of random starts.
        memory: Budget in bytes for the sweeps and for sampling.
        secant: Whether the reverse sweep takes secants, not tangents, over what dropout does, which is closer wherever
            the rate is not ½; k covectors more to send back through linear layers between dropout and an activation.
            None: where `"auto"` predicts that to cost at most half a forward pass.
        pairs: Groups of draws (16, say) whose joint effects on one activation the reverse sweep adds; 0 for none. Takes
            secants too, and means and variances behind an activation then know the third and fourth cumulants that
            dropout leaves before it. Worth most at rates near ½, for the price of two more forward passes than groups.
        dynamic: Sizes besides the batch that may change, such as a sequence length or a resolution: True for all
            that the model does not fix, dimensions of every input such as `1` or `(2, 3)`, or a mapping from the
            name of an argument to those. `auto` chooses by the sizes of the example.

    Returns:
        A `Predictor`; call it like the model.

    On a terminal a line on the error stream says what goes on once this takes over two seconds.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        >>> predict = compile(model, torch.randn(4, 3))
        >>> belief = predict(torch.randn(5, 3))
        >>> belief.mean.shape, belief.covariance_matrix.shape
        (torch.Size([5, 2]), torch.Size([5, 2, 2]))
    """
    settings = Settings(
        method=method,
        rank=rank,
        iterations=iterations,
        activation=activation,
        weight_rank=weight_rank,
        directions=directions,
        precision=precision,
        start=start,
        seed=seed,
        memory=memory,
        secant=secant,
        pairs=pairs,
    )
    settings.validate()
    with Progress(f"compiling {type(model).__name__}") as progress:
        progress.stage("capturing")
        graph = configure(capture(model, example, dynamic=dynamic), dropout)
        if at is not None:
            graph = truncate(graph, at)
        given = Posterior.wrap(posterior)
        named = model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
        tensors = {name: tensor for group in named for name, tensor in group}
        given.validate(tensors)
        predictor = Predictor(graph, settings, matched(given, tensors), model)
        progress.stage("first pass")
        rehearse(predictor, example)
    return predictor


def rehearse(predict: Predictor, example: Any) -> None:
    """Run once on a small example: plans, caches and starts are made, and what cannot work fails now."""
    args, kwargs = split_example(example)
    batch = next(t.shape[0] for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim)
    given, (output, *_) = predict.settings.directions, predict.graph.outputs
    by_input = isinstance(given, Tensor) and isinstance(output, Node) and given.ndim > len(output.shape or ())
    rows = batch if by_input else 2  # directions (k, batch, *event) go with the whole example
    args, kwargs = pytree.tree_map(
        lambda t: t[:rows] if isinstance(t, Tensor) and t.ndim and t.shape[0] == batch else t, (args, kwargs)
    )
    # The example's values mean nothing: it may be an uninitialised tensor.
    args, kwargs = pytree.tree_map(
        lambda t: t.nan_to_num(0, 0, 0) if isinstance(t, Tensor) and t.is_floating_point() else t,
        (args, kwargs),
    )
    predict._sizes = predict._other_sizes(predict._leaves(args, kwargs))
    # What is kept from here on must be usable for gradients, wherever `compile` was called.
    with torch.inference_mode(False), torch.no_grad():
        predict._warm = False
        predict(*args, **kwargs)
        predict._warm = True
        if predict.settings.memory is not None:
            predict(*args, **kwargs)
        find_head(predict)
