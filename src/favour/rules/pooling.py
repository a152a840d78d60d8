"""Average pooling, which is linear and exact. A window t has one weight 1/d_t for all its entries, so that
(G∘G)v = (Gv)/d_t, with

    1/d_t = (average of ones)_t / (number of entries)_t.

Where only variances are carried, entries of a window count as independent, unless their covariances are told
(`favour.surrogate.channels`): Var y_t = Σ_ij Cov(x_i, x_j)/d_t², for windows of up to 3 × 3 entries inside the picture.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from favour.graph.traits import Argument, Traits
from favour.rules.registry import rule
from favour.rules.windows import Box, Sizes, Windows, adaptive_windows, per_axis, pool_windows, spans
from favour.surrogate import LinearMap, Surrogate, scaled, structural
from favour.surrogate.channels import ChannelCovariance, Mapped
from favour.surrogate.value import Context, Value

aten = torch.ops.aten


def folded(op: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """`op` on (batch, …) made to act on (F, batch, …)."""

    def act(d: Tensor) -> Tensor:
        y = op(d.flatten(0, 1))
        return y.reshape(*d.shape[:2], *y.shape[1:])

    return act


REGULAR, ADAPTIVE = Traits(pool="regular", sums=True, within=True), Traits(pool="adaptive", sums=True, within=True)


def _register(
    op: Argument, make: Callable[..., tuple[Tensor, LinearMap]], windows: Callable[..., list[Windows]], traits: Traits
) -> None:
    """The rule of an average, given its result on the mean and its map, and where its windows lie."""

    @rule(op, exactness="exact", family="pooling", traits=traits)
    def average(ctx: Context, x: Value, *args: Argument, **kwargs: Argument) -> Surrogate:
        mean, G = make(x.mean, *args, **kwargs)
        result = Surrogate(mean, [(x, G)])
        within = x.known(ChannelCovariance)
        if within is not None and not within.whole:
            _correlated(result, x, within, Box(tuple(windows(x.mean, *args, **kwargs))))
        return result


def _correlated(y: Surrogate, x: Value, within: ChannelCovariance, box: Box) -> None:
    """Var y_t = Σ_ij Cov(x_i, x_j)/d², for windows that all lie inside."""
    space = x.mean.ndim - 2
    pairs = box.covariances(within, space) if box.within else None
    ((_, G),) = y.maps
    if pairs:
        total = torch.stack(list(pairs.values())).sum(0)
        share = G.square(torch.ones_like(x.mean[:1, :1])) / box.count  # 1/d²
        y.variance = G.square(x.variance) + 2 * share * total
        y.carried.append(Mapped(within, G, y.mean))


def _average_windows(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    ceil_mode: bool = False,
    *rest: Argument,
    **others: Argument,
) -> list[Windows]:
    return pool_windows(x, kernel, stride, padding, 1, ceil_mode)


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

        def average(t: Tensor, divisor: int | None) -> Tensor:
            y = pool(t.unsqueeze(2) if flat else t, *how, divisor)
            return y.squeeze(2) if flat else y

        def back(g: Tensor) -> Tensor:
            like = g.new_zeros(*g.shape[:2], *space)
            y = backward(g.unsqueeze(2) if flat else g, like, *how, 1)
            return y.squeeze(2) if flat else y

        ones = torch.ones_like(x[:1, :1])
        share = average(ones, divisor_override) / average(ones, 1)  # 1/d_t
        sums = structural(
            folded(lambda t: average(t, 1)), folded(back), disjoint=disjoint, channelwise=True, name=("windows", how)
        )
        return average(x, divisor_override), sums.scaled_after(share)

    return make


_register(aten.avg_pool1d.default, _average(1), _average_windows, REGULAR)
_register(aten.avg_pool2d.default, _average(2), _average_windows, REGULAR)
_register(aten.avg_pool3d.default, _average(3), _average_windows, REGULAR)


def _members(size: int, count: int, like: Tensor) -> Tensor:
    """(count, size): 1 where an entry is in a span."""
    rows = [[float(start <= i < start + length) for i in range(size)] for start, length in spans(size, count)]
    return like.new_tensor(rows)


def _adaptive_average(axes: int) -> Callable[..., tuple[Tensor, LinearMap]]:
    flat = axes == 1
    pool = aten.adaptive_avg_pool3d.default if axes == 3 else aten.adaptive_avg_pool2d.default

    def make(x: Tensor, output_size: Sizes) -> tuple[Tensor, LinearMap]:
        counts = per_axis(output_size, axes)
        sizes = tuple(x.shape[2:])
        out = (1, *counts) if flat else counts

        def average(t: Tensor) -> Tensor:
            y = pool(t.unsqueeze(2) if flat else t, out)
            return y.squeeze(2) if flat else y

        def back(g: Tensor) -> Tensor:
            """Every sum's number at all entries it is of; spelt out, since ONNX has no gradients."""
            for axis, (size, count) in enumerate(zip(sizes, counts, strict=True), 2):
                if size % count == 0:
                    g = g.repeat_interleave(size // count, axis)
                else:
                    g = (g.movedim(axis, -1) @ _members(size, count, g)).movedim(-1, axis)
            return g

        share = x.new_ones([1] * (axes + 2))
        for axis, (size, count) in enumerate(zip(sizes, counts, strict=True)):
            weights = x.new_tensor([1 / length for _, length in spans(size, count)])
            share = share * weights.reshape(-1, *[1] * (axes - 1 - axis))
        disjoint = all(size % count == 0 for size, count in zip(sizes, counts, strict=True))
        sums = structural(
            lambda d: scaled(folded(average)(d), 1 / share),
            folded(back),
            disjoint=disjoint,
            channelwise=True,
            name=("spans", counts),
        )
        return average(x), sums.scaled_after(share)

    return make


_register(aten.adaptive_avg_pool1d.default, _adaptive_average(1), adaptive_windows, ADAPTIVE)
_register(aten.adaptive_avg_pool2d.default, _adaptive_average(2), adaptive_windows, ADAPTIVE)
_register(aten.adaptive_avg_pool3d.default, _adaptive_average(3), adaptive_windows, ADAPTIVE)
