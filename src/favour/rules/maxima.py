"""Maxima: max pooling, global maxima, and both right behind dropout.

**Gaussian entries.** y = max_i x_i over a window, by Clark's formulas along the entries with the skewness of the
partial results (`favour.scalar.moments.maxima`):

    m = E[y],   G_i = E[∂y/∂x_i], the probability that x_i is the largest,   N = Var y − G Σ Gᵀ ≥ 0,

the choice of `"price"`: covariances with everything else are exact by Stein's lemma, and the marginal is matched.
Within a window the factor columns count as correlation; where only variances are
carried, what is known of the covariances within channels (`favour.surrogate.channels`): of a convolution's neighbouring
outputs for up to 3 × 3, of channels that fall together for any window.

Where the cumulants of entries are known (`favour.surrogate.tails`) and windows are few, the largest is taken of entries
of two values and a Gaussian instead, by their distribution functions (`favour.scalar.moments.independent`): these count
entries as independent, and where covariances are known what they say more than for Gaussians is added to Clark's.

**Behind dropout** the largest of a window is there or not, and then the second largest steps in: nothing Gaussian. The
two operations, and a ReLU around them, are one (`favour.passes.normalise.commuting` finds them), y = max_i D_i x_i or
max(0, max_i D_i x_i) with D_i ∈ {0, 1/q}, and

    m = E[y],   G_i = E[∂y/∂x_i] = E[D_i·1(i is the largest)],   N = Var y − G Σ Gᵀ

from the mixture over what was dropped. G leads to what was dropped *from*. Windows that do not overlap draw their D_i
apart, so N is diagonal. Overlapping windows share draws: with ζ_i = (D_i − 1)√(q/p) of mean 0 and variance 1,

    y = m + G(x − E x) + Σ_i √(pq)(E[y | D_i > 0] − E[y | D_i = 0])·ζ_i + rest,

one latent per entry for the sum, and a diagonal for the rest. (Without dropout the rest N of overlapping windows counts
as independent.)

In the modes `"matched"` and `"taylor"` the mean is the same, and the covariance follows the winner of the means: G has
a single 1 per window, N is the winner's own dropout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Operation, Traits, declare
from favour.rules.registry import rule
from favour.rules.windows import Box, Sizes, Windows, adaptive_windows, pool_windows
from favour.scalar.effective import effective_draw
from favour.scalar.moments.independent import NODES, Largest, TwoValued, largest_independent
from favour.scalar.moments.maxima import ABSENT, Covariances, Dropped, Law, largest, largest_dropped, without_floor
from favour.surrogate import DiagonalNoise, LatentNoise, LinearMap, Noise, Surrogate, compose, structural
from favour.surrogate.carried import Carried
from favour.surrogate.channels import ChannelCovariance, Mapped
from favour.surrogate.tails import Tails
from favour.surrogate.value import Context, Value

aten = torch.ops.aten


class _Entries:
    """Means, independent variances and factor columns of the entries of every window, in at least float32."""

    def __init__(
        self,
        box: Box,
        mean: Tensor,
        diag: Tensor | None,
        factor: Tensor | None,
        within: ChannelCovariance | None = None,
    ) -> None:
        self.box, self.dtype = box, mean.dtype
        work = torch.promote_types(mean.dtype, torch.float32)
        self.means = box.entries(mean.to(work), ABSENT)
        nothing = torch.zeros_like(self.means[0])
        self.diags = [nothing] * len(self.means) if diag is None else box.entries(diag.to(work), 0.0)
        self.factors = None if factor is None else box.entries(factor.to(work), 0.0)
        self.pairs: Covariances | None = None
        if within is not None and factor is None:
            covariances = box.covariances(within, mean.ndim - 2)
            self.pairs = None if covariances is None else {ij: c.to(work) for ij, c in covariances.items()}

    def laws(self) -> list[Law]:
        if self.factors is None:
            return [Law(m, d) for m, d in zip(self.means, self.diags, strict=True)]
        parts = zip(self.means, self.diags, self.factors, strict=True)
        return [Law(m, d + f.square().sum(0), f) for m, d, f in parts]

    def explained(self, weights: Sequence[Tensor]) -> Tensor:
        """G Σ Gᵀ of every window."""
        total = torch.zeros_like(self.means[0])
        for w, d in zip(weights, self.diags, strict=True):
            total = total + w.square() * d
        for (i, j), c in (self.pairs or {}).items():
            total = total + 2 * weights[i] * weights[j] * c
        if self.factors is None:
            return total
        columns = weights[0] * self.factors[0]
        for w, f in zip(weights[1:], self.factors[1:], strict=True):
            columns = columns + w * f
        return total + columns.square().sum(0)

    def winner(self) -> list[Tensor]:
        """1 for the entry with the largest mean, 0 for the others."""
        best = torch.stack(self.means).argmax(0)
        return [(best == j).to(best.device, self.dtype) for j in range(len(self.means))]

    def routing(self, weights: Sequence[Tensor]) -> LinearMap:
        return self.box.routing([w.to(self.dtype) for w in weights])


def maximum(ctx: Context, x: Value, windows: Sequence[Windows]) -> Surrogate:
    """The surrogate of the largest entry of every window."""
    diag, factor, known = x.diag, x.factor, x.known(ChannelCovariance)
    within = known
    box = Box(tuple(windows), spatial=min([w.dim for w in windows]) >= 2 - x.mean.ndim)
    if factor is None and known is not None and known.whole and box.spatial:
        factor, within = known.columns(), None  # channels apart, so that a latent for each of them is one for all
        assert factor is not None
        diag = (x.variance - factor.square().sum(0)).clamp_min(0)
    entries = _Entries(box, x.mean, diag, factor, within)
    best, weights = largest(entries.laws(), entries.pairs)
    tails = x.known(Tails)
    shaped = None if tails is None or factor is not None else _by_tails(entries, tails, x.variance)
    carried: list[Carried] = []
    if shaped is not None:
        best, weights = _corrected(best, weights, *shaped, entries.pairs is None)
        third, fourth = (shaped[0].third.to(entries.dtype), shaped[0].fourth.to(entries.dtype))
        carried.append(Tails(lambda: (third, fourth)))
    mean = best.mean.to(entries.dtype)
    if ctx.activation != "price":
        return Surrogate(mean, [(x, entries.routing(entries.winner()))])
    residual = (best.variance - entries.explained(weights)).clamp(min=0).to(entries.dtype)
    noise = DiagonalNoise(residual, f"{ctx.module or 'model'} (max pool)")
    result = Surrogate(mean, [(x, entries.routing(weights))], [noise], carried=carried)
    if known is not None and (within is None or entries.pairs is not None):
        result.variance = best.variance.to(entries.dtype)
        result.carried.append(Mapped(known, result.maps[0][1], mean))
    return result


# Numbers for each input up to which distribution functions are formed: four times as many are 10 ms for each input.
MOST = 2**16


def _by_tails(entries: _Entries, tails: Tails, variance: Tensor) -> tuple[Largest, Largest] | None:
    """The largest entry as if entries were independent, by their cumulants and as Gaussians; None where they are not
    known or windows are too many."""
    n, window = len(entries.means), entries.means[0]
    if n * NODES * math.prod(window.shape[1:]) > MOST:
        return None
    cumulants = tails.cumulants()
    if cumulants is None:
        return None
    third, fourth = (k.to(window.dtype).expand(variance.shape) for k in cumulants)
    rest, up, down = effective_draw(third, fourth, variance.to(window.dtype))
    rest = (variance - rest).clamp_min(0)
    mean = torch.stack(entries.means)
    parts = [torch.stack(entries.box.entries(t, 0.0)) for t in (up, down, rest)]
    none = torch.zeros_like(mean)
    plain = TwoValued(mean, none, none, torch.stack(entries.diags))
    return largest_independent(TwoValued(mean, *parts), ABSENT), largest_independent(plain, ABSENT)


def _corrected(
    best: Law, weights: list[Tensor], shaped: Largest, plain: Largest, independent: bool
) -> tuple[Law, list[Tensor]]:
    """What the shape of independent entries changes, on top of what their covariances do."""
    if independent:
        return Law(shaped.mean, shaped.variance), list(shaped.slopes.unbind())
    positive = plain.variance > 0
    ratio = torch.where(positive, shaped.variance / torch.where(positive, plain.variance, 1.0), 1.0)
    weights = [w + a - b for w, a, b in zip(weights, shaped.slopes.unbind(), plain.slopes.unbind(), strict=True)]
    return Law(best.mean + shaped.mean - plain.mean, best.variance * ratio), [w.clamp(0, 1) for w in weights]


def dropped_maximum(
    ctx: Context, x: Value | Tensor, p: Argument, rectified: bool, label: str, windows: Sequence[Windows]
) -> Surrogate:
    """The surrogate of max_i D_i x_i, or of max(0, max_i D_i x_i) where `rectified`."""

    def moments(laws: list[Law], rates: list[Any]) -> Dropped:
        y = largest_dropped(laws, rates)
        return y if rectified else without_floor(y, laws, rates)

    return behind_dropout(x, p, label, windows, moments, follow=ctx.activation != "price")


def behind_dropout(
    x: Value | Tensor,
    p: Argument,
    label: str,
    windows: Sequence[Windows],
    moments: Callable[[list[Law], list[Any]], Dropped],
    follow: bool = False,
) -> Surrogate:
    """The surrogate of a function of the D_i x_i of every window.

    Args:
        x: What is dropped from.
        p: The rate, a number or a tensor that broadcasts to x.
        label: Of the draws.
        windows: Along each of the last axes.
        moments: Given the laws of the x_i in ascending order of E[x_i]/q_i, and their rates.
        follow: The covariance follows the entry with the largest mean.
    """
    box = Box(tuple(windows))
    mean, diag, factor = (x.mean, x.diag, x.factor) if isinstance(x, Value) else (x, None, None)
    entries = _Entries(box, mean, diag, factor)
    rates: list[Any] = [p] * len(entries.means)
    if isinstance(p, Tensor):
        rates = box.entries(p.to(mean.device, entries.means[0].dtype).expand(mean.shape), 0.0)
    order = _ascending(torch.stack([m / (1 - r) for m, r in zip(entries.means, rates, strict=True)]))
    back = order.argsort(0)

    def ascending(parts: Sequence[Tensor]) -> list[Tensor]:
        stacked = torch.stack(list(parts))
        index = order if stacked.ndim == order.ndim else order.unsqueeze(1).expand(-1, *stacked.shape[1:])
        return list(stacked.gather(0, index).unbind())

    sorted_rates = ascending(rates) if isinstance(p, Tensor) else rates
    laws = entries.laws()
    means, variances = ascending([a.mean for a in laws]), ascending([a.variance for a in laws])
    factors = [None] * len(laws) if entries.factors is None else ascending(entries.factors)
    y = moments([Law(m, v, f) for m, v, f in zip(means, variances, factors, strict=True)], sorted_rates)
    slopes, draws = (list(torch.stack(parts).gather(0, back).unbind()) for parts in (y.slopes, y.draws))
    if follow:
        slopes = [w.to(means[0].dtype) for w in entries.winner()]
    maps = [(x, entries.routing(slopes))] if isinstance(x, Value) else []
    noises = _dropped_noises(entries, y, slopes, draws, rates, label, follow)
    return Surrogate(y.mean.to(entries.dtype), maps, noises)


def _ascending(keys: Tensor) -> Tensor:
    """The order of keys along the first axis; those that rounding tells apart keep their places, in any batch."""
    known = torch.where(keys > ABSENT, keys, 0.0)
    step = known.abs().amax(0, keepdim=True) * torch.finfo(keys.dtype).eps ** 0.75
    return torch.where(step > 0, (keys / step).round(), keys).argsort(dim=0, stable=True)


def _dropped_noises(
    entries: _Entries,
    y: Dropped,
    slopes: list[Tensor],
    draws: list[Tensor],
    rates: list[Any],
    label: str,
    follow: bool,
) -> list[Noise]:
    dtype, box = entries.dtype, entries.box
    left = (y.variance - entries.explained(slopes)).clamp(min=0)
    scales = [(p * (1 - p)) ** 0.5 * d for p, d in zip(rates, draws, strict=True)]
    if follow:  # the winner's own dropout, p/q·(μ² + v), and no remainder
        # of an entry that a window lacks the square would be infinite, which no weight of 0 takes away
        second = [
            torch.where(w > 0, a.mean, 0.0).square() + a.variance for w, a in zip(slopes, entries.laws(), strict=True)
        ]
        scales = [w * (p / (1 - p) * s).sqrt() for w, p, s in zip(slopes, rates, second, strict=True)]
        left = sum([s.square() for s in scales[1:]], scales[0].square())
    if box.disjoint:
        return [DiagonalNoise(left.to(dtype), label)]
    explained = sum([s.square() for s in scales[1:]], scales[0].square())
    # Approximate draws may explain more than there is.
    shrink = (left / explained.clamp(min=torch.finfo(left.dtype).tiny)).clamp(max=1).sqrt()
    shared = box.routing([(s * shrink).to(dtype) for s in scales])
    rest = (left - explained).clamp(min=0).to(dtype)
    sizes = tuple(axis.size for axis in box.axes)
    event = (*left.shape[1 : left.ndim - len(sizes)], *sizes)
    latent = LatentNoise(shared.apply, shared.transpose, torch.minimum(left, explained).to(dtype), event, None, label)
    return [latent, DiagonalNoise(rest, label)]


POOLS = (aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default)
INDEXED = (
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
)
ADAPTIVE = (
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
)
LARGEST = Traits(maximum=True, within=True)
IN_WINDOWS = replace(LARGEST, pool="regular")


def _windows(ctx: Context, op: Operation, x: Tensor, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Windows]:
    if op is aten.amax.default:
        return _whole(x, args[0], ctx)
    return (adaptive_windows if op in ADAPTIVE else pool_windows)(x, *args, **kwargs)


@rule(*POOLS, exactness="moment-matched", family="pooling", traits=IN_WINDOWS)
def max_pool(ctx: Context, x: Value, *args: Argument, **kwargs: Argument) -> Surrogate:
    return maximum(ctx, x, pool_windows(x.mean, *args, **kwargs))


@rule(*INDEXED, exactness="moment-matched", family="pooling", traits=replace(IN_WINDOWS, indices=True))
def max_pool_with_indices(ctx: Context, x: Value, *args: Argument, **kwargs: Argument) -> list[Surrogate]:
    """Only the maxima: where they were is discrete, and has no moments."""
    return [maximum(ctx, x, pool_windows(x.mean, *args, **kwargs))]


@rule(
    *ADAPTIVE,
    exactness="moment-matched",
    family="pooling",
    traits=replace(LARGEST, pool="adaptive", indices=True),
)
def adaptive_max_pool(ctx: Context, x: Value, output_size: Sizes) -> list[Surrogate]:
    return [maximum(ctx, x, adaptive_windows(x.mean, output_size))]


def _whole(x: Tensor, dims: Sequence[int], ctx: Context) -> list[Windows]:
    """One window along each of `dims`."""
    negative = sorted({d % x.ndim - x.ndim for d in dims} if dims else range(1 - x.ndim, 0))
    if -x.ndim in negative:
        raise UnsupportedOperation(
            f"the maximum at {ctx.place} of a {tuple(x.shape)} tensor runs over dimension 0, the batch; uncertain "
            "tensors are reduced over other dimensions only."
        )
    return [Windows(d, x.shape[d], 1, x.shape[d], x.shape[d]) for d in negative]


def _reduced(y: Surrogate, x: Value, dims: Sequence[int], keepdim: bool) -> Surrogate:
    """The result of windows of one entry along `dims`, with those dimensions dropped unless `keepdim`."""
    if keepdim:
        return y
    ((_, G),) = y.maps
    kept, shape = y.mean.shape, y.mean.squeeze(tuple(dims)).shape
    short = structural(lambda d: d.reshape(-1, *shape), lambda g: g.reshape(-1, *kept), one_per_row=True)
    noises: list[Noise] = [DiagonalNoise(noise.diag().reshape(shape), noise.label) for noise in y.noises]
    variance = None if y.variance is None else y.variance.reshape(shape)
    return Surrogate(y.mean.reshape(shape), [(x, compose(short, G))], noises, variance=variance)


@rule(aten.amax.default, exactness="moment-matched", family="pooling", traits=replace(LARGEST, reduces=True))
def amax(ctx: Context, x: Value, dim: Sequence[int] = (), keepdim: bool = False) -> Surrogate:
    windows = _whole(x.mean, dim, ctx)
    return _reduced(maximum(ctx, x, windows), x, [w.dim for w in windows], keepdim)


@rule(aten.max.dim, exactness="moment-matched", family="pooling", traits=replace(LARGEST, reduces=True, indices=True))
def max_dim(ctx: Context, x: Value, dim: int, keepdim: bool = False) -> list[Surrogate]:
    """Only the maxima: where they were is discrete, and has no moments."""
    return [amax(ctx, x, [dim], keepdim)]


def dropped_max_pool(
    ctx: Context,
    x: Value | Tensor,
    p: Argument,
    rectified: bool,
    label: str,
    op: Operation,
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Surrogate:
    """`op(dropout(x, p), *args, **kwargs)`, a maximum that keeps its dimensions, and a ReLU where `rectified`."""
    mean = x.mean if isinstance(x, Value) else x
    return dropped_maximum(ctx, x, p, rectified, label, _windows(ctx, op, mean, args, kwargs))


declare(dropped_max_pool, traits=Traits(random=True))
