"""How each family of operations is mapped over the batch; see `lifting`.

    entry_wise         ones between the batch and the entries of tensors with fewer dimensions
    along_dimensions   dimensions named by arguments move by one
    reshapes           written by their results
    permutations       the batch stays; those that only move axes of size 1 are reshapes
    products           `lifted_products`
    layers             `lifted_layers`: convolutions, pools, norms over channels

Where nothing names the first axis of tensors that are stored without it, the operation stays as it was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from favour.graph.node import Node, replace_nodes
from favour.graph.traits import Argument, Operation
from favour.passes.normalise.lifting import Call, Lifted, Unmapped, is_dropped, lifts, lifts_where
from favour.passes.rewriting import Shape

aten = torch.ops.aten

_NAMES = "dim dims dim0 dim1 dim2 dimension axis axis0 axis1 source destination start_dim end_dim"


def dimension_arguments(target: Operation) -> list[int]:
    """Positions of the arguments that name dimensions of a tensor."""
    schema = getattr(target, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    return [i for i, a in enumerate(arguments) if a.name in _NAMES.split() and "Tensor" not in str(a.type)]


# ------------------------------------------------------------- entry by entry


def _is_entry_wise(node: Node) -> bool:
    pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
    traits = node.traits
    return node.draw is not None or pointwise or traits.elementwise or traits.keeps or traits.scalar is not None


@lifts_where(_is_entry_wise)
@lifts(
    aten.native_dropout.default,
    aten.zeros_like.default,
    aten.ones_like.default,
    aten.full_like.default,
    aten.empty_like.default,
    aten.rand_like.default,
    aten.randn_like.default,
    aten.bernoulli.default,
    aten.bernoulli.p,
)
def entry_wise(call: Call) -> Lifted:
    node = call.node
    several = node.shape is None  # native_dropout: a result and its mask
    tensors = call.tensors or [s for s in node.inputs if s.shape is not None][:1]
    shapes = [call.shape_of(t) for t in tensors]
    result = max(shapes, key=len) if several else call.shape
    rank, dropped = len(result), is_dropped(result)
    drawn = node.draw is not None or torch.Tag.nondeterministic_seeded in node.target.tags

    def meets(x: Argument) -> Any:
        x_is_drawn = drawn and x is node.args[0] and not call.depends(x)
        return call.kept(x) if x_is_drawn else call.aligned(x, rank, dropped)

    args = [meets(a) if isinstance(a, Node) else call.swapped(a, meets) for a in node.args]
    kwargs = call.swapped(node.kwargs, meets)
    if several and not dropped:
        return call.call(node.target, *args, shape=None, **kwargs), True
    shape = None if several else (call.batch, *(result[1:] if dropped else result))
    return call.call(node.target, *args, shape=shape, **kwargs), False


@lifts(aten.rand.default, aten.randn.default)
def made_of_sizes(call: Call) -> Lifted:
    """Random numbers of given sizes: each input has its own."""
    sizes = call.swapped(call.node.args[0], call.kept)
    made = call.call(call.node.target, [call.size, *sizes], shape=(call.batch, *call.shape), **call.node.kwargs)
    return made, True


@lifts(aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default)
def like_nothing(call: Call) -> Lifted:
    """Reads no more than the dtype of its argument."""
    node = call.node
    args, kwargs = call.swapped((node.args[1:], node.kwargs), call.kept)
    made = call.call(node.target, call.kept(node.args[0]), *args, shape=node.shape, **kwargs)
    wide = call.call(aten.unsqueeze.default, made, 0, shape=(1, *call.shape))
    shape = (call.batch, *call.shape)
    return call.call(aten.expand.default, wide, [call.size, *[-1] * len(call.shape)], shape=shape), True


@lifts(aten.sym_size.int)
def one_size(call: Call) -> Lifted:
    x, dim = call.node.args[0], call.node.args[1]
    shape = call.shape_of(x)
    dim = dim % len(shape)
    if is_dropped(shape) and dim == 0:
        raise Unmapped("reads the size of the batch in a way that is not known")
    return call.call(aten.sym_size.int, call.kept(x), dim + (not is_dropped(shape)), shape=None), False


# ----------------------------------------------------------- along dimensions


def _spelled_out(call: Call, upto: int) -> list[Any]:
    """The positional arguments, defaults included, as far as the last that names a dimension."""
    schema = call.node.target._schema.arguments
    count = max(len(call.node.args), upto + 1)
    return [call.argument(a.name) for a in schema[:count] if not a.kwarg_only]


@lifts_where(lambda node: bool(dimension_arguments(node.target)))
def along_dimensions(call: Call) -> Lifted:
    """Dimensions move by one, those counted from the end stay."""
    node, target = call.node, call.node.target
    places = dimension_arguments(target)
    args = _spelled_out(call, max(places))
    names = {a.name for a in target._schema.arguments[: len(args)]}
    kwargs = {k: v for k, v in node.kwargs.items() if k not in names}
    tensors = [s for s in dict.fromkeys(node.inputs) if s.shape]
    rank = max(len(call.shape_of(t)) for t in tensors)
    if target in (aten.stack.default, aten.unsqueeze.default, aten.diag_embed.default):  # dimensions of the result
        rank = len(call.shape)

    def listed(d: Argument) -> list[int]:
        if d is None or (isinstance(d, (list, tuple)) and not d):
            return list(range(rank))
        return [d] if isinstance(d, int) else list(d)

    named = [d % rank for p in places for d in listed(args[p])]
    shapes = [call.shape_of(t) for t in tensors] + ([] if node.shape is None else [node.shape])
    if 0 not in named and all(map(is_dropped, shapes)) and node.shape is not None and all(map(call.depends, tensors)):
        return call.as_it_is()

    def moved(d: Argument) -> Any:
        if d is None or (isinstance(d, (list, tuple)) and not d):
            return [i + 1 for i in range(rank)]
        if isinstance(d, int):
            return d + 1 if d >= 0 else d
        return [i + 1 if i >= 0 else i for i in d]

    for p in places:
        args[p] = moved(args[p])
    shape = None if node.shape is None else (call.batch, *node.shape)
    return call.call(target, *_wholes(args, call), shape=shape, **_wholes(kwargs, call)), True


def _wholes(structure: Argument, call: Call) -> Any:
    """Arguments with every tensor among them for the batch."""
    return replace_nodes(structure, lambda n: call.swapped(n, call.kept) if n.shape is None else call.whole(n))


@lifts(
    aten.sum.default,
    aten.mean.default,
    aten.amax.default,
    aten.amin.default,
    aten.max.default,
    aten.min.default,
)
def over_all(call: Call) -> Lifted:
    """Reductions over all dimensions, or over those that are named."""
    names = {aten.sum.default: aten.sum.dim_IntList, aten.mean.default: aten.mean.dim}
    names |= {aten.max.default: aten.amax.default, aten.min.default: aten.amin.default}
    node = call.node
    target = names.get(node.target)
    if target is None:
        return along_dimensions(call)
    x = node.args[0]
    dims = [i + 1 for i in range(len(call.shape_of(x)))]
    return call.call(target, call.whole(x), dims, shape=(call.batch,), **node.kwargs), True


@lifts(aten.index_select.default)
def index_select(call: Call) -> Lifted:
    x, dim, index = call.node.args
    if not call.depends(index):
        args = (call.whole(x), dim + 1 if dim >= 0 else dim, call.swapped(index, call.kept))
        return call.call(aten.index_select.default, *args, shape=(call.batch, *call.shape)), True
    rank = len(call.shape_of(x))
    if call.depends(x) or dim % rank or rank != 2:
        raise Unmapped("picks rows by an index that differs from input to input")
    rows = call.call(
        aten.embedding.default, call.swapped(x, call.kept), call.whole(index), shape=(call.batch, *call.shape)
    )
    return rows, True


@lifts(aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar)
def index_add(call: Call) -> Lifted:
    x, dim, index, source = call.node.args
    if call.depends(index):
        raise Unmapped("writes to rows by an index that differs from input to input")
    source = call.whole(source) if isinstance(source, Node) else source
    args = (call.whole(x), dim + 1 if dim >= 0 else dim, call.swapped(index, call.kept), source)
    return call.call(call.node.target, *args, shape=(call.batch, *call.shape), **call.node.kwargs), True


@lifts(aten.embedding.default)
def embedding(call: Call) -> Lifted:
    table, index, *rest = call.node.args
    if call.depends(table) or not call.depends(index):
        raise Unmapped("looks up in a table that differs from input to input")
    dropped = is_dropped(call.shape_of(index))
    shape = (call.batch, *(call.shape[1:] if dropped else call.shape))
    made = call.call(aten.embedding.default, call.swapped(table, call.kept), call.kept(index), *rest, shape=shape)
    return made, not dropped


@lifts(aten.index.Tensor)
def index(call: Call) -> Lifted:
    """x[i, j]: with indices of their own, each input picks from its own."""
    x, indices = call.node.args
    batched = any(call.depends(i) for i in indices)
    known = [i for i in indices if i is not None]
    if not batched:
        plain = [call.swapped(i, call.kept) for i in indices]
        shape = (call.batch, *call.shape)
        if _has_gaps(indices):
            raise Unmapped("picks by indices that a slice separates")
        return call.call(aten.index.Tensor, call.whole(x), [None, *plain], shape=shape), True
    if any(i.dtype is torch.bool for i in known):
        raise Unmapped("picks by a mask, so that sizes depend on values")
    if indices[0] is None or _has_gaps(indices):
        raise Unmapped("picks by indices that a slice separates, which differ from input to input")
    rank = max(len(call.shape_of(i)) for i in known)
    rows = call.call(aten.arange.default, call.size, shape=(call.batch,), dtype=torch.int64)
    first = call.call(aten.reshape.default, rows, [-1, *[1] * rank], shape=(call.batch, *[1] * rank), dtype=torch.int64)
    others = [call.aligned(i, rank, False) if call.depends(i) else call.swapped(i, call.kept) for i in known]
    others = [_with_ones(call, o, i, rank) for o, i in zip(others, known, strict=True)]
    return call.call(aten.index.Tensor, call.whole(x), [first, *others], shape=(call.batch, *call.shape)), True


def _with_ones(call: Call, made: Argument, was: Argument, rank: int) -> Any:
    """An index that depends on the inputs, of `rank` dimensions behind the batch."""
    if not call.depends(was):
        return made
    while len(made.shape) < rank + 1:
        made = call.call(aten.unsqueeze.default, made, 1, shape=(call.batch, 1, *made.shape[1:]), dtype=was.dtype)
    return made


def _has_gaps(indices: Sequence[Any]) -> bool:
    positions = [k for k, i in enumerate(indices) if i is not None]
    return positions[-1] - positions[0] >= len(positions)


@lifts(aten.constant_pad_nd.default, aten.pad.default)
def pad(call: Call) -> Lifted:
    x, widths, *rest = call.node.args
    shape = call.shape_of(x)
    if is_dropped(shape) and is_dropped(call.shape) and len(widths) < 2 * len(shape):
        return call.as_it_is()
    if call.node.target is aten.pad.default and call.argument("mode") != "constant":
        raise Unmapped("pads other than with a constant")
    return call.call(call.node.target, call.whole(x), widths, *rest, shape=(call.batch, *call.shape)), True


@lifts(aten.triu.default, aten.tril.default)
def triangle(call: Call) -> Lifted:
    x, *rest = call.node.args
    return call.call(call.node.target, call.whole(x), *rest, shape=(call.batch, *call.shape)), True


@lifts(aten.layer_norm.default, aten.rms_norm.default)
def layer_norm(call: Call) -> Lifted:
    node = call.node
    x, axes = node.args[0], node.args[1]
    rest, kwargs = call.swapped((node.args[2:], node.kwargs), call.kept)
    whole = not is_dropped(call.shape) or len(axes) == len(call.shape)
    value = call.whole(x) if whole else call.kept(x)
    return call.call(node.target, value, axes, *rest, shape=value.shape, **kwargs), whole


# ------------------------------------------------------- reshapes, permutations


@lifts(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
def reshape(call: Call) -> Lifted:
    x, sizes = call.node.args
    return call.reshaped(call.kept(x), call.shape, call.swapped(sizes, call.kept) if _unknown(call.shape) else None)


def _unknown(shape: Shape) -> bool:
    return any(isinstance(s, str) for s in shape)


@lifts(
    aten.view_as.default,
    aten.reshape_as.default,
    aten.flatten.using_ints,
    aten.unflatten.int,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
def reshaped_by_result(call: Call) -> Lifted:
    x = call.node.args[0]
    if _unknown(call.shape) and call.node.target not in (aten.view_as.default, aten.reshape_as.default):
        return along_dimensions(call)
    return call.reshaped(call.kept(x), call.shape)


def _axes(call: Call) -> list[int]:
    """Where each axis of the result comes from."""
    target, (x, *rest) = call.node.target, call.node.args
    n = len(call.shape_of(x))
    axes = list(range(n))
    if target is aten.permute.default:
        return [d % n for d in rest[0]]
    if target in (aten.movedim.int, aten.movedim.intlist):
        source, destination = ([d] if isinstance(d, int) else list(d) for d in rest)
        places = {d % n: s % n for s, d in zip(source, destination, strict=True)}
        others = iter(a for a in axes if a not in places.values())
        return [places[i] if i in places else next(others) for i in range(n)]
    if target in (aten.t.default, aten.numpy_T.default):
        return axes[::-1]
    one, two = (d % n for d in rest) if rest else (n - 2, n - 1)
    axes[one], axes[two] = axes[two], axes[one]
    return axes


@lifts(
    aten.permute.default,
    aten.transpose.int,
    aten.swapaxes.default,
    aten.t.default,
    aten.numpy_T.default,
    aten.mT.default,
    aten.movedim.int,
    aten.movedim.intlist,
)
def permute(call: Call) -> Lifted:
    x, axes = call.node.args[0], _axes(call)
    shape = call.shape_of(x)
    if is_dropped(shape) and axes[0] == 0:
        return call.as_it_is()
    wide = [a for a in axes if shape[a] != 1]
    if wide == sorted(wide) and not _unknown(shape):
        return call.reshaped(call.kept(x), call.shape)
    made = call.call(aten.permute.default, call.whole(x), [0, *[a + 1 for a in axes]], shape=(call.batch, *call.shape))
    return made, True


@lifts(aten.expand.default, aten.expand_as.default)
def expand(call: Call) -> Lifted:
    x, sizes = call.node.args[:2]
    dropped = is_dropped(call.shape)
    if call.node.target is not aten.expand_as.default:
        sizes = call.swapped(sizes, call.kept)
    elif not _unknown(call.shape):
        sizes = list(call.shape)
    else:
        sizes = [s if isinstance(s, int) else _size(call, sizes, i) for i, s in enumerate(call.shape)]
    value = call.aligned(x, len(call.shape), dropped)
    shape = (call.batch, *call.shape[dropped:])
    if value.shape == shape:
        return value, not dropped
    inputs = -1 if call.depends(x) else call.size
    return call.call(aten.expand.default, value, [inputs, *sizes[dropped:]], shape=shape), not dropped


def _size(call: Call, x: Node, dim: int) -> Node:
    value = call.whole(x) if call.depends(x) else call.swapped(x, call.kept)
    return call.call(aten.sym_size.int, value, dim + call.depends(x), shape=None)


@lifts(aten.repeat.default, aten.tile.default)
def repeat(call: Call) -> Lifted:
    x, counts = call.node.args
    counts = [*[1] * (len(call.shape) - len(counts)), *call.swapped(counts, call.kept)]
    value = call.aligned(call.node.args[0], len(call.shape), False)
    if value.shape is not None and len(value.shape) <= len(call.shape):
        value = call.whole(x)
    return call.call(aten.repeat.default, value, [1, *counts], shape=(call.batch, *call.shape)), True
