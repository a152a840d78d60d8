"""Arithmetic: sums of uncertain tensors, and scaling or shifting by known numbers.

    y = x₁ + c·x₂:   m = μ₁ + cμ₂,  G = (I, cI)           exact
    y = a ∘ x + b:   m = a∘μ + b,   G = diag(a)           exact

with broadcasting, which is itself a linear map. Products and quotients of two uncertain tensors are in `products`.
Element-wise code on one tensor is fused into a scalar function before it gets here.
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits, declare
from favour.rules.embedding import added_noises
from favour.rules.products import divide, multiply
from favour.rules.registry import rule
from favour.rules.shape import broadcast
from favour.scalar import composed, intervals
from favour.surrogate import LinearMap, Surrogate, compose, scaling, structural
from favour.surrogate.attending import Scores
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten


def _traits(name: str, *affine: int) -> Traits:
    """Of the operation that `composed` and `intervals` call by a name, affine in those arguments."""
    scalar, bounds = getattr(composed, name), getattr(intervals, name)
    return Traits(elementwise=True, affine=affine, scalar=scalar, bounds=bounds)


SUM, DIFFERENCE, TURNED = _traits("add", 0, 1), _traits("subtract", 0, 1), _traits("subtract_from", 0, 1)
PRODUCT, QUOTIENT, NEGATIVE = _traits("multiply", 0, 1), _traits("divide", 0), _traits("negate", 0)


def _term(x: Argument, out: torch.Size, factor: float = 1) -> list[tuple[Any, LinearMap]]:
    if not isinstance(x, Value):
        return []
    G = broadcast(x.mean.shape, out)
    return [(x, G if factor == 1 else compose(G, scaling(factor)))]


@rule(aten.add.Tensor, aten.add.Scalar, exactness="exact", family="arithmetic", weights=True, traits=SUM)
def add(ctx: Context, a: Argument, b: Argument, alpha: float = 1) -> Surrogate:
    mean = torch.add(_tensor(mean_of(a), b), mean_of(b), alpha=alpha)
    noises = added_noises(ctx, a, mean, 1) + added_noises(ctx, b, mean, alpha)
    return Surrogate(mean, _term(a, mean.shape) + _term(b, mean.shape, alpha), noises)


@rule(aten.sub.Tensor, aten.sub.Scalar, exactness="exact", family="arithmetic", traits=DIFFERENCE)
def sub(ctx: Context, a: Argument, b: Argument, alpha: float = 1) -> Surrogate:
    return add(ctx, a, b, -alpha)


@rule(aten.rsub.Scalar, aten.rsub.Tensor, exactness="exact", family="arithmetic", traits=TURNED)
def rsub(ctx: Context, a: Argument, b: Argument, alpha: float = 1) -> Surrogate:
    mean = mean_of(b) - alpha * mean_of(a)
    return Surrogate(mean, _term(a, mean.shape, -alpha) + _term(b, mean.shape))


@rule(aten.neg.default, exactness="exact", family="arithmetic", traits=NEGATIVE)
def neg(ctx: Context, x: Value) -> Surrogate:
    return Surrogate(-x.mean, [(x, scaling(-1.0))])


def _tensor(a: Argument, other: Argument) -> Tensor:
    return a if isinstance(a, Tensor) else torch.as_tensor(a, dtype=mean_of(other).dtype, device=mean_of(other).device)


def scaled(x: Value, factor: Argument) -> Surrogate:
    """factor ∘ x for a known factor, either of which may broadcast."""
    mean = x.mean * factor
    expand = broadcast(x.mean.shape, mean.shape)
    return Surrogate(mean, [(x, compose(scaling(factor), expand))])


@rule(aten.mul.Scalar, exactness="exact", family="arithmetic", traits=PRODUCT)
@rule(aten.mul.Tensor, exactness="moment-matched", family="product", traits=PRODUCT)
def mul(ctx: Context, a: Argument, b: Argument) -> Surrogate:
    if isinstance(a, Value) and isinstance(b, Value):
        return multiply(ctx, a, b)
    return scaled(a, b) if isinstance(a, Value) else scaled(b, a)


@rule(aten.div.Scalar, exactness="exact", family="arithmetic", traits=QUOTIENT)
@rule(aten.div.Tensor, exactness="linearised", family="product", traits=QUOTIENT)
def div(ctx: Context, a: Argument, b: Argument) -> Surrogate:
    if isinstance(b, Value):
        return divide(ctx, a, b)
    # In the dtype of a: the reciprocal of an integer tensor would be float32.
    return scaled(a, 1 / (b.to(a.mean.dtype) if isinstance(b, Tensor) and not b.is_floating_point() else b))


CHOICE = Traits(elementwise=True, scalar=composed.choose, bounds=lambda condition, a, b: intervals.union(a, b))
FILLED = Traits(scalar=composed.fill, bounds=lambda x, mask, value: intervals.union(x, value))
# Without rules: only known numbers reach them, or code that is fused.
declare(aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar, traits=replace(CHOICE, elementwise=False))


@rule(aten.where.self, exactness="exact", family="arithmetic", traits=CHOICE)
def where(ctx: Context, condition: Argument, a: Argument, b: Argument) -> Surrogate:
    if isinstance(condition, Value):
        raise UnsupportedOperation(f"`where` on an uncertain condition at {ctx.place} has no rule.")
    mean = torch.where(condition, mean_of(a), mean_of(b))
    maps = []
    for x, chosen in ((a, condition), (b, ~condition)):
        if isinstance(x, Value):
            maps.append((x, compose(scaling(chosen.to(mean.dtype)), broadcast(x.mean.shape, mean.shape))))
    return Surrogate(mean, maps)


@rule(aten.masked_fill.Scalar, aten.masked_fill.Tensor, exactness="exact", family="arithmetic", traits=FILLED)
def masked_fill(ctx: Context, x: Argument, mask: Argument, value: Argument) -> Surrogate:
    if isinstance(mask, Value) or isinstance(value, Value):
        raise UnsupportedOperation(f"`masked_fill` with an uncertain mask or value at {ctx.place} has no rule.")
    mean = x.mean.masked_fill(mask, value)
    scores = x.known(Scores)  # masked entries have weight 0
    carried = [scores] if scores is not None and value == -math.inf else []
    G = compose(scaling((~mask).to(mean.dtype)), broadcast(x.mean.shape, mean.shape))
    return Surrogate(mean, [(x, G)], carried=carried)


@rule(aten.slice_scatter.default, aten.select_scatter.default, exactness="exact", family="shape")
def scatter(ctx: Context, x: Argument, source: Argument, dim: int = 0, *rest: Argument) -> Surrogate:
    """y is x with a slice replaced by `source`: what an in-place write into a view becomes."""
    op = aten.select_scatter.default if mean_of(source).ndim < mean_of(x).ndim else aten.slice_scatter.default
    take = aten.select.int if op is aten.select_scatter.default else aten.slice.Tensor
    mean = op(mean_of(x), mean_of(source), dim, *rest)
    dim = dim % mean.ndim
    out = mean.shape
    maps: list[tuple[Any, LinearMap]] = []

    def clear(d: Tensor) -> Tensor:
        window = take(d, dim + 1, *rest)
        return op(d, torch.zeros_like(window), dim + 1, *rest)

    if isinstance(x, Value):
        maps.append((x, structural(clear, clear, one_per_row=True)))
    if isinstance(source, Value):

        def put(d: Tensor) -> Tensor:
            return op(d.new_zeros(d.shape[0], *out), d, dim + 1, *rest)

        maps.append((source, structural(put, lambda g: take(g, dim + 1, *rest), one_per_row=True)))
    return Surrogate(mean, maps)


# ---- truth values: without rules, since they have no moments; code that is fused may hold them

for _name, _holds in (("gt", operator.gt), ("ge", operator.ge), ("lt", operator.lt), ("le", operator.le)):
    _packet = getattr(aten, _name)
    declare(_packet.Scalar, _packet.Tensor, traits=Traits(scalar=composed.compare(_holds)))
_ALL, _ANY, _NOT = (Traits(scalar=composed.logical(op)) for op in (operator.and_, operator.or_, torch.logical_not))
declare(aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor, traits=_ALL)
declare(aten.logical_or.default, aten.bitwise_or.Tensor, aten.__or__.Tensor, traits=_ANY)
declare(aten.logical_not.default, aten.bitwise_not.default, traits=_NOT)
declare(aten.maximum.default, traits=Traits(scalar=composed.extreme(operator.gt)))
declare(aten.minimum.default, traits=Traits(scalar=composed.extreme(operator.lt)))
