"""Dropout (paper section 3.1).

Each entry is multiplied by an independent D ∈ {0, 1/q} with P(D = 0) = p and q = 1 − p, so that E[D] = 1 and
Var[D] = p/q. By the law of total variance

    m = μ,   G = I,   N = diag((μ² + v)·p/q).

D − 1 has cumulants κ₂ = p/q and κ₃ = κ₂(1/q − 2), so that the noise x(D − 1) is skewed but for p = ½:

    ½κ₃/κ₂ = (1/(2q) − 1)·E[x³]/E[x²],   E[x³] = μ(μ² + 3v),
    κ₃ = κ₂(1/q − 2)·E[x³],   κ₄ = κ₂(1/q² − 3/q + 3)·E[x⁴] − 3κ₂²E[x²]²,   E[x⁴] = μ⁴ + 6μ²v + 3v².

p is a number, or a tensor that broadcasts to the input (a rate per neuron).
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.graph.traits import Argument, Draw, Traits
from favour.rules.registry import rule
from favour.surrogate import DiagonalNoise, Surrogate, identity, partners
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten


def hard_dropout(x: Tensor, p: Tensor, live: bool) -> Tensor:
    """x with entries dropped at rates p; x itself, copied, where it is not live."""
    if not live:
        return x.clone()
    keep = 1 - p.detach()  # the derivative of a hard draw in p is not the derivative of anything expected
    # float32, since bfloat16 uniforms are multiples of 2⁻⁸: too coarse for a rate.
    mask = torch.rand_like(x, dtype=torch.float32) < keep
    return x * (mask / keep).to(x.dtype)


# One opaque node `favour.dropout.default` in an exported graph. Export records the call above the autograd
# layer; run eagerly, the autograd kernel is the plain composite, so gradients need no formula of their own.
_LIBRARY = torch.library.Library("favour", "FRAGMENT")
_LIBRARY.define("dropout(Tensor x, Tensor p, bool live) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
_LIBRARY.impl("dropout", hard_dropout, "CompositeExplicitAutograd")
_LIBRARY.impl("dropout", hard_dropout, "Autograd")


@torch.library.register_fake("favour::dropout", lib=_LIBRARY)
def _dropout_fake(x: Tensor, p: Tensor, live: bool) -> Tensor:
    return torch.empty_like(x)


def second_moment_noise(x: Argument, centre: Tensor, scale: Argument, label: str) -> DiagonalNoise:
    """scale·diag(c² + v); between inputs that meet one mask, scale·(c_a ∘ c_b + C_ab)."""
    second = centre.square() + x.variance if isinstance(x, Value) else centre.square()

    def between(c: Tensor | None, q: int) -> DiagonalNoise:
        product = partners(centre, q) * centre
        return DiagonalNoise(((product if c is None else product + c) * scale).flatten(0, 1))

    return DiagonalNoise((second * scale).expand(centre.shape), label, between=between)


def dropped(x: Argument, p: Argument, label: str) -> Surrogate:
    """Element-wise dropout with rate p."""
    mean = mean_of(x)
    noise = second_moment_noise(x, mean, p / (1 - p), label)
    if isinstance(p, Tensor) or p not in (0.0, 0.5):
        noise.skew = lambda: (0.5 / (1 - p) - 1) * _cube_over_square(x)
    noise.cumulants = lambda: _cumulants(x, p)
    return Surrogate(mean, [(x, identity())] if isinstance(x, Value) else [], [noise])


def _cumulants(x: Argument, p: Argument) -> tuple[Tensor, Tensor]:
    """κ₃ and κ₄ of x(D − 1)."""
    mean, variance = mean_of(x), x.variance if isinstance(x, Value) else 0.0
    square, r, s = mean.square(), p / (1 - p), 1 / (1 - p)
    third = r * (s - 2) * mean * (square + 3 * variance)
    fourth = square.square() + 6 * square * variance + 3 * variance * variance
    return third, r * (s * s - 3 * s + 3) * fourth - 3 * (r * (square + variance)).square()


def _cube_over_square(x: Argument) -> Tensor:
    """E[x³]/E[x²]; that of E[x²] = 1 where x is 0, or so small that the gradient of a quotient overflows."""
    if not isinstance(x, Value):
        return x
    square = x.mean.square()
    second = square + x.variance
    return x.mean * ((square + 3 * x.variance) / torch.where(second > 16 * torch.finfo(second.dtype).tiny, second, 1.0))


def zero_or_larger(p: float) -> tuple[float, float, float]:
    """The outcomes of dropout: x/q, or 0."""
    return 1 / (1 - p), 0.0, 0.0


@rule(
    aten.dropout.default,
    torch.ops.favour.dropout.default,
    exactness="exact",
    family="dropout",
    traits=Traits(draws=Draw(falls=True, outcomes=zero_or_larger), elementwise=True, row_wise=True),
)
def dropout(ctx: Context, x: Argument, p: Argument, train: bool) -> Surrogate:
    return dropped(x, p if train else 0.0, ctx.module or "dropout")
