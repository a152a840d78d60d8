"""What is left without a rule, written in operations that have one: at uncertain tensors only, others run as they are.

    min_i x_i = −max_i(−x_i)                     logaddexp(a, b) = b + softplus(a − b)
    ∏_i x_i, two at a time                       cˣ = exp(x·ln c),  log₂ x = ln x / ln 2
    var_mean, var over several dimensions        those over one
    max(a, b) = b + relu(a − b)                  where(a > b, a, b) = max(a, b)
    1(a > b) = (1 + sign(a − b))/2               where(c, a, b) = b + c·(a − b) for a random c

`torch.special` has other names for what has rules, and NaN and infinities, which `nan_to_num` replaces, no beliefs. A
comparison becomes a number only where all that read it take it for one. Comparisons and extremes of code on one tensor,
x·1(x > 0), are a function of it (`fusion`), so that what is left of them is written out afterwards.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection
from typing import Any

import torch

from favour.graph.node import Graph, Node
from favour.passes.normalise.composites import arguments
from favour.passes.rewriting import Builder, Shape, rewrite

aten = torch.ops.aten

_NAMES = {
    aten.special_expit.default: aten.sigmoid.default,
    aten.special_erf.default: aten.erf.default,
    aten.special_erfc.default: aten.erfc.default,
    aten.special_expm1.default: aten.expm1.default,
    aten.special_log1p.default: aten.log1p.default,
    aten.special_softmax.default: aten.softmax.int,
    aten.special_log_softmax.default: aten.log_softmax.int,
    aten.special_logsumexp.default: aten.logsumexp.default,
    aten.nan_to_num.default: aten.alias.default,
}
_LONGEST = 64  # product that is written out


def spell_out(graph: Graph, uncertain: Collection[Node]) -> None:
    """Functions of one tensor. Assumes that nothing writes in place."""
    rewrite(graph, lambda node, new: _functions(node, new) if node in uncertain else None)


def _functions(node: Node, new: Builder) -> Node | None:
    if node.target in _NAMES:
        args = node.args[:1] if node.target is aten.nan_to_num.default else node.args
        return new.call(_NAMES[node.target], *args, shape=node.shape)
    made = _FUNCTIONS.get(node.target)
    return None if made is None else made(node, new)


def _shape(x: Node) -> Shape:
    assert x.shape is not None
    return x.shape


def _smallest(node: Node, new: Builder) -> Node | None:
    x, *rest = node.args
    turned = new.call(aten.neg.default, x, shape=_shape(x))
    target = aten.amax.default if node.target is aten.amin.default else aten.max.default
    made = new.call(target, turned, *rest, shape=node.shape, **node.kwargs)
    return new.call(aten.neg.default, made, shape=node.shape)


def _item(node: Node, new: Builder) -> Node | None:
    """The values of `min` along a dimension; a variance, or a mean, of `var_mean`."""
    several, which = node.args
    args = arguments(several) if hasattr(several.target, "_schema") else {}
    if several.target is aten.min.dim and which == 0:
        x = args["self"]
        turned = new.call(aten.neg.default, x, shape=_shape(x))
        made = new.call(aten.amax.default, turned, [args["dim"]], args["keepdim"], shape=node.shape)
        return new.call(aten.neg.default, made, shape=node.shape)
    if several.target not in (aten.var_mean.dim, aten.var_mean.correction):
        return None
    if which == 1:
        x = args["self"]
        dims = args["dim"] if args["dim"] else list(range(len(_shape(x))))
        return new.call(aten.mean.dim, x, dims, args["keepdim"], shape=node.shape)
    target = aten.var.dim if several.target is aten.var_mean.dim else aten.var.correction
    variance = new.call(target, *several.args, shape=node.shape, **several.kwargs)
    return _variance(variance, new) or variance


def _variance(node: Node, new: Builder) -> Node | None:
    """Over several dimensions: these side by side, as one."""
    args = arguments(node)
    x, dims = args["self"], args["dim"]
    if not isinstance(dims, (list, tuple)) or len(dims) < 2:
        return None
    shape = _shape(x)
    dims = [d % len(shape) for d in dims]
    others = [i for i in range(len(shape)) if i not in dims]
    merged = [shape[i] for i in dims]
    if 0 in dims or any(isinstance(s, str) for s in (*merged, *(shape[i] for i in others[1:]))):
        return None
    flat = (*(shape[i] for i in others), math.prod(int(s) for s in merged))
    x = new.call(aten.permute.default, x, others + dims, shape=tuple(shape[i] for i in others + dims))
    x = new.call(aten.reshape.default, x, [-1, *flat[1:]], shape=flat)
    correction = args.get("correction", 1 if args.get("unbiased", True) else 0)
    made = new.call(aten.var.correction, x, [-1], shape=flat[:-1], correction=correction)
    if not args["keepdim"]:
        return made
    return new.call(aten.reshape.default, made, [-1, *_shape(node)[1:]], shape=node.shape)


def _product(node: Node, new: Builder) -> Node | None:
    args = arguments(node)
    x, dim = args["self"], args["dim"] % len(_shape(args["self"]))
    size = _shape(x)[dim]
    if dim == 0 or not isinstance(size, int) or not 0 < size <= _LONGEST:
        return None
    shape = tuple(s for i, s in enumerate(_shape(x)) if i != dim)
    factors = [new.call(aten.select.int, x, dim, i, shape=shape) for i in range(size)]
    while len(factors) > 1:
        pairs = [
            new.call(aten.mul.Tensor, a, b, shape=shape) for a, b in zip(factors[::2], factors[1::2], strict=False)
        ]
        factors = pairs + factors[2 * len(pairs) :]
    if not args["keepdim"]:
        return factors[0]
    return new.call(aten.unsqueeze.default, factors[0], dim, shape=node.shape)


def _power(node: Node, new: Builder) -> Node | None:
    base, x = (2, node.args[0]) if node.target in _POWERS_OF_TWO else node.args
    if not base > 0:
        return None
    scaled = new.call(aten.mul.Tensor, x, math.log(base), shape=_shape(x))
    return new.call(aten.exp.default, scaled, shape=node.shape)


_POWERS_OF_TWO = (aten.exp2.default, aten.special_exp2.default)


def _logarithm(base: float) -> Callable[[Node, Builder], Node]:
    def made(node: Node, new: Builder) -> Node:
        natural = new.call(aten.log.default, node.args[0], shape=node.shape)
        return new.call(aten.mul.Tensor, natural, 1 / math.log(base), shape=node.shape)

    return made


def _log_of_sum(node: Node, new: Builder) -> Node:
    a, b = node.args
    gap = new.call(aten.sub.Tensor, a, b, shape=node.shape)
    return new.call(aten.add.Tensor, b, new.call(aten.softplus.default, gap, shape=node.shape), shape=node.shape)


def _normal_tail(node: Node, new: Builder) -> Node:
    x = new.call(aten.mul.Tensor, node.args[0], -(0.5**0.5), shape=node.shape)
    return new.call(aten.mul.Tensor, new.call(aten.erfc.default, x, shape=node.shape), 0.5, shape=node.shape)


_FUNCTIONS: dict[Any, Callable[[Node, Builder], Node | None]] = {
    aten.amin.default: _smallest,
    aten.min.default: _smallest,
    operator.getitem: _item,
    aten.var.dim: _variance,
    aten.var.correction: _variance,
    aten.prod.dim_int: _product,
    aten.pow.Scalar: _power,
    **dict.fromkeys(_POWERS_OF_TWO, _power),
    aten.log2.default: _logarithm(2),
    aten.log10.default: _logarithm(10),
    aten.logaddexp.default: _log_of_sum,
    aten.special_ndtr.default: _normal_tail,
}


# --------------------------------------------------- what is left after fusing

_ABOVE = {aten.gt.Scalar, aten.ge.Scalar, aten.gt.Tensor, aten.ge.Tensor}
_BELOW = {aten.lt.Scalar, aten.le.Scalar, aten.lt.Tensor, aten.le.Tensor}
_LARGER = {aten.maximum.default, aten.fmax.default, aten.max.other}
_SMALLER = {aten.minimum.default, aten.fmin.default, aten.min.other}
_CHOICES = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}
_BOTH = {aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor}
_NUMBERS = {aten.mul.Tensor, aten.to.dtype, aten._to_copy.default, aten.type_as.default}


def spell_out_comparisons(graph: Graph, uncertain: Collection[Node]) -> None:
    """Extremes and comparisons. Assumes that code on one tensor is one function already."""
    rewrite(graph, lambda node, new: _larger_of_two(node, new) if node in uncertain else None)
    as_numbers = _read_as_numbers(graph, uncertain)
    rewrite(graph, lambda node, new: _compared(node, new, uncertain, as_numbers) if node in uncertain else None)


def _larger_of_two(node: Node, new: Builder) -> Node | None:
    """where(a > b, a, b)."""
    if node.target not in _CHOICES or node.args[0].target not in _ABOVE | _BELOW:
        return None
    truth, a, b = node.args
    if set(map(id, truth.args)) != {id(a), id(b)} or a is b:
        return None
    return _extreme(new, (truth.target in _ABOVE) == (truth.args[0] is a), a, b, node)


def _read_as_numbers(graph: Graph, uncertain: Collection[Node]) -> set[Node]:
    """Random truth values that nothing reads otherwise."""
    users = graph.users()
    outputs = set(graph.outputs)
    numbers: set[Node] = set()
    for node in reversed(graph.calls):
        truth = node in uncertain and node.target in _ABOVE | _BELOW | _NOT | _BOTH
        if truth and node not in outputs and all(_takes(u, node, numbers) for u in users.get(node, ())):
            numbers.add(node)
    return numbers


def _takes(user: Node, truth: Node, numbers: Collection[Node]) -> bool:
    if user.target in _CHOICES:
        return user.args[0] is truth
    if user.target in _FILLS:
        return user.args[1] is truth
    return user.target in _NUMBERS or user in numbers


def _compared(node: Node, new: Builder, uncertain: Collection[Node], numbers: Collection[Node]) -> Node | None:
    shape, args = node.shape, node.args

    def step(target: Any, a: Any, b: Any) -> Node:
        return new.call(target, a, b, shape=shape, dtype=torch.get_default_dtype() if _is_truth(node) else None)

    if node.target in _LARGER | _SMALLER:
        return _extreme(new, node.target in _LARGER, args[0], args[1], node)
    if node in numbers and node.target in _ABOVE | _BELOW:
        a, b = args if node.target in _ABOVE else args[::-1]
        gap = step(aten.sub.Tensor, a, b) if isinstance(a, Node) else step(aten.rsub.Scalar, b, a)
        signs = new.call(aten.sign.default, gap, shape=shape, dtype=gap.dtype)
        return step(aten.mul.Tensor, step(aten.add.Tensor, signs, 1.0), 0.5)
    if node in numbers and node.target in _NOT:
        return step(aten.rsub.Scalar, args[0], 1.0)
    if node in numbers and node.target in _BOTH:
        return step(aten.mul.Tensor, *args)
    if node.target in _CHOICES:
        return _chosen(new, *args, node=node)
    if node.target in _FILLS:
        x, mask, value = args
        return _chosen(new, mask, value, x, node=node)
    return None


def _is_truth(node: Node) -> bool:
    return node.dtype is torch.bool


def _extreme(new: Builder, larger: bool, a: Any, b: Any, node: Node) -> Node:
    """b ± relu(±(a − b))."""
    gap = new.call(aten.sub.Tensor, *((a, b) if larger else (b, a)), shape=node.shape)
    over = new.call(aten.relu.default, gap, shape=node.shape)
    return new.call(aten.add.Tensor if larger else aten.sub.Tensor, b, over, shape=node.shape)


def _chosen(new: Builder, truth: Any, a: Any, b: Any, *, node: Node) -> Node | None:
    """What a random truth value, which is a number by now, chooses."""
    if _is_truth(truth):
        return None
    if not isinstance(a, Node) and not isinstance(b, Node):
        made = new.call(aten.mul.Tensor, truth, a - b, shape=node.shape)
        return new.call(aten.add.Tensor, made, b, shape=node.shape)
    gap = new.call(aten.sub.Tensor, a, b, shape=node.shape) if isinstance(a, Node) else None
    gap = gap or new.call(aten.rsub.Scalar, b, a, shape=node.shape)
    return new.call(aten.add.Tensor, new.call(aten.mul.Tensor, truth, gap, shape=node.shape), b, shape=node.shape)
