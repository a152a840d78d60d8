"""Where Algorithm 1 starts.

`"random"` is the paper's V ~ N(0, 1), the same columns for every input. It knows nothing of M: its first products are
spent on finding the dominant subspace at all.

`"warm"`, the default, starts where that subspace is likely to be. With the weights replaced by rank-q ones W ≈ AB (A
with orthonormal columns, decomposed once per weight), M without its diagonal is close to

    A S Aᵀ,    S = B diag(v) Bᵀ + (AᵀY)(AᵀY)ᵀ      (batch, q, q),   Y = GU the arguments' columns pushed through,

and the leading eigenvectors of the small S, by subspace iteration, give V = A z ψ. Only the last product touches
tensors of the layer's size. Where a layer has no such form (several maps meet, a layer at many positions, noises of
their own), the start is Y or r fixed draws from N(0, M), improved by a few iterations of Algorithm 1 itself with rank-q
weights, each at q(m + n)/(mn) of a full one.

On the layers of trained networks K = 2 from here is as good as about K = 4 from the random start
(`benchmarks/algorithm1.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from favour.belief.covariance import square_root
from favour.methods.algorithm1 import decompose, gram_schmidt, nothing
from favour.methods.pending import Pending, Start
from favour.passes.plan.steps import Step
from favour.surrogate import flat, weighted_gram
from favour.surrogate.matrices import LowRankMatrix

# Rank q of the weights, at least and per column; the iterations on S, where they cost next to nothing; the least
# number of cheap iterations of Algorithm 1 (more columns take up to four).
CHEAP_RANK, CHEAP_RANK_PER_COLUMN, CORE_ITERATIONS, CHEAP_ITERATIONS = 16, 2, 6, 2


def start_of(asked: str | Mapping[str, Tensor] | None, starts: dict[str, Tensor], seed: int) -> Start:
    """What is asked for: None or `"warm"`, `"random"`, or columns by module name, the rest warm."""
    if asked == "random":
        return random_start(starts, seed)
    warm = warm_start(starts, seed)
    return given_start(asked, warm) if isinstance(asked, Mapping) else warm


def fixed_noise(starts: dict[str, Tensor], seed: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Standard normal numbers that depend on `seed` and `name` only: the same for every input, batch and call."""
    key = f"{name}/{'x'.join(map(str, shape))}"
    if key not in starts:
        drawn = np.random.default_rng([seed, *name.encode()]).standard_normal(math.prod(shape))
        starts[key] = torch.as_tensor(drawn, dtype=torch.float32).reshape(shape)
    return starts[key].to(like)


def random_start(starts: dict[str, Tensor], seed: int) -> Start:
    """The paper's start."""

    def start(step: Step, pending: Pending, rank: int) -> Tensor:
        shape = (rank, *pending.like.shape[1:])
        return fixed_noise(starts, seed, step.node.name, shape, pending.like).unsqueeze(1)

    return start


def warm_start(starts: dict[str, Tensor], seed: int) -> Start:
    """The leading eigenvectors of M with rank-q weights."""

    def start(step: Step, pending: Pending, rank: int) -> Tensor:
        def noise(part: str, shape: tuple[int, ...]) -> Tensor:
            return fixed_noise(starts, seed, f"{step.node.name}.{part}", shape, pending.like)

        q = max(CHEAP_RANK, CHEAP_RANK_PER_COLUMN * rank)
        cheap = [(G.low_rank(q), variance) for G, variance in pending.spread]
        only = cheap[0][0] if len(cheap) == 1 and pending.like.ndim == 2 and not pending.noises else None
        if isinstance(only, LowRankMatrix):
            A, B = only.left, only.right
            return _leading(pending, A, B, noise("core", (rank, B.shape[0])))
        affordable = all(G.weighted for G, _ in pending.spread)
        reduced = Pending(cheap, pending.noises, pending.columns, pending.diag, pending.like)
        if pending.columns is not None and pending.columns.shape[0] == rank:
            guess = pending.columns
        else:
            guess = _draws(reduced, rank, noise)
        guess = _eigenvalue_scale(guess, pending)
        if not (affordable and pending.spread):
            return guess
        _, factor = decompose(reduced.matmul, pending.diagonal(), guess, min(4, max(CHEAP_ITERATIONS, rank)))
        return _eigenvalue_scale(factor, pending)

    return start


def given_start(columns: Mapping[str, Tensor], otherwise: Start) -> Start:
    """A start by module path, (rank, *event) or (rank, batch, *event); other steps use `otherwise`."""

    def start(step: Step, pending: Pending, rank: int) -> Tensor:
        guess = columns.get(step.node.module)
        if guess is None:
            return otherwise(step, pending, rank)
        guess = guess.to(pending.like)
        return guess if guess.ndim == pending.like.ndim + 1 else guess.unsqueeze(1)

    return start


def _leading(pending: Pending, A: Tensor, B: Tensor, start: Tensor) -> Tensor:
    """V = A z ψ for the leading eigenvectors z and eigenvalues ψ of S, (r, batch, m)."""
    ((_, variance),) = pending.spread
    A, B = A.to(variance.dtype), B.to(variance.dtype)
    S = weighted_gram(B.unsqueeze(1), variance)
    if pending.columns is not None:
        seen = pending.columns @ A  # (k, batch, q)
        S = S + torch.einsum("kbi,kbj->bij", seen, seen)
    z = start.unsqueeze(1).expand(-1, S.shape[0], -1)  # (r, batch, q)
    for _ in range(CORE_ITERATIONS):
        z = gram_schmidt(torch.einsum("rbi,bij->rbj", z, S))
        size = square_root(z.square().sum(-1, keepdim=True))
        z = z / torch.where(size > 0, size, 1.0)
    return (z * size) @ A.T


def _draws(pending: Pending, rank: int, noise: Callable[[str, tuple[int, ...]], Tensor]) -> Tensor:
    """Fixed draws from N(0, M) without its diagonal part."""
    total = torch.zeros((rank, *pending.like.shape), dtype=pending.like.dtype, device=pending.like.device)
    if pending.columns is not None:
        weights = noise("columns", (rank, pending.columns.shape[0]))
        total = total + torch.einsum("rk,k...->r...", weights, pending.columns)
    for i, (G, variance) in enumerate(pending.spread):
        omega = noise(f"spread{i}", (rank, *variance.shape[1:]))
        total = total + G.apply(square_root(variance) * omega.unsqueeze(1))
    for i, other in enumerate(pending.noises):
        omega = noise(f"noise{i}", (rank, *pending.like.shape[1:]))
        total = total + other.matmul(omega.unsqueeze(1).expand(total.shape))
    return total


def _eigenvalue_scale(columns: Tensor, pending: Pending) -> Tensor:
    """Columns √ψ·z to ψ·z, which is what Algorithm 1 iterates on; to zero where ψ is rounding beside the trace of M."""
    V = flat(columns)
    squared = V.square().sum(-1, keepdim=True)
    trace = pending.diagonal().flatten(1).sum(-1, keepdim=True)
    V = torch.where(squared > trace * nothing(V.dtype), V * square_root(squared), 0.0)
    return V.reshape(columns.shape)
