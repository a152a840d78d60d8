"""Where Algorithm 1 starts.

The paper starts from V ~ N(0, 1), which has no notion of the covariance's scale: where entries of M are small against
1/√n, the first Λ = max(diag(M − V S⁻¹Vᵀ), 0) is zero everywhere, and where they are large it is diag(M).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from favour.methods.dplr import Pending, Start
from favour.plan import Step


def fixed_noise(starts: dict[str, Tensor], seed: int, step: Step, pending: Pending, rank: int) -> Tensor:
    """Standard normal columns (rank, 1, *event) for a step: the same for every input, batch and call."""
    name = step.node.name
    shape = (rank, *pending.like.shape[1:])
    if name not in starts or starts[name].shape != shape:
        digest = [seed, *name.encode()]
        drawn = np.random.default_rng(digest).standard_normal((rank, math.prod(shape[1:])))
        starts[name] = torch.as_tensor(drawn, dtype=torch.float32).reshape(shape)
    return starts[name].to(pending.like).unsqueeze(1)


def random_start(starts: dict[str, Tensor], seed: int) -> Start:
    """The paper's start."""
    return lambda step, pending, rank: fixed_noise(starts, seed, step, pending, rank)


def warm_start(starts: dict[str, Tensor], seed: int) -> Start:
    """TODO experiment."""
    return random_start(starts, seed)
