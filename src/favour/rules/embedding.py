"""Looking up: rows of a table, entries of an uncertain tensor by known indices, parameters that are simply added.

**Embedding** with a mean-field posterior on its table, y_t = E[i_t]. A token that occurs twice in an input reads the
same random row twice: with f(t) the first position of token i_t,

    m_t = Ē[i_t],    n_t = σ[i_t] ∘ z_f(t),    so Cov[n_t, n_t′] = diag(σ²[i_t]) if i_t = i_t′, else 0.

Several lookups in one table share rows the same way: f(t) looks through the earlier lookups first. A table that is
also a layer's weight (an output layer tied with the embedding), or whose entries are correlated, keeps its draws in
weight space, n_t = (Rz)[i_t] with Rz the whole table (`weight_space`): as many numbers as the table has for each
covector and input. A bag of embeddings is a lookup and a sum (`favour.passes.normalise.decompose`).

**An added parameter**, y = x + p with p ~ N(p̄, diag σ²) (positions, biases): n = σ ∘ z, broadcast to y like p itself.

**Indexing** with known indices copies entries: linear, exact, transposed by adding up what went to several places.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits
from favour.rules.registry import rule
from favour.rules.weight_space import held, reshaped
from favour.surrogate import (
    DiagonalNoise,
    LatentNoise,
    Noise,
    Surrogate,
    factor_noise,
    partners,
    structural,
)
from favour.surrogate.value import Context, Value, Weight

aten = torch.ops.aten


@rule(
    aten.embedding.default,
    exactness="exact",
    family="embedding",
    weights=True,
    traits=Traits(weights=(0,), lookup=lambda table, index, *options: [(index, table, 0, False)]),
)
def embedding(ctx: Context, table: Argument, indices: Argument, *options: Argument) -> Surrogate:
    if not isinstance(table, Weight) or isinstance(indices, Value):
        raise UnsupportedOperation(
            f"an embedding at {ctx.place} has an uncertain index, or a table that was computed from uncertain values; "
            "only a table that is a parameter with a posterior has a rule."
        )
    made = Surrogate(table.mean[indices])
    noises = made.noises
    for part in table.draws:
        assert part.gaussian is not None
        if part.gaussian.independent and not part.mixed:
            noises += _row_noises(part, part.gaussian.variance().sqrt()[indices], indices)
            made.readings[part.name] = indices.reshape(indices.shape[0], -1)
        else:
            noises.append(_table_noise(ctx, part, indices))
    if table.latents is not None:
        noises.append(factor_noise(table.latents[:, indices], "latents", table.name))
    return made


def _row_noises(table: Weight, sigma: Tensor, indices: Tensor) -> list[Noise]:
    """n_t = σ_t ∘ z_f(t), sigma (batch, *positions, d): rows met in an earlier lookup have their draws there."""
    tokens = indices.reshape(indices.shape[0], -1)  # (batch, T)
    fresh = torch.ones_like(tokens, dtype=torch.bool)
    noises: list[Noise] = []
    for i, owner in enumerate([*table.earlier, tokens]):
        place, matches = _first(tokens, owner)
        key = (table.name, "lookup", i) if table.uses > 1 else None
        noises.append(_owned_rows(sigma, place, matches & fresh, owner.shape[1], key, table.name))
        fresh = fresh & ~matches
    return noises


def _first(tokens: Tensor, owner: Tensor) -> tuple[Tensor, Tensor]:
    """For every token the first place where `owner` has it, and whether it has; (batch, T) each."""
    same = tokens.unsqueeze(2) == owner.unsqueeze(1)
    count = owner.shape[1]
    places = torch.arange(count, device=tokens.device)
    first = torch.where(same, places, count).amin(2)
    return first.clamp_max(count - 1), first < count


def _owned_rows(sigma: Tensor, place: Tensor, mine: Tensor, count: int, key: Any, label: str) -> LatentNoise:
    """n_t = σ_t ∘ z_place(t) where `mine` holds, else 0; z has `count` rows."""
    batch, d = sigma.shape[0], sigma.shape[-1]
    shape = sigma.shape[1:]
    scale = sigma * mine.reshape(*sigma.shape[:-1], 1)

    def chosen(folds: int) -> Tensor:
        return place[None, :, :, None].expand(folds, batch, place.shape[1], d)

    def push(z: Tensor) -> Tensor:
        return z.gather(2, chosen(z.shape[0])).reshape(z.shape[0], batch, *shape) * scale

    def pull(g: Tensor) -> Tensor:
        rows = (g * scale).reshape(g.shape[0], batch, place.shape[1], d)
        return rows.new_zeros(g.shape[0], batch, count, d).scatter_add(2, chosen(g.shape[0]), rows)

    return LatentNoise(push, pull, scale.square(), (count, d), key, label)


def _table_noise(ctx: Context, table: Weight, indices: Tensor) -> LatentNoise:
    """n_t = (R z)[i_t], the whole table's draws in weight space, as other uses of the table hold them."""
    assert table.gaussian is not None
    space = held(ctx, table)
    rows, d = table.mean.shape
    batch, shape = indices.shape[0], indices.shape[1:]
    tokens = indices.reshape(batch, -1)

    def chosen(folds: int) -> Tensor:
        return tokens[None, :, :, None].expand(folds, batch, tokens.shape[1], d)

    def push(z: Tensor) -> Tensor:
        return space.push(z.squeeze(2)).gather(2, chosen(z.shape[0])).reshape(z.shape[0], batch, *shape, d)

    def pull(g: Tensor) -> Tensor:
        seen = g.reshape(g.shape[0], batch, tokens.shape[1], d)
        whole = seen.new_zeros(g.shape[0], batch, rows, d).scatter_add(2, chosen(g.shape[0]), seen)
        return space.pull(whole).unsqueeze(2)

    key = (table.name, "mean") if table.uses > 1 else None
    variances = table.gaussian.variance()[indices]

    def between(c: Tensor | None, q: int) -> Noise:  # of the same row; what correlates rows is left out here
        same = (partners(indices, q) == indices).unsqueeze(-1)
        return DiagonalNoise((variances * same).expand(q, *variances.shape).flatten(0, 1))

    latent = (1, *space.latent_shape)
    return LatentNoise(push, pull, variances, latent, key, table.name, drawn=True, between=between)


def added_noises(ctx: Context, weight: Argument, like: Tensor, factor: float) -> list[Noise]:
    """The noises that adding `factor`·weight brings to a tensor like this."""
    if not isinstance(weight, Weight):
        return []
    shape, out = tuple(weight.mean.shape), like.shape
    inner = shape[1:] if len(shape) == len(out) else shape
    if len(shape) == len(out) and shape[0] != 1:
        raise UnsupportedOperation(
            f"`{weight.name}` of shape {shape} at {ctx.place} has a posterior and a row for each input of the batch; "
            "predictions are per input."
        )
    wide = (*[1] * (len(out) - 1 - len(inner)), *inner)
    summed = [i + 2 for i, (a, b) in enumerate(zip(wide, out[1:], strict=True)) if a != b]

    def spread(p: Tensor) -> Tensor:
        return p.reshape(*p.shape[:2], *wide)

    def pull(g: Tensor) -> Tensor:
        return (g.sum(summed, keepdim=True) if summed else g).reshape(*g.shape[:2], *shape)

    noises: list[Noise] = []
    for part in weight.draws:
        noises.append(reshaped(part, spread, pull, like, held(ctx, part), factor))
    if weight.latents is not None:
        columns = factor * spread(weight.latents.unsqueeze(1)).expand(-1, *out)
        noises.append(factor_noise(columns, "latents", weight.name))
    return noises


def _separated(indices: Sequence[Any]) -> bool:
    """Whether a slice stands between index tensors: torch then puts the indexed dimensions in front of all others."""
    places = [i for i, index in enumerate(indices) if index is not None]
    return places[-1] - places[0] >= len(places)


def _looked_up(x: Argument, indices: Sequence[Any]) -> list[tuple[Any, Any, int, bool]]:
    return [(index, x, axis, True) for axis, index in enumerate(indices)]


@rule(aten.index.Tensor, exactness="exact", family="embedding", traits=Traits(within=True, lookup=_looked_up))
def index(ctx: Context, x: Argument, indices: Sequence[Any]) -> Surrogate:
    """x[:, i, j]: the batch first, or picked by `arange(batch)`, which export leaves as an index."""
    known = [i for i in indices if i is not None]
    if not isinstance(x, Value) or any(isinstance(i, Value) for i in known):
        raise UnsupportedOperation(f"indexing at {ctx.place} with an uncertain index has no rule.")
    if any(i.dtype in (torch.bool, torch.uint8) for i in known):
        raise UnsupportedOperation(
            f"indexing at {ctx.place} with a mask makes a result whose size depends on values; use `torch.where`."
        )
    batch, shape = x.mean.shape[0], x.mean.shape
    if indices[0] is not None:
        _check_rows(ctx, indices[0], batch)
    if _separated(indices):
        raise UnsupportedOperation(
            f"indexing at {ctx.place} with tensors that a slice separates moves the batch from the front; index one "
            "dimension after the other."
        )
    mean = aten.index.Tensor(x.mean, list(indices))
    folded = [None, *indices]

    def put(g: Tensor) -> Tensor:
        return aten.index_put.default(g.new_zeros(g.shape[0], *shape), folded, g, True)

    G = structural(
        lambda d: aten.index.Tensor(d, folded), put, one_per_row=True, disjoint=False, alike=indices[0] is None
    )
    return Surrogate(mean, [(x, G)])


def _check_rows(ctx: Context, rows: Tensor, batch: int) -> None:
    """An index of the batch must be arange(batch), each input its own."""
    if rows.ndim and rows.shape[0] == batch and torch.compiler.is_compiling():
        return
    positions = torch.arange(batch, device=rows.device).reshape(-1, *[1] * max(rows.ndim - 1, 0))
    if rows.ndim == 0 or rows.shape[0] != batch or not bool((rows == positions).all()):
        raise UnsupportedOperation(
            f"indexing at {ctx.place} picks from dimension 0, the batch ({batch}), with an index of shape "
            f"{tuple(rows.shape)}; predictions are per input. Only `torch.arange(batch)` may stand there."
        )


@rule(
    aten.gather.default,
    exactness="exact",
    family="embedding",
    traits=Traits(within=True, lookup=lambda x, dim, index, **rest: [(index, x, dim, False)]),
)
def gather(ctx: Context, x: Argument, dim: int, index: Argument, *, sparse_grad: bool = False) -> Surrogate:
    if not isinstance(x, Value) or isinstance(index, Value):
        raise UnsupportedOperation(f"`gather` at {ctx.place} with an uncertain index has no rule.")
    dim = dim % x.mean.ndim
    shape = x.mean.shape
    if dim == 0:
        raise UnsupportedOperation(
            f"`gather` at {ctx.place} picks from dimension 0 of a tensor of shape {tuple(shape)}, the batch; "
            "predictions are per input."
        )

    def folded(t: Tensor) -> Tensor:
        return index.unsqueeze(0).expand(t.shape[0], *index.shape)

    def put(g: Tensor) -> Tensor:
        return g.new_zeros(g.shape[0], *shape).scatter_add(dim + 1, folded(g), g)

    G = structural(lambda d: d.gather(dim + 1, folded(d)), put, one_per_row=True, disjoint=False, alike=False)
    return Surrogate(x.mean.gather(dim, index), [(x, G)])
