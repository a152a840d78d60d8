"""Products, mapped over the batch: factors broadcast over the axes in front, so that mm and bmm become matmul."""

from __future__ import annotations

from typing import Any

import torch

from favour.graph.traits import Argument
from favour.passes.normalise.lifting import Call, Lifted, Unmapped, is_dropped, lifts
from favour.passes.rewriting import Shape

aten = torch.ops.aten


@lifts(aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default)
def matmul(call: Call) -> Lifted:
    a, b = call.node.args[:2]
    return _product(call, a, b, call.shape)


def _product(call: Call, a: Argument, b: Argument, result: Shape) -> Lifted:
    ra, rb = len(call.shape_of(a)), len(call.shape_of(b))
    first, second = call.shape_of(a), call.shape_of(b)
    if ra == 2 and rb == 2 and is_dropped(first) and not call.depends(b):  # one row for each input
        shape = (call.batch, second[1])
        return call.call(aten.matmul.default, call.kept(a), call.swapped(b, call.kept), shape=shape), False
    rank = max(ra, rb, 2)
    dropped = rank > 2 and is_dropped(result) and ra > 1 and rb > 1
    x, y = _matrix(call, a, rank, dropped, -2), _matrix(call, b, rank, dropped, -1)
    lead = (call.batch, *result[dropped : len(result) - (ra > 1) - (rb > 1)])
    rows, columns = (first[-2] if ra > 1 else 1), (second[-1] if rb > 1 else 1)
    made = call.call(aten.matmul.default, x, y, shape=(*lead, rows, columns))
    if ra == 1:
        made = call.call(aten.squeeze.dim, made, -2, shape=(*lead, columns))
    if rb == 1:
        assert made.shape is not None
        made = call.call(aten.squeeze.dim, made, -1, shape=made.shape[:-1])
    return made, not dropped


def _matrix(call: Call, x: Argument, rank: int, dropped: bool, at: int) -> Any:
    """A factor with the batch in front; a vector as a row or a column."""
    shape = call.shape_of(x)
    if len(shape) > 1:
        return call.aligned(x, rank, dropped)
    lead = (call.batch,) if call.depends(x) else ()
    value = call.whole(x) if call.depends(x) else call.swapped(x, call.kept)
    matrix = (1, shape[0]) if at == -2 else (shape[0], 1)
    value = call.call(aten.unsqueeze.default, value, at, shape=(*lead, *matrix))
    ones: Shape = ()
    while lead and len(ones) < rank - 2:
        ones = (*ones, 1)
        value = call.call(aten.unsqueeze.default, value, 1, shape=(*lead, *ones, *matrix))
    return value


@lifts(aten.addmm.default, aten.baddbmm.default)
def product_and_sum(call: Call) -> Lifted:
    added, a, b = call.node.args[:3]
    alpha, beta = call.argument("alpha"), call.argument("beta")
    if a not in call.tensors and b not in call.tensors:
        raise Unmapped("adds a product that is the same for every input")
    shapes = call.shape_of(a), call.shape_of(b)
    y, whole = _product(call, a, b, (*shapes[0][:-1], shapes[1][-1]))
    if alpha != 1:
        y = call.call(aten.mul.Tensor, y, alpha, shape=y.shape)
    if beta == 0:
        return y, whole
    other = call.aligned(added, len(call.shape), not whole)
    if beta != 1:
        other = call.call(aten.mul.Tensor, other, beta, shape=other.shape)
    return call.call(aten.add.Tensor, y, other, shape=y.shape), whole


@lifts(aten.linear.default)
def linear(call: Call) -> Lifted:
    x, weight, *bias = call.node.args
    if call.depends(weight) or any(call.depends(b) for b in bias) or not call.depends(x):
        raise Unmapped("has a weight that differs from input to input")
    value = call.kept(x)
    whole = not is_dropped(call.shape_of(x))
    if is_dropped(call.shape_of(x)) and len(call.shape_of(x)) == 1:
        value, whole = call.whole(x), True
    assert value.shape is not None
    shape = (*value.shape[:-1], call.shape[-1])
    return call.call(aten.linear.default, value, *call.swapped((weight, *bias), call.kept), shape=shape), whole


@lifts(aten.einsum.default)
def einsum(call: Call) -> Lifted:
    equation, operands = call.node.args[:2]
    terms, _, result = equation.replace(" ", "").partition("->")
    if "->" not in equation:
        raise Unmapped("names no indices of its result; write `->`")
    letter = next(c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBAzyxwvutsrqponmlkjihgfedcba" if c not in equation)
    written = [letter + t if call.depends(o) else t for t, o in zip(terms.split(","), operands, strict=True)]
    tensors = [call.whole(o) if call.depends(o) else call.swapped(o, call.kept) for o in operands]
    made = call.call(
        aten.einsum.default,
        f"{','.join(written)}->{letter}{result}",
        tensors,
        shape=(call.batch, *call.shape),
    )
    return made, True
