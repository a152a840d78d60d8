"""Modules whose dropout is left out, because what they belong to predicts without it (`favour.adapters.silence`)."""

from __future__ import annotations

import warnings

from torch import nn

from favour.errors import SilencedDropout
from favour.graph.node import Graph

MARK = "favour_silent"  # on a module: the paths of dropouts of which the user has been told


def quiet(model: nn.Module) -> None:
    """Put every module that is marked, and all inside it, into eval mode."""
    for module in model.modules():
        if getattr(module, MARK, None) is not None:
            module.eval()


def warn_of_functions(model: nn.Module, graph: Graph) -> None:
    """Tell of calls of `functional.dropout` in a marked model, which no attribute of a module gave away."""
    modules = getattr(model, MARK, None)
    if modules is None:
        return
    calls = [n for n in graph.nodes if n.draw is not None and not n.live and n.rate != 0]
    places = list(dict.fromkeys(n.place for n in calls if n.module not in modules))
    if places:
        setattr(model, MARK, (*modules, *(n.module for n in calls)))
        warnings.warn(
            f"silenced: dropout at {', '.join(places[:4])}. The model comes from an adapter, whose library predicts "
            "with dropout switched off; pass `keep_dropout=True` to the adapter to count it on top of the posterior.",
            SilencedDropout,
            stacklevel=4,
        )
