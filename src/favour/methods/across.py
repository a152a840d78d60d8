"""Beliefs across inputs: one network, many inputs.

The weights of a network are drawn once, whatever it is asked, so its answers at different inputs are correlated. With
inputs a and b, sources s and covectors A_s(a) that the reverse sweep (`adjoint`) brings to source s for input a,

    Cov(y_a, y_b) = Σ_s A_s(a) N_s(a, b) A_s(b)ᵀ,

where N_s(a, b) is the covariance of what one draw adds at a and at b. It takes second moments between inputs, entry by
entry: C_ab = Cov(x_a, x_b), (q, batch, *event). A forward sweep carries them as `DiagonalOnly` carries variances,

    C_ab(y) = Σ_i (G_a ∘ G_b) C_ab(x_i) + Σ_s diag N_s(a, b),

so that C_aa is the variance and the covariance at a = b is that of a single input.

| source                              | N(a, b)                                     |
|-------------------------------------|---------------------------------------------|
| dropout, one mask for all inputs    | p/q·diag(μ_a ∘ μ_b + C_ab)                  |
| dropout, a mask for each input      | 0 for a ≠ b                                 |
| mean-field weights, variances V     | diag(V(μ_a ∘ μ_b + C_ab))                   |
| other weights                       | J(μ_a) Σ_w J(μ_b)ᵀ in weight space, and C's |
| what an activation leaves over      | Mehler's formula, `favour.scalar.between`   |
| what other nonlinearities leave over| √N_a ρ² √N_b, ρ the correlation of the line |

All but the last are what `adjoint` has for one input. The last, and maps that differ from input to input and are no
scaling (norms, softmax, products of two uncertain tensors), for which C_ab(y) = √(v_a v_b)·r with r the correlation of
the whole argument, keep N(a, b) positive semi-definite and right at a = b, and are approximate between.

Cost: q² forward passes for the second moments (batches of q inputs), and one reverse sweep.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from favour.methods.forward import Entry, Sweep
from favour.methods.reverse import Inputs, all_outputs, bend_back, bending_values
from favour.scalar.between import correlation, safe_root
from favour.surrogate import LatentNoise, Noise, Unavailable, flat, inner, partners
from favour.surrogate.value import Value

# Numbers in the largest intermediate result of a product over pairs; above, it is made piece by piece.
PIECE = 2**25


@dataclass
class InputPairs:
    """Second moments between inputs.

    Attributes:
        moments: C_ab of every uncertain value, by its identity.
        noises: For each line of the tape, what its noises are between inputs: a noise of pairs, or correlations
            (q, batch) by which two inputs share a latent draw.
    """

    moments: dict[int, Tensor] = field(default_factory=dict)
    noises: list[list[Noise | Tensor]] = field(default_factory=list)


def itself(q: int, like: Tensor) -> Tensor:
    """1 for an input with itself, else 0; (q, batch)."""
    return torch.eye(q, dtype=like.dtype, device=like.device).repeat(1, like.shape[0] // q)


def moments_between(sweep: Sweep, inputs: Inputs, q: int, one_mask: bool) -> InputPairs:
    """The forward sweep over pairs of inputs; `sweep` must be of variances only."""
    pairs = InputPairs()
    for _, _, seen in inputs:  # uncertain inputs are independent of each other
        identity = itself(q, seen.mean)
        pairs.moments[id(seen)] = _rows(identity, seen.mean) * seen.variance
    for entry in sweep.tape:
        notes: list[str] = []
        line, noises = _entry_between(entry, pairs, q, one_mask, notes)
        for note in notes:
            sweep.note(entry.step, note)
        pairs.moments[id(entry.value)] = line
        pairs.noises.append(noises)
    return pairs


def _entry_between(
    entry: Entry, pairs: InputPairs, q: int, one_mask: bool, notes: list[str]
) -> tuple[Tensor, list[Noise | Tensor]]:
    surrogate, mean = entry.surrogate, entry.surrogate.mean
    total = mean.new_zeros(q, *mean.shape)
    for x, G in surrogate.maps:
        c = pairs.moments[id(x)]
        through = G.between(c, q)
        if isinstance(through, Unavailable):
            notes.append(f"between inputs: one correlation for the whole tensor, {through.reason}")
            root = safe_root(G.square(x.variance))
            through = _rows(_overall(c, x.variance), mean) * root * partners(root, q)
        total = total + through
    line, variance = total, _diagonal(total)
    first = pairs.moments[id(surrogate.maps[0][0])] if surrogate.maps else None
    apart = entry.step.node.draw is not None and not one_mask
    noises: list[Noise | Tensor] = []
    for noise in surrogate.noises:
        made = None if apart or noise.between is None else noise.between(first, q)
        if made is not None:
            added = made.diag().expand(q * mean.shape[0], *mean.shape[1:]).unflatten(0, (q, mean.shape[0]))
            shared = mean.new_ones(1, 1)
        else:
            root = safe_root(noise.diag().expand(mean.shape))
            if apart:
                shared = rho = itself(q, mean)
                rho = _rows(rho, mean)
            else:
                rho = correlation(line, variance).square()
                shared = _overall(line, variance).square()
            added = rho * root * partners(root, q)
        noises.append(made if made is not None and not _latent(noise) else shared)
        total = total + added
    if surrogate.variance is not None or len(surrogate.maps) > 1:
        # Neighbours, or siblings among the arguments, told more than the line and the noises hold.
        scale = safe_root(entry.value.variance) / safe_root(_diagonal(total)).clamp_min(torch.finfo(total.dtype).tiny)
        total = total * scale * partners(scale, q)
    return total, noises


def _latent(noise: Noise) -> bool:
    """Whether inputs share the latent draw of a noise, so that its covectors meet there."""
    return isinstance(noise, LatentNoise) and noise.drawn


def _rows(weights: Tensor, like: Tensor) -> Tensor:
    """(q, batch) to (q, batch, 1, …)."""
    return weights.reshape(*weights.shape, *[1] * (like.ndim - 1))


def _diagonal(c: Tensor) -> Tensor:
    """C_aa, (batch, *event)."""
    q = c.shape[0]
    diagonal = c.unflatten(1, (-1, q)).diagonal(dim1=0, dim2=2)  # (groups, *event, q)
    return diagonal.movedim(-1, 1).flatten(0, 1)


def _overall(c: Tensor, variance: Tensor) -> Tensor:
    """The correlation of whole tensors, Σ_i C_ab,i/√(Σ_i v_a,i Σ_i v_b,i), (q, batch)."""
    return correlation(flat(c).sum(-1), flat(variance.unsqueeze(0)).sum((0, -1)))


def covariance_between(
    sweep: Sweep, output: Value, inputs: Inputs, pairs: InputPairs, q: int, secant: bool = False
) -> Tensor:
    """Σ over the outputs of q inputs together, (groups, q·n, q·n) for n outputs; `secant` as in `reverse`."""
    batch = output.mean.shape[0]
    basis = all_outputs(output.mean)
    k = basis.shape[0]
    waiting: dict[int, Tensor] = {id(output): basis.expand(k, batch, *basis.shape[2:])}
    total = output.mean.new_zeros(batch // q, q, k, q, k)
    shared: dict[Hashable, Tensor] = {}
    bending = bending_values(sweep) if secant else set()
    bends: dict[int, Tensor] = {}
    for entry, noises in zip(reversed(sweep.tape), reversed(pairs.noises), strict=True):
        g = waiting.pop(id(entry.value), None)
        if g is None:
            continue
        c = bends.pop(id(entry.value), None)
        for noise, between in zip(entry.surrogate.noises, noises, strict=True):
            if isinstance(between, Noise):
                total = total + _gram_between(noise.bent(g, c), between, q)
            elif noise.key is not None:
                assert isinstance(noise, LatentNoise)
                pulled = noise.pull(g)
                shared[noise.key] = pulled if noise.key not in shared else shared[noise.key] + pulled
            else:
                total = total + _gram_shared(noise.pulled(g, c), q, between)
        for x, G in entry.surrogate.maps:
            back = G.transpose(g)
            waiting[id(x)] = waiting[id(x)] + back if id(x) in waiting else back
            curvature = bend_back(sweep, entry, x, G, g, c, batch) if id(x) in bending else None
            if curvature is not None:
                bends[id(x)] = bends[id(x)] + curvature if id(x) in bends else curvature
    for pulled in shared.values():
        total = total + _gram_shared(pulled, q, pulled.new_ones(1, 1))
    for _, exact, seen in inputs:
        g = waiting.get(id(seen))
        if g is None:
            continue
        identity = itself(q, seen.mean)
        if exact.diag is not None:
            total = total + _gram_shared(g * safe_root(exact.diag), q, identity)
        if exact.factor is not None:
            total = total + _gram_shared(inner(g, exact.factor).transpose(0, 1), q, identity)
    matrix = total.reshape(batch // q, q * k, q * k)
    return (matrix + matrix.mT) / 2


def _gram_shared(pulled: Tensor, q: int, shared: Tensor) -> Tensor:
    """Σ_z A_a A_b weighted by how far two inputs share z, (groups, q, F, q, F); `shared` (q, batch) or (1, 1)."""
    rows = flat(pulled)  # (F, batch, z)
    F, batch, _ = rows.shape
    both = rows.unflatten(1, (batch // q, q)).permute(1, 2, 0, 3).flatten(1, 2)  # (groups, q·F, z)
    gram = (both @ both.mT).unflatten(2, (q, F)).unflatten(1, (q, F))
    if shared.numel() == 1:
        return gram
    weights = shared.unflatten(1, (batch // q, q)).transpose(0, 1)  # (groups, q, q)
    return gram * weights[:, :, None, :, None]


def _gram_between(g: Tensor, noise: Noise, q: int) -> Tensor:
    """A_a N_ab A_bᵀ, (groups, q, F, q, F), for covectors (F, batch, *event) and a noise of q·batch pairs."""
    F, batch = g.shape[:2]
    groups = batch // q
    theirs = g.unflatten(1, (groups, q)).permute(2, 1, 0, *range(3, g.ndim + 1))  # (a, groups, F, *event)
    if g.numel() * q <= PIECE:
        wide = (
            theirs.movedim(2, 0).unsqueeze(3).expand(F, q, groups, q, *g.shape[2:]).reshape(F, q * batch, *g.shape[2:])
        )
        mine = g.unsqueeze(1).expand(F, q, batch, *g.shape[2:]).reshape(F, q * batch, *g.shape[2:])
        gram = inner(wide, noise.matmul(mine))
        return gram.reshape(q, groups, q, F, F).permute(1, 0, 3, 2, 4)
    pieces = []
    for h in range(F):  # one covector of the right side at a time
        mine = g[h].expand(1, q, *g.shape[1:]).reshape(1, q * batch, *g.shape[2:])
        right = flat(noise.matmul(mine)).reshape(q, groups, q, -1)
        pieces.append(torch.einsum("agfn,agbn->gafb", flat(theirs.flatten(0, 1)).reshape(q, groups, F, -1), right))
    return torch.stack(pieces, -1)
