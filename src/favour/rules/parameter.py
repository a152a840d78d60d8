"""A parameter as an uncertain tensor: one draw for each input, the same wherever the input reads it.

    y = p for every input of the batch,    m = p̄,    n = R z (and columns of draws shared between layers).

Norm weights, scales, class tokens and position tables go through the rules of the operations that read them.
`favour.passes.normalise.drawn` puts this operation into the graph.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument
from favour.rules.registry import rule
from favour.rules.weight_space import held, reshaped
from favour.surrogate import Noise, Surrogate, factor_noise
from favour.surrogate.value import Context, Weight, mean_of

_LIBRARY = torch.library.Library("favour", "FRAGMENT")
_LIBRARY.define("drawn(Tensor parameter, Tensor like, bool squeeze=False) -> Tensor")


def for_each(parameter: Tensor, like: Tensor, squeeze: bool = False) -> Tensor:
    """The parameter for every input of `like`, the batch in front; `squeeze` drops a first dimension of one."""
    inner = parameter.squeeze(0) if squeeze else parameter
    return inner.unsqueeze(0).expand(like.shape[0], *inner.shape)


_LIBRARY.impl("drawn", for_each, "CompositeImplicitAutograd")
drawn = torch.ops.favour.drawn.default


@rule(drawn, exactness="exact", family="parameter", weights=True)
def drawn_parameter(ctx: Context, parameter: Argument, like: Argument, squeeze: bool = False) -> Surrogate:
    if not isinstance(parameter, Weight):
        raise UnsupportedOperation(f"`favour::drawn` at {ctx.place} takes a parameter that has a posterior.")
    like = mean_of(like)
    mean = for_each(parameter.mean, like, squeeze)

    def alone(p: Tensor) -> Tensor:
        return p.squeeze(2) if squeeze else p

    def back(g: Tensor) -> Tensor:
        return g.unsqueeze(2) if squeeze else g

    noises: list[Noise] = [reshaped(part, alone, back, mean, held(ctx, part)) for part in parameter.draws]
    if parameter.latents is not None:
        columns = parameter.latents.squeeze(1) if squeeze else parameter.latents
        wide = columns.unsqueeze(1).expand(columns.shape[0], *mean.shape)
        noises.append(factor_noise(wide, "latents", parameter.name))
    return Surrogate(mean, [], noises)
