"""The windows of pooling: boxes, axis by axis.

`Box` lists, for every window at once, its first, second, … entry, and maps weights of the entries back: a maximum over
windows is then written once, for tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.scalar.table import table
from favour.surrogate import LinearMap, Routing
from favour.surrogate.channels import ChannelCovariance, Lag

aten = torch.ops.aten
Sizes = int | Sequence[int]

# Entries of a window up to which their covariances are asked for, one by one: 3 × 3 has 12 different lags.
MOST_NEIGHBOURS = 9


def per_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    """One number for each axis."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def spans(size: int, count: int) -> list[tuple[int, int]]:
    """First entry and length of the windows of adaptive pooling: ⌊i·size/count⌋ up to ⌈(i + 1)·size/count⌉."""
    starts = [i * size // count for i in range(count)]
    return [(start, -(-(i + 1) * size // count) - start) for i, start in enumerate(starts)]


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
        unequal = spans(size, count)
        return cls(dim, size, count, max(length for _, length in unequal), spans=tuple(unequal))

    @property
    def within(self) -> bool:
        """No window reaches over the edge."""
        return self.padding == 0 and (self.count - 1) * self.stride + self.dilation * (self.window - 1) < self.size

    @property
    def disjoint(self) -> bool:
        return self.spans is None and (self.dilation * (self.window - 1) < self.stride or self.window == 1)

    def _index(self, j: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Entry j of each window of unequal length, and whether there is one."""
        assert self.spans is not None
        at = tuple(start + min(j, length - 1) for start, length in self.spans)
        return table(at, like, torch.long), table(tuple(j < length for _, length in self.spans), like, torch.bool)

    def entries(self, t: Tensor, fill: float) -> list[Tensor]:
        """The first, second, … entry of every window, each of `count` along the axis; `fill` where there is none."""
        if self.spans is not None:
            shape = [-1] + [1] * (-self.dim - 1)
            indices = [self._index(j, t) for j in range(self.window)]
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
                at, ok = self._index(j, like)
                total = total.index_add(self.dim, at, part * ok.reshape([-1] + [1] * (-self.dim - 1)))
            return total
        if self.stride == self.window and self.dilation == 1 and self.padding == 0:  # tiles
            dim = self.dim + like.ndim
            tiled = torch.stack(list(parts), dim + 1).flatten(dim, dim + 1)
            after = self.size - self.count * self.window
            return tiled if after == 0 else F.pad(tiled, [0, 0] * (-self.dim - 1) + [0, after])
        last = (self.count - 1) * self.stride + 1
        shape[self.dim] = max(self.padding + self.size, last + self.dilation * (self.window - 1))
        dim = self.dim + like.ndim
        total = like.new_zeros(shape)
        for j, part in enumerate(parts):
            start = j * self.dilation
            old = 0 if j == 0 or self.disjoint else total[self._slice(start, start + last)]
            total = aten.slice_scatter.default(total, part + old, dim, start, start + last, self.stride)
        return total.narrow(self.dim, self.padding, self.size)


@dataclass(frozen=True)
class Box:
    """Windows along several axes.

    Attributes:
        axes: The windows along each.
        spatial: They lie behind the channels of a tensor (batch, channels, *space).
    """

    axes: tuple[Windows, ...]
    spatial: bool = False

    @property
    def count(self) -> int:
        """Entries of a window."""
        total = 1
        for axis in self.axes:
            total *= axis.window
        return total

    @property
    def within(self) -> bool:
        """Windows are alike, and none reaches over the edge."""
        return all([axis.spans is None and axis.within for axis in self.axes])

    @property
    def disjoint(self) -> bool:
        return all([axis.disjoint for axis in self.axes])

    @property
    def channelwise(self) -> bool:
        """All axes are given as axes of space, behind the channels."""
        return self.spatial

    def entries(self, t: Tensor, fill: float) -> list[Tensor]:
        """The first, second, … entry of every window; `fill` where there is none."""
        parts = [t]
        for axis in self.axes:
            parts = [entry for part in parts for entry in axis.entries(part, fill)]
        return parts

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """The adjoint of `entries`."""
        left = list(parts)
        for axis in reversed(self.axes):
            left = [axis.gather(left[i : i + axis.window]) for i in range(0, len(left), axis.window)]
        return left[0]

    def offsets(self, space: int) -> list[Lag] | None:
        """Where the entries of a window lie along `space` axes; None for many, or where it differs between windows."""
        steps = {axis.dim: [j * axis.dilation for j in range(axis.window)] for axis in self.axes}
        if any([axis.spans is not None or axis.dim < -space for axis in self.axes]):
            return None
        places: list[Lag] = [()]
        for dim in range(-space, 0):
            places = [(*place, d) for place in places for d in steps.get(dim, [0])]
        return places if len(places) <= MOST_NEIGHBOURS else None

    def covariances(self, within: ChannelCovariance, space: int) -> dict[tuple[int, int], Tensor] | None:
        """Cov(entry i, entry j) of every window by (i, j), i < j; None where `offsets` has none."""
        places = self.offsets(space)
        if places is None:
            return None
        by_lag: dict[Lag, list[Tensor]] = {}
        pairs: dict[tuple[int, int], Tensor] = {}
        for j, there in enumerate(places):
            for i, here in enumerate(places[:j]):
                lag = tuple([b - a for a, b in zip(here, there, strict=True)])
                if lag not in by_lag:
                    by_lag[lag] = self.entries(within.at(lag), 0.0)
                pairs[i, j] = by_lag[lag][i]
        return pairs

    def routing(self, weights: Sequence[Tensor]) -> LinearMap:
        """(Gx)_window = Σ_j weights_j · entry j. One path leads from an entry to a window, so squares are plain."""
        return Routing(self, weights)


def pool_windows(
    x: Tensor,
    kernel: Sizes,
    stride: Sizes = (),
    padding: Sizes = 0,
    dilation: Sizes = 1,
    ceil_mode: bool = False,
) -> list[Windows]:
    """The windows of max and average pooling of x, (batch, channels, *space)."""
    axes = x.ndim - 2
    k = per_axis(kernel, axes)
    s = k if isinstance(stride, Sequence) and not stride else per_axis(stride, axes)
    p, d = per_axis(padding, axes), per_axis(dilation, axes)
    regular = Windows.regular
    return [regular(i - axes, x.shape[2 + i], k[i], s[i], p[i], d[i], ceil_mode) for i in range(axes)]


def adaptive_windows(x: Tensor, output_size: Sizes) -> list[Windows]:
    """The windows of adaptive pooling of x, (batch, channels, *space)."""
    axes = x.ndim - 2
    counts = per_axis(output_size, axes)
    return [Windows.adaptive(i - axes, x.shape[2 + i], counts[i]) for i in range(axes)]
