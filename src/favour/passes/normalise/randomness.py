"""The ways to write a draw, brought to three sources: a Bernoulli, a normal and a uniform one (`favour.rules.randomness`).

    randn, randn_like, normal_, torch.normal      mean + scale ∘ z
    rand, rand_like, uniform_                     low + (high − low)·u, u = ½ + uniform draw
    bernoulli, bernoulli_                         Bernoulli(p)
    u < c, u > c, ⌊u + c⌋ and their like          Bernoulli(P), for u read through sums and products with known numbers
    exponential_                                  −log Φ(z)/λ, with z normal
    u in other functions                          Φ(z), so that what follows is one function of a normal variable
    where(mask, a, b), masked_fill                b + mask∘(a − b)
    x ∘ mask, one entry of a mask for each of x   dropout

A draw of one number for the whole batch is one for each input to a belief, which is about each input alone; it gets the
batch in front.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch

from favour.errors import UnsupportedOperation
from favour.graph.node import Graph, Node, rewired
from favour.passes.rewriting import Builder, Shape, rewrite
from favour.rules.randomness import bernoulli_draw, normal_draw, uniform_draw
from favour.rules.registry import RULES

aten = torch.ops.aten

_BELOW = {aten.lt.Scalar, aten.lt.Tensor, aten.le.Scalar, aten.le.Tensor}
_ABOVE = {aten.gt.Scalar, aten.gt.Tensor, aten.ge.Scalar, aten.ge.Tensor}
_STEPS = {aten.floor.default: 0.0, aten.round.default: 0.5, aten.ceil.default: 1.0, aten.trunc.default: 0.0}
_ADD = {aten.add.Tensor, aten.add.Scalar}
_SUB = {aten.sub.Tensor, aten.sub.Scalar}
_MUL = {aten.mul.Tensor, aten.mul.Scalar}
_DIV = {aten.div.Tensor, aten.div.Scalar}
_COPIES = {aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default}
_CASTS = {aten.to.dtype, aten.to.dtype_layout, aten._to_copy.default, aten.type_as.default, aten.to.other}
_NOT = {aten.logical_not.default, aten.bitwise_not.default}
_AND = {aten.logical_and.default, aten.bitwise_and.Tensor, aten.__and__.Tensor}
_FILLS = {aten.masked_fill.Scalar, aten.masked_fill.Tensor}
_WHERE = {aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther, aten.where.Scalar}
_ARITHMETIC = _ADD | _SUB | _MUL | _DIV | _COPIES | _CASTS | {aten.rsub.Scalar, aten.neg.default}

_UNIFORM = {"rand", "rand_like", "uniform", "uniform_"}
_NORMAL = {"randn", "randn_like", "normal", "normal_", "normal_functional"}
_BERNOULLI = {"bernoulli", "bernoulli_"}
_EXPONENTIAL = {"exponential", "exponential_"}
_FARTHEST = 5.3  # 1 − Φ(5.3) = 6e-8, the step of float32 below 1
SOURCES = {bernoulli_draw, normal_draw, uniform_draw}
_NAMES = _UNIFORM | _NORMAL | _BERNOULLI | _EXPONENTIAL


def _name(node: Node) -> str:
    target = node.target
    return str(target).split(".")[1] if isinstance(target, torch._ops.OpOverload) and target.namespace == "aten" else ""


def spell_out_draws(graph: Graph) -> None:
    """Rewrite `graph` in place."""
    rewrite(graph, _native_dropout)
    if not any(n.kind == "call" and _name(n) in _NAMES for n in graph.nodes):
        return
    rewrite(graph, _Sources(graph))
    _lead_with_batch(graph)
    rewrite(graph, _Masks())
    rewrite(graph, _Dropouts(graph))
    graph.prune()


def _native_dropout(node: Node, new: Builder) -> Node | None:
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    call = node.args[0]
    if call.target is not aten.native_dropout.default:
        return None
    x, p, train = call.args
    return new.call(aten.dropout.default, x, p, train is not False, shape=node.shape)


# ------------------------------------------------------------------- sources


@dataclass(frozen=True)
class _Uniform:
    """scale·u + shift for a uniform u in [0, 1); numbers or nodes."""

    draw: Node
    scale: Any = 1.0
    shift: Any = 0.0


class _Sources:
    """Replaces random calls by sources; steps of uniform draws by Bernoulli ones."""

    def __init__(self, graph: Graph) -> None:
        self.users = graph.users()
        self.kinds: dict[Node, str] = {}  # by uniform draw: what is made of it
        self.forms: dict[Node, _Uniform] = {}  # by node of the graph as it was
        for node in graph.nodes:
            if node.kind == "call" and _name(node) in _UNIFORM:
                self.kinds[node] = self._kind(node)

    def _kind(self, draw: Node) -> str:
        """`"step"` where one comparison alone reads the draw, `"linear"` where arithmetic does, else `"smooth"`."""
        ahead, steps, smooth = [draw], 0, False
        seen: set[Node] = set()
        while ahead:
            node = ahead.pop()
            for user in self.users[node]:
                if _is_step(user, node):
                    steps += 1 + (user.shape != draw.shape)  # wider than the draw: not one for each entry
                elif user.target in _ARITHMETIC and _numbers_beside(user, node):
                    if user not in seen:
                        seen.add(user)
                        ahead.append(user)
                elif _bends(user):
                    smooth = True
        if steps == 1 and not smooth:
            return "step"
        return "smooth" if smooth or steps else "linear"

    def __call__(self, node: Node, new: Builder) -> Node | None:
        name = _name(node)
        if node in self.kinds:
            low, high = _bounds(node)
            if self.kinds[node] == "step":
                self.forms[node] = _Uniform(node, high - low, low)
                return None
            return self._uniform(node, new, low, high)
        if name in _NORMAL:
            return _normal(node, new)
        if name in _BERNOULLI:
            return _bernoulli(node, new)
        if name in _EXPONENTIAL:
            rate, shape = _argument(node, 1, 1.0), node.shape
            inside = _phi(new, _standard(node, new), shape)
            return new.call(aten.mul.Tensor, new.call(aten.log.default, inside, shape=shape), -1 / rate, shape=shape)
        form = next((self.forms[s] for s in node.inputs if s in self.forms), None)
        if form is None:
            return None
        return self._followed(node, new, form)

    def _uniform(self, node: Node, new: Builder, low: Any, high: Any) -> Node:
        shape = node.shape
        if self.kinds[node] == "smooth":
            u = _phi(new, _standard(node, new), shape)
        else:
            u = new.call(uniform_draw, _full(node, new, 0.5), shape=shape)
        if (low, high) == (0, 1):
            return u
        return new.call(aten.add.Scalar, new.call(aten.mul.Scalar, u, high - low, shape=shape), low, shape=shape)

    def _followed(self, node: Node, new: Builder, form: _Uniform) -> Node | None:
        x = next(s for s in node.inputs if s in self.forms)
        if node.target in _ARITHMETIC:
            self.forms[node] = _moved(node, x, form)
            return None
        scale, shift = form.scale, form.shift
        if node.target in _STEPS:  # ⌊s + u⌋ = ⌊s⌋ + 1 with the probability s − ⌊s⌋
            if scale not in (1.0, -1.0):
                raise UnsupportedOperation(
                    f"`{node.target}` at {node.place} makes a random number of several whole values; favour knows "
                    "draws of two. Write it as sums of `bernoulli`, or take it out of the model."
                )
            whole = shift + _STEPS[node.target] - (scale < 0)
            least = math.floor(whole)
            drawn = _drawn(form.draw, node, new, whole - least)
            return drawn if not least else new.call(aten.add.Scalar, drawn, float(least), shape=node.shape)
        first = node.args[0] is x
        other = node.args[1] if first else node.args[0]
        below = ((node.target in _BELOW) == first) == (scale > 0)  # u is less than what it is compared with
        if not isinstance(other, Node):
            inside = min(max((other - shift) / scale, 0.0), 1.0)
            return _drawn(form.draw, node, new, inside if below else 1 - inside)
        shape, dtype = node.shape, _floating(form.draw)
        t = new.call(aten.div.Scalar, _plus(new, other, -shift, dtype), scale, shape=other.shape, dtype=dtype)
        t = new.call(aten.clamp.default, t, 0.0, 1.0, shape=other.shape, dtype=dtype)
        t = t if below else new.call(aten.rsub.Scalar, t, 1.0, shape=other.shape, dtype=dtype)
        wide = new.call(aten.add.Tensor, _full(form.draw, new, 0.0), t, shape=shape, dtype=dtype)
        return new.call(bernoulli_draw, wide, shape=shape, dtype=dtype)


def _is_step(user: Node, x: Node) -> bool:
    return user.target in _STEPS or user.target in _BELOW | _ABOVE


def _numbers_beside(user: Node, x: Node) -> bool:
    """Whether arithmetic reads nothing beside a tensor but numbers."""
    divides = user.target in _DIV and user.args[0] is not x
    return not divides and all(s is x for s in user.inputs) and user.inputs.count(x) == 1 and not user.kwargs.get("alpha")


def _bends(user: Node) -> bool:
    entry = RULES.get(user.target)
    return entry is not None and entry.pointwise is not None


def _moved(node: Node, x: Node, form: _Uniform) -> _Uniform:
    """The form behind arithmetic with a number."""
    target = node.target
    if target in _COPIES | _CASTS:
        return form
    if target is aten.neg.default:
        return _Uniform(form.draw, -form.scale, -form.shift)
    a, b = node.args[:2]
    number = b if a is x else a
    if target in _MUL:
        return _Uniform(form.draw, form.scale * number, form.shift * number)
    if target in _DIV:
        return _Uniform(form.draw, form.scale / number, form.shift / number)
    if target in _ADD:
        return _Uniform(form.draw, form.scale, form.shift + number)
    turned = (target is aten.rsub.Scalar) == (a is x)  # number − x
    sign = -1 if turned else 1
    return _Uniform(form.draw, sign * form.scale, sign * (form.shift - number))


def _argument(node: Node, position: int, default: Any) -> Any:
    """A number in the signature, by its position."""
    declared = node.target._schema.arguments
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(declared[position].name, default) if position < len(declared) else default


def _floating(draw: Node) -> torch.dtype:
    dtype = draw.dtype
    return dtype if dtype is not None and dtype.is_floating_point else torch.get_default_dtype()


def _full(draw: Node, new: Builder, value: float) -> Node:
    """A constant of the shape of a draw."""
    dtype, first = _floating(draw), draw.args[0]
    like = first if isinstance(first, Node) and first.shape is not None else None
    if like is not None:
        made = new.call(aten.full_like.default, like, value, shape=draw.shape, dtype=dtype)
        made.kwargs = {"dtype": dtype}
    else:
        sizes = next(a for a in draw.args if isinstance(a, (list, tuple)))
        made = new.call(aten.full.default, sizes, value, shape=draw.shape, dtype=dtype)
        made.kwargs = {"dtype": dtype} | {k: v for k, v in draw.kwargs.items() if k == "device"}
    return made


def _drawn(draw: Node, node: Node, new: Builder, p: float) -> Node:
    """1 with probability p, for each entry; certain where p is 0 or 1."""
    constant = _full(draw, new, float(p))
    return constant if p in (0, 1) else new.call(bernoulli_draw, constant, shape=node.shape, dtype=constant.dtype)


def _plus(new: Builder, x: Node, number: float, dtype: Any) -> Node:
    return new.call(aten.add.Scalar, x, float(number), shape=x.shape, dtype=dtype)


def _phi(new: Builder, z: Node, shape: Shape | None) -> Node:
    """Φ(z) = ½ erfc(−z/√2), uniform for a normal z; never 0 or 1, as torch's numbers hardly ever are."""
    turned = new.call(aten.clamp.default, z, -_FARTHEST, _FARTHEST, shape=shape, dtype=z.dtype)
    turned = new.call(aten.mul.Scalar, turned, -(0.5**0.5), shape=shape, dtype=z.dtype)
    outside = new.call(aten.erfc.default, turned, shape=shape, dtype=z.dtype)
    return new.call(aten.mul.Scalar, outside, 0.5, shape=shape, dtype=z.dtype)


def _standard(node: Node, new: Builder) -> Node:
    zeros = _full(node, new, 0.0)
    return new.call(normal_draw, zeros, shape=node.shape, dtype=zeros.dtype)


def _bounds(node: Node) -> tuple[float, float]:
    if _name(node) in ("uniform", "uniform_"):
        return _argument(node, 1, 0.0), _argument(node, 2, 1.0)
    return 0.0, 1.0


def _normal(node: Node, new: Builder) -> Node:
    """mean + std∘z."""
    shape, overload = node.shape, node.target._overloadname
    mean: Any = 0.0
    std: Any = 1.0
    if _name(node) in ("normal_", "normal_functional"):
        mean, std = _argument(node, 1, 0.0), _argument(node, 2, 1.0)
    elif _name(node) == "normal":
        mean, std = _argument(node, 0, 0.0), _argument(node, 1, 1.0)
    if overload == "float_Tensor":  # the shape is that of the standard deviations
        zeros = new.call(aten.zeros_like.default, std, shape=shape, dtype=_floating(node))
        z = new.call(normal_draw, zeros, shape=shape, dtype=zeros.dtype)
    else:
        z = _standard(node, new)
    y = z if isinstance(std, (int, float)) and std == 1 else new.call(aten.mul.Tensor, z, std, shape=shape, dtype=z.dtype)
    if isinstance(mean, (int, float)) and mean == 0:
        return y
    return new.call(aten.add.Tensor, y, mean, shape=shape, dtype=z.dtype)


def _bernoulli(node: Node, new: Builder) -> Node:
    shape, dtype = node.shape, _floating(node)
    if node.target is aten.bernoulli.default:
        return new.call(bernoulli_draw, node.args[0], shape=shape, dtype=dtype)
    p = _argument(node, 1, 0.5)
    if isinstance(p, Node):
        wide = new.call(aten.add.Tensor, _full(node, new, 0.0), p, shape=shape, dtype=dtype)
        return new.call(bernoulli_draw, wide, shape=shape, dtype=dtype)
    return _drawn(node, node, new, p)


# ------------------------------------------------------------------- the batch


def _lead_with_batch(graph: Graph) -> None:
    """Draws without the batch in front get it, and what element-wise code makes of them."""
    first = next((n for n in graph.inputs if n is not None and n.shape), None)
    if first is None or first.shape is None or not isinstance(first.shape[0], str):
        return
    rewrite(graph, _Leading(first, first.shape[0]))


class _Leading:
    def __init__(self, first: Node, batch: str) -> None:
        self.first, self.batch = first, batch
        self.led: set[Node] = set()  # the batch stands where the model has a one
        self.loose: set[Node] = set()  # the batch stands in front of what the model has

    def __call__(self, node: Node, new: Builder) -> Node | None:
        shape = node.shape
        if shape is None:
            return None
        if node.target in SOURCES and shape[:1] != (self.batch,):
            return self._widened(node, new, shape)
        behind = [s for s in node.inputs if s in self.loose]
        if not behind:
            if any(s in self.led for s in node.inputs) and shape[:1] == (1,) and _entrywise(node):
                node.shape = (self.batch, *shape[1:])
                self.led.add(node)
            return None
        if not _entrywise(node):
            raise UnsupportedOperation(
                f"`{node.target}` at {node.place} reads random numbers that are drawn once for the whole batch, in a "
                "way favour does not follow; draw them for each input, with the batch in front."
            )
        whole = shape[:1] == (self.batch,)
        dims = len(shape) if whole else len(shape) + 1
        swapped = {s: _under(new, s, dims) for s in dict.fromkeys(behind)}
        made = rewired(node, lambda n: swapped.get(n, n))
        made.name = f"{node.name}_led"
        if not whole:
            made.shape = (self.batch, *shape)
            self.loose.add(made)
        new.nodes.append(made)
        return made

    def _widened(self, node: Node, new: Builder, shape: Shape) -> Node:
        size = new.call(aten.sym_size.int, self.first, 0, shape=None)
        led = shape[:1] == (1,)
        inner = shape[1:] if led else shape
        base = new.call(aten.expand.default, node.args[0], [size, *[-1] * len(inner)], shape=(self.batch, *inner))
        made = new.call(node.target, base, *node.args[1:], shape=(self.batch, *inner))
        (self.led if led else self.loose).add(made)
        return made


def _entrywise(node: Node) -> bool:
    known = _ARITHMETIC | _BELOW | _ABOVE | _NOT | _AND | _FILLS | _WHERE
    return node.target in known or _bends(node) or node.target is bernoulli_draw


def _under(new: Builder, x: Node, dims: int) -> Node:
    """x with ones behind the batch, so that it has `dims` dimensions."""
    assert x.shape is not None
    for _ in range(dims - len(x.shape)):
        shape = x.shape
        x = new.call(aten.unsqueeze.default, x, 1, shape=(shape[0], 1, *shape[1:]), dtype=x.dtype)
        assert x.shape is not None
    return x


# ------------------------------------------------------------------- masks


class _Masks:
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
        if target in _COPIES | _CASTS and node.args[0] is mask:
            return self._kept(self._cast(mask, node, new))
        if target in _NOT:
            return self._kept(new.call(aten.rsub.Scalar, mask, 1.0, shape=shape, dtype=mask.dtype))
        if target in _AND:
            other = node.args[1] if node.args[0] is mask else node.args[0]
            if other not in self.masks:
                other = new.call(aten.to.dtype, other, mask.dtype, shape=other.shape, dtype=mask.dtype)
            return self._kept(new.call(aten.mul.Tensor, mask, other, shape=shape, dtype=mask.dtype))
        if target in _WHERE and node.args[0] is mask:
            return _mixed(mask, node.args[1], node.args[2], node, new)
        if target in _FILLS and node.args[1] is mask:
            return _mixed(mask, node.args[2], node.args[0], node, new)
        return None

    def _kept(self, mask: Node) -> Node:
        self.masks.add(mask)
        return mask

    def _cast(self, mask: Node, node: Node, new: Builder) -> Node:
        if node.dtype is None or not node.dtype.is_floating_point or node.dtype is mask.dtype:
            return mask
        return new.call(aten.to.dtype, mask, node.dtype, shape=node.shape, dtype=node.dtype)


def _mixed(mask: Node, a: Any, b: Any, node: Node, new: Builder) -> Node:
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


def _number(value: Any) -> float | None:
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


class _Dropouts:
    """x∘cM with M of two values for each entry, or channel, is dropout, whatever the ways to write it."""

    def __init__(self, graph: Graph) -> None:
        self.users = graph.users()

    def __call__(self, node: Node, new: Builder) -> Node | None:
        if node.target not in _MUL or node.shape is None or not all(isinstance(a, Node) for a in node.args):
            return None
        for x, mask in (node.args, node.args[::-1]):
            found = self._scaled(mask)
            if found is None or x.shape != node.shape or found[2].shape is None:
                continue
            factor, keep, drawn = found
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
            if here.target in _COPIES | _CASTS:
                here = here.args[0]
            elif here.target in _MUL | _DIV and isinstance(here.args[1], (int, float)):
                factor = factor * here.args[1] if here.target in _MUL else factor / here.args[1]
                here = here.args[0]
            elif here.target is aten.rsub.Scalar and here.args[1] == 1 and not turned:
                turned, here = True, here.args[0]
            else:
                return None
        return None
