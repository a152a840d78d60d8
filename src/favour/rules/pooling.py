"""Pooling: averages, which are linear, and maxima, which are not.

**Averages** are exact. A window t has one weight 1/d_t for all its entries, so that (G∘G)v = (Gv)/d_t, with

    1/d_t = (average of ones)_t / (number of entries)_t.

**Maxima.** max is associative and windows are boxes, so a window is reduced axis by axis and pair by pair. A pair is

    max(a, b) = b + relu(a − b),

and for Gaussian a, b with d = a − b ~ N(δ, s²) the moments of relu, of `favour.moments`, give (Clark 1961)

    E[max] = max(E a, E b) + E relu(−|δ| + s z),   G = (Φ(δ/s), Φ(−δ/s)),   N = the residual of relu at (δ, s²).

G has the probabilities that either one is the larger; after all pairs, that entry i is the largest of its window. That
is E[∂max/∂x_i], the choice of `"price"`: mean and variance of a pair are exact for Gaussians, covariances with
everything else exact by Stein's lemma. Approximations: the result of a pair is taken for Gaussian again; within a
window only the factor columns and channel dropout right before count as correlation; the draws N of overlapping
windows count as independent.

In the modes `"matched"` and `"taylor"` the mean is the same, and the covariance follows the winner of the means: G
has a single 1 per window, N = 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour import scalar
from favour.rules.channel_dropout import WITHIN_CHANNELS
from favour.rules.registry import linear_map, rule
from favour.surrogate import DiagonalNoise, LinearMap, Surrogate
from favour.value import Context, Value

aten = torch.ops.aten
Sizes = int | Sequence[int]


def per_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * axes if len(given) == 1 else given


def folded(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`op` on (batch, …) made to act on (F, batch, …)."""

    def act(d: Tensor) -> Tensor:
        y = op(d.flatten(0, 1))
        return y.reshape(*d.shape[:2], *y.shape[1:])

    return act


# ------------------------------------------------------------------ averages


def _average(axes: int) -> Callable[..., tuple[Tensor, LinearMap]]:
    """avg_pool over the last `axes` axes; one axis is two with a window of one in front."""
    flat = axes == 1
    pool = aten.avg_pool3d.default if axes == 3 else aten.avg_pool2d.default
    backward = aten.avg_pool3d_backward.default if axes == 3 else aten.avg_pool2d_backward.default

    def make(
        x: Tensor,
        kernel: Sizes,
        stride: Sizes = (),
        padding: Sizes = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> tuple[Tensor, LinearMap]:
        windows = per_axis(kernel, axes)
        strides = per_axis(stride, axes) if stride != () and stride != [] else windows
        paddings = per_axis(padding, axes)
        disjoint = all(s >= k for s, k in zip(strides, windows, strict=True))
        if flat:
            windows, strides, paddings = (1, *windows), (1, *strides), (0, *paddings)
        space = (1, *x.shape[2:]) if flat else tuple(x.shape[2:])
        how = (windows, strides, paddings, ceil_mode, count_include_pad)

        def average(t: Tensor, divisor: int | None = divisor_override) -> Tensor:
            y = pool(t.unsqueeze(2) if flat else t, *how, divisor)
            return y.squeeze(2) if flat else y

        def back(g: Tensor) -> Tensor:
            like = g.new_zeros(*g.shape[:2], *space)
            y = backward(g.unsqueeze(2) if flat else g, like, *how, divisor_override)
            return y.squeeze(2) if flat else y

        def square(v: Tensor) -> Tensor:
            ones = torch.ones_like(v[:1, :1])
            return average(v) * (average(ones) / average(ones, 1))

        return average(x), LinearMap(folded(average), folded(back), square, disjoint=disjoint, any_batch=True)

    return make


linear_map(aten.avg_pool1d.default, make=_average(1), family="pooling")
linear_map(aten.avg_pool2d.default, make=_average(2), family="pooling")
linear_map(aten.avg_pool3d.default, make=_average(3), family="pooling")


def _spans(size: int, count: int) -> list[tuple[int, int]]:
    """First entry and length of the windows of adaptive pooling: ⌊i·size/count⌋ up to ⌈(i + 1)·size/count⌉."""
    starts = [i * size // count for i in range(count)]
    return [(start, -(-(i + 1) * size // count) - start) for i, start in enumerate(starts)]


def _adaptive_average(axes: int) -> Callable[..., tuple[Tensor, LinearMap]]:
    flat = axes == 1
    pool = aten.adaptive_avg_pool3d.default if axes == 3 else aten.adaptive_avg_pool2d.default
    backward = aten._adaptive_avg_pool3d_backward.default if axes == 3 else aten._adaptive_avg_pool2d_backward.default

    def make(x: Tensor, output_size: Sizes) -> tuple[Tensor, LinearMap]:
        counts = per_axis(output_size, axes)
        sizes = tuple(x.shape[2:])
        out, space = ((1, *counts), (1, *sizes)) if flat else (counts, sizes)

        def average(t: Tensor) -> Tensor:
            y = pool(t.unsqueeze(2) if flat else t, out)
            return y.squeeze(2) if flat else y

        def back(g: Tensor) -> Tensor:
            y = backward(g.unsqueeze(2) if flat else g, g.new_zeros(*g.shape[:2], *space))
            return y.squeeze(2) if flat else y

        def square(v: Tensor) -> Tensor:
            y = average(v)
            for axis, (size, count) in enumerate(zip(sizes, counts, strict=True)):
                weights = y.new_tensor([1 / length for _, length in _spans(size, count)])
                y = y * weights.reshape(-1, *[1] * (axes - 1 - axis))
            return y

        disjoint = all(size % count == 0 for size, count in zip(sizes, counts, strict=True))
        return average(x), LinearMap(folded(average), folded(back), square, disjoint=disjoint, any_batch=True)

    return make


linear_map(aten.adaptive_avg_pool1d.default, make=_adaptive_average(1), family="pooling")
linear_map(aten.adaptive_avg_pool2d.default, make=_adaptive_average(2), family="pooling")
linear_map(aten.adaptive_avg_pool3d.default, make=_adaptive_average(3), family="pooling")


# -------------------------------------------------------------------- maxima


@dataclass(frozen=True)
class Windows:
    """The windows along one axis: which entry is the j-th of each of them.

    Attributes:
        dim: The axis, counted from the end (negative), so that a fold axis in front does not matter.
        size: Entries along the axis.
        count: Windows.
        window: Entries of a window, j = 0 … window − 1.
        stride, dilation, padding: Entry j of window t is t·stride + j·dilation − padding, where there is one.
        spans: Windows of unequal lengths instead (adaptive pooling): first entry and length.
    """

    dim: int
    size: int
    count: int
    window: int
    stride: int = 1
    dilation: int = 1
    padding: int = 0
    spans: tuple[tuple[int, int], ...] | None = None

    @classmethod
    def regular(cls, dim: int, size: int, k: int, stride: int, padding: int, dilation: int, ceil: bool) -> Windows:
        reach = size + 2 * padding - dilation * (k - 1) - 1
        count = -(-reach // stride) + 1 if ceil else reach // stride + 1
        if ceil and (count - 1) * stride >= size + padding:  # a window has to begin inside
            count -= 1
        return cls(dim, size, count, k, stride, dilation, padding)

    @classmethod
    def adaptive(cls, dim: int, size: int, count: int) -> Windows:
        if size % count == 0:
            return cls(dim, size, count, size // count, size // count)
        spans = _spans(size, count)
        return cls(dim, size, count, max(length for _, length in spans), spans=tuple(spans))

    @property
    def disjoint(self) -> bool:
        return self.spans is None and (self.dilation * (self.window - 1) < self.stride or self.window == 1)

    def _index(self, j: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Entry j of each window of unequal length, and whether there is one."""
        assert self.spans is not None
        at = [start + min(j, length - 1) for start, length in self.spans]
        return torch.tensor(at, device=device), torch.tensor([j < length for _, length in self.spans], device=device)

    def entries(self, t: Tensor, fill: float) -> list[Tensor]:
        """The first, second, … entry of every window, each of `count` along the axis; `fill` where there is none."""
        if self.spans is not None:
            shape = [-1] + [1] * (-self.dim - 1)
            indices = [self._index(j, t.device) for j in range(self.window)]
            return [torch.where(ok.reshape(shape), t.index_select(self.dim, at), fill) for at, ok in indices]
        last = (self.count - 1) * self.stride + 1
        after = max(0, last + self.dilation * (self.window - 1) - self.size - self.padding)
        if self.padding or after:
            t = F.pad(t, [0, 0] * (-self.dim - 1) + [self.padding, after], value=fill)
        starts = [j * self.dilation for j in range(self.window)]
        return [t[self._slice(start, start + last)] for start in starts]

    def _slice(self, start: int, stop: int) -> tuple[Any, ...]:
        return (..., slice(start, stop, self.stride), *[slice(None)] * (-self.dim - 1))

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The adjoint of `entries`: every part added where its entries came from."""
        like = parts[0]
        shape = list(like.shape)
        if self.spans is not None:
            shape[self.dim] = self.size
            total = like.new_zeros(shape)
            for j, part in enumerate(parts):
                at, ok = self._index(j, like.device)
                total = total.index_add(self.dim, at, part * ok.reshape([-1] + [1] * (-self.dim - 1)))
            return total
        last = (self.count - 1) * self.stride + 1
        shape[self.dim] = max(self.padding + self.size, last + self.dilation * (self.window - 1))
        dim = self.dim + like.ndim
        total = like.new_zeros(shape)
        for j, part in enumerate(parts):
            start = j * self.dilation
            old = 0 if j == 0 or self.disjoint else total[self._slice(start, start + last)]
            total = aten.slice_scatter.default(total, part + old, dim, start, start + last, self.stride)
        return total.narrow(self.dim, self.padding, self.size)


@dataclass
class _Belief:
    """Mean, independent variance and factor columns of the entries that are being reduced."""

    mean: Tensor
    diag: Tensor
    factor: Tensor | None

    @property
    def variance(self) -> Tensor:
        return self.diag if self.factor is None else self.diag + self.factor.square().sum(0)


def _larger(a: _Belief, b: _Belief) -> tuple[_Belief, Tensor, Tensor]:
    """The larger of two, the probability that it is a, and the residual variance (module docstring)."""
    spread = a.diag + b.diag
    if a.factor is not None and b.factor is not None:
        spread = spread + (a.factor - b.factor).square().sum(0)
    gap = a.mean - b.mean
    moments = scalar.relu().moments(-gap.abs(), spread)  # the residual is even in the gap
    first = torch.where(gap > 0, 1 - moments.slope, moments.slope)
    second = torch.where(gap > 0, moments.slope, 1 - moments.slope)
    mean = torch.maximum(a.mean, b.mean) + moments.mean
    diag = first.square() * a.diag + second.square() * b.diag + moments.residual
    factor = None if a.factor is None or b.factor is None else first * a.factor + second * b.factor
    return _Belief(mean, diag, factor), first, moments.residual


def _reduce(x: _Belief, windows: Windows) -> tuple[_Belief, list[Tensor], Tensor]:
    """The largest of every window along one axis, each entry's probability to be it, and the residual variance."""
    lowest = torch.finfo(x.mean.dtype).min / 4  # −∞ without its arithmetic
    means, diags = windows.entries(x.mean, lowest), windows.entries(x.diag, 0.0)
    factors = [None] * len(means) if x.factor is None else windows.entries(x.factor, 0.0)
    best = _Belief(means[0], diags[0], factors[0])
    weights = [torch.ones_like(best.mean)]
    residual = torch.zeros_like(best.mean)
    for j in range(1, len(means)):
        best, kept, fresh = _larger(best, _Belief(means[j], diags[j], factors[j]))
        weights = [w * kept for w in weights] + [1 - kept]
        residual = kept.square() * residual + fresh
    return best, weights, residual


def _routing(windows: Windows, weights: list[Tensor]) -> LinearMap:
    """G along one axis: Σ_j weights_j · entry j of the window."""

    def mix(d: Tensor, factors: Sequence[Tensor]) -> Tensor:
        parts = windows.entries(d, 0.0)
        total = parts[0] * factors[0]
        for part, factor in zip(parts[1:], factors[1:], strict=True):
            total = total + part * factor
        return total

    return LinearMap(
        lambda d: mix(d, weights),
        lambda g: windows.gather([g * w for w in weights]),
        lambda v: mix(v, [w.square() for w in weights]),
        disjoint=windows.disjoint,
    )


def _chain(outer: LinearMap, inner: LinearMap) -> LinearMap:
    """outer ∘ inner for two axes. One path leads from an entry to a window, so squares compose."""
    return LinearMap(
        lambda d: outer.apply(inner.apply(d)),
        lambda g: inner.transpose(outer.transpose(g)),
        lambda v: outer.square(inner.square(v)),
        disjoint=outer.disjoint and inner.disjoint,
    )


def _largest(x: _Belief, windows: Sequence[Windows]) -> tuple[Tensor, LinearMap, Tensor]:
    """Mean, map and residual variance of the largest entry of every window, axis by axis from the last."""
    G: LinearMap | None = None
    residual: Tensor | None = None
    for along in reversed(windows):
        x, weights, fresh = _reduce(x, along)
        step = _routing(along, weights)
        residual = fresh if residual is None else step.square(residual) + fresh
        G = step if G is None else _chain(step, G)
    assert G is not None and residual is not None
    return x.mean, G, residual


def maximum(ctx: Context, x: Value, windows: Sequence[Windows]) -> Surrogate:
    """The surrogate of the largest entry of every window."""
    nothing = torch.zeros_like(x.mean)
    diag, factor = ctx.shared.get((WITHIN_CHANNELS, x.name), (x.diag, x.factor))
    mean, G, residual = _largest(_Belief(x.mean, nothing if diag is None else diag, factor), windows)
    if ctx.activation != "price":
        return Surrogate(mean, [(x, _largest(_Belief(x.mean, nothing, None), windows)[1])])
    return Surrogate(mean, [(x, G)], [DiagonalNoise(residual, f"{ctx.module or 'model'} (max pool)")])


def _max_pool(
    ctx: Context,
    x: Value,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> Surrogate:
    axes = x.mean.ndim - 2
    k = per_axis(kernel, axes)
    s = k if isinstance(stride, Sequence) and not stride else per_axis(stride, axes)
    p, d = per_axis(padding, axes), per_axis(dilation, axes)
    sizes = x.mean.shape[2:]
    regular = Windows.regular
    return maximum(ctx, x, [regular(i - axes, sizes[i], k[i], s[i], p[i], d[i], ceil_mode) for i in range(axes)])


rule(
    aten.max_pool1d.default,
    aten.max_pool2d.default,
    aten.max_pool3d.default,
    exactness="moment-matched",
    family="pooling",
)(_max_pool)


@rule(
    aten.max_pool1d_with_indices.default,
    aten.max_pool2d_with_indices.default,
    aten.max_pool3d_with_indices.default,
    exactness="moment-matched",
    family="pooling",
)
def max_pool_with_indices(ctx: Context, x: Value, *args: Any, **kwargs: Any) -> list[Surrogate]:
    """Only the maxima: where they were is discrete, and has no moments."""
    return [_max_pool(ctx, x, *args, **kwargs)]


@rule(
    aten.adaptive_max_pool1d.default,
    aten.adaptive_max_pool2d.default,
    aten.adaptive_max_pool3d.default,
    exactness="moment-matched",
    family="pooling",
)
def adaptive_max_pool(ctx: Context, x: Value, output_size: Sizes) -> list[Surrogate]:
    axes = x.mean.ndim - 2
    counts, sizes = per_axis(output_size, axes), x.mean.shape[2:]
    return [maximum(ctx, x, [Windows.adaptive(i - axes, sizes[i], counts[i]) for i in range(axes)])]
