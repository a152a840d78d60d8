"""Output directions for the reverse sweep.

With many outputs, one covector per output is too many, and most of them matter little: what the Jensen–Shannon
divergence and the class probabilities see of Σ is its product with the Jacobian of the softmax, J = diag(p) − ppᵀ
(the JSD is ½tr(JΣ) to leading order). So the k leading eigenvectors of J are the directions worth having. They sit on
the few classes that have probability, and subspace iteration started from the k most probable classes finds them in a
few products Jv = p∘v − p(p·v). Only the M most probable classes take part (M = 4k, at least 16), so that all that grows
with the number of classes is one pass to find them.

J has a null vector: a softmax does not see a shift 1 = (1, …, 1) of all scores. Nothing in training holds such a shift
back, and in networks with many classes it is often the largest direction of Σ by far (99% of ‖Σ‖²_F in a 1,000-class
perceptron), while the directions above are all orthogonal to it. So it is added to them: with M the covariance of the
scores as the forward sweep knows it, GΣ_xGᵀ + N at the last layer,

    w = M1                       one step from 1 towards the leading eigenvector of M, the added direction
    D − w∘w/(1·w)                the marginals of M less w's rank-one part of it, for what lies off the directions

where wwᵀ/(1·w) ≤ M (it is M^½ times a projection times M^½), so that the second stays ≥ 0. Without it the variance of
the shift would count twice, along w and on every score's own.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from favour.belief.covariance import Directional
from favour.errors import InvalidValue, ShapeMismatch
from favour.graph.tracing import traced
from favour.methods.forward import Entry
from favour.surrogate import inner
from favour.surrogate.value import Value

ITERATIONS = 4

# How many of the most probable classes the directions may touch: at least, and per direction.
CANDIDATES, CANDIDATES_PER_DIRECTION = 16, 4


def directional(value: Value, asked: int | Tensor, made: Entry | None, gram: Callable[[Tensor], Tensor]) -> Directional:
    """The covariance of an output, exact in some directions and independent off them.

    Args:
        value: The output, as the forward sweep knows it.
        asked: The covectors, or how many directions of a softmax; one of these is the common shift where `made` is
            given and knows one.
        made: The step that makes the output.
        gram: Covariance in the directions of a basis, (k, batch, *event) to (batch, k, k).
    """
    mean, diag = value.mean, value.variance.to(value.mean.dtype)
    if isinstance(asked, Tensor):
        basis = given_directions(asked, mean)
        return Directional(diag, basis, gram(basis))
    shift = common_shift(made)
    if shift is not None:
        w, share = shift
        basis = with_shift(softmax_directions(mean, asked - 1), w)
        diag = (diag - share).clamp_min(0)
    else:
        basis = softmax_directions(mean.flatten(1), asked).reshape(asked, *mean.shape)
    return Directional(diag, basis, gram(basis))


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


def common_shift(entry: Entry | None) -> tuple[Tensor, Tensor] | None:
    """w = M1 and the diagonal of wwᵀ/(1·w), both (batch, C), for scores (batch, C) that a layer with a weight makes.

    Args:
        entry: The step that makes the scores, in a forward sweep; None where they are an input.

    Returns:
        None where the scores come from something else: a log-softmax, say, has taken the shift out.
    """
    if entry is None:
        return None
    surrogate = entry.surrogate
    if len(surrogate.maps) != 1 or not surrogate.maps[0][1].weighted or surrogate.mean.ndim != 2:
        return None
    ((x, G),) = surrogate.maps
    ones = torch.ones_like(surrogate.mean[:1] if G.thin else surrogate.mean).unsqueeze(0)
    back = G.transpose(ones)  # (1, batch or 1, *inputs)
    spread = torch.zeros_like(back) if x.diag is None else back * x.diag
    if x.factor is not None:
        spread = spread + torch.einsum("bfk,kb...->fb...", inner(back, x.factor), x.factor)
    w = G.apply(spread)
    for noise in surrogate.noises:
        w = w + noise.matmul(ones.expand(1, *surrogate.mean.shape))
    w = w.squeeze(0).to(surrogate.mean.dtype)
    size = w.sum(-1, keepdim=True)
    return w, torch.where(size > 0, w.square() / torch.where(size > 0, size, 1.0), 0.0)


def with_shift(basis: Tensor, w: Tensor) -> Tensor:
    """The basis (k, batch, C) and, orthonormal to it, the direction of w, (k + 1, batch, C); of 1 where w is zero."""
    size = w.square().sum(-1, keepdim=True)
    y = torch.where(size > 0, w / torch.where(size > 0, size, 1.0).sqrt(), 0.0) + 1e-3 / w.shape[-1] ** 0.5
    for _ in range(2):
        y = y - ((basis * y).sum(-1, keepdim=True) * basis).sum(0)
        y = y / y.square().sum(-1, keepdim=True).sqrt().clamp_min(torch.finfo(y.dtype).tiny)
    return torch.cat([basis, y.unsqueeze(0)])


def given_directions(directions: Tensor, mean: Tensor) -> Tensor:
    """The user's covectors, orthonormalised, one set for the whole batch or one per input.

    Args:
        directions: (k, *event), or (k, batch, *event).
        mean: (batch, *event), for shape and dtype.
    """
    event = tuple(mean.shape[1:])
    shape = tuple(directions.shape)
    if shape[1:] == event:
        directions = directions.unsqueeze(1)
    elif shape[1:] != tuple(mean.shape):
        raise ShapeMismatch(
            f"`directions` has shape {shape}; for outputs of shape {tuple(mean.shape)} give (k, *event) with event "
            f"{event}, or the same with the batch after k."
        )
    flat = directions.to(mean).flatten(2)
    if not traced():
        rank = torch.linalg.matrix_rank(flat.transpose(0, 1).double())
        if bool((rank < flat.shape[0]).any()):
            raise InvalidValue("`directions` are linearly dependent; give independent covectors.")
    return orthonormal(flat).reshape(directions.shape).expand(shape[0], *mean.shape)
