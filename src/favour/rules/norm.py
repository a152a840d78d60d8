"""BatchNorm with running statistics: y = (x − r)·w/√(s + ε) + b, channel by channel. Affine, so exact."""

from __future__ import annotations

from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.rules.registry import rule
from favour.surrogate import Surrogate, scaling
from favour.value import Context, Value

aten = torch.ops.aten


@rule(aten.batch_norm.default, exactness="exact", family="norm")
def batch_norm(
    ctx: Context,
    x: Value,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn: bool,
) -> Surrogate:
    if training or running_mean is None or running_var is None:
        raise UnsupportedOperation(
            f"batch normalisation at {ctx.place} uses the statistics of the batch, which mixes its inputs; "
            "predictions are per input. Keep running statistics (`track_running_stats=True`) and use them (`training=False`)."
        )
    mean = torch.nn.functional.batch_norm(x.mean, running_mean, running_var, weight, bias, False, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    return Surrogate(mean, [(x, scaling(scale.reshape(1, -1, *[1] * (x.mean.ndim - 2))))])
