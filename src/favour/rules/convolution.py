"""Convolutions and transposed convolutions, of known or Gaussian kernels (paper section 4.2).

y = K ∗ x + b is linear in x, so mean and deviations go through convolutions (exact):

    E[y] = K̄ ∗ μ + b̄,   G = K̄ ∗ ·,   Gᵀ = the transposed convolution with the same kernel,   G∘G = (K̄∘K̄) ∗ ·

**Gaussian kernels.** One kernel is drawn and used at every position, so the noise is correlated across positions.
y is linear in the kernel too: K ∗ a = J(a) k, J(a) = ∂(K ∗ a)/∂k. With Σ_k the covariance of the kernel's entries,

    N = Σ over a ∈ {μ, u₁, …, u_r} of J(a) Σ_k J(a)ᵀ  +  diag(diag(Σ_k) ∗ λ),

matrix-free (`weight_space`). J(a) is held as the patches of a, (batch, groups, channels, kernel positions, output
positions), which a convolution with one-hot kernels makes for any dimension, stride, padding and dilation, transposed
or not. λ's part is exact for independent entries: two outputs see an independent entry of x through different entries
of the kernel. Correlated entries make it correlated: a column of x's covariance within channels, where x tells one
(`favour.surrogate.channels`), joins the a of a mean-field kernel; the rest is left out (its variances are exact). What
the result tells in turn is in `kernel_channels`. A kernel (m, …) is a matrix of m rows for row-wise and Kronecker
posteriors and for one Gaussian over [K | b], the bias a weight on a constant patch of ones.

Rank-q kernels (`weight_rank`): K as a matrix of its first axis is AB, q kernels B and a change of channels A. Grouped
kernels, which are small, stay as they are.

Symbols: μ, v, λ, u the input's mean, marginal variance, independent part and factor columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Operation, Traits
from favour.posterior import Gaussian
from favour.rules.kernel_channels import Convolved, Draws
from favour.rules.linear import kept
from favour.rules.registry import rule
from favour.rules.weight_space import Layout, held, reshaped, shared_noise
from favour.surrogate import (
    DiagonalNoise,
    LatentNoise,
    LinearMap,
    Noise,
    Surrogate,
    factor_noise,
    products,
)
from favour.surrogate.channels import ChannelCovariance
from favour.surrogate.convolution import Convolution, Geometry
from favour.surrogate.value import Context, Value, Weight, mean_of

aten = torch.ops.aten
Sizes = int | Sequence[int]


def convolved(ctx: Context, x: Argument, kernel: Argument, bias: Argument, geometry: Geometry) -> Surrogate:
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
    maps: list[tuple[Any, LinearMap]] = []
    if isinstance(x, Value):
        maps.append((x, Convolution(geometry, kept(ctx, K), mean.shape[2:])))
    draws = Draws()
    noises: list[Noise] = []
    for part in kernel.draws if isinstance(kernel, Weight) else ():
        noises += _kernel_noises(ctx, x, part, bias, y, geometry, draws)
    for part in bias.draws if isinstance(bias, Weight) and bias.partner is None else ():
        noises.append(_bias_noise(ctx, part, y, draws))
    noises += _latent_noises(x, kernel, bias, y, geometry, draws)
    return Surrogate(y, maps, noises, carried=[] if geometry.transposed else [Convolved(x, K, geometry, draws, y)])


def _per_axis(value: Sizes, axes: int) -> tuple[int, ...]:
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _plain(kernel: Argument, stride: Sizes = 1, padding: Sizes = 0, dilation: Sizes = 1, groups: int = 1) -> Geometry:
    n = mean_of(kernel).ndim - 2
    zero = (0,) * n
    strides, paddings, dilations = (_per_axis(v, n) for v in (stride, padding, dilation))
    return Geometry(strides, paddings, dilations, groups, False, zero, zero)


def _named(
    kernel: Argument, stride: Sizes = 1, padding: str = "valid", dilation: Sizes = 1, groups: int = 1
) -> Geometry:
    """`"same"` adds dilation·(window − 1) zeros, half of them in front, an odd one behind; `"valid"` adds none."""
    window = mean_of(kernel).shape[2:]
    total = [d * (k - 1) for d, k in zip(_per_axis(dilation, len(window)), window, strict=True)]
    total = total if padding == "same" else [0] * len(total)
    made = _plain(kernel, stride, [t // 2 for t in total], dilation, groups)
    return replace(made, extra=tuple(t % 2 for t in total))


def _turned(
    kernel: Argument,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
) -> Geometry:
    made = _plain(kernel, stride, padding, dilation, groups)
    return replace(made, transposed=True, output_padding=_per_axis(output_padding, len(made.stride)))


def _either(
    kernel: Argument,
    stride: Sizes,
    padding: Sizes,
    dilation: Sizes,
    transposed: bool,
    output_padding: Sizes,
    groups: int,
) -> Geometry:
    if transposed:
        return _turned(kernel, stride, padding, output_padding, groups, dilation)
    return _plain(kernel, stride, padding, dilation, groups)


def _register(geometry: Callable[..., Geometry], *overloads: Operation) -> Callable[..., Surrogate]:
    """The rule of overloads (x, kernel, bias, arguments of `geometry`)."""

    @rule(*overloads, exactness="exact", family="convolution", weights=True, traits=Traits(weights=(1, 2)))
    def convolution(
        ctx: Context, x: Argument, kernel: Argument, bias: Argument = None, *args: Argument, **kwargs: Argument
    ) -> Surrogate:
        return convolved(ctx, x, kernel, bias, geometry(kernel, *args, **kwargs))

    return convolution


conv = _register(_plain, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default)
_register(_named, aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding)
_register(_turned, aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input)
_register(_either, aten.convolution.default)


def _kernel_noises(
    ctx: Context, x: Argument, weight: Weight, bias: Argument, y: Tensor, geometry: Geometry, draws: Draws
) -> list[Noise]:
    """The draws of a kernel: in its own space for the mean and the factor columns, diagonal for λ."""
    gaussian = weight.gaussian
    assert gaussian is not None
    joint = weight.partner is not None
    if joint and not (isinstance(bias, Weight) and bias.name == weight.partner):
        raise UnsupportedOperation(
            f"`{weight.name}` shares one Gaussian with `{weight.partner}`, but the convolution at {ctx.place} uses it "
            "with another bias; give the two separate Gaussians."
        )
    if geometry.transposed and joint:
        raise UnsupportedOperation(
            f"`{weight.name}` at {ctx.place} is the kernel of a transposed convolution, of shape "
            f"{tuple(weight.shape)}, inputs first, and shares one Gaussian with `{weight.partner}`; give the two "
            "separate Gaussians."
        )
    space = held(ctx, weight)
    mean = mean_of(x)
    shape = tuple(weight.shape)
    out = y.shape[2:]

    layout = _layout(gaussian, shape, geometry, out)

    def noise(points: Tensor, key: Any, one: float) -> LatentNoise:
        seen = geometry.patches(points.flatten(0, 1), weight.mean)  # (P·batch, groups, channels, window, *out)
        a = seen.reshape(*points.shape[:2], geometry.groups, seen.shape[2] * seen.shape[3], math.prod(out))
        a = F.pad(a, (0, 0, 0, 1), value=one) if joint else a
        if not mean_field and points is first:
            draws.patches.append((gaussian, layout, a.unflatten(-1, tuple(out))))
        return shared_noise(space, gaussian, a, layout, key, weight.name)

    variance = gaussian.variance()
    variance = (variance[:, :-1] if joint else variance).reshape(shape)
    mean_field = gaussian.independent and not joint
    if mean_field:
        draws.variance = variance if draws.variance is None else draws.variance + variance
    first = mean.unsqueeze(0)
    latent = [noise(first, (weight.name, "mean") if weight.uses > 1 else None, 1.0)]
    columns = None
    if isinstance(x, Value) and x.factor is not None:
        latent.append(noise(x.factor, None, 0.0))
    elif isinstance(x, Value) and mean_field:
        within = x.known(ChannelCovariance)
        columns = None if within is None else within.columns()  # a mean-field kernel never sees two channels together
        if columns is not None:
            latent.append(noise(columns, None, 0.0))
    draws.latent += latent if gaussian.by_rows else []
    noises: list[Noise] = [*latent]
    if isinstance(x, Value) and x.diag is not None:
        noises.append(_independent(x.diag, variance, geometry, weight.name, columns))
    return noises


def _independent(
    diag: Tensor, variance: Tensor, geometry: Geometry, label: str, columns: Tensor | None = None
) -> DiagonalNoise:
    """What independent entries of x add, position by position; `columns` of the covariance are accounted for."""

    def between(c: Tensor | None, q: int) -> Noise:
        assert c is not None
        if columns is not None:
            c = c - products(columns, q).variance.reshape(c.shape)
        return DiagonalNoise(geometry.apply(c.flatten(0, 1), variance))

    left = diag if columns is None else (diag - columns.square().sum(0)).clamp_min(0)
    return DiagonalNoise(geometry.apply(left, variance), label, between=between)


def _layout(gaussian: Gaussian, shape: tuple[int, ...], geometry: Geometry, out: Sequence[int]) -> Layout:
    """The kernel as groups of matrices, (out/groups, in/groups·window), and the results (batch, channels, *out)."""
    groups, kernel_shape = geometry.groups, tuple(gaussian.shape)
    lead = len(kernel_shape)
    if geometry.transposed:
        parts = (groups, shape[0] // groups, shape[1], math.prod(shape[2:]))  # inputs, then outputs

        def blocks(w: Tensor) -> Tensor:
            return w.reshape(*w.shape[: w.ndim - lead], *parts).transpose(-3, -2).flatten(-2)

        def whole(w: Tensor) -> Tensor:
            turned = w.unflatten(-1, (parts[1], parts[3])).transpose(-3, -2)
            return turned.reshape(*w.shape[:-3], *kernel_shape)

        m = shape[1]
    else:
        m = shape[0] // groups
        inputs = math.prod(kernel_shape) // max(shape[0], 1)

        def blocks(w: Tensor) -> Tensor:
            return w.reshape(*w.shape[: w.ndim - lead], groups, m, inputs)

        def whole(w: Tensor) -> Tensor:
            return w.reshape(*w.shape[:-3], *kernel_shape)

    return Layout(
        blocks,
        whole,
        lambda y: y.reshape(*y.shape[:2], groups * m, *out),
        lambda g: g.reshape(*g.shape[:2], groups, m, math.prod(out)),
        rows=not geometry.transposed,
    )


def _bias_noise(ctx: Context, bias: Weight, y: Tensor, draws: Draws) -> Noise:
    """b ~ N(b̄, Σ_b), one number per channel, the same at every position and at every use."""
    assert bias.gaussian is not None
    space = y.shape[2:]

    def wide(b: Tensor) -> Tensor:
        return b.reshape(*b.shape, *[1] * len(space))

    def summed(g: Tensor) -> Tensor:
        return g.flatten(3).sum(3) if space else g

    noise = reshaped(bias, wide, summed, y, held(ctx, bias), named=True)
    draws.flat = noise.diag() if draws.flat is None else draws.flat + noise.diag()
    draws.latent += [noise] if bias.gaussian.independent else []
    return noise


def _latent_noises(
    x: Argument, kernel: Argument, bias: Argument, y: Tensor, geometry: Geometry, draws: Draws
) -> list[Noise]:
    """Low-rank draws shared by every layer: columns Pₖ ∗ μ + pₖ under one key (see `rules.linear`)."""
    parts: list[Tensor] = []
    noises: list[Noise] = []
    label = ""
    if isinstance(kernel, Weight) and kernel.latents is not None:
        label = kernel.name
        parts.append(torch.stack([geometry.apply(mean_of(x), P) for P in kernel.latents]))
        if isinstance(x, Value):
            noises.append(_independent(x.variance, kernel.latents.square().sum(0), geometry, label))
    if isinstance(bias, Weight) and bias.latents is not None:
        p = bias.latents  # (K, channels)
        label = label or bias.name
        parts.append(p.reshape(p.shape[0], 1, -1, *[1] * (y.ndim - 2)).expand(p.shape[0], *y.shape))
    if not parts:
        return []
    draws.columns = sum(parts[1:], parts[0])
    return [factor_noise(draws.columns, "latents", label), *noises]
