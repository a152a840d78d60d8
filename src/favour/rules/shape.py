"""Operations that move numbers about: reshaping, slicing, reducing.

All are linear with constant entries, so mean and deviations go through the same operation and no noise
is added (exact). `fold` marks the extra leading axis of deviations: a dimension d ≥ 0 of the tensor is
dimension d + 1 there.

`disjoint` says whether each input entry feeds at most one output entry: then independent entries stay
independent. Slices, permutations, sums and concatenations are disjoint; expansion and repetition are not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from favour.errors import UnsupportedOperation
from favour.graph.traits import Argument, Traits, declare
from favour.rules.registry import deterministic, linear_map, rule
from favour.scalar import composed
from favour.surrogate import LinearMap, Surrogate, identity, structural
from favour.surrogate.value import Context, Value, mean_of

aten = torch.ops.aten


def broadcast(shape: Sequence[int], out: Sequence[int]) -> LinearMap:
    """The map that expands a tensor of `shape` to `out` by broadcasting."""
    if tuple(shape) == tuple(out):
        return identity()
    lead = len(out) - len(shape)
    widened = (1,) * lead + tuple(shape)
    summed = [d + 1 for d in range(len(out)) if widened[d] != out[d]]

    def apply(d: Tensor) -> Tensor:
        return d.reshape(d.shape[0], *widened).expand(d.shape[0], *out)

    def transpose(g: Tensor) -> Tensor:
        return g.sum(summed, keepdim=True).reshape(g.shape[0], *shape) if summed else g.reshape(g.shape[0], *shape)

    name = ("broadcast", tuple(shape), tuple(out))
    return structural(apply, transpose, one_per_row=True, disjoint=not summed, name=name)


def _reshaping(op: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, LinearMap]]:
    def make(x: Tensor, *args: Argument, **kwargs: Argument) -> tuple[Tensor, LinearMap]:
        y = op(x, *args, **kwargs)
        before, after = x.shape, y.shape
        return y, structural(
            lambda d: d.reshape(d.shape[0], *after),
            lambda g: g.reshape(g.shape[0], *before),
            one_per_row=True,
            name=("reshape", before, after),
        )

    return make


ORDERED = Traits(ordered=True)
COPIED = Traits(keeps=True)

for _overload in (
    aten.view.default,
    aten.reshape.default,
    aten._unsafe_view.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
):
    linear_map(_overload, make=_reshaping(_overload), family="shape", traits=ORDERED)
for _overload in (
    aten.contiguous.default,
    aten.clone.default,
    aten.alias.default,
    aten.detach.default,
    aten.lift_fresh_copy.default,
):
    linear_map(_overload, make=_reshaping(_overload), family="shape", traits=COPIED)


@rule(aten.reshape_as.default, aten.view_as.default, exactness="exact", family="shape", traits=ORDERED)
def reshape_as(ctx: Context, x: Argument, other: Argument) -> Surrogate:
    if not isinstance(x, Value):
        return Surrogate(x.reshape(other.shape))
    y, G = _reshaping(torch.reshape)(x.mean, other.shape)
    return Surrogate(y, [(x, G)])


def permuting(dims_of: Callable[..., Sequence[int]]) -> Callable[..., tuple[Tensor, LinearMap]]:
    def make(x: Tensor, *args: Argument) -> tuple[Tensor, LinearMap]:
        dims = [d % x.ndim for d in dims_of(x, *args)]
        inverse = [dims.index(d) for d in range(x.ndim)]

        def folded(order: Sequence[int]) -> Callable[[Tensor], Tensor]:
            return lambda d: d.permute(0, *[i + 1 for i in order])

        return x.permute(dims), structural(
            folded(dims), folded(inverse), one_per_row=True, name=("permute", tuple(dims))
        )

    return make


def swapped(x: Tensor, a: int, b: int) -> list[int]:
    dims = list(range(x.ndim))
    a, b = a % x.ndim, b % x.ndim
    dims[a], dims[b] = dims[b], dims[a]
    return dims


def _move(x: Tensor, source: int, destination: int) -> list[int]:
    dims = [d for d in range(x.ndim) if d != source % x.ndim]
    dims.insert(destination % x.ndim, source % x.ndim)
    return dims


def _permuted_back(base: Any, value: Any, dims: Sequence[int]) -> tuple[Any, tuple]:
    order = [d % len(dims) for d in dims]
    return aten.permute.default, (value, [order.index(d) for d in range(len(order))])


PERMUTED = Traits(permutes=True)
SWAPPED = Traits(permutes=True, inverse=lambda base, value, *axes: (aten.transpose.int, (value, *(axes or (0, 1)))))
linear_map(
    aten.permute.default,
    make=permuting(lambda x, dims: dims),
    family="shape",
    traits=Traits(permutes=True, inverse=_permuted_back),
)
linear_map(aten.transpose.int, aten.swapaxes.default, make=permuting(swapped), family="shape", traits=SWAPPED)
linear_map(
    aten.t.default,
    make=permuting(lambda x: list(range(x.ndim))[::-1]),
    family="shape",
    traits=Traits(permutes=True, inverse=lambda base, value: (aten.t.default, (value,))),
)
linear_map(aten.movedim.int, make=permuting(_move), family="shape", traits=PERMUTED)


def put_back(
    take: Callable[..., Tensor], put: Callable[..., Tensor], g: Tensor, shape: Sequence[int], dim: int, *rest: Argument
) -> Tensor:
    """g where `take` reads it in a fold (F, *shape), and 0 elsewhere; compilers use `put`, which copies the zeros."""
    zeros = g.new_zeros(g.shape[0], *shape)
    if torch.compiler.is_compiling():
        return put(zeros, g, dim, *rest)
    take(zeros, dim, *rest).copy_(g)
    return zeros


def selecting(take: Callable[..., Tensor], put: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, LinearMap]]:
    """Selection along one dimension: `take(x, dim, …)`, and `put(zeros, g, dim, …)` as its transpose."""

    def make(x: Tensor, dim: int = 0, *rest: Argument) -> tuple[Tensor, LinearMap]:
        dim = dim % x.ndim
        before = x.shape

        def transpose(g: Tensor) -> Tensor:
            return put_back(take, put, g, before, dim + 1, *rest)

        return take(x, dim, *rest), structural(
            lambda d: take(d, dim + 1, *rest), transpose, one_per_row=True, name=("take", take, dim, *rest)
        )

    return make


_END = 2**63 - 1  # how export writes the open end of a slice, and what vmap's slice_scatter overflows on


def _written_by(scatter: Any) -> Traits:
    """Of a selection that `scatter` writes back."""
    return Traits(
        within=True, inverse=lambda base, value, *rest: (scatter, (base, value, *_from_the_front(base.shape, *rest)))
    )


def _from_the_front(shape: Any, dim: int, *places: Any) -> list[Any]:
    """Places of a selection as vmap's slice_scatter takes them: not open, and not counted from behind."""
    size = shape[dim]
    behind = [isinstance(size, int) and isinstance(a, int) and a < 0 for a in places]
    return [dim, *(None if a == _END else a + size if b else a for a, b in zip(places, behind, strict=True))]


def _narrowed_back(base: Any, value: Any, dim: int, start: Any, length: Any) -> tuple[Any, tuple] | None:
    if not isinstance(start, int) or not isinstance(length, int):
        return None
    return aten.slice_scatter.default, (base, value, dim, start, start + length)


linear_map(
    aten.slice.Tensor,
    make=selecting(aten.slice.Tensor, aten.slice_scatter.default),
    family="shape",
    traits=_written_by(aten.slice_scatter.default),
)
linear_map(
    aten.select.int,
    make=selecting(aten.select.int, aten.select_scatter.default),
    family="shape",
    traits=_written_by(aten.select_scatter.default),
)


def narrow_put(zeros: Tensor, g: Tensor, dim: int, start: int, length: int) -> Tensor:
    start = start + zeros.shape[dim] if start < 0 else start  # −1 to −1 + 1 would be an empty slice
    return aten.slice_scatter.default(zeros, g, dim, start, start + length)


linear_map(
    aten.narrow.default,
    make=selecting(torch.narrow, narrow_put),
    family="shape",
    traits=Traits(within=True, inverse=_narrowed_back),
)


def _index_select(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, LinearMap]:
    dim = dim % x.ndim
    before = x.shape
    return x.index_select(dim, index), structural(
        lambda d: d.index_select(dim + 1, index),
        lambda g: g.new_zeros(g.shape[0], *before).index_add(dim + 1, index, g),
        one_per_row=True,
        disjoint=False,
    )


linear_map(
    aten.index_select.default,
    make=_index_select,
    family="shape",
    traits=Traits(within=True, lookup=lambda x, dim, index: [(index, x, dim, False)]),
)


WITHIN = Traits(within=True)


def _flip(x: Tensor, dims: Sequence[int]) -> tuple[Tensor, LinearMap]:
    folded = [d % x.ndim + 1 for d in dims]
    return x.flip(tuple(dims)), structural(lambda d: d.flip(folded), lambda g: g.flip(folded), one_per_row=True)


linear_map(aten.flip.default, make=_flip, family="shape", traits=WITHIN)


def expanded(x: Tensor, sizes: Sequence[int], implicit: bool = False) -> tuple[Tensor, LinearMap]:
    y = x.expand(*sizes)
    return y, broadcast(x.shape, y.shape)


linear_map(aten.expand.default, make=expanded, family="shape", traits=WITHIN)


@rule(aten.expand_as.default, exactness="exact", family="shape", traits=WITHIN)
def expand_as(ctx: Context, x: Argument, other: Argument) -> Surrogate:
    y = mean_of(x).expand(mean_of(other).shape)
    return Surrogate(y, [(x, broadcast(x.mean.shape, y.shape))] if isinstance(x, Value) else [])


def _repeat(x: Tensor, repeats: Sequence[int]) -> tuple[Tensor, LinearMap]:
    y = x.repeat(*repeats)
    widened = (1,) * (len(repeats) - x.ndim) + tuple(x.shape)
    split = [s for pair in zip(repeats, widened, strict=True) for s in pair]
    before = x.shape

    def transpose(g: Tensor) -> Tensor:
        counts = list(range(1, 2 * len(repeats) + 1, 2))
        return g.reshape(g.shape[0], *split).sum(counts).reshape(g.shape[0], *before)

    def apply(d: Tensor) -> Tensor:
        return d.reshape(d.shape[0], *widened).repeat(1, *repeats)

    return y, structural(apply, transpose, one_per_row=True, disjoint=math.prod(repeats) == 1)


linear_map(aten.repeat.default, make=_repeat, family="shape", traits=WITHIN)


def _reducing(average: bool) -> Callable[..., tuple[Tensor, LinearMap]]:
    def make(
        x: Tensor, dim: Sequence[int] | int | None = None, keepdim: bool = False, *, dtype: Argument = None
    ) -> tuple[Tensor, LinearMap]:
        if dim is None or (not isinstance(dim, int) and not dim):
            dims = list(range(x.ndim))
        else:
            dims = [d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)]
        if 0 in dims:
            raise UnsupportedOperation(
                f"a reduction over dimension 0 of a tensor of shape {tuple(x.shape)} mixes the inputs of a batch; "
                "predictions are per input. Reduce over the other dimensions."
            )
        count = math.prod([x.shape[d] for d in dims]) if average else 1
        before, input_dtype = x.shape, x.dtype
        folded = [d + 1 for d in dims]

        def apply(d: Tensor) -> Tensor:
            return d.sum(folded, keepdim=keepdim, dtype=dtype)

        def transpose(g: Tensor) -> Tensor:
            if not keepdim:
                for d in sorted(folded):
                    g = g.unsqueeze(d)
            return g.expand(g.shape[0], *before).to(input_dtype)

        total = structural(
            apply, transpose, channelwise=min(dims) > 1, name=("sum", before, tuple(dims), keepdim, dtype)
        )
        mean = x.sum(dims, keepdim=keepdim, dtype=dtype)
        return (mean / count, total.scaled_after(1 / count)) if average else (mean, total)

    return make


SUM = Traits(sums=True, reduces=True)
AVERAGE = Traits(sums=True, reduces=True, within=True)
linear_map(aten.sum.dim_IntList, aten.sum.default, make=_reducing(False), family="reduction", traits=SUM)
linear_map(aten.mean.dim, aten.mean.default, make=_reducing(True), family="reduction", traits=AVERAGE)


@rule(
    aten._to_copy.default,
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.type_as.default,
    exactness="exact",
    family="shape",
    traits=Traits(keeps=True, scalar=composed.convert),
)
def convert(ctx: Context, x: Argument, *args: Argument, **kwargs: Argument) -> Surrogate:
    if not isinstance(x, Value):  # `type_as`, which reads no more than the type of an uncertain tensor
        return Surrogate(x.to(mean_of(args[0]).dtype))
    dtype = kwargs.get("dtype", mean_of(args[0]).dtype if args and isinstance(mean_of(args[0]), Tensor) else None)
    dtype = dtype or next((a for a in args if isinstance(a, torch.dtype)), x.mean.dtype)
    if not dtype.is_floating_point:
        raise UnsupportedOperation(f"conversion of an uncertain tensor to {dtype} at {ctx.place} has no moments.")
    before = x.mean.dtype
    return Surrogate(
        x.mean.to(dtype), [(x, structural(lambda d: d.to(dtype), lambda g: g.to(before), one_per_row=True))]
    )


declare(aten.to.other, aten.to.device, traits=COPIED)
NUMBERS = Traits(shape_only=True)
declare(aten.sym_size.int, aten.sym_numel.default, traits=NUMBERS)
_LIKE = (aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like)
_NEW = (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty)
declare(*[op.default for op in (*_LIKE, *_NEW)], traits=NUMBERS)


deterministic(
    aten.argmax.default,
    aten.argmin.default,
    aten.argsort.default,
    aten.topk.default,
    aten.sort.default,
    aten.round.default,
    aten.floor.default,
    aten.ceil.default,
    aten.bernoulli.default,
)
