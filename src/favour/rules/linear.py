"""Linear layers, with every kind of weight posterior (paper section 3.2, equation 1).

For y = Wx + b with E[W] = W̄ and x independent of W,

    E[y] = W̄μ + b̄,   G = W̄,   N_ij = SUM(Σ_w,ij ∘ (Σ + μμᵀ)) + Σ_b,ij.

The posterior decides what N looks like:

| posterior                    | N                                                                        |
|------------------------------|--------------------------------------------------------------------------|
| mean-field, variances V      | diag(V(μ² + v))                                                          |
| independent rows D + Σ fₖfₖᵀ | diag(D(μ² + v) + Σₖ E[(fₖᵀx)²]),  E[(fᵀx)²] = (fᵀμ)² + Σⱼ(fᵀuⱼ)² + (f²)ᵀλ  |
| Kronecker A ⊗ B              | tr(A(Σ + μμᵀ))·B                                                         |
| V in bases P, Q              | P diag(V t) Pᵀ,  t_b = E[(q_bᵀx)²]: mean-field in these bases            |
| full                         | equation 1, dense m × m                                                  |
| latents P shared by layers   | columns Pₖμ (first order in the uncertainty of x; the rest is diagonal)  |

A bias correlated with its matrix is a weight on a constant input 1.

**One draw, many places.** Where the parameter is used by one operation on one vector per input, its noise is
independent of everything else. Otherwise

- the layer is applied at several positions t (x of shape (batch, T, n)): noise at t and t′ is correlated,
  N_(t,i),(t′,k) = SUM(Σ_w,ik ∘ E[x_t x_t′ᵀ]). It is the image of draws in weight space (`weight_space`) for
  a ∈ {μ, u₁, …, u_r}, plus λ's part, which is independent from position to position;
- the parameter is used by several operations a, b, … on one vector each: for posteriors that are diagonal over
  outputs, N_ab = V E[x_a ∘ x_b] element by element, and n_a = Σ_{c ≤ a} L_ac z_c with L the Cholesky factor of that
  (uses × uses) matrix, built row by row as the uses come;
- in all other cases, a table that is also an output layer among them, the uses share their draws in weight space at
  the mean of x, and what the uncertainty of x adds is independent.

Symbols: μ, v, λ, u the input's mean, marginal variance, independent part and factor columns; m outputs, n inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits
from favour.posterior import Diagonal, Gaussian
from favour.rules.registry import rule
from favour.rules.weight_space import Layout, held, reshaped, shared_noise
from favour.surrogate import (
    DiagonalNoise,
    LinearMap,
    Noise,
    Surrogate,
    constant_between,
    diagonal_latent,
    factor_noise,
    root,
)
from favour.surrogate.matrices import Kept, Matrix
from favour.surrogate.moments import Moments
from favour.surrogate.value import Context, Value, Weight, mean_of

aten = torch.ops.aten


def kept(ctx: Context, weight: Tensor) -> Kept:
    """A weight with what products need of it, in their dtype, kept until it changes."""

    def shortened(made: Argument) -> Any:
        return tuple(map(ctx.shortened, made)) if isinstance(made, tuple) else ctx.shortened(made)

    def make(name: str, function: Callable[[Tensor], Any], costly: bool) -> Any:
        return ctx.cached(name, weight, lambda w: shortened(function(w)), costly=costly)

    return Kept(weight, make, ctx.tf32)


@rule(
    aten.linear.default,
    exactness="exact",
    family="linear",
    weights=True,
    traits=Traits(mixes=lambda shape, *rest, **more: (len(shape) - 1,), row_wise=True, weights=(1, 2)),
)
def linear(ctx: Context, x: Argument, weight: Argument, bias: Argument = None) -> Surrogate:
    if isinstance(weight, Value) or isinstance(bias, Value):
        raise UnsupportedOperation(f"a linear layer at {ctx.place} computes its weight from uncertain values.")
    W = mean_of(weight)
    mean = F.linear(mean_of(x), W, mean_of(bias))
    maps: list[tuple[Any, LinearMap]] = [(x, Matrix(kept(ctx, W)))] if isinstance(x, Value) else []
    made = Surrogate(mean, maps)
    made.noises = weight_noises(ctx, x, weight, bias, mean, made.readings)
    return made


@rule(aten.addmm.default, exactness="exact", family="linear")
def addmm(
    ctx: Context, bias: Argument, x: Argument, weight: Argument, *, beta: float = 1, alpha: float = 1
) -> Surrogate:
    if not isinstance(x, Value) or isinstance(weight, Value) or isinstance(bias, Value):
        raise UnsupportedOperation(f"addmm at {ctx.place} is supported for an uncertain left matrix only.")
    return Surrogate(
        torch.addmm(bias, x.mean, weight, beta=beta, alpha=alpha), [(x, Matrix(kept(ctx, alpha * weight.T)))]
    )


def weight_noises(
    ctx: Context, x: Argument, weight: Argument, bias: Argument, y: Tensor, readings: dict[str, Any]
) -> list[Noise]:
    """The noises that the posteriors of `weight` and `bias` add to a linear layer's output y.

    What later uses of the weight have to know is put into `readings` (`Surrogate.readings`).
    """
    noises: list[Noise] = []
    joint = isinstance(weight, Weight) and weight.partner is not None
    if joint and weight.gaussian is not None and not (isinstance(bias, Weight) and bias.name == weight.partner):
        raise UnsupportedOperation(
            f"`{weight.name}` shares one Gaussian with `{weight.partner}`, but the layer at {ctx.place} uses it "
            "with another bias; give the two separate Gaussians."
        )
    for part in weight.draws if isinstance(weight, Weight) else ():
        noises += _matrix_noises(ctx, Moments.of(x, constant=joint), part, readings)
    for part in bias.draws if isinstance(bias, Weight) and not joint else ():
        noises += _bias_noises(ctx, part, y)
    return noises + _latent_noises(x, weight, bias, y)


def _matrix_noises(ctx: Context, x: Moments, weight: Weight, readings: dict[str, Any]) -> list[Noise]:
    gaussian = weight.gaussian
    assert gaussian is not None
    if x.mean.ndim > 2 or weight.mixed or (weight.uses > 1 and not gaussian.by_rows):
        return _shared(ctx, x, weight, gaussian)
    if weight.uses == 1:
        return gaussian.noise(x, weight.name)
    row = _over_uses(x, weight, gaussian)
    readings[weight.name] = x, row
    return [diagonal_latent(scale, (weight.name, c), weight.name) for c, scale in enumerate(row)]


def _over_uses(x: Moments, weight: Weight, gaussian: Gaussian) -> list[Tensor]:
    """One more use of a parameter: the next row of the Cholesky factor over uses."""
    row: list[Tensor] = []
    for other, factor in weight.earlier:
        b = len(row)
        cross = gaussian.rows_between(x, other)
        for c in range(b):
            cross = cross - row[c] * factor[c]
        pivot = factor[b]
        row.append(torch.where(pivot > 0, cross / torch.where(pivot > 0, pivot, 1.0), 0.0))
    rest = gaussian.rows_between(x, x)
    for entry in row:
        rest = rest - entry.square()
    row.append(root(rest))
    return row


def _shared(ctx: Context, x: Moments, weight: Weight, gaussian: Gaussian) -> list[Noise]:
    """One draw of the weight at many places: in weight space for the mean and the factor columns of x."""
    space, layout = held(ctx, weight), _positions(x.mean, gaussian.shape[0])

    def vectors(points: Tensor) -> Tensor:  # (P, batch, *positions, n) to (P, batch, 1, n, T)
        flat = points.flatten(2, -2) if points.ndim > 3 else points.unsqueeze(2)
        return flat.mT.unsqueeze(2)

    key = (weight.name, "mean") if weight.uses > 1 else None
    first = shared_noise(space, gaussian, vectors(x.mean.unsqueeze(0)), layout, key, weight.name)
    if x.variance is None:
        return [first]
    if x.mean.ndim == 2 and not gaussian.by_rows:
        *noises, rest = gaussian.noise(x, weight.name, mean=False)

        def between(c: Tensor | None, q: int) -> Noise:  # the same for pairs, C in the place of λ
            assert c is not None
            pairs = F.pad(c.flatten(0, 1), (0, x.mean.shape[-1] - c.shape[-1]))
            return gaussian.noise(Moments(pairs, pairs, pairs), weight.name, mean=False)[-1]

        rest.between = between
        return [first, *noises, rest]
    noises = [first]
    if x.factor is not None:
        noises.append(shared_noise(space, gaussian, vectors(x.factor), layout, None, weight.name))
    return noises if x.diag is None else [*noises, gaussian.spread(x.diag, weight.name)]


def _positions(x: Tensor, m: int) -> Layout:
    """A matrix as one group, its results as (batch, *positions, m)."""
    places = x.shape[1:-1]
    return Layout(
        lambda w: w.unsqueeze(-3),
        lambda w: w.squeeze(-3),
        lambda y: y.squeeze(2).mT.reshape(*y.shape[:2], *places, m),
        lambda g: (g.flatten(2, -2) if places else g.unsqueeze(2)).mT.unsqueeze(2),
    )


def _bias_noises(ctx: Context, bias: Weight, y: Tensor) -> list[Noise]:
    """b ~ N(b̄, Σ_b), the same draw at every position and at every use."""
    gaussian = bias.gaussian
    assert gaussian is not None
    if gaussian.independent and y.ndim == 2 and bias.uses == 1:
        variances = gaussian.variance().expand(y.shape)
        return [DiagonalNoise(variances, bias.name, between=constant_between(variances))]
    positions = y.shape[1:-1]

    def wide(b: Tensor) -> Tensor:
        return b.reshape(*b.shape[:2], *[1] * len(positions), b.shape[-1])

    def summed(g: Tensor) -> Tensor:
        return g.flatten(2, -2).sum(2) if positions else g

    return [reshaped(bias, wide, summed, y, held(ctx, bias), named=True)]


def _latent_noises(x: Argument, weight: Argument, bias: Argument, y: Tensor) -> list[Noise]:
    """Low-rank draws shared by every layer: columns Pₖμ + pₖ, all under one key.

    A matrix and its bias move with the same draws, so their columns are added, not their variances.
    """
    parts: list[Tensor] = []
    noises: list[Noise] = []
    label = ""
    if isinstance(weight, Weight) and weight.latents is not None:
        P = weight.latents
        label = weight.name
        parts.append(torch.einsum("b...n,kmn->kb...m", mean_of(x), P))
        if isinstance(x, Value):
            noises.append(Diagonal(P.square().sum(0)).spread(x.variance, label))
    if isinstance(bias, Weight) and bias.latents is not None:
        p = bias.latents  # (K, m)
        label = label or bias.name
        parts.append(p.reshape(p.shape[0], *[1] * (y.ndim - 1), -1).expand(p.shape[0], *y.shape))
    return [factor_noise(sum(parts[1:], parts[0]), "latents", label), *noises] if parts else []
