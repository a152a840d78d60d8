"""The reverse sweep: the output covariance without compressing anything on the way.

A forward sweep gives every operation its surrogate. Then covectors g, one per output direction, go back through the
transposed maps; covectors add where paths meet. With A_s the accumulated covectors at noise source s,

    Σ_out = Σ_s A_s N_s A_sᵀ.

Nothing is truncated: for given surrogates this is the exact covariance, residual branches and tied parameters included.
A draw shared by several operations (equal `Noise.key`) collects Bᵀg over all of them before its Gram matrix is taken.

The sum over sources is the attribution of the variance.

Cost in forward passes, for k covectors: 2 for means and variances, and k for the way back.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from favour.methods.forward import Sweep
from favour.surrogate import LatentNoise, inner
from favour.value import Value


def reverse(
    sweep: Sweep, output: Value, covectors: Tensor, inputs: list[tuple[str, Value, Value]]
) -> dict[str, Tensor]:
    """Covariance of the outputs in the given directions, by source.

    Args:
        sweep: A forward sweep with its tape.
        output: The value whose covariance is wanted.
        covectors: (k, batch, *event).
        inputs: Uncertain inputs: name, the value as given (its covariance is exact) and the value the sweep saw.

    Returns:
        Source label to (batch, k, k). Their sum is the covariance.
    """
    waiting: dict[int, Tensor] = {id(output): covectors}
    parts: dict[str, Tensor] = {}
    shared: dict[Hashable, tuple[str, Tensor]] = {}

    def add(label: str, gram: Tensor) -> None:
        parts[label] = parts[label] + gram if label in parts else gram

    for entry in reversed(sweep.tape):
        g = waiting.pop(id(entry.value), None)
        if g is None:
            continue
        for noise in entry.surrogate.noises:
            if noise.key is None:
                add(noise.label, noise.gram(g))
            else:
                assert isinstance(noise, LatentNoise)
                pulled = noise.pull(g)
                label, total = shared.get(noise.key, (noise.label, None))
                shared[noise.key] = (label, pulled if total is None else total + pulled)
        for x, G in entry.surrogate.maps:
            back = G.transpose(g)
            waiting[id(x)] = waiting[id(x)] + back if id(x) in waiting else back
    for label, pulled in shared.values():
        add(label, inner(pulled, pulled))
    for name, value, seen_value in inputs:
        g = waiting.get(id(seen_value))
        if g is None:
            continue
        if value.diag is not None:
            add(name, inner(g * value.diag, g))
        if value.factor is not None:
            seen = inner(g, value.factor)
            add(name, seen @ seen.mT)
    return parts


def total(parts: dict[str, Tensor], like: Tensor, k: int) -> Tensor:
    """The sum over sources, (batch, k, k); zeros where there is no source at all."""
    result: Tensor | None = None
    for part in parts.values():
        result = part if result is None else result + part
    return like.new_zeros(like.shape[0], k, k) if result is None else result


def all_outputs(mean: Tensor) -> Tensor:
    """One covector per output entry: the identity, (n, batch, *event)."""
    n = mean[:1].numel() if mean.shape[0] else mean.flatten(1).shape[1]
    eye = torch.eye(n, dtype=mean.dtype, device=mean.device)
    return eye.reshape(n, 1, *mean.shape[1:]).expand(n, *mean.shape)
