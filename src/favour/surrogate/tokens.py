"""Covariances within a token: a few columns for every position.

Draws of different tokens are independent, so that no low rank of a whole sequence holds what varies together within
each of them. A few columns for every position do,

    Cov x_t = diag(λ_t) + Σ_k u_tk u_tkᵀ,

tokens counted as independent of each other; λ is what the columns leave of the variances. They are held as
(rank, batch, tokens, width).

**Moved** by maps that keep tokens apart: linear layers of the last axis, slopes, Jacobians of norms: u_t ↦ G_t u_t, and
Var (Gx)_t = (G_t∘G_t)λ_t + Σ_k (G_t u_tk)². A linear layer makes new ones of λ: for orthonormal b_1 … b_q that W takes
far, those of its leading singular values, W diag(λ_t) Wᵀ holds about Σ_k (b_k²ᵀλ_t) (Wb_k)(Wb_k)ᵀ.

**Named** after the draws they stand for. Where x and f(x) meet in a residual sum columns of one name are added, and

    Cov(x_i, f(x)_i) = (P∘Q)λ + Σ_k (Pu_k)_i (Qu_k)_i

for their paths P and Q from one origin (`favour.surrogate.siblings`).

**Compressed** where arguments meet: of columns C with Gram matrix K = CᵀC, r combinations CB with orthonormal B, along
the leading eigenvectors of K. Then CB(CB)ᵀ ⪯ CCᵀ, so that λ ≥ 0 stays.

**Attention.** Of y_i = Σ_j s_ij v_j the draws of s_ij move all entries of a head along v_j together, M = Σ_j Var(s_ij)
v_j v_jᵀ. Each head has a column of its own for that, Mw/√(wᵀMw) with w = Σ_j Var(s_ij) v_j, until a linear layer reads
all heads (`heads`).
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Self

import torch
from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.jacobian import DiagonalPlusLowRank
from favour.surrogate.linear_map import LinearMap, Scaling
from favour.surrogate.matrices import Matrix
from favour.surrogate.siblings import Origin, covariance_at, parts
from favour.surrogate.structural import Structural

# Columns that are kept where arguments meet, and those that a linear layer makes.
RANK = 2
NEW = 2

Columns = dict[Hashable, Tensor]


class TokenColumns(Carried):
    """Columns for every token of a value (batch, tokens, width), or of its heads (batch, heads, tokens, width).

    Args:
        blocks: Columns by the draws they stand for.
        heads: Parts of the last axis, of which each has draws of its own.
    """

    title = "covariances within tokens"

    def __init__(self, blocks: Columns, heads: int = 1) -> None:
        self.blocks, self.heads = blocks, heads
        self._pushed: tuple[LinearMap, Columns] | None = None

    def rest(self, variance: Tensor) -> Tensor:
        """λ."""
        return (variance - sum([block.square().sum(0) for block in self.blocks.values()])).clamp_min(0)

    @property
    def columns(self) -> Tensor:
        """All of them, (rank, batch, tokens, width)."""
        return torch.cat(list(self.blocks.values()))

    @classmethod
    def after(cls, y: Any) -> Self | None:
        if len(y.maps) == 1:
            ((x, G),) = y.maps
            known = find(x.carried, cls)
            if known is not None and (known.heads > 1 or x.mean.ndim == 4) and not isinstance(G, Matrix):
                return known._rearranged(G, x.mean.ndim)
        if y.mean.ndim != 3:
            return None
        blocks: Columns = {}
        for x, G in y.maps:
            for name, columns in {**moved(x, G), **_made(x, G)}.items():
                blocks[name] = blocks[name] + columns if name in blocks else columns
        if len(y.maps) > 1 and sum([len(block) for block in blocks.values()]) > RANK:
            blocks = {object(): leading(torch.cat(list(blocks.values())), RANK)}
        return cls(blocks) if blocks else None

    def through(self, variance: Tensor, G: LinearMap) -> Tensor | None:
        if isinstance(G, Scaling) or not self._takes(G, variance.ndim):
            return None
        return G.square(self.rest(variance)) + sum([block.square().sum(0) for block in self.pushed(G).values()])

    def pushed(self, G: LinearMap) -> Columns:
        """Behind a map that keeps tokens apart."""
        if self._pushed is None or self._pushed[0] is not G:
            self._pushed = G, self._through(G)
        return self._pushed[1]

    def _through(self, G: LinearMap) -> Columns:
        if self.heads > 1:
            assert isinstance(G, Matrix)
            W = G.weight.unflatten(-1, (self.heads, -1))
            heads = {name: block.unflatten(-1, (self.heads, -1)) for name, block in self.blocks.items()}
            return {
                name: torch.einsum("rbthe,mhe->rhbtm", block, W.to(block.dtype)).flatten(0, 1)
                for name, block in heads.items()
            }
        sizes = [block.shape[0] for block in self.blocks.values()]
        return dict(zip(self.blocks, G.apply(self.columns).split(sizes), strict=True))

    def _takes(self, G: LinearMap, ndim: int) -> bool:
        return ndim == 3 and (isinstance(G, Matrix) if self.heads > 1 else _apart(G))

    def _rearranged(self, G: LinearMap, ndim: int) -> Self | None:
        """From heads beside each other to heads in one axis, which code spells in several ways."""
        heads = self.heads
        for step in parts(G):
            name = step.pattern.name if isinstance(step, Structural) else None
            kind, *how = name if isinstance(name, tuple) else (None,)
            if kind == "reshape" and ndim == 4 and len(how[1]) == 3 and how[0][:2] == how[1][:2]:
                heads, ndim = how[0][2], 3
            elif not (kind == "permute" and how[0] == (0, 2, 1, 3)) and not (kind == "reshape" and how[0] == how[1]):
                return None
        return type(self)({name: G.apply(block) for name, block in self.blocks.items()}, heads)


def token_columns(x: Any) -> TokenColumns | None:
    """What a `Value` carries of it, whose tokens have one vector each."""
    known = find(x.carried, TokenColumns)
    return known if known is not None and x.mean.ndim == 3 and known.heads == 1 else None


def moved(x: Any, G: LinearMap) -> Columns:
    """The columns of x behind a map; none where it mixes tokens."""
    known = find(x.carried, TokenColumns)
    return known.pushed(G) if known is not None and known._takes(G, x.mean.ndim) else {}


def shared_variance(origin: Origin, both: LinearMap, x: tuple[Any, LinearMap], y: tuple[Any, LinearMap]) -> Tensor:
    """Cov((Gx)_i, (Hy)_i) of two values with one origin, from P∘Q and, where both still hold them, its columns."""
    covariance, known = covariance_at(origin, both), find(origin.carried, TokenColumns)
    if known is None or known.heads > 1:
        return covariance
    one, other = moved(*x), moved(*y)
    if not all([name in one and name in other for name in known.blocks]):
        return covariance
    alone = both.apply(known.columns.square().sum(0, keepdim=True)).squeeze(0)
    return covariance - alone + sum([(one[name] * other[name]).sum(0) for name in known.blocks])


def attended(weights: Any, v: Any) -> TokenColumns:
    """Of the product of attention weights and values."""
    spread = weights.variance
    w = spread @ v.mean
    column = (spread * (w @ v.mean.mT)) @ v.mean
    size = (w * column).sum(-1, keepdim=True)
    positive = size > 0
    column = torch.where(positive, column * torch.where(positive, size, 1.0).rsqrt(), 0.0)
    return TokenColumns({object(): column.unsqueeze(0)})


def leading(columns: Tensor, rank: int) -> Tensor:
    """Combinations that hold most of them, token by token: (m, *shape) to (rank, *shape)."""
    rows = columns.movedim(0, -2)
    gram = rows @ rows.mT
    chosen: list[Tensor] = []
    for k in range(min(rank, len(columns))):
        if k:
            b = chosen[-1]
            gram = gram - b @ (b.mT @ gram)
            gram = gram - (gram @ b) @ b.mT
        sizes = gram.square().sum(-1, keepdim=True)
        b = (sizes == sizes.amax(-2, keepdim=True)).to(gram.dtype)
        chosen.append(_unit(gram @ (gram @ (gram @ b))))
    return (torch.cat(chosen, -1).mT @ rows).movedim(-2, 0)


def _unit(b: Tensor) -> Tensor:
    size = b.square().sum(-2, keepdim=True)
    positive = size > 0
    return torch.where(positive, b * torch.where(positive, size, 1.0).rsqrt(), 0.0)


def _made(x: Any, G: LinearMap) -> Columns:
    """What a linear layer makes of λ."""
    if not isinstance(G, Matrix) or G.n != 1 or x.mean.ndim != 3 or min(G.weight.shape) <= NEW:
        return {}
    basis = G.kept.make("farthest", farthest, True)
    known = find(x.carried, TokenColumns)
    variance = x.variance if known is None else known.rest(x.variance)
    size = (variance @ basis.square().to(variance.dtype)).clamp_min(0)
    positive = size > 0
    size = torch.where(positive, torch.where(positive, size, 1.0).sqrt(), 0.0)
    return {object(): torch.einsum("btk,mk->kbtm", size, (G.weight @ basis.to(G.weight.dtype)).to(size.dtype))}


@torch.no_grad()
def farthest(weight: Tensor) -> Tensor:
    """Orthonormal directions (n, NEW) that a matrix takes far, by subspace iteration."""
    w = weight.detach()
    w = w.float() if w.dtype.itemsize < 4 else w
    n = w.shape[1]
    places = torch.arange(n, device=w.device, dtype=w.dtype) + 0.5
    basis = torch.stack([torch.cos((k + 1) * places) for k in range(NEW)], 1)
    for _ in range(8):
        basis = torch.linalg.qr(w.mT @ (w @ basis)).Q
    return basis.to(weight.dtype)


def _apart(G: LinearMap) -> bool:
    return all([_within(step) for step in parts(G)])


def _within(step: LinearMap) -> bool:
    """Whether a map of (batch, tokens, width) keeps tokens apart."""
    if isinstance(step, DiagonalPlusLowRank):
        return step.axis == -1 and len(step.grouped) == 3
    return isinstance(step, Scaling | Matrix)
