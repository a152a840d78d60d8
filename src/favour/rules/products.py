"""Products of two tensors: element by element, matrix by matrix, or any two-operand einsum.

All are bilinear, y = Σ a∘b over the contracted indices. With one operand known they are linear maps: exact. With both
uncertain, a = μ_a + δ_a and b = μ_b + δ_b,

    y − E[y] = δ_a·μ_b + μ_a·δ_b + (δ_a·δ_b − Cov),     m = μ_a·μ_b + Cov(a, b)
    G = (·μ_b, μ_a·),    N = Σ_a∘Σ_b + C∘Cᵀ    (Isserlis)

where · is the product itself and C = Cov(a, b) is known from the columns that a and b share. For element-wise products
of Gaussians m, G and N are exact, a broadcast operand included: its one draw meets many entries. A contraction keeps
the correlation of what comes from columns and takes the rest, terms with an independent part, by its variances. Too
many columns, and variances are all that is kept. Of independent parts a sweep of variances knows what siblings share
(`favour.surrogate.siblings`), entry by entry, and what attention weights share with values
(`favour.surrogate.attending`); else they count as uncorrelated unless a and b are one tensor with equal indices.

What no second moment shows is skewness. A product of two tensors behind the same dropout, (μ_a + δ_a)(μ_b + δ_b) with
E[δ³] ≠ 0, has Cov(δ, δ²) ≠ 0 between its linear and its quadratic part: with a rate of 0.2 on 32 units the covariance
comes out a tenth to a quarter too large, with Gaussian noise within 2 to 10 %.

A quotient a/b is the product of a with 1/b, by the delta method: m_{1/b} = 1/μ + v/μ³, slope −1/μ².

Indices. Every product is written with one letter for each axis, `ia, ib -> io`; deviations have the fold axis, letter
`Z`, in front. The map of a is then `Z ia, ib -> Z io`, and its transpose `Z io, ib -> Z ia`.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits
from favour.rules.linear import linear
from favour.rules.registry import rule
from favour.rules.shape import broadcast
from favour.surrogate import (
    DiagonalNoise,
    LatentNoise,
    LinearMap,
    Noise,
    Pointwise,
    Surrogate,
    compose,
    factor_noise,
    identity,
    scaling,
)
from favour.surrogate.attending import met, scores_of
from favour.surrogate.matrices import FOLD, Contraction
from favour.surrogate.siblings import Origin, covariance_at, meeting
from favour.surrogate.tokens import attended
from favour.surrogate.value import Context, Value, Weight, mean_of

aten = torch.ops.aten

LETTERS = [letter for letter in string.ascii_letters if letter != FOLD]


def _label(ctx: Context) -> str:
    return f"{ctx.module or 'model'} (product)"


def shared_covariance(a: Value, b: Value) -> list[tuple[Tensor, Tensor]]:
    """Pairs of columns (rank, *shape) of a and b that belong to the same latent variables."""
    return [(a.blocks[name], b.blocks[name]) for name in a.blocks if name in b.blocks]


# Second-order noises are kept with their correlations while they have at most this many columns.
COLUMNS = 160


def multiply(ctx: Context, a: Value, b: Value) -> Surrogate:
    """a∘b of two uncertain tensors, with broadcasting."""
    if a is b:  # one map, so that its independent part is not counted as two
        v = a.variance
        noises: list[Noise] = [DiagonalNoise(2 * v.square(), _label(ctx))]
        return Surrogate(
            a.mean.square() + v, [(a, scaling(2 * a.mean))], noises, Pointwise(lambda: torch.full_like(v, 2))
        )
    mean = a.mean * b.mean
    out = mean.shape
    expand_a, expand_b = broadcast(a.mean.shape, out), broadcast(b.mean.shape, out)
    for p, q in shared_covariance(a, b):
        mean = mean + (expand_a.apply(p) * expand_b.apply(q)).sum(0)
    maps = [
        (a, compose(scaling(b.mean), expand_a)),
        (b, compose(scaling(a.mean), expand_b)),
    ]
    noises = second_order(a, b, expand_a, expand_b, out, _label(ctx))
    shared = meeting(a, b, expand_a, expand_b)
    if not isinstance(shared, tuple):
        return Surrogate(mean, maps, noises)
    c = covariance_at(*shared)
    noises.append(DiagonalNoise(c.square().expand(out), _label(ctx)))
    return Surrogate(mean + c, maps, noises, crossed=[shared])


def second_order(
    a: Value, b: Value, expand_a: LinearMap, expand_b: LinearMap, out: torch.Size, label: str
) -> list[Noise]:
    """The noise δ_a∘δ_b − Cov, of covariance Σ_a∘Σ_b + C∘Cᵀ after broadcasting.

    With δ_a = √λ_a ε + Uᵀz, δ_b = √λ_b ε′ + Wᵀz over the union of their latent variables z, it has four parts:
    λ_aλ_b, which is diagonal; √λ_a ε∘Wᵀz, diagonal unless a is broadcast, when one ε meets many entries; the same the
    other way round; and Σ_k<l (u_k∘w_l + u_l∘w_k) z_k z_l + Σ_k u_k∘w_k (z_k² − 1).
    """
    diag: Tensor = torch.zeros(out, dtype=a.mean.dtype, device=a.mean.device)
    noises: list[Noise] = []
    if a.diag is not None and b.diag is not None:
        diag = diag + a.diag * b.diag
    for x, y, expand_x, expand_y in ((a, b, expand_a, expand_b), (b, a, expand_b, expand_a)):
        if x.diag is None or y.factor is None:
            continue
        if expand_x.one_per_column or y.factor.shape[0] > COLUMNS:
            diag = diag + x.diag * y.factor.square().sum(0)
        else:
            noises.append(_draw_times_columns(x.diag, expand_y.apply(y.factor), expand_x, label))
    if a.factor is not None and b.factor is not None:
        names, sizes = _latents(a, b)
        R = sum(sizes.values())
        if R * (R + 1) // 2 <= COLUMNS:
            U, W = (_aligned(x, e, names, sizes, out) for x, e in ((a, expand_a), (b, expand_b)))
            noises.append(_pairs(lambda i, j: U[i] * W[j], R, label))
        else:
            c = torch.zeros_like(diag)
            for p, q in shared_covariance(a, b):
                c = c + (expand_a.apply(p) * expand_b.apply(q)).sum(0)
            diag = diag + a.factor.square().sum(0) * b.factor.square().sum(0) + c.square()
    return [DiagonalNoise(diag, label), *noises]


def _aligned(x: Value, expand: LinearMap, names: list[Any], sizes: dict[Any, int], out: torch.Size) -> Tensor:
    """The columns of x for every latent variable in `names`, zero where x does not have them: (R, *out)."""
    zero = x.mean.new_zeros(1, *out)
    parts = [expand.apply(x.blocks[name]) if name in x.blocks else zero.expand(sizes[name], *out) for name in names]
    return torch.cat(parts)


def _draw_times_columns(diag: Tensor, columns: Tensor, expand: LinearMap, label: str) -> LatentNoise:
    """n = Σ_k w_k ∘ E(√λ ∘ z_k) with E a broadcast: one draw for every entry of λ and column k."""
    sigma = diag.clamp_min(0).sqrt()
    shape = diag.shape
    r = columns.shape[0]

    def push(z: Tensor) -> Tensor:
        total = columns.new_zeros(z.shape[0], *columns.shape[1:])
        for k in range(r):
            total = total + columns[k] * expand.apply(z[:, :, k].reshape(z.shape[0], *shape) * sigma)
        return total

    def pull(g: Tensor) -> Tensor:
        parts = [expand.transpose(g * columns[k]) * sigma for k in range(r)]
        return torch.stack([part.reshape(g.shape[0], columns.shape[1], -1) for part in parts], 2)

    variances = columns.square().sum(0) * expand.square(diag)
    return LatentNoise(push, pull, variances, (r, sigma[:1].numel()), None, label)


def divide(ctx: Context, a: Argument, b: Value) -> Surrogate:
    """a/b for an uncertain b: with r = 1/b ≈ 1/μ + v/μ³ − δ/μ², y = a·r."""
    inverse = b.mean.reciprocal()
    slope = -inverse.square()
    curved = b.variance * inverse.square() * inverse
    r = inverse + curved
    if a is b:
        return Surrogate(torch.ones_like(b.mean), [(b, scaling(torch.zeros_like(b.mean)))])
    mean = mean_of(a) * r
    out = mean.shape
    expand_b = broadcast(b.mean.shape, out)
    remainder = 2 * curved.square()  # Var of δ²/μ³
    noise = mean_of(a) ** 2 * remainder
    maps: list[tuple[Any, LinearMap]] = [(b, compose(scaling(mean_of(a) * slope), expand_b))]
    crossed: list[tuple[Origin, LinearMap]] = []
    if isinstance(a, Value):
        expand_a = broadcast(a.mean.shape, out)
        maps.append((a, compose(scaling(r), expand_a)))
        noise = noise + a.variance * (b.variance * slope.square() + remainder)
        pairs = shared_covariance(a, b)
        if pairs:
            c = slope * sum((expand_a.apply(p) * expand_b.apply(q)).sum(0) for p, q in pairs)
            mean, noise = mean + c, noise + c.square()
        shared = meeting(b, a, compose(scaling(slope), expand_b), expand_a)
        if isinstance(shared, tuple):
            c = covariance_at(*shared)
            mean, noise, crossed = mean + c, noise + c.square(), [shared]
    curvature = Pointwise(lambda: 2 * (mean_of(a) * inverse.pow(3)).expand(out), ends_cumulants=False)
    second = curvature if b.mean.shape == out else None
    return Surrogate(mean, maps, [DiagonalNoise(noise.expand(out), _label(ctx))], second, crossed=crossed)


def bilinear(ctx: Context, a: Argument, b: Argument, ia: str, ib: str, io: str) -> Surrogate:
    """einsum(f"{ia},{ib}->{io}") of two tensors, at least one of them uncertain; one letter is one axis."""
    for operand, letters in ((a, ia), (b, ib)):
        if isinstance(operand, Weight):
            raise UnsupportedOperation(
                f"the product at {ctx.place} reads `{operand.name}`, a parameter with a posterior; only linear layers "
                "and convolutions have a rule for that. Use `torch.nn.functional.linear`."
            )
        if isinstance(operand, Value) and (not letters or not io or letters[0] != io[0]):
            raise UnsupportedOperation(
                f"the product `{ia},{ib}->{io}` at {ctx.place} of tensors of shapes {tuple(mean_of(a).shape)} and "
                f"{tuple(mean_of(b).shape)} moves or sums the first dimension of an uncertain one, which is the batch; "
                "predictions are per input. Keep the batch in front."
            )
        for one, other in ((ia, ib), (ib, ia)):
            if len(set(one)) < len(one) or not set(one) <= set(io) | set(other):
                raise UnsupportedOperation(
                    f"the product `{ia},{ib}->{io}` at {ctx.place} takes a diagonal of one operand, or sums it alone, "
                    "which has no rule; use `torch.diagonal` or `sum` before it."
                )
    x, y = mean_of(a), mean_of(b)
    mean = torch.einsum(f"{ia},{ib}->{io}", x, y)
    maps: list[tuple[Any, LinearMap]] = []
    if isinstance(a, Value):
        maps.append((a, Contraction(y, ia, ib, io, x.shape)))
    if isinstance(b, Value):
        maps.append((b, Contraction(x, ib, ia, io, y.shape)))
    noises: list[Noise] = []
    if isinstance(a, Value) and isinstance(b, Value):
        for p, q in shared_covariance(a, b):
            mean = mean + torch.einsum(f"{FOLD}{ia},{FOLD}{ib}->{io}", p, q)
        if a is b and ia == ib:
            if a.diag is not None:
                mean = mean + torch.einsum(f"{ia}->{io}", a.diag)
            variance = 2 * torch.einsum(f"{ia},{ib}->{io}", a.variance, b.variance)
            maps = [(a, compose(scaling(2.0), maps[0][1]))]
            noises.append(DiagonalNoise(variance, _label(ctx)))
        else:
            noises += _contracted(a, b, ia, ib, io, _label(ctx))
            row, inner, column = ia[-2:-1], ia[-1:], ib[-1:]
            if ib[-2:-1] == inner and io[-2:] == row + column and len(ia) == len(ib) > 2:  # tokens with tokens
                return _attention(Surrogate(mean, maps, noises), a, b)
    return Surrogate(mean, maps, noises)


def _attention(made: Surrogate, a: Value, b: Value) -> Surrogate:
    """A product of tokens with tokens, which may be queries with keys or attention weights with values."""
    shared = met(a, b)
    if shared is not None:
        return replace(made, mean=made.mean + shared, carried=[attended(a, b)])
    variance, carried = scores_of(a, b)
    if variance is not None:
        variance = sum([noise.diag() for noise in made.noises], variance)
    return replace(made, carried=carried, variance=variance)


def _contracted(a: Value, b: Value, ia: str, ib: str, io: str, label: str) -> list[Noise]:
    """The second-order noise of a contraction: columns with columns as they are, the rest by its variances."""

    def marginal(v: Tensor, w: Tensor) -> Tensor:
        return torch.einsum(f"{ia},{ib}->{io}", v, w)

    if a.factor is None or b.factor is None:
        return [DiagonalNoise(marginal(a.variance, b.variance), label)]
    names, sizes = _latents(a, b)
    R = sum(sizes.values())
    if R * (R + 1) // 2 > COLUMNS:
        return [DiagonalNoise(marginal(a.variance, b.variance), label)]
    noises: list[Noise] = []
    if a.diag is not None or b.diag is not None:
        both = marginal(a.variance, b.variance)
        rest = both - marginal(a.factor.square().sum(0), b.factor.square().sum(0))
        noises.append(DiagonalNoise(rest.clamp_min(0), label))
    U, W = (_aligned(x, identity(), names, sizes, x.mean.shape) for x in (a, b))

    def times(i: Tensor, j: Tensor) -> Tensor:
        return torch.einsum(f"{FOLD}{ia},{FOLD}{ib}->{FOLD}{io}", U[i], W[j])

    return [*noises, _pairs(times, R, label)]


def _latents(a: Value, b: Value) -> tuple[list[Any], dict[Any, int]]:
    """The latent variables of both, and how many columns each has."""
    names = list(dict.fromkeys([*a.blocks, *b.blocks]))
    return names, {name: (a.blocks[name] if name in a.blocks else b.blocks[name]).shape[0] for name in names}


def _pairs(times: Callable[[Tensor, Tensor], Tensor], R: int, label: str) -> LatentNoise:
    """Σ_k<l (u_k·w_l + u_l·w_k) z_k z_l + Σ_k u_k·w_k (z_k² − 1), with `times(i, j)` the products u_i·w_j."""
    k, m = torch.triu_indices(R, R)
    both = times(k, m) + times(m, k)
    halved = (k == m).to(both).reshape(-1, *[1] * (both.ndim - 1)) * (1 - 0.5**0.5)  # √2 u_k·w_k
    return factor_noise(both * (1 - halved), None, label)


def matmul_letters(a: int, b: int) -> tuple[str, str, str]:
    """The letters of `torch.matmul` for operands with a and b axes."""
    lead = max(a, b, 2) - 2
    names = LETTERS[:lead]
    row, inner, column = LETTERS[lead : lead + 3]
    ia = "".join(names[lead - (a - 2) :]) + row + inner if a > 1 else inner
    ib = "".join(names[lead - (b - 2) :]) + inner + column if b > 1 else inner
    io = "".join(names) + (row if a > 1 else "") + (column if b > 1 else "")
    return ia, ib, io


@rule(
    *(aten.matmul.default, aten.mm.default),
    exactness="moment-matched",
    family="product",
    weights=True,
    traits=Traits(weights=(1,)),
)
@rule(aten.bmm.default, exactness="moment-matched", family="product", weights=True)
def matmul(ctx: Context, a: Argument, b: Argument) -> Surrogate:
    if isinstance(b, Weight) and b.mean.ndim == 2 and not isinstance(a, Weight):
        return linear(ctx, a, _matrix(ctx, b))
    return bilinear(ctx, a, b, *matmul_letters(mean_of(a).ndim, mean_of(b).ndim))


def _matrix(ctx: Context, b: Weight) -> Weight:
    """The weight as a linear layer holds it."""
    if b.partner is not None:
        raise UnsupportedOperation(
            f"`{b.name}` at {ctx.place} shares one Gaussian with `{b.partner}`, and is read by a product; give the two "
            "separate Gaussians, or use `torch.nn.functional.linear`."
        )
    return b.transposed()


@rule(aten.baddbmm.default, exactness="moment-matched", family="product")
def baddbmm(ctx: Context, bias: Argument, a: Argument, b: Argument, *, beta: float = 1, alpha: float = 1) -> Surrogate:
    """β·bias + α·(a @ b)."""
    if isinstance(a, Value) or isinstance(b, Value):
        made = bilinear(ctx, a, b, *matmul_letters(3, 3))
    else:
        made = Surrogate(torch.bmm(a, b))
    out = made.mean.shape
    maps = [(x, compose(scaling(alpha), G)) for x, G in made.maps]
    if isinstance(bias, Value):
        maps.append((bias, compose(scaling(beta), broadcast(bias.mean.shape, out))))
    noises: list[Noise] = [DiagonalNoise(noise.diag() * alpha**2, noise.label) for noise in made.noises]
    mean = alpha * made.mean
    return Surrogate(mean + beta * mean_of(bias) if beta else mean, maps, noises)


def einsum_letters(equation: str, dims: Sequence[int]) -> tuple[str, str, str]:
    """A two-operand equation with its dots and implicit result written out."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [letter for letter in LETTERS if letter not in equation]
    hidden = max((n - len(t.replace("...", "")) for t, n in zip(terms, dims, strict=True) if "..." in t), default=0)
    dots = "".join(free[:hidden])
    spelled = []
    for term, n in zip(terms, dims, strict=True):
        dotted = n - len(term.replace("...", ""))
        spelled.append(term.replace("...", dots[hidden - dotted :] if dotted else ""))
    if not arrow:
        joined = "".join(terms).replace(".", "")
        right = "..." * bool(hidden) + "".join(sorted({c for c in joined if joined.count(c) == 1}))
    return spelled[0], spelled[1], right.replace("...", dots)


@rule(aten.einsum.default, exactness="moment-matched", family="product")
def einsum(ctx: Context, equation: str, tensors: Sequence[Any], path: Argument = None) -> Surrogate:
    unused = next((letter for letter in LETTERS if letter not in equation and letter != FOLD), None)
    if len(tensors) > 2 or unused is None:
        raise UnsupportedOperation(
            f"the einsum `{equation}` of {len(tensors)} tensors at {ctx.place} has no rule: at most two tensors. Write "
            "it as several."
        )
    equation = equation.replace(FOLD, unused)
    if len(tensors) == 1:  # a product with the number 1
        (x,) = tensors
        left, _, right = equation.replace(" ", "").partition("->")
        missing = [c for c in left if c not in right]
        one = x.mean.new_ones([x.mean.shape[left.index(c)] for c in missing])
        return bilinear(ctx, x, one, left, "".join(missing), right)
    a, b = tensors
    return bilinear(ctx, a, b, *einsum_letters(equation, [mean_of(a).ndim, mean_of(b).ndim]))
