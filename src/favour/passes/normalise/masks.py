"""What models do with random masks, `favour.rules.randomness.bernoulli`.

where(mask, a, b), masked_fill                b + mask∘(a − b)
~mask, mask & other                           1 − mask, mask∘other
x ∘ c·mask, one entry of a mask for each of x c·P(1)·dropout(x), whatever the way to write it
"""

from __future__ import annotations

import math

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node
from favour.graph.traits import Argument
from favour.passes.rewriting import Builder
from favour.passes.words import AND, DIV, FILLS, MUL, NOT, WHERE
from favour.rules.randomness import bernoulli_draw

aten = torch.ops.aten


class Masks:
    """Where a model chooses by a random mask, it computes b + mask∘(a − b)."""

    def __init__(self) -> None:
        self.masks: set[Node] = set()  # 0 or 1

    def __call__(self, node: Node, new: Builder) -> Node | None:
        if node.target is bernoulli_draw:
            self.masks.add(node)
            return None
        mask = next((s for s in node.inputs if s in self.masks), None)
        if mask is None:
            return None
        shape, target = node.shape, node.target
        if node.traits.keeps and node.args[0] is mask:
            return self._kept(self._cast(mask, node, new))
        if target in NOT:
            return self._kept(new.call(aten.rsub.Scalar, mask, 1.0, shape=shape, dtype=mask.dtype))
        if target in AND:
            other = node.args[1] if node.args[0] is mask else node.args[0]
            if other not in self.masks:
                other = new.call(aten.to.dtype, other, mask.dtype, shape=other.shape, dtype=mask.dtype)
            return self._kept(new.call(aten.mul.Tensor, mask, other, shape=shape, dtype=mask.dtype))
        if target in WHERE and node.args[0] is mask:
            return _mixed(mask, node.args[1], node.args[2], node, new)
        if target in FILLS and node.args[1] is mask:
            return _mixed(mask, node.args[2], node.args[0], node, new)
        return None

    def _kept(self, mask: Node) -> Node:
        self.masks.add(mask)
        return mask

    def _cast(self, mask: Node, node: Node, new: Builder) -> Node:
        if node.dtype is None or not node.dtype.is_floating_point or node.dtype is mask.dtype:
            return mask
        return new.call(aten.to.dtype, mask, node.dtype, shape=node.shape, dtype=node.dtype)


def _mixed(mask: Node, a: Argument, b: Argument, node: Node, new: Builder) -> Node:
    """a where the mask is 1, b where it is 0."""
    shape = node.shape
    known = [_number(v) for v in (a, b)]
    if any(v is not None and not math.isfinite(v) for v in known):
        raise UnsupportedOperation(
            f"`{node.target}` at {node.place} fills entries with infinity by a random mask; such scores have no "
            "moments. Drop the weights behind the softmax instead."
        )
    if known[1] == 0:
        return a if known[0] == 0 else new.call(aten.mul.Tensor, mask, a, shape=shape)
    if known[0] == 0:
        rest = new.call(aten.rsub.Scalar, mask, 1.0, shape=mask.shape, dtype=mask.dtype)
        return new.call(aten.mul.Tensor, b, rest, shape=shape)
    if known[0] is not None and known[1] is not None:
        scaled = new.call(aten.mul.Scalar, mask, known[0] - known[1], shape=shape)
        return new.call(aten.add.Scalar, scaled, known[1], shape=shape)
    gap = new.call(aten.rsub.Scalar, b, known[0], shape=b.shape) if known[0] is not None else None
    gap = gap or new.call(aten.sub.Tensor, a, b if known[1] is None else known[1], shape=shape)
    chosen = new.call(aten.mul.Tensor, gap, mask, shape=shape)
    return new.call(aten.add.Tensor, chosen, b if known[1] is None else known[1], shape=shape)


_CONSTANTS = {aten.zeros_like.default: 0.0, aten.zeros.default: 0.0, aten.new_zeros.default: 0.0,
              aten.ones_like.default: 1.0, aten.ones.default: 1.0, aten.new_ones.default: 1.0}  # fmt: skip
_FULL = {aten.full_like.default: 1, aten.full.default: 1, aten.scalar_tensor.default: 0}


def _number(value: Argument) -> float | None:
    """The one number that a value is made of, where its code says so."""
    if isinstance(value, (int, float)):
        return float(value)
    if not isinstance(value, Node) or value.kind != "call":
        return None
    if value.target in _CONSTANTS:
        return _CONSTANTS[value.target]
    if value.target in _FULL and isinstance(value.args[_FULL[value.target]], (int, float)):
        return float(value.args[_FULL[value.target]])
    return None


class Dropouts:
    """x∘cM with M of two values for each entry, or channel, is dropout, whatever the ways to write it."""

    def __init__(self, graph: Graph) -> None:
        self.users = graph.users()

    def __call__(self, node: Node, new: Builder) -> Node | None:
        if node.target not in MUL or node.shape is None or not all(isinstance(a, Node) for a in node.args):
            return None
        for x, mask in (node.args, node.args[::-1]):
            parts = self._scaled(mask)
            if parts is None or x.shape != node.shape or parts[2].shape is None:
                continue
            factor, keep, drawn = parts
            assert drawn.shape is not None
            shape, event = node.shape, drawn.shape[2:]
            channels = len(shape) > 2 and drawn.shape[:2] == shape[:2] and all(s == 1 for s in event)
            if drawn.shape != shape and not (channels and len(drawn.shape) == len(shape)):
                continue
            op = aten.dropout.default if drawn.shape == shape else aten.feature_dropout.default
            y = new.call(op, x, 1 - keep, True, shape=shape)
            gain = factor * keep
            return y if abs(gain - 1) < 1e-9 else new.call(aten.mul.Scalar, y, gain, shape=shape)
        return None

    def _scaled(self, mask: Node) -> tuple[float, float, Node] | None:
        """(c, P(M = 1), draw) where a node is cM, and nothing else reads the draw."""
        factor, turned, here = 1.0, False, mask
        while len(self.users.get(here, ())) == 1 or here.target is bernoulli_draw:
            if len(self.users.get(here, ())) != 1:
                return None
            if here.target is bernoulli_draw:
                p = _number(here.args[0])
                return None if p is None else (factor, 1 - p if turned else p, here)
            if here.traits.keeps:
                here = here.args[0]
            elif here.target in MUL | DIV and isinstance(here.args[1], (int, float)):
                factor = factor * here.args[1] if here.target in MUL else factor / here.args[1]
                here = here.args[0]
            elif here.target is aten.rsub.Scalar and here.args[1] == 1 and not turned:
                turned, here = True, here.args[0]
            else:
                return None
        return None
