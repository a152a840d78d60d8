"""Convolutions and transposed convolutions, of known or Gaussian kernels (paper section 4.2).

y = K ∗ x + b is linear in x, so mean and deviations go through convolutions (exact):

    E[y] = K̄ ∗ μ + b̄,   G = K̄ ∗ ·,   Gᵀ = the transposed convolution with the same kernel,   G∘G = (K̄∘K̄) ∗ ·

A strided convolution ignores the last entries that fill no window; the transposed one is told how many by its
output padding, which makes it the exact adjoint.

**Gaussian kernels.** One kernel is drawn and used at every position, so the noise is correlated across positions.
y is linear in the kernel too: K ∗ a = J(a) k, J(a) = ∂(K ∗ a)/∂k. With independent entries of variance σ²,

    N = Σ over a ∈ {μ, u₁, …, u_r} of J(a) diag(σ²) J(a)ᵀ  +  diag(σ² ∗ λ).

λ's part is diagonal: two outputs see an independent entry of x through different entries of the kernel. J(a) is held
as the patches of a, (batch, groups, channels, kernel positions, output positions), which a convolution with one-hot
kernels makes for any dimension, stride, padding and dilation, transposed or not.

Symbols: μ, v, λ, u the input's mean, marginal variance, independent part and factor columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.posterior import Diagonal, Gaussian
from favour.posterior.gaussians import psd_root
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, LatentNoise, LinearMap, Noise, Surrogate, factor_noise
from favour.value import Context, Value, Weight, mean_of

aten = torch.ops.aten
Sizes = int | Sequence[int]


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

        Channel by channel a convolution with the one-hot kernels e_1, …, e_window.
        """
        window = kernel.shape[2:]
        count, channels = math.prod(window), a.shape[1]
        eye = torch.eye(count, dtype=a.dtype, device=a.device).reshape(1, count, *window)
        hot = eye.expand(channels, count, *window)
        hot = hot if self.transposed else hot.reshape(channels * count, 1, *window)
        seen = replace(self, groups=channels).apply(a, hot)
        return seen.reshape(a.shape[0], self.groups, channels // self.groups, count, *seen.shape[2:])


def convolution_map(ctx: Context, geometry: Geometry, kernel: Tensor, space: Sequence[int]) -> LinearMap:
    """G = K ∗ · on inputs with the spatial sizes `space`; the fold axis rides in the batch."""
    squared = ctx.cached("square", kernel, lambda w: ctx.shortened(w.square()))
    short = ctx.cached("short", kernel, ctx.shortened)

    def apply(d: Tensor) -> Tensor:
        y = geometry.apply(d.flatten(0, 1).to(short.dtype), short)
        return y.reshape(*d.shape[:2], *y.shape[1:]).to(d.dtype)

    def transpose(g: Tensor) -> Tensor:
        x = geometry.adjoint(g.flatten(0, 1).to(short.dtype), short, space)
        return x.reshape(*g.shape[:2], *x.shape[1:]).to(g.dtype)

    return LinearMap(
        apply, transpose, lambda v: geometry.apply(v.to(squared.dtype), squared).to(v.dtype), any_batch=True
    )


def convolved(ctx: Context, x: Any, kernel: Any, bias: Any, geometry: Geometry) -> Surrogate:
    """The surrogate of K ∗ x + b."""
    if isinstance(kernel, Value) or isinstance(bias, Value):
        raise UnsupportedOperation(f"a convolution at {ctx.place} computes its kernel from uncertain values.")
    mean, K = mean_of(x), mean_of(kernel)
    if mean.ndim != K.ndim:
        raise UnsupportedOperation(
            f"a convolution at {ctx.place} takes an input of shape {tuple(mean.shape)} without a batch dimension "
            f"(kernel {tuple(K.shape)}); uncertain tensors keep the batch in front."
        )
    y = geometry.apply(mean, K, mean_of(bias))
    maps = [(x, convolution_map(ctx, geometry, K, mean.shape[2:]))] if isinstance(x, Value) else []
    noises = _kernel_noises(ctx, x, kernel, geometry) if isinstance(kernel, Weight) else []
    if isinstance(bias, Weight) and bias.gaussian is not None:
        noises.append(_bias_noise(bias, bias.gaussian, y))
    return Surrogate(y, maps, noises + _latent_noises(x, kernel, bias, y, geometry))


def _per_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * axes if len(given) == 1 else given


def _plain(
    kernel: Any, stride: Sizes, padding: Sizes, dilation: Sizes, groups: int, extra: Sequence[int] | None = None
) -> Geometry:
    n = mean_of(kernel).ndim - 2
    zero = (0,) * n
    strides, paddings, dilations = (_per_axis(v, n) for v in (stride, padding, dilation))
    return Geometry(strides, paddings, dilations, groups, False, zero, zero if extra is None else tuple(extra))


@rule(
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
    exactness="exact",
    family="convolution",
    weights=True,
)
def conv(
    ctx: Context,
    x: Any,
    kernel: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    dilation: Sizes = 1,
    groups: int = 1,
) -> Surrogate:
    return convolved(ctx, x, kernel, bias, _plain(kernel, stride, padding, dilation, groups))


@rule(
    aten.conv1d.padding,
    aten.conv2d.padding,
    aten.conv3d.padding,
    exactness="exact",
    family="convolution",
    weights=True,
)
def conv_padding(
    ctx: Context,
    x: Any,
    kernel: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: str = "valid",
    dilation: Sizes = 1,
    groups: int = 1,
) -> Surrogate:
    """`"same"` adds dilation·(window − 1) zeros, half of them in front, an odd one behind; `"valid"` adds none."""
    window = mean_of(kernel).shape[2:]
    total = [d * (k - 1) for d, k in zip(_per_axis(dilation, len(window)), window, strict=True)]
    total = total if padding == "same" else [0] * len(total)
    front, odd = [t // 2 for t in total], [t % 2 for t in total]
    return convolved(ctx, x, kernel, bias, _plain(kernel, stride, front, dilation, groups, odd))


@rule(
    aten.conv_transpose1d.default,
    aten.conv_transpose2d.input,
    aten.conv_transpose3d.input,
    exactness="exact",
    family="convolution",
    weights=True,
)
def conv_transpose(
    ctx: Context,
    x: Any,
    kernel: Any,
    bias: Any = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Surrogate:
    return convolution(ctx, x, kernel, bias, stride, padding, dilation, True, output_padding, groups)


@rule(aten.convolution.default, exactness="exact", family="convolution", weights=True)
def convolution(
    ctx: Context,
    x: Any,
    kernel: Any,
    bias: Any,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Surrogate:
    geometry = _plain(kernel, stride, padding, dilation, groups)
    if transposed:
        geometry = replace(geometry, transposed=True, output_padding=_per_axis(output_padding, len(geometry.stride)))
    return convolved(ctx, x, kernel, bias, geometry)


def _kernel_noises(ctx: Context, x: Any, weight: Weight, geometry: Geometry) -> list[Noise]:
    """The draws of a kernel: in its own space for the mean and the factor columns, diagonal for λ."""
    gaussian = weight.gaussian
    if gaussian is None:
        return []
    if not isinstance(gaussian, Diagonal) or weight.partner is not None:
        raise UnsupportedOperation(
            f"`{weight.name}` at {ctx.place} is a convolution kernel of shape {tuple(weight.shape)}, applied at many "
            f"positions; there only independent entries are supported (`favour.Diagonal`), not "
            f"{type(gaussian).__name__}{' shared with its bias' if weight.partner is not None else ''}."
        )
    variance = gaussian.variance()
    key = (weight.name, "mean") if weight.uses > 1 else None
    noises: list[Noise] = [_kernel_space(mean_of(x).unsqueeze(0), variance, geometry, key, weight.name)]
    if isinstance(x, Value) and x.factor is not None:
        noises.append(_kernel_space(x.factor, variance, geometry, None, weight.name))
    if isinstance(x, Value) and x.diag is not None:
        noises.append(DiagonalNoise(geometry.apply(x.diag, variance), weight.name))
    return noises


def _kernel_space(points: Tensor, variance: Tensor, geometry: Geometry, key: Any, label: str) -> LatentNoise:
    """n = Σ_p J(a_p)(σ ∘ z_p) for points a of shape (P, batch, channels, *space), z of shape (P, *kernel)."""
    P, batch = points.shape[:2]
    seen = geometry.patches(points.flatten(0, 1), variance)
    space = seen.shape[4:]
    a = seen.reshape(P, batch, *seen.shape[1:4], math.prod(space))  # (P, batch, groups, in/groups, window, T)
    sigma = variance.sqrt()
    shape = tuple(variance.shape)
    groups = geometry.groups
    blocks = (groups, shape[0] // groups, shape[1], math.prod(shape[2:]))
    latent = "fbpgcmk" if geometry.transposed else "fbpgmck"

    def push(z: Tensor) -> Tensor:
        z = (z * sigma).reshape(*z.shape[:3], *blocks)
        y = torch.einsum(f"{latent},pbgckt->fbgmt", z, a)
        return y.reshape(*y.shape[:2], y.shape[2] * y.shape[3], *space)

    def pull(g: Tensor) -> Tensor:
        g = g.reshape(*g.shape[:2], groups, g.shape[2] // groups, a.shape[-1])
        z = torch.einsum(f"fbgmt,pbgckt->{latent}", g, a)
        return z.reshape(*z.shape[:3], *shape) * sigma

    variances = geometry.apply(points.square().sum(0), variance)
    return LatentNoise(push, pull, variances, (P, *shape), key, label)


def _bias_noise(bias: Weight, gaussian: Gaussian, y: Tensor) -> Noise:
    """b ~ N(b̄, Σ_b), one number per channel, the same at every position and at every use."""
    space = y.shape[2:]
    independent = isinstance(gaussian, Diagonal)
    root = gaussian.variance().sqrt() if independent else psd_root(gaussian.covariance())

    def push(z: Tensor) -> Tensor:
        draw = z * root if independent else z @ root.T
        return draw.reshape(*draw.shape, *[1] * len(space)).expand(*draw.shape, *space)

    def pull(g: Tensor) -> Tensor:
        total = g.flatten(3).sum(3) if space else g
        return total * root if independent else total @ root

    variances = gaussian.variance().reshape(-1, *[1] * len(space)).expand(y.shape)
    return LatentNoise(push, pull, variances, (y.shape[1],), (bias.name, "bias"), bias.name)


def _latent_noises(x: Any, kernel: Any, bias: Any, y: Tensor, geometry: Geometry) -> list[Noise]:
    """Low-rank draws shared by every layer: columns Pₖ ∗ μ + pₖ under one key (see `rules.linear`)."""
    parts: list[Tensor] = []
    noises: list[Noise] = []
    label = ""
    if isinstance(kernel, Weight) and kernel.latents is not None:
        label = kernel.name
        parts.append(torch.stack([geometry.apply(mean_of(x), P) for P in kernel.latents]))
        if isinstance(x, Value):
            noises.append(DiagonalNoise(geometry.apply(x.variance, kernel.latents.square().sum(0)), label))
    if isinstance(bias, Weight) and bias.latents is not None:
        p = bias.latents  # (K, channels)
        label = label or bias.name
        parts.append(p.reshape(p.shape[0], 1, -1, *[1] * (y.ndim - 2)).expand(p.shape[0], *y.shape))
    return [factor_noise(sum(parts[1:], parts[0]), "latents", label), *noises] if parts else []
