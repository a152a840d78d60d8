"""Tensors joined, and taken apart into several; see `shape` for the conventions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from favour.graph.traits import Traits
from favour.rules.registry import rule
from favour.rules.shape import narrow_put, put_back, selecting
from favour.scalar import intervals
from favour.surrogate import LinearMap, Surrogate, compose, structural
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten


def _joined(parts: list[Any], dim: int, op: Callable[..., Tensor]) -> Surrogate:
    """Concatenation of uncertain and plain tensors along an existing dimension."""
    mean = op([mean_of(p) for p in parts], dim)
    dim = dim % mean.ndim
    maps, start = [], 0
    for part in parts:
        length = mean_of(part).shape[dim]
        if isinstance(part, Value):
            maps.append((part, _placed(mean.shape, dim, start, length)))
        start += length
    return Surrogate(mean, maps)


def _placed(out: Sequence[int], dim: int, start: int, length: int) -> LinearMap:
    def apply(d: Tensor) -> Tensor:
        return put_back(torch.narrow, narrow_put, d, out, dim + 1, start, length)

    return structural(apply, lambda g: g.narrow(dim + 1, start, length), one_per_row=True)


JOINED = Traits(bounds=lambda parts, *dim: intervals.union(*parts))


@rule(aten.cat.default, aten.concat.default, exactness="exact", family="shape", traits=JOINED)
def cat(ctx: Context, tensors: list[Any], dim: int = 0) -> Surrogate:
    return _joined(tensors, dim, torch.cat)


@rule(aten.stack.default, exactness="exact", family="shape", traits=JOINED)
def stack(ctx: Context, tensors: list[Any], dim: int = 0) -> Surrogate:
    mean = torch.stack([mean_of(p) for p in tensors], dim)
    dim = dim % mean.ndim
    widen = structural(lambda d: d.unsqueeze(dim + 1), lambda g: g.squeeze(dim + 1), one_per_row=True)
    maps = [
        (part, compose(_placed(mean.shape, dim, i, 1), widen))
        for i, part in enumerate(tensors)
        if isinstance(part, Value)
    ]
    return Surrogate(mean, maps)


def pieces_of(x: Value, dim: int, sizes: Sequence[int], squeeze: bool = False) -> list[Surrogate]:
    dim = dim % x.mean.ndim
    result, start = [], 0
    for size in sizes:
        mean, G = (
            selecting(aten.select.int, aten.select_scatter.default)(x.mean, dim, start)
            if squeeze
            else selecting(torch.narrow, narrow_put)(x.mean, dim, start, size)
        )
        result.append(Surrogate(mean, [(x, G)]))
        start += size
    return result


def _pieces(ends: Callable[..., list[int] | None]) -> Traits:
    """Of an operation whose results lie behind each other along `dim`, up to each of the ends."""

    def piece(index: int, shape: Sequence[Any], *rest: Any) -> tuple[Any, tuple] | None:
        dim = rest[1] if len(rest) > 1 else 0
        total = shape[dim]
        if not isinstance(total, int):
            return None
        known = ends(total, rest[0])
        if known is None:
            return None
        return aten.slice.Tensor, (dim, known[index - 1] if index else 0, min(known[index], total))

    return Traits(within=True, pieces=piece)


def _steps(total: int, size: Any) -> list[int] | None:
    return None if not isinstance(size, int) else list(range(size, total + size, size))


def _sums(total: int, sizes: Any) -> list[int] | None:
    return list(itertools.accumulate(sizes)) if isinstance(sizes, (list, tuple)) else None


EQUAL, GIVEN = _pieces(_steps), _pieces(_sums)
CHUNKS = _pieces(lambda total, count: _steps(total, -(-total // count)) if isinstance(count, int) else None)


@rule(aten.split.Tensor, exactness="exact", family="shape", traits=EQUAL)
def split(ctx: Context, x: Value, split_size: int, dim: int = 0) -> list[Surrogate]:
    total = x.mean.shape[dim]
    return pieces_of(x, dim, [min(split_size, total - s) for s in range(0, total, split_size)])


@rule(aten.split.sizes, aten.split_with_sizes.default, exactness="exact", family="shape", traits=GIVEN)
def split_sizes(ctx: Context, x: Value, sizes: Sequence[int], dim: int = 0) -> list[Surrogate]:
    return pieces_of(x, dim, sizes)


@rule(aten.chunk.default, exactness="exact", family="shape", traits=CHUNKS)
def chunk(ctx: Context, x: Value, chunks: int, dim: int = 0) -> list[Surrogate]:
    total = x.mean.shape[dim]
    size = -(-total // chunks)
    return pieces_of(x, dim, [min(size, total - s) for s in range(0, total, size)])


def _row(index: int, shape: Sequence[Any], dim: int = 0) -> tuple[Any, tuple]:
    return aten.select.int, (dim, index)


@rule(aten.unbind.int, exactness="exact", family="shape", traits=Traits(within=True, pieces=_row))
def unbind(ctx: Context, x: Value, dim: int = 0) -> list[Surrogate]:
    return pieces_of(x, dim, [1] * x.mean.shape[dim], squeeze=True)
