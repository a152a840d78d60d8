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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Traits
from favour.posterior import Diagonal, Full, Gaussian, Kronecker, Rotated, Rows
from favour.posterior.gaussians import psd_root
from favour.rules.registry import rule
from favour.rules.weight_space import Layout, shared_noise, weight_space
from favour.surrogate import (
    DenseNoise,
    DiagonalNoise,
    LatentNoise,
    LinearMap,
    Noise,
    RotatedNoise,
    Surrogate,
    constant_between,
    diagonal_latent,
    factor_noise,
    partners,
)
from favour.surrogate.matrices import Kept, Matrix
from favour.surrogate.value import Context, Value, Weight, mean_of

aten = torch.ops.aten


def kept(ctx: Context, weight: Tensor) -> Kept:
    """A weight with what products need of it, in their dtype, kept until it changes."""

    def shortened(made: Any) -> Any:
        return tuple(map(ctx.shortened, made)) if isinstance(made, tuple) else ctx.shortened(made)

    def make(name: str, function: Callable[[Tensor], Any], costly: bool) -> Any:
        return ctx.cached(name, weight, lambda w: shortened(function(w)), costly=costly)

    return Kept(weight, make, ctx.tf32)


@dataclass
class Input:
    """What the noises need to know of x: mean, marginal variance, independent part, named columns."""

    mean: Tensor
    variance: Tensor | None
    diag: Tensor | None
    blocks: dict[Any, Tensor]

    @classmethod
    def of(cls, x: Any, *, constant: bool = False) -> Input:
        """The moments of x; with `constant`, of x with a 1 appended, which carries the bias."""
        given = cls(x.mean, x.variance, x.diag, dict(x.blocks)) if isinstance(x, Value) else cls(x, None, None, {})
        if not constant:
            return given

        def pad(t: Tensor | None, value: float = 0.0) -> Tensor | None:
            return None if t is None else F.pad(t, (0, 1), value=value)

        mean = pad(given.mean, 1.0)
        assert mean is not None
        blocks = {name: F.pad(block, (0, 1)) for name, block in given.blocks.items()}
        return cls(mean, pad(given.variance), pad(given.diag), blocks)

    @property
    def second(self) -> Tensor:
        """E[x²], element-wise."""
        return self.mean.square() if self.variance is None else self.mean.square() + self.variance

    @property
    def factor(self) -> Tensor | None:
        return torch.cat(list(self.blocks.values())) if self.blocks else None


@rule(
    aten.linear.default,
    exactness="exact",
    family="linear",
    weights=True,
    traits=Traits(mixes=lambda shape, *rest, **more: (len(shape) - 1,)),
)
def linear(ctx: Context, x: Any, weight: Any, bias: Any = None) -> Surrogate:
    if isinstance(weight, Value) or isinstance(bias, Value):
        raise UnsupportedOperation(f"a linear layer at {ctx.place} computes its weight from uncertain values.")
    W = mean_of(weight)
    mean = F.linear(mean_of(x), W, mean_of(bias))
    maps: list[tuple[Any, LinearMap]] = [(x, Matrix(kept(ctx, W)))] if isinstance(x, Value) else []
    return Surrogate(mean, maps, weight_noises(ctx, x, weight, bias, mean))


@rule(aten.addmm.default, exactness="exact", family="linear")
def addmm(ctx: Context, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Surrogate:
    if not isinstance(x, Value) or isinstance(weight, Value) or isinstance(bias, Value):
        raise UnsupportedOperation(f"addmm at {ctx.place} is supported for an uncertain left matrix only.")
    return Surrogate(
        torch.addmm(bias, x.mean, weight, beta=beta, alpha=alpha), [(x, Matrix(kept(ctx, alpha * weight.T)))]
    )


def weight_noises(ctx: Context, x: Any, weight: Any, bias: Any, y: Tensor) -> list[Noise]:
    """The noises that the posteriors of `weight` and `bias` add to a linear layer's output y."""
    noises: list[Noise] = []
    joint = isinstance(weight, Weight) and weight.partner is not None
    if isinstance(weight, Weight) and weight.gaussian is not None:
        if joint and not (isinstance(bias, Weight) and bias.name == weight.partner):
            raise UnsupportedOperation(
                f"`{weight.name}` shares one Gaussian with `{weight.partner}`, but the layer at {ctx.place} uses it "
                "with another bias; give the two separate Gaussians."
            )
        noises += _matrix_noises(ctx, Input.of(x, constant=joint), weight, weight.gaussian)
    if isinstance(bias, Weight) and bias.gaussian is not None and not joint:
        noises += _bias_noises(bias, bias.gaussian, y)
    return noises + _latent_noises(x, weight, bias, y)


def _matrix_noises(ctx: Context, x: Input, weight: Weight, gaussian: Gaussian) -> list[Noise]:
    by_rows = isinstance(gaussian, (Diagonal, Rows))
    if x.mean.ndim > 2 or weight.mixed or (weight.uses > 1 and not by_rows):
        return _shared(ctx, x, weight, gaussian)
    if isinstance(gaussian, (Diagonal, Rows)):
        if weight.uses > 1:
            return _tied(ctx, x, weight, gaussian)
        between = partial(_between_inputs, gaussian, x)
        return [DiagonalNoise(_diagonal_over_outputs(gaussian, x, x), weight.name, between=between)]
    return [_dense(gaussian, x, weight.name, with_mean=True)]


def _diagonal_over_outputs(gaussian: Diagonal | Rows, a: Input, b: Input) -> Tensor:
    """N_ab = diag of E[J(x_a) Σ_w J(x_b)ᵀ], (batch, m); the noise's own variance where a is b.

    Between two uses only the named columns they share count: their independent parts are independent.
    """
    same = a is b
    shared = [(a.blocks[k], b.blocks[k]) for k in a.blocks if k in b.blocks]
    second = a.second if same else a.mean * b.mean + sum((p * q).sum(0) for p, q in shared)
    if isinstance(gaussian, Diagonal):
        return F.linear(second, gaussian.variance())
    total = F.linear(second, gaussian.diag)
    for f in gaussian.factor:  # (m, n)
        total = total + F.linear(a.mean, f) * F.linear(b.mean, f)
        for p, q in shared:
            total = total + (F.linear(p, f) * F.linear(q, f)).sum(0)
        if same and a.diag is not None:
            total = total + F.linear(a.diag, f.square())
    return total


def _between_inputs(gaussian: Diagonal | Rows, x: Input, c: Tensor | None, q: int) -> Noise:
    """diag of E[J(x_a) Σ_w J(x_b)ᵀ] for pairs of inputs with C_ab = c, (q, batch, m)."""
    c = None if c is None else F.pad(c, (0, x.mean.shape[-1] - c.shape[-1]))  # a constant 1 varies with nothing
    product = partners(x.mean, q) * x.mean
    second = product if c is None else product + c
    if isinstance(gaussian, Diagonal):
        return DiagonalNoise(F.linear(second, gaussian.variance()).flatten(0, 1))
    total = F.linear(second, gaussian.diag)
    for f in gaussian.factor:
        seen = F.linear(x.mean, f)
        total = total + partners(seen, q) * seen
        total = total if c is None else total + F.linear(c, f.square())
    return DiagonalNoise(total.flatten(0, 1))


def _tied(ctx: Context, x: Input, weight: Weight, gaussian: Diagonal | Rows) -> list[Noise]:
    """One more use of a parameter: the next row of the Cholesky factor over uses."""
    uses: list[tuple[Input, list[Tensor]]] = ctx.shared.setdefault(("tied", weight.name), [])
    row: list[Tensor] = []
    for earlier, factor in uses:
        b = len(row)
        cross = _diagonal_over_outputs(gaussian, x, earlier)
        for c in range(b):
            cross = cross - row[c] * factor[c]
        pivot = factor[b]
        row.append(torch.where(pivot > 0, cross / torch.where(pivot > 0, pivot, 1.0), 0.0))
    rest = _diagonal_over_outputs(gaussian, x, x)
    for entry in row:
        rest = rest - entry.square()
    row.append(rest.clamp_min(0).sqrt())
    uses.append((x, row))
    return [diagonal_latent(scale, (weight.name, c), weight.name) for c, scale in enumerate(row)]


def _dense(gaussian: Gaussian, x: Input, label: str, *, with_mean: bool) -> Noise:
    """Covariances that couple outputs; without the mean only what the uncertainty of x adds."""
    points = [x.mean.unsqueeze(0)] if with_mean else []
    points += [x.factor] if x.factor is not None else []
    a = torch.cat(points) if points else x.mean.new_zeros(0, *x.mean.shape)  # (1 + r, batch, n)
    if isinstance(gaussian, Kronecker):
        scale = torch.einsum("pbi,ij,pbj->b", a, gaussian.inputs, a)
        if x.diag is not None:
            scale = scale + x.diag @ gaussian.inputs.diagonal()
        return DenseNoise(gaussian.outputs.unsqueeze(0), scale, label)
    if isinstance(gaussian, Rotated):
        second = (a @ gaussian.inputs).square().sum(0)
        if x.diag is not None:
            second = second + x.diag @ gaussian.inputs.square()
        return RotatedNoise(second @ gaussian.diag.mT, gaussian.outputs, label)
    assert isinstance(gaussian, Full)
    m, n = gaussian.shape
    blocks = gaussian.matrix.reshape(m, n, m, n)
    matrix = torch.einsum("minj,pbi,pbj->bmn", blocks, a, a)
    if x.diag is not None:
        matrix = matrix + torch.einsum("mini,bi->bmn", blocks, x.diag)
    return DenseNoise(matrix, None, label)


def _shared(ctx: Context, x: Input, weight: Weight, gaussian: Gaussian) -> list[Noise]:
    """One draw of the weight at many places: in weight space for the mean and the factor columns of x."""
    space, layout = weight_space(ctx, weight), _positions(x.mean, gaussian.shape[0])

    def vectors(points: Tensor) -> Tensor:  # (P, batch, *positions, n) to (P, batch, 1, n, T)
        flat = points.flatten(2, -2) if points.ndim > 3 else points.unsqueeze(2)
        return flat.mT.unsqueeze(2)

    key = (weight.name, "mean") if weight.uses > 1 else None
    noises: list[Noise] = [shared_noise(space, gaussian, vectors(x.mean.unsqueeze(0)), layout, key, weight.name)]
    if x.mean.ndim == 2 and not isinstance(gaussian, (Diagonal, Rows)):
        if x.variance is None:
            return noises
        rest = _dense(gaussian, x, weight.name, with_mean=False)

        def between(c: Tensor | None, q: int) -> Noise:  # the same for pairs, C in the place of λ
            assert c is not None
            pairs = F.pad(c.flatten(0, 1), (0, x.mean.shape[-1] - c.shape[-1]))
            return _dense(gaussian, Input(pairs, pairs, pairs, {}), weight.name, with_mean=False)

        rest.between = between
        return [*noises, rest]
    if x.factor is not None:
        noises.append(shared_noise(space, gaussian, vectors(x.factor), layout, None, weight.name))
    if x.diag is not None:
        noises.append(_independent(gaussian, x.diag, weight.name))
    return noises


def _positions(x: Tensor, m: int) -> Layout:
    """A matrix as one group, its results as (batch, *positions, m)."""
    places = x.shape[1:-1]
    return Layout(
        lambda w: w.unsqueeze(-3),
        lambda w: w.squeeze(-3),
        lambda y: y.squeeze(2).mT.reshape(*y.shape[:2], *places, m),
        lambda g: (g.flatten(2, -2) if places else g.unsqueeze(2)).mT.unsqueeze(2),
    )


def _independent(gaussian: Gaussian, diag: Tensor, label: str) -> Noise:
    """What independent entries of x add: N_t = Σ_j λ_tj Cov(W_·j), independent from place to place.

    For Kronecker (Σ_j A_jj λ_tj)·B, for a full covariance n_t = Σ_j √λ_tj R_j z_tj with R_j a root of Cov(W_·j).
    """
    if isinstance(gaussian, Rotated):
        return RotatedNoise(diag @ gaussian.inputs.square() @ gaussian.diag.mT, gaussian.outputs, label)
    variances = F.linear(diag, gaussian.variance())
    if isinstance(gaussian, (Diagonal, Rows)):

        def between(c: Tensor | None, q: int) -> Noise:
            assert c is not None
            return _independent(gaussian, F.pad(c, (0, diag.shape[-1] - c.shape[-1])).flatten(0, 1), label)

        return DiagonalNoise(variances, label, between=between)
    if isinstance(gaussian, Kronecker):
        root, scale = psd_root(gaussian.outputs), (diag @ gaussian.inputs.diagonal()).sqrt().unsqueeze(-1)
        return LatentNoise(
            lambda z: z @ root.mT * scale,
            lambda g: g * scale @ root,
            variances,
            tuple(variances.shape[1:]),
            None,
            label,
        )
    m, n = gaussian.shape
    blocks = gaussian.covariance().reshape(m, n, m, n).diagonal(dim1=1, dim2=3).permute(2, 0, 1)  # (n, m, m)
    roots, sigma = psd_root(blocks), diag.sqrt()
    return LatentNoise(
        lambda z: torch.einsum("fb...nk,nmk->fb...m", z * sigma.unsqueeze(-1), roots),
        lambda g: torch.einsum("fb...m,nmk->fb...nk", g, roots) * sigma.unsqueeze(-1),
        variances,
        (*diag.shape[1:], m),
        None,
        label,
    )


def _bias_noises(bias: Weight, gaussian: Gaussian, y: Tensor) -> list[Noise]:
    """b ~ N(b̄, Σ_b), the same draw at every position and at every use."""
    variances = gaussian.variance().expand(y.shape)
    between = constant_between(variances)
    if isinstance(gaussian, Diagonal) and y.ndim == 2 and bias.uses == 1:
        return [DiagonalNoise(variances, bias.name, between=between)]
    independent = isinstance(gaussian, Diagonal)
    root = gaussian.variance().sqrt() if independent else psd_root(gaussian.covariance())  # (m,) or (m, m)
    positions = y.shape[1:-1]
    m = root.shape[0]

    def push(z: Tensor) -> Tensor:
        draw = z * root if independent else z @ root.T
        return draw.reshape(*draw.shape[:2], *[1] * len(positions), m).expand(*draw.shape[:2], *positions, m)

    def pull(g: Tensor) -> Tensor:
        total = g.flatten(2, -2).sum(2) if positions else g
        return total * root if independent else total @ root

    key = (bias.name, "bias")
    return [LatentNoise(push, pull, variances, (m,), key, bias.name, drawn=True, between=between)]


def _latent_noises(x: Any, weight: Any, bias: Any, y: Tensor) -> list[Noise]:
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
            noises.append(_independent(Diagonal(P.square().sum(0)), x.variance, label))
    if isinstance(bias, Weight) and bias.latents is not None:
        p = bias.latents  # (K, m)
        label = label or bias.name
        parts.append(p.reshape(p.shape[0], *[1] * (y.ndim - 1), -1).expand(p.shape[0], *y.shape))
    return [factor_noise(sum(parts[1:], parts[0]), "latents", label), *noises] if parts else []
