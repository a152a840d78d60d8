"""The captured graph against the model it came from, without noise: do both still compute the same?

The model is run as it is for prediction, in evaluation mode, on a structural copy that shares its tensors; the graph
is run with every dropout left out. Beliefs are about the graph, and so are its samples: only this comparison can tell
that the model says something else, because it was changed in a way nothing else notices (a global, a closure) or
because it does something else while training.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.graph.apart import close, places
from favour.graph.example import without_caches
from favour.graph.taking import copied_structure
from favour.program.propagator import Propagator

# Relative to the largest output: other kernels and another order of sums may differ by so much.
_TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-3}
_COARSE = 5e-2


def live_difference(predict: Propagator, args: tuple, kwargs: Mapping[str, Any]) -> str | None:
    """A sentence where the model's own output differs from the captured graph's; None where it does not.

    None also where there is nothing to compare with: no model (a loaded predictor), an inner output (`at`), or a model
    that draws random numbers in evaluation mode too.
    """
    origin = predict.program.origin
    if origin is None or origin.at is not None:
        return None
    clone = copied_structure(origin.model)
    clone.eval()
    for module in clone.modules():
        if hasattr(module, "favour_posterior"):
            module.sampling = False  # type: ignore[assignment]
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        try:
            twice = [pytree.tree_flatten(without_caches(clone(*args, **kwargs))) for _ in range(2)]
        except Exception as error:
            return f"the model itself fails on these inputs: {type(error).__name__}: {str(error).splitlines()[0]}"
        if _gap(twice[0][0], twice[1][0]) is not None:
            return None
        captured = predict.program.plain(predict.program.leaves(args, kwargs))
        if not predict.graph.batched:  # one event, with the axis of a batch
            captured = [c[0] if isinstance(c, Tensor) else c for c in captured]
    live, _ = twice[0]
    if len(live) != len(captured):
        return (
            f"the model returns {len(live)} tensors in evaluation mode and {len(captured)} while training, which is "
            "what was captured"
        )
    gap = _gap(live, captured)
    return None if gap is None else f"the model's output in evaluation mode differs from the captured graph's {gap}"


def _gap(a: list[Any], b: list[Any]) -> str | None:
    for one, other in zip(a, b, strict=True):
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        one = next((t for t in places(one, other) if close(t, other)), one)
        if one.shape != other.shape:
            return f"in shape, {tuple(one.shape)} and {tuple(other.shape)}"
        if not one.numel() or not one.is_floating_point():
            continue
        difference = float((one.double() - other.double()).abs().max())
        size = float(other.double().abs().max())
        if not difference <= _TOLERANCES.get(one.dtype, _COARSE) * size + torch.finfo(one.dtype).tiny:
            return f"by up to {difference:.2g}, where the largest output is {size:.2g}"
    return None
