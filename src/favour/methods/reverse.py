"""The reverse sweep: the output covariance without compressing anything on the way.

A forward sweep gives every operation its surrogate. Then covectors g, one per output direction, go back through the
transposed maps; covectors add where paths meet. With A_s the accumulated covectors at noise source s,

    Σ_out = Σ_s A_s N_s A_sᵀ.

Nothing is truncated: for given surrogates this is the exact covariance, residual branches and tied parameters included.
A draw shared by several operations (equal `Noise.key`) collects Bᵀg over all of them before its Gram matrix is taken.
The sum over sources is the attribution of the variance.

Secants. A dropped unit takes a step that is not small, over which the slope of the next activation changes: to second
order in its noise ε, of variance N and third cumulant T, an output moves by aε + ½c(ε² − N), with a its covector and
c = ∂²/∂ε². The line through that with the right covariance has slope a + ½cT/N, for noise of two values (all of
dropout) the secant between them, and no variance is left over. So the Gram matrix is taken of A + C∘½T/N instead of A.
Curvatures go back beside the covectors: through activations c ↦ E[f′]²c + E[f″]a, through linear maps c ↦ (G∘G)ᵀc,
which is the diagonal of GᵀcG for a diagonal c: exact at the nearest activation, and an estimate without bias for
weights of random signs beyond it. A product of two values from one origin is curved there, by 2(P∘Q)ᵀa.

Pairs. Two units that act on one activation also move it together; see `favour.methods.pairs`.

Two savings. Covectors are the same for every input until they meet the first map that is not, so they start with a
batch of one. And independent element-wise draws on either side of an identity (the residual of a ReLU and the dropout
behind it) share their covectors, so their variances are added before the Gram matrix is taken, once.

Cost in forward passes, for k covectors: 1 for the mean, then, over the part behind the first noise, 1 for variances
and k for the way back, and k more for secants where dropout lies before an activation. With weights of rank q
(`weight_rank`) the way back costs q(m + n)/(mn) of that at an m × n layer, and a convolution's q/m and a change of
channels; means and variances keep the whole weights. What that is worth is measured by `benchmarks/subinference.py`:
little.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import Tensor

from favour.methods.forward import Entry, Sweep, unexplained
from favour.methods.pairs import Pairs
from favour.surrogate import DiagonalNoise, Identity, LatentNoise, LinearMap, Unavailable, inner, weighted_gram
from favour.surrogate.value import Value

Inputs = list[tuple[str, Value, Value]]


def reverse(
    sweep: Sweep,
    output: Value,
    covectors: Tensor,
    inputs: Inputs,
    *,
    apart: bool = False,
    weight_rank: int | None = None,
    secant: bool = False,
    pairs: Pairs | None = None,
    last: bool = False,
    met: dict[int, Any] | None = None,
) -> dict[str, Tensor]:
    """Covariance of the outputs in the given directions, by source.

    Args:
        sweep: A forward sweep with its tape.
        output: The value whose covariance is wanted.
        covectors: (k, batch or 1, *event).
        inputs: Uncertain inputs: name, the value as given (its covariance is exact) and the value the sweep saw.
        apart: Keep every source apart; otherwise what can be added early is.
        weight_rank: q, to send covectors through rank-q approximations of the weights (sub-inference).
        secant: Take secants of skewed noises, not tangents.
        pairs: Joint effects of two draws on one activation.
        last: Take the tape apart on the way: what is behind the sweep goes while covectors meet larger layers.
        met: Told what arrives at values, by their `id`: covectors and curvatures, each (k, batch, *event) or None.

    Returns:
        Source label to (batch, k, k). Their sum is the covariance.
    """
    batch = output.mean.shape[0]
    readers: dict[int, int] = {}
    for entry in sweep.tape:
        for x, _ in entry.surrogate.maps:
            readers[id(x)] = readers.get(id(x), 0) + 1
    waiting: dict[int, Tensor] = {id(output): covectors}
    carried: dict[int, Tensor] = {}  # variances waiting at a value for its covectors
    parts: dict[str, Tensor] = {}
    shared: dict[Hashable, tuple[str, Tensor]] = {}
    bending = bending_values(sweep) if secant else set()
    bends: dict[int, Tensor] = {}  # curvatures, as `waiting`

    def add(label: str, gram: Tensor) -> None:
        parts[label] = parts[label] + gram if label in parts else gram

    for entry in _backwards(sweep.tape, last):
        g = waiting.pop(id(entry.value), None)
        if g is None:
            continue
        variance = carried.pop(id(entry.value), None)
        c = bends.pop(id(entry.value), None)
        _tell(met, entry.value, g, c, batch)
        noises = entry.surrogate.noises
        paired = None if pairs is None else pairs.at(entry, g)
        if paired is not None:
            label, gram, noises = paired
            add(label, gram)
        elif secant:
            noises = unexplained(noises)
        label = "noise" if not apart else ""
        for noise in noises:
            if noise.key is not None:
                assert isinstance(noise, LatentNoise)
                pulled = noise.pull(_whole(g, batch))
                first, total = shared.get(noise.key, (noise.label, None))
                shared[noise.key] = (first, pulled if total is None else total + pulled)
            elif c is not None and noise.skewed:
                add(noise.label if apart else label, noise.secant_gram(_whole(g, batch), _whole(c, batch)))
            elif isinstance(noise, DiagonalNoise) and not apart:
                variance = noise.variance if variance is None else variance + noise.variance
            else:
                add(noise.label, noise.gram(_whole(g, batch)))
        if variance is not None:
            ahead = _single_identity(entry, readers)
            if ahead is not None:
                carried[id(ahead)] = variance
            else:
                add(label, weighted_gram(g, variance))
        for x, full in entry.surrogate.maps:
            G = full if weight_rank is None else full.low_rank(weight_rank)
            back = G.transpose(g if G.thin else _whole(g, batch))
            waiting[id(x)] = waiting[id(x)] + back if id(x) in waiting else back
            if id(x) in bending:
                _add(bends, id(x), bend_back(sweep, entry, x, full, g, c, batch))
        for origin, both in entry.surrogate.crossed:
            if origin.value in bending:
                _add(bends, origin.value, 2 * both.transpose(_whole(g, batch)))
    for label, pulled in shared.values():
        add(label, inner(pulled, pulled))
    for name, value, seen in inputs:
        g = waiting.get(id(seen))
        if g is None:
            continue
        g = _whole(g, batch)
        _tell(met, seen, g, None, batch)
        left = carried.pop(id(seen), None)
        if left is not None:
            add("noise", weighted_gram(g, left))
        if value.diag is not None:
            add(name, weighted_gram(g, value.diag))
        if value.factor is not None:
            weights = inner(g, value.factor)
            add(name, weights @ weights.mT)
    return parts


def bending_values(sweep: Sweep) -> set[int]:
    """Values whose curvatures reach a skewed noise."""
    ids: set[int] = set()
    for entry in sweep.tape:
        skewed = any(noise.skewed for noise in entry.surrogate.noises)
        if skewed or any(id(x) in ids for x, _ in entry.surrogate.maps):
            ids.add(id(entry.value))
    return ids


def bend_back(
    sweep: Sweep, entry: Entry, x: Value, G: LinearMap, g: Tensor, c: Tensor | None, batch: int
) -> Tensor | None:
    """Curvatures at the argument x of an operation, from covectors g and curvatures c at its result.

    What its map or the operation itself does not tell of is noted in the sweep.
    """
    curvature = None
    if c is not None:
        squared = G.power(2)
        if isinstance(squared, Unavailable):
            sweep.note(entry.step, f"secants: curvatures stop here, {squared.reason}")
        else:
            curvature = squared.transpose(c if squared.thin else _whole(c, batch))
    second = entry.surrogate.second
    if second is None and entry.curved and not entry.surrogate.crossed:
        sweep.note(entry.step, "secants: its own second derivatives are not known, and left out")
    if second is not None and x is entry.surrogate.maps[0][0]:
        diagonal = second.diagonal(_whole(g, batch))
        curvature = diagonal if curvature is None else curvature + diagonal
    return curvature


def _backwards(tape: list[Entry], last: bool) -> Iterator[Entry]:
    """The lines of a tape from its end, which is cut off as it is read if nobody will read it again."""
    if not last:
        yield from reversed(tape)
    while last and tape:
        yield tape.pop()


def _tell(met: dict[int, Any] | None, value: Value, g: Tensor, c: Tensor | None, batch: int) -> None:
    if met is not None and id(value) in met:
        met[id(value)] = _whole(g, batch), None if c is None else _whole(c, batch)


def _add(waiting: dict[int, Tensor], at: int, part: Tensor | None) -> None:
    if part is not None:
        waiting[at] = waiting[at] + part if at in waiting else part


def _single_identity(entry: Entry, readers: dict[int, int]) -> Value | None:
    """The argument, if the operation only adds noise to it and nobody else reads it."""
    if len(entry.surrogate.maps) != 1:
        return None
    ((x, G),) = entry.surrogate.maps
    return x if isinstance(G, Identity) and readers.get(id(x)) == 1 else None


def _whole(g: Tensor, batch: int) -> Tensor:
    """Covectors for every input."""
    return g if g.shape[1] == batch else g.expand(g.shape[0], batch, *g.shape[2:])


def total(parts: dict[str, Tensor], like: Tensor, k: int) -> Tensor:
    """The sum over sources, (batch, k, k); zeros where there is no source at all."""
    result: Tensor | None = None
    for part in parts.values():
        result = part if result is None else result + part
    if result is None:
        return like.new_zeros(like.shape[0], k, k)
    return result.to(like.dtype).expand(like.shape[0], k, k)


def all_outputs(mean: Tensor) -> Tensor:
    """One covector per output entry: the identity, (n, 1, *event), the same for every input."""
    n = mean[0].numel() if mean.shape[0] else mean.flatten(1).shape[1] if mean.ndim > 1 else 1
    eye = torch.eye(n, dtype=mean.dtype, device=mean.device)
    return eye.reshape(n, 1, *mean.shape[1:])
