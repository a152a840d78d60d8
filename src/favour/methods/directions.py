"""Output directions for the reverse sweep.

With many outputs, one covector per output is too many, and most of them matter little: what the Jensen–Shannon
divergence and the class probabilities see of Σ is its product with the Jacobian of the softmax, J = diag(p) − ppᵀ
(the JSD is ½tr(JΣ) to leading order). So the k leading eigenvectors of J are the directions worth having. They sit on
the few classes that have probability, and subspace iteration started from the k most probable classes finds them in a
few products Jv = p∘v − p(p·v). Only the M most probable classes take part (M = 4k, at least 16), so that all that grows
with the number of classes is one pass to find them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.errors import InvalidValue, ShapeMismatch

ITERATIONS = 4

# How many of the most probable classes the directions may touch: at least, and per direction.
CANDIDATES, CANDIDATES_PER_DIRECTION = 16, 4


def softmax_directions(logits: Tensor, k: int, iterations: int = ITERATIONS) -> Tensor:
    """Orthonormal estimates of the k leading eigenvectors of diag(p) − ppᵀ, p = softmax(logits).

    Args:
        logits: (batch, C).
        k: Number of directions, below C.
        iterations: Steps of subspace iteration.

    Returns:
        (k, batch, C), orthonormal for each row of the batch.

    Example:
        >>> basis = softmax_directions(torch.tensor([[4.0, 3.0, 0.0, -1.0]]), 2)
        >>> basis.shape
        torch.Size([2, 1, 4])
    """
    M = min(logits.shape[-1], max(CANDIDATES, CANDIDATES_PER_DIRECTION * k))
    top, classes = logits.topk(M, -1)  # (batch, M), most probable first
    p = (top - logits.logsumexp(-1, keepdim=True)).exp()
    V = torch.eye(k, M, dtype=p.dtype, device=p.device).unsqueeze(1).expand(k, *p.shape)
    # Where one class has all the probability J vanishes; a share of the identity keeps the start then.
    scale = (p * (1 - p)).amax(-1, keepdim=True).clamp_min(torch.finfo(p.dtype).tiny)
    for _ in range(iterations):
        product = p * V - p * (V * p).sum(-1, keepdim=True)
        V = orthonormal(product / scale + 1e-3 * V)
    wide = logits.new_zeros(logits.shape[0], k, logits.shape[-1])
    index = classes.unsqueeze(1).expand(-1, k, -1)
    return wide.scatter(-1, index, V.transpose(0, 1)).transpose(0, 1)


def orthonormal(V: Tensor) -> Tensor:
    """Gram–Schmidt with normalisation over the last axis, columns in front."""
    columns: list[Tensor] = []
    for v in V.unbind(0):
        for _ in range(2):  # twice is enough (Kahan): rounding may leave a component of the earlier ones
            for u in columns:
                v = v - u * (u * v).sum(-1, keepdim=True)
        columns.append(v / v.square().sum(-1, keepdim=True).sqrt().clamp_min(torch.finfo(V.dtype).tiny))
    return torch.stack(columns)


def given_directions(directions: Tensor, mean: Tensor) -> Tensor:
    """The user's covectors, orthonormalised, one set for the whole batch or one per input.

    Args:
        directions: (k, *event), or (k, batch, *event).
        mean: (batch, *event), for shape and dtype.
    """
    event = tuple(mean.shape[1:])
    given = tuple(directions.shape)
    if given[1:] == event:
        directions = directions.unsqueeze(1)
    elif given[1:] != tuple(mean.shape):
        raise ShapeMismatch(
            f"`directions` has shape {given}; for outputs of shape {tuple(mean.shape)} give (k, *event) with event "
            f"{event}, or the same with the batch after k."
        )
    flat = directions.to(mean).flatten(2)
    if not torch.compiler.is_compiling():
        rank = torch.linalg.matrix_rank(flat.transpose(0, 1).double())
        if bool((rank < flat.shape[0]).any()):
            raise InvalidValue("`directions` are linearly dependent; give independent covectors.")
    return orthonormal(flat).reshape(directions.shape).expand(given[0], *mean.shape)
