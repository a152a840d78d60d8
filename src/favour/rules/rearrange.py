"""More operations that move numbers about: windows, diagonals, triangles, running sums, rolling, tiling, scattering.

All are linear with constant entries, so exact; see `shape` for the conventions. None may touch dimension 0, the batch.

    cumsum        y_i = Σ_{j ≤ i} x_j,               transposed: the running sum from the end
    diff          y_i = x_{i+1} − x_i,               transposed: −g_i + g_{i−1}
    unfold        y_wk = x_{w·step + k},             transposed: add up what went to several windows
    triu, tril    a mask, its own transpose
    scatter_add   y = x + Sᵀ source, index_add too,  transposed: g, and the entries of g at the indices
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits
from favour.rules.joined import cat, pieces_of
from favour.rules.registry import linear_map, rule
from favour.rules.shape import (
    COPIED,
    PERMUTED,
    SWAPPED,
    WITHIN,
    broadcast,
    expanded,
    permuting,
    swapped,
)
from favour.surrogate import LinearMap, Sum, Surrogate, compose, identity, scaling, structural
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten


def _event(x: Tensor, dim: int, what: str) -> int:
    """A dimension that is not the batch, counted from the front."""
    dim = dim % x.ndim
    if dim == 0:
        raise UnsupportedOperation(
            f"`{what}` over dimension 0 of a tensor of shape {tuple(x.shape)} mixes the inputs of a batch; predictions "
            "are per input. Use another dimension."
        )
    return dim


def _last_two(x: Tensor) -> list[int]:
    return swapped(x, -2, -1)


def _move_list(x: Tensor, source: Sequence[int], destination: Sequence[int]) -> list[int]:
    to = {d % x.ndim: s % x.ndim for s, d in zip(source, destination, strict=True)}
    rest = iter([d for d in range(x.ndim) if d not in to.values()])
    return [to[d] if d in to else next(rest) for d in range(x.ndim)]


# The conjugate transpose of a real matrix is its transpose.
linear_map(
    aten.mT.default, aten.mH.default, aten.adjoint.default, make=permuting(_last_two), family="shape", traits=PERMUTED
)
linear_map(aten.movedim.intlist, make=permuting(_move_list), family="shape", traits=PERMUTED)
linear_map(aten.swapdims.default, make=permuting(swapped), family="shape", traits=SWAPPED)
linear_map(aten.positive.default, make=lambda x: (x, identity()), family="arithmetic", traits=COPIED)


def _broadcast_to(x: Tensor, size: Sequence[int]) -> tuple[Tensor, LinearMap]:
    return expanded(x, size)


linear_map(aten.broadcast_to.default, make=_broadcast_to, family="shape", traits=WITHIN)


def _roll(x: Tensor, shifts: Sequence[int], dims: Sequence[int] = ()) -> tuple[Tensor, LinearMap]:
    if not dims:
        raise UnsupportedOperation(
            f"`roll` of a tensor of shape {tuple(x.shape)} without dimensions rolls through dimension 0, the batch; "
            "name the dimensions."
        )
    folded = [_event(x, d, "roll") + 1 for d in dims]
    there, back = list(shifts), [-s for s in shifts]
    return x.roll(there, list(dims)), structural(
        lambda d: d.roll(there, folded), lambda g: g.roll(back, folded), one_per_row=True
    )


linear_map(aten.roll.default, make=_roll, family="shape", traits=WITHIN)


def _rotate(x: Tensor, k: int = 1, dims: Sequence[int] = (0, 1)) -> tuple[Tensor, LinearMap]:
    plane = [_event(x, d, "rot90") + 1 for d in dims]
    return x.rot90(k, list(dims)), structural(
        lambda d: d.rot90(k, plane), lambda g: g.rot90(-k, plane), one_per_row=True
    )


linear_map(aten.rot90.default, make=_rotate, family="shape", traits=WITHIN)


def _interleave(
    x: Tensor, repeats: int, dim: int | None = None, *, output_size: Argument = None
) -> tuple[Tensor, LinearMap]:
    if dim is None:
        raise UnsupportedOperation(
            f"`repeat_interleave` of a tensor of shape {tuple(x.shape)} without a dimension flattens dimension 0, the "
            "batch; name a dimension."
        )
    at = _event(x, dim, "repeat_interleave") + 1

    def transpose(g: Tensor) -> Tensor:
        return g.unflatten(at, (g.shape[at] // repeats, repeats)).sum(at + 1)

    y = x.repeat_interleave(repeats, dim)
    return y, structural(lambda d: d.repeat_interleave(repeats, at), transpose, one_per_row=True, disjoint=repeats == 1)


linear_map(aten.repeat_interleave.self_int, make=_interleave, family="shape", traits=WITHIN)


def _triangle(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, LinearMap]]:
    def make(x: Tensor, diagonal: int = 0) -> tuple[Tensor, LinearMap]:
        if x.ndim < 3:
            _event(x, 0, "triu or tril")
        mask = op(x.new_ones(x.shape[-2:]), diagonal)
        return op(x, diagonal), scaling(mask)

    return make


linear_map(aten.triu.default, make=_triangle(torch.triu), family="shape")
linear_map(aten.tril.default, make=_triangle(torch.tril), family="shape")


def _cumsum(x: Tensor, dim: int, *, dtype: Argument = None) -> tuple[Tensor, LinearMap]:
    at = _event(x, dim, "cumsum") + 1

    def transpose(g: Tensor) -> Tensor:
        return g.flip(at).cumsum(at).flip(at)

    return x.cumsum(dim), structural(
        lambda d: d.cumsum(at), transpose, disjoint=x.shape[at - 1] < 2, name=("cumsum", at)
    )


linear_map(aten.cumsum.default, make=_cumsum, family="reduction")


def _diff(
    x: Tensor, n: int = 1, dim: int = -1, prepend: Argument = None, append: Argument = None
) -> tuple[Tensor, LinearMap]:
    if n != 1 or prepend is not None or append is not None:
        raise UnsupportedOperation(
            f"`diff` of a tensor of shape {tuple(x.shape)}, of order {n} or with rows before or behind it, has no "
            "rule; use order 1, and `torch.cat` before it, over any but dimension 0, the batch."
        )
    at = _event(x, dim, "diff") + 1

    count = x.shape[at - 1] - 1

    def shifted(by: int) -> LinearMap:
        """All entries but the last, or but the first: one from each."""

        def back(g: Tensor) -> Tensor:
            zero = torch.zeros_like(g.narrow(at, 0, 1)) if count > 0 else g.new_zeros(x.unsqueeze(0).shape)
            return torch.cat([zero, g] if by else [g, zero], at)

        return structural(lambda d: d.narrow(at, by, count), back, one_per_row=True, name=("shifted", at, by))

    return x.diff(dim=dim), Sum(shifted(1), compose(scaling(-1.0), shifted(0)))


linear_map(aten.diff.default, make=_diff, family="reduction")


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> tuple[Tensor, LinearMap]:
    one, two = _event(x, dim1, "diagonal") + 1, _event(x, dim2, "diagonal") + 1
    before = x.shape

    def put(g: Tensor) -> Tensor:
        return aten.diagonal_scatter.default(g.new_zeros(g.shape[0], *before), g, offset, one, two)

    return x.diagonal(offset, dim1, dim2), structural(lambda d: d.diagonal(offset, one, two), put, one_per_row=True)


def _diagonal_back(base: Any, value: Any, *rest: Any) -> tuple[Any, tuple]:
    return aten.diagonal_scatter.default, (base, value, *rest)


linear_map(aten.diagonal.default, make=_diagonal, family="shape", traits=Traits(within=True, inverse=_diagonal_back))


def _diag_embed(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> tuple[Tensor, LinearMap]:
    y = torch.diag_embed(x, offset, dim1, dim2)
    one, two = _event(y, dim1, "diag_embed") + 1, _event(y, dim2, "diag_embed") + 1
    return y, structural(
        lambda d: torch.diag_embed(d, offset, one, two), lambda g: g.diagonal(offset, one, two), one_per_row=True
    )


linear_map(aten.diag_embed.default, make=_diag_embed, family="shape")


def _unfold(x: Tensor, dim: int, size: int, step: int) -> tuple[Tensor, LinearMap]:
    at = _event(x, dim, "unfold") + 1
    before = x.shape

    def transpose(g: Tensor) -> Tensor:
        places = torch.arange(before[at - 1], device=g.device).unfold(0, size, step).reshape(-1)
        # Windows and their entries side by side in place of the dimension.
        entries = g.movedim(-1, at + 1).flatten(at, at + 1)
        return g.new_zeros(g.shape[0], *before).index_add(at, places, entries)

    return x.unfold(dim, size, step), structural(
        lambda d: d.unfold(at, size, step), transpose, one_per_row=True, disjoint=step >= size
    )


linear_map(aten.unfold.default, make=_unfold, family="shape")


@rule(aten.tensor_split.sections, exactness="exact", family="shape")
def tensor_split(ctx: Context, x: Value, sections: int, dim: int = 0) -> list[Surrogate]:
    size, more = divmod(x.mean.shape[dim], sections)
    return pieces_of(x, dim, [size + (i < more) for i in range(sections)])


@rule(aten.tensor_split.indices, exactness="exact", family="shape")
def tensor_split_at(ctx: Context, x: Value, indices: Sequence[int], dim: int = 0) -> list[Surrogate]:
    total = x.mean.shape[dim]
    ends = [min(max(i + total if i < 0 else i, 0), total) for i in indices]
    starts = [0, *ends]
    return pieces_of(x, dim, [max(b - a, 0) for a, b in zip(starts, [*ends, total], strict=True)])


@rule(aten.hstack.default, exactness="exact", family="shape")
def hstack(ctx: Context, tensors: list[Any]) -> Surrogate:
    return cat(ctx, tensors, 1)


@rule(aten.broadcast_tensors.default, exactness="exact", family="shape")
def broadcast_tensors(ctx: Context, tensors: list[Any]) -> list[Surrogate]:
    means = torch.broadcast_tensors(*map(mean_of, tensors))
    return [
        Surrogate(y, [(t, broadcast(t.mean.shape, y.shape))] if isinstance(t, Value) else [])
        for t, y in zip(tensors, means, strict=True)
    ]


@rule(aten.scatter_add.default, exactness="exact", family="shape")
def scatter_add(ctx: Context, x: Argument, dim: int, index: Argument, source: Argument) -> Surrogate:
    """x with the entries of `source` added at known places."""
    _known_index(ctx, "scatter_add", index)
    at = _event(mean_of(x), dim, "scatter_add") + 1
    mean = mean_of(x).scatter_add(dim, index, mean_of(source))

    def folded(t: Tensor) -> Tensor:
        return index.unsqueeze(0).expand(t.shape[0], *index.shape)

    return _added(
        x,
        source,
        mean,
        lambda d: d.new_zeros(d.shape[0], *mean.shape).scatter_add(at, folded(d), d),
        lambda g: g.gather(at, folded(g)),
        alike=False,
    )


@rule(aten.scatter_reduce.two, exactness="linearised", family="shape")
def scatter_reduce(
    ctx: Context, x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Surrogate:
    """Largest or smallest entry of each group, as at the mean; among equals their average. `"sum"` is exact."""
    if reduce == "sum" and include_self:
        return scatter_add(ctx, x, dim, index, source)
    _known_index(ctx, "scatter_reduce", index)
    if reduce not in ("amax", "amin") or isinstance(x, Value):
        what = "with an uncertain start" if isinstance(x, Value) else f"with reduce={reduce!r}"
        raise UnsupportedOperation(f"`scatter_reduce` {what} at {ctx.place} has no rule; write sums by `scatter_add`.")
    at = _event(x, dim, "scatter_reduce") + 1
    mean = x.scatter_reduce(dim, index, source.mean, reduce, include_self=include_self)
    first = (source.mean == mean.gather(dim, index)).to(mean.dtype)
    first = first / torch.zeros_like(mean).scatter_add(dim, index, first).gather(dim, index).clamp(min=1)

    def folded(t: Tensor) -> Tensor:
        return index.unsqueeze(0).expand(t.shape[0], *index.shape)

    chosen = structural(
        lambda d: d.new_zeros(d.shape[0], *mean.shape).scatter_add(at, folded(d), d),
        lambda g: g.gather(at, folded(g)),
        alike=False,
    )
    return Surrogate(mean, [(source, chosen.scaled_before(first))])


@rule(aten.index_add.default, exactness="exact", family="shape")
def index_add(ctx: Context, x: Argument, dim: int, index: Argument, source: Argument, *, alpha: float = 1) -> Surrogate:
    _known_index(ctx, "index_add", index)
    at = _event(mean_of(x), dim, "index_add") + 1
    mean = mean_of(x).index_add(dim, index, mean_of(source), alpha=alpha)
    return _added(
        x,
        source,
        mean,
        lambda d: d.new_zeros(d.shape[0], *mean.shape).index_add(at, index, d),
        lambda g: g.index_select(at, index),
        alpha,
    )


def _known_index(ctx: Context, what: str, index: Argument) -> None:
    if isinstance(index, Value):
        raise UnsupportedOperation(f"`{what}` at {ctx.place} with an uncertain index has no rule.")


def _added(
    x: Argument,
    source: Argument,
    mean: Tensor,
    put: Callable[[Tensor], Tensor],
    take: Callable[[Tensor], Tensor],
    alpha: float = 1,
    alike: bool = True,
) -> Surrogate:
    maps: list[tuple[Any, LinearMap]] = [(x, identity())] if isinstance(x, Value) else []
    if isinstance(source, Value):
        # Every entry of the source goes to one place.
        maps.append((source, structural(put, take, alike=alike).scaled_after(alpha)))
    return Surrogate(mean, maps)


@rule(aten.tile.default, exactness="exact", family="shape")
def tile(ctx: Context, x: Value, dims: Sequence[int]) -> Surrogate:
    """`repeat`, with ones in front where there are fewer counts than dimensions."""
    counts = [1] * (x.mean.ndim - len(dims)) + list(dims)
    mean = x.mean.repeat(*counts)
    if len(counts) > x.mean.ndim or counts[0] != 1:
        _event(x.mean, 0, "tile")
    split = [s for pair in zip(counts, x.mean.shape, strict=True) for s in pair]
    before = x.mean.shape

    def transpose(g: Tensor) -> Tensor:
        return g.reshape(g.shape[0], *split).sum(list(range(1, 2 * len(counts) + 1, 2))).reshape(g.shape[0], *before)

    G = structural(lambda d: d.repeat(1, *counts), transpose, one_per_row=True, disjoint=math.prod(counts) == 1)
    return Surrogate(mean, [(x, G)])
