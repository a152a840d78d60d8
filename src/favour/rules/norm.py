"""BatchNorm with running statistics: y = (x − r)·w/√(s + ε) + b, channel by channel. Affine, so exact."""

from __future__ import annotations

from typing import Any

import torch

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
    mean = torch.nn.functional.batch_norm(x.mean, running_mean, running_var, weight, bias, False, momentum, eps)
    scale = (running_var + eps).rsqrt()
    scale = scale if weight is None else scale * weight
    return Surrogate(mean, [(x, scaling(scale.reshape(1, -1, *[1] * (x.mean.ndim - 2))))])
