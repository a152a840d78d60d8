"""Draws of the network, pooled by what a sweep of variances says: many outputs, each with its own variance.

A sweep of variances knows where an output is uncertain and not how much: entries of a picture share noise, and what
neighbours do together is lost. n draws know how much, and for each entry by itself badly: the relative error of a
variance from n draws is √(2/n). So with d the variances of the sweep and s² those of the draws, the ratio

    ρ = s²/d

is estimated as a field that is mostly smooth. Averages of it over more and more entries, A_0 (each entry), A_1, …, A_K
(all of them; in between neighbourhoods that double, within a channel, and whole channels) take it apart,

    ρ = A_K + (A_{K−1} − A_K) + … + (A_0 − A_1),

with averages weighted by d, A = (blur of s²)/(blur of d). Each difference Δ is an average over draws, so the draws say
how well it is known: with E its energy Σ d²Δ² and N the part of it that is noise (the spread over draws, divided by n),
James and Stein's factor (1 − N/E)₊ keeps what is more than noise. Of detail that the sweep has right nothing is left
but its noise, which goes; where the sweep is wrong in every entry the result is s². The variance is d times that sum,
never much worse than the draws alone, and better the more the sweep knows. d itself is first fitted to s² by a factor
and a constant (least squares, neither negative): where the sweep calls an entry certain its neighbours' noise counts.
Decoders leave a pattern that repeats every second or fourth entry: averages over entries of one phase come before the
neighbourhoods.

Means likewise: (ȳ − m)/σ, with m the sweep's, in the same differences.

The covariance between outputs is that of the draws, less than all of it: Σ = (1 − α) diag v + α S R̂ S, with R̂ the
sample correlation, S the square roots of v, and α the share of ‖R̂‖²'s off-diagonal part that is more than noise,
E R̂_ij² = 1/(n − 1) for independent entries.

Masks are the same for every input of a batch, so that the belief over one does not depend on the others; those of whole
channels are balanced over the draws (`MaskSource`). Gradients: the
ratio and the correction of the mean are held constant, and variances and means move with those of the sweep.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import DiagonalPlusFactor
from favour.graph.node import Node
from favour.methods.cost import output_entries, sweep_and_columns, uncertain_share
from favour.methods.diag import VARIANCES
from favour.methods.forward import DiagonalOnly, forward
from favour.methods.method import Bound, Method, Numerics, belief_of, check_whole, register
from favour.methods.sampling import drawn_outputs
from favour.passes.plan.steps import Plan
from favour.surrogate import flat
from favour.surrogate.value import Value

# A ratio below this is noise of few draws.
LEAST = 0.05

# Entries along an axis from which on averages over those of one phase are means of several.
PERIODS = 16

Blur = Callable[[Tensor], Tensor]


@register
@dataclass(frozen=True, eq=False, repr=False)
class Pooled(Method):
    """A sweep of variances, and n draws to correct it. Cannot be compiled or exported: it makes random numbers.

    Args:
        n: Number of draws.
    """

    name = "pooled"
    fixed = False

    n: int = 20

    def run(self, bound: Bound) -> list[Any]:
        with torch.no_grad():
            drawn = drawn_outputs(bound, self.n, alike=True)
        sweep = forward(bound, DiagonalOnly(*VARIANCES))
        results = []
        for planned, draws in zip(bound.plan.outputs, drawn, strict=True):
            value = sweep.result(planned)
            real = isinstance(planned, Node) and isinstance(value, Value) and isinstance(draws, Tensor)
            results.append(corrected(value, draws) if real else belief_of(value))
        return results

    def draws(self, bound: Bound, n: int | None) -> Tensor | None:
        return drawn_outputs(bound, self.n if n is None else max(n, 2), alike=True)[0]

    def cost(self, plan: Plan) -> float:
        return sweep_and_columns(plan, 0, 0) + self.n * uncertain_share(plan)

    def memory(self, plan: Plan) -> int:
        return super().memory(plan) + 4 * self.n * output_entries(plan)

    def held(self) -> str:
        return (
            f"A forward sweep holds variances only; {self.n} draws of the network correct means and variances as far "
            "as they are more than noise, and are all that is known of correlations."
        )

    def untried(self) -> str:
        return f"more draws, favour.methods.Pooled(n={4 * self.n}), or method='adjoint', which keeps all correlations"

    def validate(self, numerics: Numerics) -> None:
        check_whole("n", self.n, 3)


def corrected(value: Value, draws: Tensor) -> Belief:
    """The belief of a sweep, corrected by draws (n, batch, *event)."""
    if value.mean.ndim == 1:  # one number for each input
        alone = corrected(Value(value.mean.unsqueeze(1), value.variance.unsqueeze(1)), draws.unsqueeze(2))
        return Belief(alone.mean.squeeze(1), diag=alone.variance.squeeze(1), validate=False)
    wide = torch.promote_types(value.mean.dtype, torch.float32)  # squares of variances are 0 in float16
    if wide != value.mean.dtype:
        exact = corrected(Value(value.mean.to(wide), value.variance.to(wide)), draws.to(wide))
        return exact.to(value.mean.dtype)
    n, mean, variance = len(draws), value.mean, value.variance
    with torch.no_grad():
        centred = draws - draws.mean(0)
        squares = _grouped(centred.square()) * (n / (n - 1))
        fitted = _fit(squares.mean(0), variance)
        wider = widening(mean.shape)
        fitted = fitted * (1 + _repeated(squares - fitted, fitted)).clamp_min(LEAST)
        ratio = 1 + pooled(squares - fitted, fitted, wider, fitted.square())
        made = fitted * ratio.clamp_min(LEAST)
        scale = made.sqrt().clamp_min(torch.finfo(made.dtype).tiny)
        ones = torch.ones_like(mean)
        moved = pooled((_grouped(draws) - mean) / scale, ones, wider, ones) * scale
        columns = _columns(centred, squares.mean(0), made)
        rest = made - columns.square().sum(0)
    if variance.requires_grad:  # 1, with the gradient of the sweep's variance, where there is one
        share = torch.where(variance > 0, variance / variance.detach().clamp_min(torch.finfo(made.dtype).tiny), 1.0)
        rest, columns = rest * share, columns * share.sqrt()
    return Belief(mean + moved, covariance=DiagonalPlusFactor(rest.clamp_min(0), columns), validate=False)


def grouping(n: int) -> int:
    """In how many groups of one size n draws go: 4 to 8, or each by itself where that does not divide them."""
    return next((g for g in range(8, 3, -1) if n % g == 0), n)


def _grouped(draws: Tensor) -> Tensor:
    """Means of groups of draws: they tell the noise as well as the draws, for less."""
    return draws.unflatten(0, (grouping(len(draws)), -1)).mean(1)


def pooled(draws: Tensor, d: Tensor, wider: list[Blur], weight: Tensor) -> Tensor:
    """The mean over draws of draw/d, each difference between averages kept as far as it is more than noise.

    Args:
        draws: (n, batch, *event).
        d: (batch, *event), positive.
        wider: From the entries to averages over all of them; see `widening`.
        weight: Of the squares of differences, (batch, *event).
    """
    n, event = len(draws), tuple(range(1, d.ndim))
    total, fine = torch.zeros_like(d), draws / d
    for blur in [*wider, None]:
        coarse: Tensor | float = 0.0
        if blur is not None:
            draws, d = blur(draws), blur(d)
            coarse = draws / d
        step = fine - coarse
        mean = step.mean(0)
        noise = ((step - mean).square().sum(0) * weight).sum(event, keepdim=True) / (n * (n - 1))
        energy = (mean.square() * weight).sum(event, keepdim=True)
        total = total + mean * (1 - noise / energy.clamp_min(torch.finfo(d.dtype).tiny)).clamp(0, 1)
        if isinstance(coarse, Tensor):
            fine = coarse
    return total


def widening(shape: torch.Size) -> list[Blur]:
    """For tensors (…, batch, channels, *space), one after the other: neighbourhoods that double, the channel, all."""
    space = len(shape) - 2
    sizes = {i - space: size for i, size in enumerate(shape[2:])}
    blurs: list[Blur] = []
    reach = 1
    while any(size > 2 * reach for size in sizes.values()):
        blurs.append(partial(_blurred, axes=[axis for axis, size in sizes.items() if size > reach], reach=reach))
        reach *= 2
    if space > 0:
        blurs.append(partial(_averaged, axes=list(sizes)))
    return [*blurs, partial(_averaged, axes=[-space - 1, *sizes])]


def _repeated(draws: Tensor, d: Tensor) -> Tensor:
    """`pooled`, of averages over the entries of a channel with one phase, of period 4, 2 and 1, on long axes."""
    axes = [i - d.ndim for i, size in enumerate(d.shape) if i > 1 and size >= PERIODS]
    if not axes:
        return torch.zeros_like(d)
    four, two, one = (partial(_phases, axes=axes, period=period) for period in (4, 2, 1))
    return pooled(four(draws), four(d), [two, one], d.square())


def _phases(t: Tensor, axes: list[int], period: int) -> Tensor:
    """At each entry the sum of those whose places differ by multiples of a period."""
    for axis in axes:
        size = t.shape[axis]
        count = -(-size // period)
        whole = F.pad(t, [*[0] * (2 * (-axis - 1)), 0, count * period - size]).unflatten(axis, (count, period))
        sums = whole.sum(axis - 1, keepdim=True).expand_as(whole)
        t = sums.flatten(axis - 1, axis).narrow(axis, 0, size)
    return t


def _averaged(t: Tensor, axes: list[int]) -> Tensor:
    return t.mean(axes, keepdim=True).expand_as(t)


def _blurred(t: Tensor, axes: list[int], reach: int) -> Tensor:
    for axis in axes:
        t = _neighbours(t, axis, reach)
    return t


def _neighbours(t: Tensor, axis: int, reach: int) -> Tensor:
    """¼t(p − reach) + ½t(p) + ¼t(p + reach) along a negative axis, 0 outside."""
    size, result = t.shape[axis] - reach, t / 2
    result.narrow(axis, reach, size).add_(t.narrow(axis, 0, size), alpha=0.25)
    result.narrow(axis, 0, size).add_(t.narrow(axis, reach, size), alpha=0.25)
    return result


def _fit(s: Tensor, d: Tensor) -> Tensor:
    """a·d + b·(its average over the channel), by least squares over the entries of each input, a and b not negative."""
    event = tuple(range(1, d.ndim))
    space = tuple(range(2, d.ndim)) or event
    tiny = torch.finfo(d.dtype).tiny
    level = d.mean(space, keepdim=True).clamp_min(1e-6 * d.mean(event, keepdim=True) + tiny)
    weight = 1 / (d / level + 0.5).square() / level.square()

    def product(x: Tensor, y: Tensor) -> Tensor:
        return (weight * x * y).sum(event, keepdim=True)

    flat_level = level.expand_as(d)
    dd, db, bb = product(d, d), product(d, flat_level), product(flat_level, flat_level)
    ds, bs = product(d, s), product(flat_level, s)
    determinant = (dd * bb - db * db).clamp_min(tiny)
    a, b = (ds * bb - bs * db) / determinant, (bs * dd - ds * db) / determinant
    lone = (dd * bb - db * db) <= 1e-6 * dd * bb  # d is its own average
    a, b = torch.where((b < 0) | lone, ds / dd.clamp_min(tiny), a), torch.where((a < 0) & ~lone, bs / bb, b)
    a, b = a.clamp_min(0), torch.where(lone, torch.zeros_like(b), b).clamp_min(0)
    return (a * d + b * level).clamp_min(tiny)


def _columns(centred: Tensor, squares: Tensor, variance: Tensor) -> Tensor:
    """√α S R̂^½: what the draws know of correlations, (n, batch, *event)."""
    n, shape = len(centred), (-1, *[1] * (variance.ndim - 1))
    unit = centred / squares.sqrt().clamp_min(torch.finfo(variance.dtype).tiny) / (n - 1) ** 0.5
    rows = flat(unit)  # (n, batch, entries)
    entries = rows.shape[-1]
    off = torch.einsum("nbi,mbi->bnm", rows, rows).square().sum((1, 2)) - entries  # of ‖R̂‖², without its diagonal
    noise = entries * (entries - 1) / (n - 1)
    share = ((off - noise) / off.clamp_min(torch.finfo(variance.dtype).tiny)).clamp(0, 1 - 1 / n)
    return unit * (share.reshape(shape) * variance).sqrt()
