"""Convolutions and transposed convolutions as maps: products of kernels of one geometry are products of entries.

y = K ∗ x holds each kernel entry once for every pair of an input and an output entry that it joins, so that

    (K ∗ ·)∘(L ∗ ·) = (K∘L) ∗ ·          for one stride, padding, dilation and grouping.

A window that lies within the other's is one with zeros around it.

The diagonal of a way there and back, G = K ∗ (s ∘ (L ∗ ·)), needs no such product:

    G_ii = Σ_j K_ij s_j L_ji,        K∘Lᵀ one convolution of s, with taps of K times those of L turned round.

A strided convolution ignores the last entries that fill no window; the transposed one is told how many by its output
padding, which makes it the exact adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.surrogate.linear_map import Factor, LinearMap, Unavailable, meet
from favour.surrogate.matrices import Kept, passing

aten = torch.ops.aten


@dataclass(frozen=True)
class Geometry:
    """How a kernel moves over its input, one number for each spatial dimension.

    Attributes:
        stride, padding, dilation: As in `torch.nn.functional.conv2d`.
        groups: Blocks of channels that do not see each other.
        transposed: The transposed convolution, whose kernel is (in, out/groups, *window).
        output_padding: Of the transposed convolution.
        extra: Zeros at the far end beyond `padding`, for an even window and `padding="same"`.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    transposed: bool = False
    output_padding: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()

    def apply(self, x: Tensor, kernel: Tensor, bias: Tensor | None = None) -> Tensor:
        """K ∗ x + b, for x of shape (batch, channels, *space)."""
        if any(self.extra):
            x = F.pad(x, [n for e in reversed(self.extra) for n in (0, e)])
        return self._run(x, kernel, bias, self.transposed, self.output_padding)

    def adjoint(self, g: Tensor, kernel: Tensor, space: Sequence[int]) -> Tensor:
        """⟨K ∗ x, g⟩ = ⟨x, adjoint(g)⟩ for x with the spatial sizes `space`."""
        if self.transposed:
            back = self._run(g, kernel, None, False, (0,) * len(space))
        else:
            # What the strided convolution did not look at.
            rest = tuple(
                n + e + 2 * p - d * (k - 1) - 1 - s * (m - 1)
                for n, e, p, d, k, s, m in zip(
                    space,
                    self.extra,
                    self.padding,
                    self.dilation,
                    kernel.shape[2:],
                    self.stride,
                    g.shape[2:],
                    strict=True,
                )
            )
            back = self._run(g, kernel, None, True, rest)
        for i, size in enumerate(space):
            back = back.narrow(i + 2, 0, size) if back.shape[i + 2] != size else back
        return back

    def _run(self, x: Tensor, kernel: Tensor, bias: Tensor | None, transposed: bool, rest: tuple[int, ...]) -> Tensor:
        return aten.convolution.default(
            x, kernel, bias, self.stride, self.padding, self.dilation, transposed, rest, self.groups
        )

    def patches(self, a: Tensor, kernel: Tensor) -> Tensor:
        """The entries of a that each entry of the kernel meets, (batch, groups, channels/groups, window, *output).

        In compiled code, and of a transposed one, channel by channel a convolution with the one-hot kernels e_1, ….
        """
        window = kernel.shape[2:]
        count, channels = math.prod(window), a.shape[1]
        if not (self.transposed or torch.compiler.is_compiling()):
            behind = self.extra or (0,) * len(window)
            sides = zip(reversed(self.padding), reversed(behind), strict=True)
            seen = F.pad(a, [n for p, e in sides for n in (p, p + e)])
            for i, (k, s, d) in enumerate(zip(window, self.stride, self.dilation, strict=True)):
                seen = seen.unfold(i + 2, d * (k - 1) + 1, s)[..., ::d]
            out = seen.shape[2 : 2 + len(window)]
            seen = seen.permute(0, 1, *range(2 + len(window), seen.ndim), *range(2, 2 + len(window)))
            return seen.reshape(a.shape[0], self.groups, channels // self.groups, count, *out)
        eye = torch.eye(count, dtype=a.dtype, device=a.device).reshape(1, count, *window)
        hot = eye.expand(channels, count, *window)
        hot = hot if self.transposed else hot.reshape(channels * count, 1, *window)
        seen = replace(self, groups=channels).apply(a, hot)
        return seen.reshape(a.shape[0], self.groups, channels // self.groups, count, *seen.shape[2:])


class Convolution(LinearMap):
    """G = Kⁿ ∗ ·, powers entry by entry, on inputs with the spatial sizes `space`; the fold axis rides in the batch."""

    alike = thin = weighted = True

    def __init__(self, geometry: Geometry, kept: Kept, space: Sequence[int], n: int = 1) -> None:
        self.geometry, self.kept, self.space, self.n = geometry, kept, tuple(space), n
        self.kernel = kept.power(n)

    def apply(self, d: Tensor) -> Tensor:
        return _folded(d, self.kernel.dtype, lambda t: self.geometry.apply(t, self.kernel))

    def transpose(self, g: Tensor) -> Tensor:
        return _folded(g, self.kernel.dtype, lambda t: self.geometry.adjoint(t, self.kernel, self.space))

    def square(self, v: Tensor) -> Tensor:
        squared = self.kept.power(2 * self.n)
        return self.geometry.apply(v.to(squared.dtype), squared).to(v.dtype)

    def power(self, n: int) -> LinearMap:
        return Convolution(self.geometry, self.kept, self.space, self.n * n)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(other, LowRankConvolution):
            return other.hadamard(self)
        if not isinstance(other, Convolution):
            return meet(self, other)
        if other.geometry != self.geometry or other.kernel.shape != self.kernel.shape:
            return self._within(other) or other._within(self) or meet(self, other)
        if other.kept is self.kept:
            return Convolution(self.geometry, self.kept, self.space, self.n + other.n)
        product = self.kernel * other.kernel
        return Convolution(self.geometry, passing(product), self.space)

    def _within(self, other: Convolution) -> Convolution | None:
        """The product where this window lies within the other's; None where it does not."""
        mine, theirs = self.geometry, other.geometry
        alike = mine.stride == theirs.stride and mine.groups == theirs.groups and not any(mine.extra + theirs.extra)
        if mine.transposed or theirs.transposed or not alike or self.kernel.shape[:2] != other.kernel.shape[:2]:
            return None
        margins: list[int] = []
        for i, (k, large) in enumerate(zip(self.kernel.shape[2:], other.kernel.shape[2:], strict=True)):
            d = theirs.dilation[i]
            first, rest = divmod(theirs.padding[i] - mine.padding[i], d)
            if rest or (k > 1 and mine.dilation[i] != d) or first < 0 or first + k > large:
                return None
            margins = [first, large - first - k, *margins]
        return Convolution(theirs, passing(F.pad(self.kernel, margins) * other.kernel), other.space)

    def diagonal_after(self, there: LinearMap, factor: Factor) -> Factor | Unavailable:
        unknown, mine = super().diagonal_after(there, factor), self.geometry
        if not isinstance(there, Convolution):
            return unknown
        K, L, g = self.kernel, there.kernel, there.geometry
        plain = [
            h.stride == (1,) * len(h.stride) and h.groups == 1 and not (h.transposed or any(h.extra)) for h in (mine, g)
        ]
        padding = tuple([(k - 1) * d - p for k, d, p in zip(L.shape[2:], g.dilation, g.padding, strict=True)])
        if not all(plain) or K.shape[0] != L.shape[1] or any(p < 0 for p in padding):
            return unknown
        turned = L.transpose(0, 1).flip(*range(2, L.ndim))
        both = self.hadamard(Convolution(replace(g, padding=padding), passing(turned), self.space))
        if isinstance(both, Unavailable):
            return unknown
        s = factor if isinstance(factor, Tensor) and factor.ndim else K.new_ones([1] * K.ndim) * factor
        return both.apply(s.expand(s.shape[0], K.shape[1], *self.space).unsqueeze(0)).squeeze(0)

    def diagonal(self) -> Factor | Unavailable:
        """The tap that an entry sees itself through."""
        g, window = self.geometry, self.kernel.shape[2:]
        across = self.kernel.shape[1] * g.groups != self.kernel.shape[0]
        still = all(s == 1 for s in g.stride) and not g.transposed and not any(g.extra)
        same = all(2 * p == d * (k - 1) for p, d, k in zip(g.padding, g.dilation, window, strict=True))
        if across or not still or not same:
            return Unavailable("a convolution that changes the shape has no diagonal here")
        if any(k % 2 == 0 for k in window):  # no tap lies in the middle
            return 0.0
        middle = self.kernel.flatten(2)[..., math.prod(window) // 2]
        blocks = middle.unflatten(0, (g.groups, -1))  # (groups, channels, channels)
        return blocks.diagonal(dim1=1, dim2=2).reshape(1, -1, *[1] * len(window))

    def low_rank(self, q: int) -> LinearMap:
        K = self.kernel
        if self.geometry.groups != 1 or self.n != 1 or q >= min(K.shape[0], K[:1].numel()):
            return self
        left, right = self.kept.factors(q, (K.shape[0], -1))
        return LowRankConvolution(self, left, right.reshape(q, *K.shape[1:]))


class LowRankConvolution(LinearMap):
    """K ≈ AB over its first axis, for products: q kernels B and a change of channels A (paper section 4.1).

    Squares of entries are those of the whole kernel.
    """

    alike = thin = weighted = True

    def __init__(self, whole: Convolution, left: Tensor, right: Tensor) -> None:
        self.whole, self.left, self.right = whole, left, right

    def apply(self, d: Tensor) -> Tensor:
        geometry = self.whole.geometry

        def run(t: Tensor) -> Tensor:
            return geometry.apply(t, self.right)

        if geometry.transposed:  # the first axis is the input's
            return _folded(self._mix(d, self.left.mT), self.right.dtype, run).to(d.dtype)
        return self._mix(_folded(d, self.right.dtype, run), self.left).to(d.dtype)

    def transpose(self, g: Tensor) -> Tensor:
        geometry = self.whole.geometry

        def run(t: Tensor) -> Tensor:
            return geometry.adjoint(t, self.right, self.whole.space)

        if geometry.transposed:
            return self._mix(_folded(g, self.right.dtype, run), self.left).to(g.dtype)
        return _folded(self._mix(g, self.left.mT), self.right.dtype, run).to(g.dtype)

    def square(self, v: Tensor) -> Tensor:
        return self.whole.square(v)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        return self.whole.hadamard(other.whole if isinstance(other, LowRankConvolution) else other)

    def _mix(self, t: Tensor, matrix: Tensor) -> Tensor:
        return torch.einsum("fbc...,dc->fbd...", t.to(matrix.dtype), matrix)


def _folded(d: Tensor, dtype: torch.dtype, run: Callable[[Tensor], Tensor]) -> Tensor:
    """`run` on (batch, …) made to act on (F, batch, …), in another dtype."""
    y = run(d.flatten(0, 1).to(dtype))
    return y.reshape(*d.shape[:2], *y.shape[1:]).to(d.dtype)
