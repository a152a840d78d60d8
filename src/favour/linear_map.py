"""Linear maps, known by what they do.

An operation's surrogate holds a map G for each uncertain argument (`favour.surrogate`). Methods apply it to deviations,
send covectors through its transpose, and carry variances, curvatures and cumulants by the powers of its entries; nobody
forms its matrix.

Shapes. A tensor of the graph is (batch, *event). Deviations and covectors carry one more axis in front, the fold axis
F: (F, batch, *event). Variances and cumulants are (batch, *event).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LinearMap:
    """A linear map G between tensors, known by what it does.

    Attributes:
        apply: δ ↦ Gδ, (F, *input shape) to (F, *output shape).
        transpose: g ↦ Gᵀg, (F, *output shape) to (F, *input shape).
        square: v ↦ (G∘G)v, (*input shape) to (*output shape); carries variances of independent entries.
        disjoint: Each input entry feeds at most one output entry, so that G diag(v) Gᵀ stays diagonal.
        any_batch: The same for every input of a batch, and takes covectors with a batch of one.
        is_identity: G = I.
        compressed: Given q, the same map through a rank-q approximation of its weight, where there is one.
        factors: Of such an approximation: A (m, q) with orthonormal columns and B (q, n), G = AB over the last axis.
        pairs: C ↦ (G_a ∘ G_b)C_ab, (q, *input shape) to (q, *output shape): covariances between the same entries of
            two inputs. See `paired`.
        square_transpose: c ↦ (G∘G)ᵀc, (F, *output shape) to (F, *input shape); carries curvatures back.
        power: (κ, n) ↦ Σ_j G_ijⁿκ_j, as `square`; carries n-th cumulants of independent entries.
        curvature: Of the element-wise function that G stands for, E[f″], (batch, *event), when called.
    """

    apply: Callable[[Tensor], Tensor]
    transpose: Callable[[Tensor], Tensor]
    square: Callable[[Tensor], Tensor]
    disjoint: bool = False
    any_batch: bool = False
    is_identity: bool = False
    compressed: Callable[[int], LinearMap] | None = None
    factors: tuple[Tensor, Tensor] | None = None
    pairs: Callable[[Tensor], Tensor] | None = None
    square_transpose: Callable[[Tensor], Tensor] | None = None
    curvature: Callable[[], Tensor] | None = None
    power: Callable[[Tensor, int], Tensor] | None = None


def identity() -> LinearMap:
    """G = I."""

    def same(t: Tensor) -> Tensor:
        return t

    return LinearMap(
        same,
        same,
        same,
        disjoint=True,
        any_batch=True,
        is_identity=True,
        pairs=same,
        square_transpose=same,
        power=lambda k, n: k,
    )


def partners(t: Tensor, q: int) -> Tensor:
    """What every input's partners have: (batch, *event) to (q, batch, *event), or (1, 1, *event) for a batch of one."""
    if t.shape[0] == 1:  # the same for every input
        return t.unsqueeze(0)
    groups, event = t.shape[0] // q, t.shape[1:]
    rows = t.reshape(groups, q, *event).transpose(0, 1).unsqueeze(2)  # (a, g, 1, *event)
    return rows.expand(q, groups, q, *event).reshape(q, groups * q, *event)


def paired(G: LinearMap) -> Callable[[Tensor], Tensor] | None:
    """C ↦ (G_a ∘ G_b)C_ab; for a map that is the same for every input, its square. None where the map does not say."""
    if G.pairs is not None or not G.any_batch:
        return G.pairs
    return lambda c: G.square(c.flatten(0, 1)).unflatten(0, (c.shape[0], c.shape[1]))


def scaled(d: Tensor, factor: Tensor | float) -> Tensor:
    """factor ∘ d for d with a fold axis in front; `factor` broadcasts to the rest."""
    if not isinstance(factor, Tensor) or factor.ndim != d.ndim - 1:
        return d * factor
    # Written batch first: covectors that were the same for every input come out stored that way, which is how
    # their Gram matrices and products with weights read them.
    return (d.transpose(0, 1) * factor.unsqueeze(1)).transpose(0, 1)


def scaling(factor: Tensor | float, curvature: Callable[[], Tensor] | None = None) -> LinearMap:
    """G = diag(factor), `factor` broadcasting to the input's shape without enlarging it."""

    def times(d: Tensor) -> Tensor:
        return scaled(d, factor)

    def pairs(c: Tensor) -> Tensor:
        if not isinstance(factor, Tensor) or factor.ndim != c.ndim - 1:
            return c * (factor * factor)
        return c * factor * partners(factor, c.shape[0])

    return LinearMap(
        times,
        times,
        lambda v: v * (factor * factor),
        disjoint=True,
        any_batch=True,
        pairs=pairs,
        square_transpose=lambda c: scaled(c, factor * factor),
        curvature=curvature,
        power=lambda k, n: k * factor**n,
    )


def weighted_sum(weights: Tensor, axis: int, keepdim: bool) -> LinearMap:
    """G: δ ↦ Σ over `axis` of weights ∘ δ; `weights` has the input's shape and `axis` counts from the front."""

    def reduced(t: Tensor, at: int) -> Tensor:
        return t.sum(at, keepdim=keepdim)

    return LinearMap(
        lambda d: reduced(d * weights, axis + 1),
        lambda g: (g if keepdim else g.unsqueeze(axis + 1)) * weights,
        lambda v: reduced(v * weights.square(), axis),
        disjoint=True,
        pairs=lambda c: reduced(c * weights * partners(weights, c.shape[0]), axis + 1),
        square_transpose=lambda c: (c if keepdim else c.unsqueeze(axis + 1)) * weights.square(),
        power=lambda k, n: reduced(k * weights**n, axis),
    )


def structural(
    apply: Callable[[Tensor], Tensor],
    transpose: Callable[[Tensor], Tensor],
    *,
    disjoint: bool = True,
    alike: bool = True,
) -> LinearMap:
    """A map whose matrix has entries 0 and 1 only, so that G∘G = G. `apply` takes a leading fold axis.

    `alike` says that it is the same for every input.
    """

    def square(v: Tensor) -> Tensor:
        return apply(v.unsqueeze(0)).squeeze(0)

    return LinearMap(
        apply,
        transpose,
        square,
        disjoint=disjoint,
        pairs=apply if alike else None,
        square_transpose=transpose,
        power=lambda k, n: square(k),
    )


def compose(outer: LinearMap, inner: LinearMap) -> LinearMap:
    """outer ∘ inner, where (at least) one of the two is disjoint so that squares compose too."""
    first, second = paired(inner), paired(outer)
    near, far = inner.square_transpose, outer.square_transpose
    one, two = inner.power, outer.power
    return LinearMap(
        lambda d: outer.apply(inner.apply(d)),
        lambda g: inner.transpose(outer.transpose(g)),
        lambda v: outer.square(inner.square(v)),
        disjoint=outer.disjoint and inner.disjoint,
        pairs=None if first is None or second is None else lambda c: second(first(c)),
        square_transpose=None if near is None or far is None else lambda c: near(far(c)),
        power=None if one is None or two is None else lambda k, n: two(one(k, n), n),
    )
