"""Pairs: what two draws do to one activation together.

With u the linear image of all draws at the input of an activation f, and g the covector behind it, the second Hermite
term of the output is ½ Σ_j b_j (u_j² − Var u_j), b = g∘E[f″]. Over draws k and l, with x_jk their images,

    Σ_{k<l} H_kl ε_k ε_l,   H_kl = Σ_j b_j x_jk x_jl,   of variance Σ_{k<l} H_kl² for draws of variance one.

What k = l would add is in the secants, for noise of two values, or in the activation's own residual. Of the residual,
all that is counted here or in the secants is taken out: what the expansion to second order gives to a single entry,

    ½E[f″]²((v − d)² − u² − o²)      beside what secants explain (`favour.scalar.effective`),

with u the variance of the entry's effective draw of two values, if its mean and variance behind f know of one. o is the
variance of Gaussian draws that an entry has to itself (a mean-field layer's noise up to the next linear map), which
make no pairs, and d that of draws without an image, which are neither element-wise nor have a latent vector
(`DenseNoise`, `RotatedNoise`).

All n² numbers H_kl are not formed: every draw gets a random sign and one of P groups, and the images u_p of the groups
go forward once, for all covectors. Then

    M_pq = Σ_j b_j u_pj u_qj = Σ_{k in p, l in q} H_kl s_k s_l,   E[M_pq²] = Σ_{k in p, l in q} H_kl²,

so that Σ_{p<q} M_pq² misses the pairs within a group only, of n draws (n/P − 1)/(n − 1), and is scaled up by that. As a
Gram matrix of the covectors' M it is positive semi-definite. Its relative spread is about 2/P.

Cost in forward passes: P, and 2 for the cumulants, over the part behind the first noise; P² multiplications
per covector and entry before an activation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

from favour.graph.tracing import constant
from favour.methods.forward import Entry, Sweep, unexplained
from favour.surrogate import DiagonalNoise, LatentNoise, Noise, Pointwise, Residual, root
from favour.surrogate.value import Value


class Pairs:
    """Images of the groups of draws at every value of a sweep.

    Args:
        sweep: With its tape.
        inputs: Uncertain inputs as the sweep saw them.
        groups: P ≥ 2.
    """

    def __init__(self, sweep: Sweep, inputs: list[Value], groups: int) -> None:
        self.sweep, self.groups = sweep, groups
        self.images: dict[int, Tensor] = {}
        self.draws: dict[int, int] = {}  # n, of an image
        self.entry_variances: dict[int, Tensor] = {}  # o
        self.unseen: dict[int, Tensor] = {}  # d
        shared: dict[Hashable, int] = {}
        count = 0
        for value in inputs:
            if value.diag is not None:
                self._add(value, self._spread(value.diag, count), math.prod(value.diag.shape[1:]))
                _sum(self.entry_variances, value, value.diag)
                count += 1
        for entry in sweep.tape:
            for x, G in entry.surrogate.maps:
                if id(x) in self.images:
                    self._add(entry.value, G.apply(self.images[id(x)]), self.draws[id(x)])
                alike = math.prod(x.mean.shape[1:]) == math.prod(entry.value.mean.shape[1:])
                if id(x) in self.entry_variances and G.one_per_column and alike:
                    _sum(self.entry_variances, entry.value, G.square(self.entry_variances[id(x)]))
                if id(x) in self.unseen:
                    _sum(self.unseen, entry.value, G.square(self.unseen[id(x)]))
            for noise in entry.surrogate.noises:
                seed = count if noise.key is None else shared.setdefault(noise.key, count)
                count += 1
                if isinstance(noise, DiagonalNoise):
                    image = self._spread(noise.variance.expand(entry.value.mean.shape), seed)
                    self._add(entry.value, image, math.prod(image.shape[2:]))
                    if noise.cumulants is None:
                        _sum(self.entry_variances, entry.value, noise.variance)
                elif isinstance(noise, LatentNoise):
                    shape = noise.latent_shape
                    z = self._signs(shape, entry.value.mean, seed)
                    image = noise.push(z.expand(-1, entry.value.mean.shape[0], *shape))
                    self._add(entry.value, image, math.prod(shape))
                else:
                    _sum(self.unseen, entry.value, noise.diag())

    def _add(self, value: Value, image: Tensor, draws: int) -> None:
        _sum(self.images, value, image)
        self.draws[id(value)] = self.draws.get(id(value), 0) + draws

    def _spread(self, variance: Tensor, seed: int) -> Tensor:
        spread = root(variance)
        return spread * self._signs(tuple(spread.shape[1:]), spread, seed)

    def _signs(self, event: tuple[int, ...], like: Tensor, seed: int) -> Tensor:
        """(P, 1, *event): a sign in the group of each draw, 0 in the others."""
        return _signs(self.groups, tuple(int(s) for s in event), seed).to(like).unsqueeze(1)

    def at(self, entry: Entry, g: Tensor) -> tuple[str, Tensor, list[Noise]] | None:
        """For covectors g behind an activation: a label, the pairs' covariance and the noises that are left."""
        if len(entry.surrogate.maps) != 1:
            return None
        ((x, _),) = entry.surrogate.maps
        u = self.images.get(id(x))
        if u is None:
            return None
        second = entry.surrogate.second
        if not isinstance(second, Pointwise):
            if second is not None or entry.curved:
                self.sweep.note(entry.step, "pairs: what two draws do here together is left out")
            return None
        curvature = second.curvature()
        one, two = torch.triu_indices(self.groups, self.groups, 1, device=u.device).unbind()
        M = second.forms(g, u)[..., one, two]  # (batch, F, P(P − 1)/2)
        seen = x.variance - self.unseen[id(x)] if id(x) in self.unseen else x.variance
        paired = seen.clamp_min(0).square()
        if id(x) in self.entry_variances:
            paired = (paired - self.entry_variances[id(x)].square()).clamp_min(0)
        for noise in entry.surrogate.noises:
            if isinstance(noise, Residual) and noise.draw is not None:
                paired = (paired - noise.draw.variance.square()).clamp_min(0)
        left = unexplained(entry.surrogate.noises, 0.5 * curvature.square() * paired)
        n = self.draws[id(x)]
        missed = max(0.0, n / self.groups - 1) / max(1, n - 1)
        label = next((noise.label for noise in entry.surrogate.noises), "noise")
        return label, (M @ M.mT) / (1 - missed), left


def _sum(totals: dict[int, Tensor], value: Value, part: Tensor) -> None:
    known = totals.get(id(value))
    totals[id(value)] = part if known is None else known + part


@functools.cache
def _table(groups: int, size: int, seed: int) -> np.ndarray:
    random = np.random.Generator(np.random.PCG64([seed, groups]))
    group = random.permutation(size) % groups
    signs = random.integers(0, 2, size) * 2 - 1
    table = np.zeros((groups, size), np.float32)
    table[group, np.arange(size)] = signs
    return table


@constant
def _signs(groups: int, event: tuple[int, ...], seed: int) -> Tensor:
    return torch.from_numpy(_table(groups, math.prod(event), seed)).reshape(groups, *event)
