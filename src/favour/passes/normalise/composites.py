"""Operations that are short programs of others, written out so that every step has its own rule.

    glu              a ∘ σ(b)                        addcmul, addcdiv   x + c·(a∘b),  x + c·(a/b)
    lerp             x + w∘(y − x)                   std                √var
    vector norm      √Σx², Σ|x|                      normalise          x/‖x‖ = RMSNorm(x)/√n
    cosine           Σ normalised a ∘ normalised b   pairwise distance  √Σ(a − b + ε)²
    cdist            √Σ_d (a_id − b_jd)²             bilinear           einsum bi,oij,bj->bo, two at a time
    inner, tensordot, vecdot, linalg.matmul          products that have a rule
    einsum of three or more                          two at a time, from the left

Norms and softmax written by hand, x∘rsqrt(mean(x²) + ε), (x − x̄)/√(var(x) + ε), eˣ/Σeˣ, become the operation: as a
product of x with a number made from x they would lose their covariance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from favour.graph.node import Node, draws_numbers
from favour.graph.traits import Argument, Operation
from favour.passes.rewriting import Builder, Shape

aten = torch.ops.aten

Expansion = Callable[[Node, Builder, dict[str, Any]], Node | None]
EXPANSIONS: dict[Operation, Expansion] = {}


def _expands(*targets: Operation) -> Callable[[Expansion], Expansion]:
    def register(function: Expansion) -> Expansion:
        for target in targets:
            EXPANSIONS[target] = function
        return function

    return register


def arguments(node: Node) -> dict[str, Any]:
    """The arguments of a call by name, defaults included."""
    schema = node.target._schema.arguments
    args = {a.name: a.default_value for a in schema if a.has_default_value()}
    args |= dict(zip([a.name for a in schema], node.args, strict=False))
    return args | node.kwargs


def expand_composite(node: Node, new: Builder) -> Node | None:
    """The node that replaces a composite operation, or None."""
    expansion = EXPANSIONS.get(node.target)
    if expansion is None or node.shape is None:
        return None
    return expansion(node, new, arguments(node))


def _shape(x: Argument) -> Shape:
    assert x.shape is not None
    return x.shape


def _dims(x: Node, dim: int | Sequence[int] | None) -> list[int]:
    n = len(_shape(x))
    if dim is None or (not isinstance(dim, int) and not dim):
        return list(range(n))
    return [d % n for d in ([dim] if isinstance(dim, int) else dim)]


def _kept(shape: Shape, dims: Sequence[int]) -> Shape:
    return tuple(1 if i in dims else s for i, s in enumerate(shape))


def _summed(new: Builder, x: Node, dims: Sequence[int], keepdim: bool, shape: Shape) -> Node:
    return new.call(aten.sum.dim_IntList, x, list(dims), keepdim, shape=shape)


@_expands(aten.glu.default)
def _glu(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    x = args["self"]
    dim = args["dim"] % len(_shape(x))
    size = _shape(x)[dim]
    if not isinstance(size, int):
        return None
    a = new.call(aten.slice.Tensor, x, dim, 0, size // 2, shape=node.shape)
    b = new.call(aten.slice.Tensor, x, dim, size // 2, size, shape=node.shape)
    return new.call(aten.mul.Tensor, a, new.call(aten.sigmoid.default, b, shape=node.shape), shape=node.shape)


@_expands(aten.addcmul.default, aten.addcdiv.default)
def _addc(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    op = aten.mul.Tensor if node.target is aten.addcmul.default else aten.div.Tensor
    a, b = args["tensor1"], args["tensor2"]
    made = new.call(op, a, b, shape=_broadcast(_shape(a), _shape(b)))
    made = new.call(aten.add.Tensor, args["self"], made, shape=node.shape)
    if args["value"] != 1:
        made.kwargs = {"alpha": args["value"]}
    return made


def _broadcast(a: Shape, b: Shape) -> Shape:
    n = max(len(a), len(b))
    a, b = (1,) * (n - len(a)) + a, (1,) * (n - len(b)) + b
    return tuple(t if s == 1 else s for s, t in zip(a, b, strict=True))


@_expands(aten.lerp.Scalar, aten.lerp.Tensor)
def _lerp(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    x, y, weight = args["self"], args["end"], args["weight"]
    gap = new.call(aten.sub.Tensor, y, x, shape=_broadcast(_shape(y), _shape(x)))
    return new.call(aten.add.Tensor, x, new.call(aten.mul.Tensor, gap, weight, shape=node.shape), shape=node.shape)


@_expands(aten.std.dim, aten.std.correction)
def _std(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    target = aten.var.dim if node.target is aten.std.dim else aten.var.correction
    variance = new.call(target, *node.args, shape=node.shape)
    variance.kwargs = node.kwargs
    return new.call(aten.sqrt.default, variance, shape=node.shape)


@_expands(aten.linalg_vector_norm.default, aten.linalg_norm.default, aten.norm.ScalarOpt_dim)
def _vector_norm(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    x, order, dim = args["self"], args.get("ord", args.get("p")), args["dim"]
    dims, keepdim = _dims(x, dim), bool(args["keepdim"])
    order = 2 if order is None else order
    if order not in (1, 2) or args.get("dtype") is not None or (len(dims) > 1 and order != 2):
        return None
    entry = aten.square.default if order == 2 else aten.abs.default
    total = _summed(new, new.call(entry, x, shape=_shape(x)), dims, keepdim, _shape(node))
    return new.call(aten.sqrt.default, total, shape=node.shape) if order == 2 else total


def _unit(new: Builder, x: Node, axis: int, eps: float) -> Node | None:
    """x/‖x‖ over an axis."""
    n = _shape(x)[axis]
    if not isinstance(n, int):
        return None
    normal = _along(new, aten.rms_norm.default, x, axis, (None, eps**2 / n))
    return None if normal is None else new.call(aten.mul.Tensor, normal, n**-0.5, shape=_shape(x))


@_expands(aten.cosine_similarity.default)
def _cosine(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b, dim = args["x1"], args["x2"], args["dim"]
    n = len(_shape(a))
    axis = dim % n
    if len(_shape(b)) != n or axis == 0:
        return None
    units = [_unit(new, t, axis, args["eps"]) for t in (a, b)]
    if units[0] is None or units[1] is None:
        return None
    shape = _broadcast(_shape(a), _shape(b))
    return _summed(new, new.call(aten.mul.Tensor, *units, shape=shape), [axis], False, _shape(node))


@_expands(aten.pairwise_distance.default)
def _pairwise(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b = args["x1"], args["x2"]
    if args["p"] != 2:
        return None
    shape = _broadcast(_shape(a), _shape(b))
    gap = new.call(aten.sub.Tensor, a, b, shape=shape)
    gap = new.call(aten.add.Tensor, gap, args["eps"], shape=shape)
    total = _summed(new, new.call(aten.square.default, gap, shape=shape), [-1], bool(args["keepdim"]), _shape(node))
    return new.call(aten.sqrt.default, total, shape=node.shape)


def _same(a: Node, b: Node) -> bool:
    """Whether two nodes have one value: one node, or one operation without draws on the same arguments."""
    calls = a.kind == b.kind == "call" and a.draw is None and not draws_numbers(a)
    return a is b or (calls and a.target is b.target and a.args == b.args and a.kwargs == b.kwargs)


@_expands(aten.cdist.default)
def _cdist(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b = args["x1"], args["x2"]
    if args["p"] != 2:
        return None
    (*lead, rows, d), (*_, columns, _) = _shape(a), _shape(b)
    left = new.call(aten.unsqueeze.default, a, -2, shape=(*lead, rows, 1, d))
    right = new.call(aten.unsqueeze.default, b, -3, shape=(*_shape(b)[:-2], 1, columns, d))
    shape = (*_shape(node), d)
    gap = new.call(aten.sub.Tensor, left, right, shape=shape)
    total = _summed(new, new.call(aten.square.default, gap, shape=shape), [-1], False, _shape(node))
    y = new.call(aten.sqrt.default, total, shape=node.shape)
    if not _same(a, b):
        return y
    # A row is at 0 from itself for every draw, which marginals of a gap do not know.
    above, below = (new.call(op, y, d, shape=node.shape) for op, d in ((aten.triu.default, 1), (aten.tril.default, -1)))
    return new.call(aten.add.Tensor, above, below, shape=node.shape)


@_expands(aten.moveaxis.int, aten.moveaxis.intlist, aten.fliplr.default)
def _renamed(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    if node.target is aten.fliplr.default:
        return new.call(aten.flip.default, node.args[0], [1], shape=node.shape)
    target = aten.movedim.int if node.target is aten.moveaxis.int else aten.movedim.intlist
    return new.call(target, *node.args, shape=node.shape)


@_expands(aten.linalg_matmul.default)
def _linalg_matmul(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    return new.call(aten.matmul.default, *node.args, shape=node.shape)


@_expands(aten.linalg_vecdot.default)
def _vecdot(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b = args["x"], args["y"]
    shape = _broadcast(_shape(a), _shape(b))
    return _summed(new, new.call(aten.mul.Tensor, a, b, shape=shape), [args["dim"]], False, _shape(node))


def _letters(count: int) -> list[str]:
    return [chr(ord("a") + i) for i in range(count)]


@_expands(aten.inner.default)
def _inner(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b = args["self"], args["other"]
    n, m = len(_shape(a)), len(_shape(b))
    if n == 0 or m == 0:
        return None
    return _tensordot_of(node, new, a, b, [n - 1], [m - 1])


@_expands(aten.tensordot.default)
def _tensordot(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    return _tensordot_of(node, new, args["self"], args["other"], args["dims_self"], args["dims_other"])


def _tensordot_of(node: Node, new: Builder, a: Node, b: Node, da: Sequence[int], db: Sequence[int]) -> Node:
    n, m = len(_shape(a)), len(_shape(b))
    names = _letters(n + m)
    ia, ib = names[:n], names[n:]
    for i, j in zip(da, db, strict=True):
        ib[j % m] = ia[i % n]
    gone = {ia[i % n] for i in da}
    out = [c for c in ia + ib if c not in gone]
    return new.call(aten.einsum.default, f"{''.join(ia)},{''.join(ib)}->{''.join(out)}", [a, b], shape=node.shape)


@_expands(aten.bilinear.default)
def _bilinear(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    a, b, weight, bias = args["input1"], args["input2"], args["weight"], args["bias"]
    if not all(isinstance(s, int) for s in _shape(weight)):
        return None
    half = (*_shape(a)[:-1], _shape(weight)[0], _shape(weight)[2])
    left = new.call(aten.einsum.default, "...i,oij->...oj", [a, weight], shape=half)
    y = new.call(aten.einsum.default, "...oj,...j->...o", [left, b], shape=node.shape)
    return y if bias is None else new.call(aten.add.Tensor, y, bias, shape=node.shape)


@_expands(aten.einsum.default)
def _einsum(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    """Three or more tensors two at a time: a letter goes as soon as nothing behind reads it."""
    tensors = list(args["tensors"])
    equation = args["equation"].replace(" ", "")
    left, arrow, out = equation.partition("->")
    if len(tensors) < 3 or not arrow or "." in equation:
        return None
    terms = left.split(",")
    sizes = {c: s for term, t in zip(terms, tensors, strict=True) for c, s in zip(term, _shape(t), strict=True)}
    first, x = terms[0], tensors[0]
    for i in range(1, len(tensors)):
        later = set("".join(terms[i + 1 :]) + out)
        kept = out if i == len(tensors) - 1 else "".join(c for c in dict.fromkeys(first + terms[i]) if c in later)
        step = f"{first},{terms[i]}->{kept}"
        x = new.call(aten.einsum.default, step, [x, tensors[i]], shape=tuple(sizes[c] for c in kept))
        first = kept
    return x


# ----------------------------------------------------------- norms by hand


def _call(x: Argument, *targets: Operation) -> bool:
    return isinstance(x, Node) and x.kind == "call" and x.target in targets


def _squared(x: Argument) -> Node | None:
    """The tensor that x is the square of."""
    if _call(x, aten.square.default):
        return x.args[0]
    if _call(x, aten.pow.Tensor_Scalar) and x.args[1] == 2:
        return x.args[0]
    return x.args[0] if _call(x, aten.mul.Tensor) and x.args[0] is x.args[1] else None


def _reduced(x: Argument, *targets: Operation) -> tuple[Node, int] | None:
    """(t, axis) where x reduces t over one axis that is kept, and not the batch."""
    if not _call(x, *targets):
        return None
    args = arguments(x)
    dims = _dims(args["self"], args["dim"])
    biased = args.get("unbiased") is False or args.get("correction", 1) == 0 or "var" not in str(x.target)
    return (args["self"], dims[0]) if len(dims) == 1 and dims[0] and args["keepdim"] and biased else None


def _centred(x: Argument) -> tuple[Node, int] | None:
    """(t, axis) where x is t − mean(t)."""
    if not _call(x, aten.sub.Tensor) or x.kwargs:
        return None
    mean = _reduced(x.args[1], aten.mean.dim)
    return mean if mean is not None and mean[0] is x.args[0] else None


def _normalised(new: Builder, x: Node, inner: Argument) -> Node | None:
    """x/√inner, where inner is mean(x²) + ε, or the variance of t + ε with x = t − mean(t)."""
    if not _call(inner, aten.add.Tensor, aten.add.Scalar) or isinstance(inner.args[1], Node) or inner.kwargs:
        return None
    spread, eps = inner.args[0], float(inner.args[1])
    centred = _centred(x)
    second = _reduced(spread, aten.mean.dim)
    if second is not None:
        t = _squared(second[0])
        same = t is x or (centred is not None and _centred(t) == centred)
        axis = second[1] if same else None
    else:
        variance = _reduced(spread, aten.var.dim, aten.var.correction)
        axis = variance[1] if variance is not None and centred == variance else None
    if axis is None:
        return None
    if centred is not None and centred[1] == axis:
        return _along(new, aten.layer_norm.default, centred[0], axis, (None, None, eps))
    return _along(new, aten.rms_norm.default, x, axis, (None, eps))


def _along(new: Builder, norm: Argument, x: Node, axis: int, options: tuple[Any, ...]) -> Node | None:
    """A norm over one axis, moved to the end for it."""
    shape = _shape(x)
    n = shape[axis]
    if not isinstance(n, int):
        return None
    if axis == len(shape) - 1:
        return new.call(norm, x, [n], *options, shape=shape)
    moved = (*shape[:axis], *shape[axis + 1 :], n)
    y = new.call(aten.movedim.int, x, axis, -1, shape=moved)
    y = new.call(norm, y, [n], *options, shape=moved)
    return new.call(aten.movedim.int, y, -1, axis, shape=shape)


@_expands(aten.mul.Tensor)
def _times_norm(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    for x, root in ((args["self"], args["other"]), (args["other"], args["self"])):
        if isinstance(x, Node) and _call(root, aten.rsqrt.default) and x.shape == node.shape:
            return _normalised(new, x, root.args[0])
    return None


@_expands(aten.div.Tensor)
def _divided_by_norm(node: Node, new: Builder, args: dict[str, Any]) -> Node | None:
    x, below = args["self"], args["other"]
    if not isinstance(x, Node) or x.shape != node.shape:
        return None
    if _call(below, aten.sqrt.default):
        return _normalised(new, x, below.args[0])
    total = _reduced(below, aten.sum.dim_IntList)
    if total is not None and total[0] is x and _call(x, aten.exp.default):  # a softmax by hand
        return new.call(aten.softmax.int, x.args[0], total[1], shape=node.shape)
    if _call(below, aten.expand_as.default, aten.expand.default):
        below = below.args[0]
    if not _call(below, aten.clamp_min.default):
        return None
    norm, eps = below.args
    total = _reduced(norm.args[0], aten.sum.dim_IntList) if _call(norm, aten.sqrt.default) else None
    if total is None or _squared(total[0]) is not x:
        return None
    return _unit(new, x, total[1], float(eps))


__all__ = ["EXPANSIONS", "arguments", "expand_composite"]
