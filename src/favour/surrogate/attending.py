"""What attention weights and values have in common: they are siblings, made of one tensor of tokens.

Of y_i = Σ_j s_ij v_j with s = softmax(ℓ), ℓ_ij = c·q_i·k_j: where ℓ_ij is above its mean, so is the part of v_j that
goes along with k_j. To first order δs_ij = Σ_l s_ij(δ_jl − s_il) δℓ_il, and with q = Qz, k = Kz, v = Vz token by token,
tokens that vary independently of each other, and Σ_j = Cov z_j,

    E[Σ_j δs_ij δv_j] = c·V [Σ_j s_ij(1 − s_ij) Σ_j] Kᵀμ_q,i + c·s_ii V Σ_i Qᵀ(μ_k,i − Σ_j s_ij μ_k,j).

The second term is a token's own query, and is there where queries are made of the same z. For Σ_j = diag λ_j the first
is c·V(Kᵀμ_q,i ∘ Σ_j s_ij(1 − s_ij)λ_j): for each token two products with a weight, and for each head one of s with λ.

`Scores` is what is carried from q kᵀ to the weights: masks, scales and dropout on the way change nothing of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.linear_map import Identity, LinearMap, Scaling, Unavailable
from favour.surrogate.matrices import Matrix
from favour.surrogate.siblings import Path, paths_of
from favour.surrogate.structural import Structural


@dataclass(frozen=True, eq=False)
class Scores(Carried):
    """Of scores c·q kᵀ, or of their softmax.

    Attributes:
        query: μ_q, (batch, *heads, tokens, width).
        key: μ_k transposed, (batch, *heads, width, tokens).
        queries, keys: Where q and k come from.
        factor: c.
        weights: The softmax has been taken.
    """

    query: Tensor
    key: Tensor
    queries: tuple[Path, ...]
    keys: tuple[Path, ...]
    factor: float = 1.0
    weights: bool = False

    title = "covariances of attention weights and values"

    @classmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        known = [(find(x.carried, cls), G) for x, G in y.maps]
        scores, G = next(((s, G) for s, G in known if s is not None), (None, None))
        if scores is None:
            return None
        if len(known) > 1:
            met = partners_of(scores, y.maps[1][0]) if scores.weights and known[0][0] is scores else None
            return met if isinstance(met, Unavailable) else None
        if isinstance(G, Identity):
            return scores
        if isinstance(G, Scaling) and not isinstance(G.factor, Tensor) and not scores.weights:
            return replace(scores, factor=scores.factor * G.factor)
        return None


def scores_of(q: Any, k: Any) -> list[Carried]:
    """What is known of the product of queries and transposed keys, two values."""
    queries, keys = paths_of(q), paths_of(k)
    return [Scores(q.mean, k.mean, queries, keys)] if keys else []


@dataclass(frozen=True, eq=False)
class Partners:
    """The weights that make keys, values and queries of tokens z, each (width of z, heads, width).

    Attributes:
        variance: λ, (batch, tokens, width of z).
        K, V: Of keys and values.
        Q: Of queries, where they are made of z.
    """

    variance: Tensor
    K: Tensor
    V: Tensor
    Q: Tensor | None


def partners_of(scores: Scores, v: Any) -> Partners | Unavailable | None:
    """The origin that keys and values share, and how they are made of it; None where they share none."""
    refused: Unavailable | None = None
    for path in reversed(paths_of(v)):
        key = next((one for one in scores.keys if one.origin is path.origin), None)
        query = next((one for one in scores.queries if one.origin is path.origin), None)
        if key is None:
            continue
        K, V = token_weight(key, -1), token_weight(path, -2)
        Q = None if query is None else token_weight(query, -2)
        if not (isinstance(K, Unavailable) or isinstance(V, Unavailable) or isinstance(Q, Unavailable)):
            return Partners(path.origin.variance, K, V, Q)
        refused = refused or next((one for one in (K, V, Q) if isinstance(one, Unavailable)), None)
    return refused


def token_weight(path: Path, at: int) -> Tensor | Unavailable:
    """W of a path z_t ↦ W z_t that takes every token alike, (width of z, heads, width).

    Args:
        path: From z of shape (batch, tokens, width).
        at: The axis along which tokens lie in its result, counted from the end.
    """
    if path.origin.variance.ndim != 3 or not path.steps or not isinstance(path.steps[0], Matrix):
        return Unavailable("they are not made of tokens by one linear layer each")
    W, axis = path.steps[0].weight.mT.unsqueeze(1), 1  # z's width in the place of the batch, one token
    for step in path.steps[1:]:
        made = _moved(step, W, axis)
        if isinstance(made, Unavailable):
            return made
        W, axis = made
    if axis != W.ndim + at:
        return Unavailable("tokens do not lie where attention looks for them")
    return W.squeeze(axis).flatten(1, -2) if W.ndim > 3 else W.squeeze(axis).unsqueeze(1)


def _moved(step: LinearMap, W: Tensor, axis: int) -> tuple[Tensor, int] | Unavailable:
    """Another map behind W, and the axis of tokens then."""
    if isinstance(step, Scaling) and not isinstance(step.factor, Tensor):
        return W * step.factor, axis
    pattern = step.pattern if isinstance(step, Structural) else None
    name = None if pattern is None else pattern.name
    known = isinstance(name, tuple) and isinstance(step, Structural)
    if not known or isinstance(step.outer, Tensor) or isinstance(step.inner, Tensor):  # type: ignore[attr-defined]
        return Unavailable(f"{step} may treat tokens differently")
    moved = _rearranged(name, W, axis)  # type: ignore[arg-type]
    if isinstance(moved, Unavailable):
        return moved
    return moved[0] * (step.outer * step.inner), moved[1]  # type: ignore[attr-defined]


def _rearranged(name: tuple[Any, ...], W: Tensor, axis: int) -> tuple[Tensor, int] | Unavailable:
    kind, *how = name
    if kind == "permute" and how[0][0] == 0:
        return W.permute(how[0]), how[0].index(axis)
    if kind == "reshape" and how[0][0] == how[1][0]:
        before, after = how
        ahead = math.prod(before[1:axis])
        for at, size in enumerate(after):
            if at and size == before[axis] and math.prod(after[1:at]) == ahead:
                return W.reshape(W.shape[0], *_but(after, at)), at
    if kind == "broadcast" and len(how[0]) == len(how[1]) and how[0][axis] == how[1][axis]:
        return W.expand(W.shape[0], *_but(how[1], axis)), axis
    if kind == "take":
        take, dim, *rest = how
        if dim not in (0, axis):
            made = take(W, dim, *rest)
            return made, axis - (made.ndim < W.ndim and dim < axis)
    return Unavailable(f"tokens are mixed or moved by a {kind}")


def _but(shape: Sequence[int], axis: int) -> list[int]:
    """Sizes behind the batch, with one token."""
    return [1 if i == axis else size for i, size in enumerate(shape) if i]


def met(weights: Any, v: Any) -> Tensor | None:
    """E[Σ_j δs_ij δv_j] of attention weights and values, or None where nothing is known of it."""
    scores = find(weights.carried, Scores)
    if scores is None or not scores.weights:
        return None
    with_z = partners_of(scores, v)
    if not isinstance(with_z, Partners):
        return None
    s, q, k = (t.flatten(1, -3) if t.ndim > 3 else t.unsqueeze(1) for t in (weights.mean, scores.query, scores.key.mT))
    lam = with_z.variance
    along = torch.einsum("bhie,dhe->bhid", q, with_z.K)
    total = along * torch.einsum("bhij,bjd->bhid", s * (1 - s), lam)
    if with_z.Q is not None and s.shape[-1] == s.shape[-2]:
        diagonal = s.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        total = total + diagonal * lam.unsqueeze(1) * torch.einsum("bhie,dhe->bhid", k - s @ k, with_z.Q)
    covariance = torch.einsum("bhid,dhf->bhif", total, with_z.V) * scores.factor
    return covariance.reshape(*weights.mean.shape[:-1], v.mean.shape[-1])
