"""`favour.compile`: from a trained network to a predictor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.errors import ReducedCovariance
from favour.graph.dynamic import Dynamic
from favour.graph.example import split_example
from favour.graph.node import Node
from favour.inspect.selfcheck import self_check, warn_of, warn_of_silence
from favour.methods import DPLR, Adjoint, Auto, Linearised, Method, Numerics, Pooled
from favour.methods.cost import output_entries
from favour.methods.keywords import method_of
from favour.passes.capture import capture
from favour.passes.plan.steps import configure, truncate
from favour.posterior import Posterior
from favour.predictor.predictor import Predictor
from favour.program.following import Origin
from favour.program.program import Program
from favour.program.tensors import matched, named_tensors
from favour.progress import Progress


def compile(
    model: nn.Module,
    example: Any,
    *,
    method: str | Method = "auto",
    effort: str = "balanced",
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
    pairs: int | None = None,
    task: str | None = None,
    dynamic: Dynamic = None,
    batched: bool = True,
    check: Any = True,
) -> Predictor:
    """Turn a trained network into a predictor of means and covariances.

    Args:
        model: Any module `torch.export` can take. Never modified.
        example: A tensor, a tuple of arguments or a dict of keyword arguments, of any batch size.
        method: `"adjoint"`, `"dplr"`, `"full"`, `"diag"`, `"linearised"`, `"sampling"`, `"pooled"` or `"auto"`; or
            an object of `favour.methods`, which has its parameters, so that of the keywords below `effort`, `rank`,
            `iterations`, `weight_rank`, `directions`, `start`, `secant`, `pairs` and `task` are refused beside it.
            `"auto"` by itself takes `"linearised"` where the posterior is of a linearised network, as Laplace's are.
        effort: What the reverse sweep takes where `secant` and `pairs` do not say: `"fast"`, tangents; `"balanced"`,
            secants where `"auto"` predicts them to be cheap; `"best"`, secants and 16 groups of pairs.
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
            None: by `effort`; in `"balanced"` where `"auto"` predicts half a forward pass, or the network is small.
        pairs: Groups of draws (16, say) whose joint effects on one activation the reverse sweep adds; 0 for none, None
            by `effort`. Takes secants too, and means and variances behind an activation then know the third and fourth
            cumulants that dropout leaves before it. Worth most at rates near ½, for the price of two more forward
            passes than groups.
        task: What the outputs are, where it matters for what `"auto"` keeps of very many: `"classification"` for class
            scores, of which it then follows the directions that class probabilities see. None: all outputs while
            that is affordable, else `"pooled"` draws for pictures and sequences and `"dplr"` for vectors, with a
            warning (`favour.errors.ReducedCovariance`).
        dynamic: Sizes besides the batch that may change, such as a sequence length or a resolution: True for all
            that the model does not fix, dimensions of every input such as `1` or `(2, 3)`, or a mapping from the
            name of an argument to those. `auto` chooses by the sizes of the example.
        batched: Whether the model's tensors have a batch in front. False takes all of a call for one event (a graph
            network's nodes, a whole scene): beliefs are about all of it, with a batch of one in front, such as
            (1, nodes, classes). Sizes are then the example's, and whole numbers among the inputs (edges, indices) say
            how the event is made up.
        check: Whether to compare beliefs with some 200 samples of the network before returning, in about the time that
            compiling took: True for the example's first inputs, or inputs of your own, given like the example. Warns
            (`favour.UntrustedBelief`) where they disagree; `print(predict)` says what was found, or "not checked".
            torch's global random state is left as it was.

    Returns:
        A `Predictor`; call it like the model.

    Warns:
        NothingUncertain: No noise reaches an output.
        UntrustedBelief: Samples disagree with the beliefs.
        ReducedCovariance: There are too many outputs for `"auto"` to keep all their correlations.

    On a terminal a line on the error stream says what goes on once this takes over two seconds.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        >>> predict = compile(model, torch.randn(4, 3))
        >>> belief = predict(torch.randn(5, 3))
        >>> belief.mean.shape, belief.covariance_matrix.shape
        (torch.Size([5, 2]), torch.Size([5, 2, 2]))
    """
    asked = method_of(
        method,
        effort=effort,
        rank=rank,
        iterations=iterations,
        weight_rank=weight_rank,
        directions=directions,
        start=start,
        secant=secant,
        pairs=pairs,
        task=task,
    )
    weight_posterior = Posterior.wrap(posterior)
    if weight_posterior.linearised and isinstance(asked, Auto) and not asked.asked():
        asked = Linearised()
    numerics = Numerics(activation, precision, seed, memory)
    numerics.validate()
    asked.validate(numerics)
    begin = time.perf_counter()
    with Progress(f"compiling {type(model).__name__}") as progress:
        progress.stage("capturing")
        graph = configure(capture(model, example, dynamic=dynamic, batched=batched), dropout)
        if at is not None:
            graph = truncate(graph, at)
        tensors = named_tensors(model)
        weight_posterior.validate(tensors)
        predictor = Predictor(Program(graph, asked, matched(weight_posterior, tensors), model, numerics))
        progress.stage("first pass")
        small = rehearse(predictor, example)
        predictor.program.origin = Origin.of(model, small, dynamic, dropout, at, batched)
        if predictor.is_certain:
            warn_of_silence(predictor, stacklevel=3)
            return predictor
        warn_of_reduction(predictor, stacklevel=3)
        if check is not False:
            progress.stage("checking against samples")
            seconds = time.perf_counter() - begin
            predictor.checked = self_check(predictor, example if check is True else check, seconds)
            warn_of(predictor, predictor.checked, stacklevel=3)
    return predictor


def warn_of_reduction(predict: Predictor, stacklevel: int) -> None:
    """Say what is lost where `auto` found too many outputs for their whole covariance."""
    chosen, plan = predict.method, predict.plain_plan
    if chosen is predict.asked or not isinstance(chosen, (DPLR, Pooled)):
        return
    n, everything = output_entries(plan), Adjoint().cost(plan)
    if isinstance(chosen, DPLR):
        instead = (
            f"so 'dplr' is taken: of the correlations between outputs a rank of {chosen.columns} is kept, and "
            "variances are those of a forward sweep. If these are class scores, task='classification' keeps what "
            "probabilities see of them; otherwise"
        )
    else:
        instead = (
            f"so samples are taken: {chosen.n} draws of the network, and a forward sweep of variances that smooths "
            "them (method='pooled'). Correlations between outputs are known as well as so many draws know them;"
        )
    warnings.warn(
        f"{n} outputs are too many for their whole covariance by default (about {everything:.0f} forward passes with "
        f"method='adjoint'), {instead} method='adjoint' keeps everything, `directions` what you name, and "
        f"method={chosen.name!r} says that this is meant.",
        ReducedCovariance,
        stacklevel=stacklevel,
    )


def rehearse(predict: Predictor, example: Any) -> Any:
    """Run once on a small example, and return it: plans, caches and starts are made, what cannot work fails now."""
    args, kwargs = split_example(example)
    batch = next(t.shape[0] for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim)
    directions, (output, *_) = getattr(predict.asked, "directions", None), predict.graph.outputs
    by_input = isinstance(directions, Tensor) and isinstance(output, Node) and directions.ndim > len(output.shape or ())
    rows = batch if by_input else 2  # directions (k, batch, *event) go with the whole example
    if predict.graph.batched:
        args, kwargs = pytree.tree_map(
            lambda t: t[:rows].clone() if isinstance(t, Tensor) and t.ndim and t.shape[0] == batch else t,
            (args, kwargs),
        )
    # The example's values mean nothing: it may be an uninitialised tensor.
    args, kwargs = pytree.tree_map(
        lambda t: t.nan_to_num(0, 0, 0) if isinstance(t, Tensor) and t.is_floating_point() else t,
        (args, kwargs),
    )
    program = predict.program
    program.sizes = program.sizes_besides_batch(program.leaves(args, kwargs))
    # What is kept from here on must be usable for gradients, wherever `compile` was called.
    with torch.inference_mode(False), torch.no_grad():
        program.measuring = False
        predict(*args, **kwargs)
        program.measuring = True
        if predict.numerics.memory is not None:
            predict(*args, **kwargs)
        predict.prepare()
    return kwargs if isinstance(example, dict) else args
