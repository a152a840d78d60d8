"""Padding, resizing and rearranging images. All linear, so exact.

Interpolation works axis by axis: y = (M₁ ⊗ … ⊗ M_d) x with M_a the weights of one axis, (output size, input size). So
Gᵀ = M₁ᵀ ⊗ … ⊗ M_dᵀ and G∘G = M₁² ⊗ … ⊗ M_d², squares taken entry by entry. The M_a are what the operation makes of the
unit vectors of an axis. Padding by reflection, repetition or wrapping picks entries along each axis in the same way;
padding by a constant adds to the mean only. The rest (pixel and channel shuffles, patches) moves entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits
from favour.rules.pooling import folded
from favour.rules.registry import linear_map
from favour.rules.windows import per_axis
from favour.scalar.table import table
from favour.surrogate import LinearMap, structural
from favour.surrogate.matrices import Separable

aten = torch.ops.aten


# ------------------------------------------------------------------- padding


def _pad_constant(x: Tensor, pad: Sequence[int], value: float | None = 0.0) -> tuple[Tensor, LinearMap]:
    """Zeros around deviations; the transpose cuts off what was added (and pads what was cut off)."""
    back = [-n for n in pad]
    return F.pad(x, list(pad), value=value), structural(
        lambda d: F.pad(d, list(pad)), lambda g: F.pad(g, back), one_per_row=True
    )


def _source(mode: str, i: int, size: int) -> int:
    """Which entry of an axis stands at position i, i < 0 and i ≥ size being the padding."""
    if mode == "circular":
        return i % size
    if mode == "replicate":
        return min(max(i, 0), size - 1)
    return abs(i) if i < size else 2 * (size - 1) - i  # reflect, without the edge itself


def _pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> tuple[Tensor, LinearMap]:
    if len(pad) >= 2 * x.ndim and any(pad[2 * x.ndim - 2 :]):
        raise UnsupportedOperation(
            f"padding {list(pad)} of a tensor of shape {tuple(x.shape)} adds to dimension 0, the batch."
        )
    if mode == "constant":
        return _pad_constant(x, pad, value)
    axes = len(pad) // 2
    picked = {}
    for axis in range(axes):  # pairs count from the last axis
        before, after, size = pad[2 * axis], pad[2 * axis + 1], x.shape[-1 - axis]
        sources = tuple(_source(mode, i, size) for i in range(-before, size + after))
        picked[-1 - axis] = table(sources, x, torch.long)

    def apply(d: Tensor) -> Tensor:
        for dim, index in picked.items():
            d = d.index_select(dim, index)
        return d

    def transpose(g: Tensor) -> Tensor:
        for dim, index in picked.items():
            shape = list(g.shape)
            shape[dim] = x.shape[dim]
            g = g.new_zeros(shape).index_add(dim, index, g)
        return g

    return aten.pad.default(x, pad, mode, value), structural(apply, transpose, one_per_row=True, disjoint=False)


linear_map(aten.pad.default, make=_pad, family="resampling")
linear_map(aten.constant_pad_nd.default, make=_pad_constant, family="resampling")


# ------------------------------------------------------------- interpolation


def _interpolating(op: Callable[..., Tensor], corners: bool) -> Callable[..., tuple[Tensor, LinearMap]]:
    def make(x: Tensor, output_size: Sequence[int] | None, *rest: Argument) -> tuple[Tensor, LinearMap]:
        aligned, scales = rest if corners else (None, *rest)

        def resize(t: Tensor, sizes: Sequence[int] | None, factors: Sequence[float] | None) -> Tensor:
            return op(t, sizes, aligned, factors) if corners else op(t, sizes, factors)

        def weights(axis: int) -> Tensor:
            """Interpolation of unit vectors that lie along one axis; the others stay as they are."""
            n, axes = x.shape[axis + 2], x.ndim - 2
            # Two equal entries, since torch 2.13 gets antialiasing beside an axis of size one wrong.
            twice = [2] * axes
            units = torch.eye(n, dtype=x.dtype, device=x.device)
            units = units.reshape(n, 1, *[1] * axis, n, *[1] * (axes - 1 - axis))
            units = units.expand(n, 1, *twice[:axis], n, *twice[axis + 1 :])
            sizes = None if output_size is None else [*twice[:axis], output_size[axis], *twice[axis + 1 :]]
            ones = [1.0] * axes
            factors = None if scales is None else [*ones[:axis], scales[axis], *ones[axis + 1 :]]
            made = resize(units, sizes, factors).movedim(axis + 2, 1)
            return made.reshape(n, made.shape[1], -1)[..., 0].mT  # (output size, input size)

        matrices = [weights(axis) for axis in range(x.ndim - 2)]
        return resize(x, output_size, scales), Separable(matrices)

    return make


for _op in (
    aten.upsample_nearest1d.vec,
    aten.upsample_nearest2d.vec,
    aten.upsample_nearest3d.vec,
    aten._upsample_nearest_exact1d.vec,
    aten._upsample_nearest_exact2d.vec,
    aten._upsample_nearest_exact3d.vec,
):
    linear_map(_op, make=_interpolating(_op, False), family="resampling", traits=Traits(within=True))
for _op in (
    aten.upsample_linear1d.vec,
    aten.upsample_bilinear2d.vec,
    aten.upsample_trilinear3d.vec,
    aten.upsample_bicubic2d.vec,
    aten._upsample_bilinear2d_aa.vec,
    aten._upsample_bicubic2d_aa.vec,
):
    smooth = _op not in (aten.upsample_bicubic2d.vec, aten._upsample_bicubic2d_aa.vec)  # which overshoot
    linear_map(_op, make=_interpolating(_op, True), family="resampling", traits=Traits(within=smooth))


# ----------------------------------------------------------- moving entries


def _pixel_shuffle(x: Tensor, factor: int) -> tuple[Tensor, LinearMap]:
    return F.pixel_shuffle(x, factor), structural(
        lambda d: F.pixel_shuffle(d, factor), lambda g: F.pixel_unshuffle(g, factor), one_per_row=True
    )


def _pixel_unshuffle(x: Tensor, factor: int) -> tuple[Tensor, LinearMap]:
    return F.pixel_unshuffle(x, factor), structural(
        lambda d: F.pixel_unshuffle(d, factor), lambda g: F.pixel_shuffle(g, factor), one_per_row=True
    )


def _channel_shuffle(x: Tensor, groups: int) -> tuple[Tensor, LinearMap]:
    """Channels as a (groups, rest) matrix, transposed; transposing back has `rest` groups."""

    def shuffle(d: Tensor, rows: int) -> Tensor:
        return d.unflatten(2, (rows, -1)).transpose(2, 3).flatten(2, 3)

    rest = x.shape[1] // groups
    return aten.channel_shuffle.default(x, groups), structural(
        lambda d: shuffle(d, groups), lambda g: shuffle(g, rest), one_per_row=True
    )


def _patches(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> tuple[Tensor, LinearMap]:
    """`torch.nn.Unfold`: the windows of an image as columns; the transpose adds them up again."""
    size = x.shape[2:]
    how = tuple(per_axis(v, 2) for v in (kernel, dilation, padding, stride))
    disjoint = all(d * (k - 1) < s for k, d, s in zip(how[0], how[1], how[3], strict=True))
    return aten.im2col.default(x, *how), structural(
        folded(lambda d: aten.im2col.default(d, *how)),
        folded(lambda g: aten.col2im.default(g, size, *how)),
        one_per_row=True,
        disjoint=disjoint,
    )


def _unpatched(x: Tensor, size: Sequence[int], *how: Sequence[int]) -> tuple[Tensor, LinearMap]:
    """`torch.nn.Fold`: columns added up to an image."""
    return aten.col2im.default(x, size, *how), structural(
        folded(lambda d: aten.col2im.default(d, size, *how)), folded(lambda g: aten.im2col.default(g, *how))
    )


linear_map(aten.pixel_shuffle.default, make=_pixel_shuffle, family="resampling")
linear_map(aten.pixel_unshuffle.default, make=_pixel_unshuffle, family="resampling")
linear_map(aten.channel_shuffle.default, make=_channel_shuffle, family="resampling")
linear_map(aten.im2col.default, make=_patches, family="resampling")
linear_map(aten.col2im.default, make=_unpatched, family="resampling")
