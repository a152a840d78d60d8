"""What attention weights and values have in common: they are siblings, made of one tensor of tokens.

Of y_i = Σ_j s_ij v_j with s = softmax(ℓ), ℓ_ij = c·q_i·k_j: where ℓ_ij is above its mean, so is the part of v_j that
goes along with k_j. To first order δs_ij = Σ_l s_ij(δ_jl − s_il) δℓ_il, and with q = Qz, k = Kz, v = Vz token by token,
tokens that vary independently of each other, and Σ_j = Cov z_j,

    E[Σ_j δs_ij δv_j] = c·V [Σ_j s_ij(1 − s_ij) Σ_j] Kᵀμ_q,i + c·s_ii V Σ_i Qᵀ(μ_k,i − Σ_j s_ij μ_k,j).

The second term is a token's own query, and is there where queries are made of the same z. With Σ_j = diag λ_j +
Σ_p u_jp u_jpᵀ (`favour.surrogate.tokens`) the part of λ in the first is c·V(Kᵀμ_q,i ∘ Σ_j s_ij(1 − s_ij)λ_j), for each
token two products with a weight and for each head one of s with λ; that of a column c·Σ_j s_ij(1 − s_ij)
(μ_q,i·Ku_jp) Vu_jp.

**Scores** know their variances from the tokens too. Entries of a key vary together, whatever those of z do, and so do
those of a query:

    Var(q_i·k_j) = (Kᵀμ_q,i)ᵀ Σ_j (Kᵀμ_q,i) + (Qᵀμ_k,j)ᵀ Σ_i (Qᵀμ_k,j) + the variance of δq_i·δk_j.

The variances of q and k alone make it a fifth of that in a trained encoder. The part of keys is independent from score
to score of a row; that of the query is not, and most of it is what all scores of a row share, which a softmax does not
see: with k̄ the mean of the keys, its column is b_ij = (Qᵀμ_k,j)ᵀ Σ_i (Qᵀk̄)/√((Qᵀk̄)ᵀ Σ_i (Qᵀk̄)).

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
from favour.surrogate.siblings import Origin, Path, paths_of
from favour.surrogate.structural import Structural
from favour.surrogate.tokens import TokenColumns


@dataclass(frozen=True, eq=False)
class Scores(Carried):
    """Of scores c·q kᵀ, or of their softmax.

    Attributes:
        query: μ_q, (batch, *heads, tokens, width).
        key: μ_k transposed, (batch, *heads, width, tokens).
        queries, keys: Where q and k come from.
        factor: c.
        common: b, (batch, *heads, tokens, tokens), before c.
        weights: The softmax has been taken.
    """

    query: Tensor
    key: Tensor
    queries: tuple[Path, ...]
    keys: tuple[Path, ...]
    factor: float = 1.0
    common: Tensor | None = None
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


@dataclass(frozen=True, eq=False)
class Made:
    """Vectors of every token made of tokens z.

    Attributes:
        weight: By this matrix, (width of z, heads, width).
        rest: λ, (batch, tokens, width of z).
        columns: u, (rank, batch, 1, tokens, width of z), or None.
    """

    weight: Tensor
    rest: Tensor
    columns: Tensor | None

    @classmethod
    def by(cls, weight: Tensor, origin: Origin) -> Made:
        known = find(origin.carried, TokenColumns)
        if known is None:
            return cls(weight, origin.variance, None)
        return cls(weight, known.rest(origin.variance), known.columns.unsqueeze(2))

    def directions(self, a: Tensor) -> Tensor:
        """Wᵀa, (batch, heads, n, width) to (batch, heads, n, width of z)."""
        return torch.einsum("bhie,dhe->bhid", a, self.weight)

    def covariance(self, a: Tensor, b: Tensor) -> Tensor:
        """aᵀ Σ_t b for directions a, b of z that broadcast, for all tokens t: (batch, heads, n, tokens)."""
        total = (a * b) @ self.rest.unsqueeze(1).mT
        if self.columns is not None:
            total = total + ((a @ self.columns.mT) * (b @ self.columns.mT)).sum(0)
        return total

    def moved(self) -> Tensor:
        """Wu, (rank, batch, heads, tokens, width)."""
        assert self.columns is not None
        return torch.einsum("pbtd,dhe->pbhte", self.columns.squeeze(2), self.weight)


def scores_of(q: Any, k: Any) -> tuple[Tensor | None, list[Carried]]:
    """First-order variances of the product of queries and transposed keys, two values, and what is known of it."""
    queries, keys = paths_of(q), paths_of(k)
    if not keys:
        return None, []
    variance = common = None
    by_key, by_query = _made(keys, -1), _made(queries, -2)
    if by_key is not None and by_query is not None:
        along = by_key.directions(_heads(q.mean))
        across = by_query.directions(_heads(k.mean.mT))
        level = across.mean(-2, keepdim=True)
        shape = (*q.mean.shape[:-1], k.mean.shape[-1])
        variance = (by_key.covariance(along, along) + by_query.covariance(across, across).mT).reshape(shape)
        shared, size = by_query.covariance(across, level).mT, by_query.covariance(level, level).mT
        positive = size > 0
        common = torch.where(positive, shared * torch.where(positive, size, 1.0).rsqrt(), 0.0).reshape(shape)
    return variance, [Scores(q.mean, k.mean, queries, keys, common=common)]


def _heads(t: Tensor) -> Tensor:
    """(batch, *heads, n, width) with one axis of heads."""
    return t.flatten(1, -3) if t.ndim > 3 else t.unsqueeze(1)


def _made(paths: Sequence[Path], at: int) -> Made | None:
    for path in reversed(paths):
        weight = token_weight(path, at)
        if isinstance(weight, Tensor):
            return Made.by(weight, path.origin)
    return None


@dataclass(frozen=True, eq=False)
class Partners:
    """Keys and values, and queries where they are too, made of the same tokens z."""

    keys: Made
    values: Made
    queries: Made | None


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
            origin = path.origin
            return Partners(Made.by(K, origin), Made.by(V, origin), None if Q is None else Made.by(Q, origin))
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
    s, q, k = (_heads(t) for t in (weights.mean, scores.query, scores.key.mT))
    keys, values, queries = with_z.keys, with_z.values, with_z.queries
    rest = keys.rest
    total = keys.directions(q) * torch.einsum("bhij,bjd->bhid", s * (1 - s), rest)
    itself = queries is not None and s.shape[-1] == s.shape[-2]
    diagonal, apart = s.diagonal(dim1=-2, dim2=-1).unsqueeze(-1), k - s @ k if itself else k
    if queries is not None and itself:
        total = total + diagonal * rest.unsqueeze(1) * queries.directions(apart)
    covariance = torch.einsum("bhid,dhf->bhif", total, values.weight)
    if keys.columns is not None:
        moved = values.moved()
        covariance = covariance + ((s * (1 - s) * (q @ keys.moved().mT)) @ moved).sum(0)
        if queries is not None and itself:
            covariance = covariance + (diagonal * (queries.moved() * apart).sum(-1, keepdim=True) * moved).sum(0)
    return (covariance * scores.factor).reshape(*weights.mean.shape[:-1], v.mean.shape[-1])
