"""Average pooling, which is linear and exact. A window t has one weight 1/d_t for all its entries, so that
(G∘G)v = (Gv)/d_t, with

    1/d_t = (average of ones)_t / (number of entries)_t.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from favour.rules.registry import linear_map
from favour.surrogate import LinearMap

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


def spans(size: int, count: int) -> list[tuple[int, int]]:
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
                weights = y.new_tensor([1 / length for _, length in spans(size, count)])
                y = y * weights.reshape(-1, *[1] * (axes - 1 - axis))
            return y

        disjoint = all(size % count == 0 for size, count in zip(sizes, counts, strict=True))
        return average(x), LinearMap(folded(average), folded(back), square, disjoint=disjoint, any_batch=True)

    return make


linear_map(aten.adaptive_avg_pool1d.default, make=_adaptive_average(1), family="pooling")
linear_map(aten.adaptive_avg_pool2d.default, make=_adaptive_average(2), family="pooling")
linear_map(aten.adaptive_avg_pool3d.default, make=_adaptive_average(3), family="pooling")
