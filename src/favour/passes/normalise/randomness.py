"""The ways to write a draw, brought to three sources: a Bernoulli, a normal and a uniform one.

`favour.rules.randomness` has the sources, `favour.passes.normalise.masks` what models do with masks.

    randn, randn_like, normal_, torch.normal      mean + scale ∘ z
    rand, rand_like, uniform_                     low + (high − low)·u, u = ½ + uniform draw
    bernoulli, bernoulli_                         Bernoulli(p)
    u < c, u > c, ⌊u + c⌋ and their like          Bernoulli(P), for u read through sums and products with known numbers
    exponential_                                  −log Φ(z)/λ, with z normal
    u in other functions                          Φ(z), so that what follows is one function of a normal variable

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
from favour.graph.traits import Argument
from favour.passes.normalise.masks import Dropouts, Masks
from favour.passes.rewriting import Builder, Shape, rewrite
from favour.passes.words import ABOVE, ADD, BELOW, DIV, MUL
from favour.rules.randomness import bernoulli_draw, normal_draw, uniform_draw
from favour.rules.registry import RULES

aten = torch.ops.aten

_STEPS = {aten.floor.default: 0.0, aten.round.default: 0.5, aten.ceil.default: 1.0, aten.trunc.default: 0.0}
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
    """Rewrite `graph` in place. Assumes that no operation writes to its arguments."""
    rewrite(graph, _native_dropout)
    if not any(n.kind == "call" and _name(n) in _NAMES for n in graph.nodes):
        return
    rewrite(graph, _Sources(graph))
    _lead_with_batch(graph)
    rewrite(graph, Masks())
    rewrite(graph, Dropouts(graph))
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
                elif _arithmetic(user) and _numbers_beside(user, node):
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

    def _uniform(self, node: Node, new: Builder, low: Argument, high: Argument) -> Node:
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
        if _arithmetic(node):
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
        below = ((node.target in BELOW) == first) == (scale > 0)  # u is less than what it is compared with
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
    return user.target in _STEPS or user.target in BELOW | ABOVE


def _numbers_beside(user: Node, x: Node) -> bool:
    """Whether arithmetic reads nothing beside a tensor but numbers."""
    divides = user.target in DIV and user.args[0] is not x
    return (
        not divides and all(s is x for s in user.inputs) and user.inputs.count(x) == 1 and not user.kwargs.get("alpha")
    )


def _arithmetic(user: Node) -> bool:
    return bool(user.traits.affine or user.traits.keeps)


def _bends(user: Node) -> bool:
    entry = RULES.get(user.target)
    return entry is not None and entry.pointwise is not None


def _moved(node: Node, x: Node, form: _Uniform) -> _Uniform:
    """The form behind arithmetic with a number."""
    target = node.target
    if node.traits.keeps:
        return form
    if target is aten.neg.default:
        return _Uniform(form.draw, -form.scale, -form.shift)
    a, b = node.args[:2]
    number = b if a is x else a
    if target in MUL:
        return _Uniform(form.draw, form.scale * number, form.shift * number)
    if target in DIV:
        return _Uniform(form.draw, form.scale / number, form.shift / number)
    if target in ADD:
        return _Uniform(form.draw, form.scale, form.shift + number)
    turned = (target is aten.rsub.Scalar) == (a is x)  # number − x
    sign = -1 if turned else 1
    return _Uniform(form.draw, sign * form.scale, sign * (form.shift - number))


def _argument(node: Node, position: int, default: Argument) -> Any:
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


def _plus(new: Builder, x: Node, number: float, dtype: Argument) -> Node:
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
    y = (
        z
        if isinstance(std, (int, float)) and std == 1
        else new.call(aten.mul.Tensor, z, std, shape=shape, dtype=z.dtype)
    )
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
    return node.traits.scalar is not None or node.traits.keeps or node.target is bernoulli_draw


def _under(new: Builder, x: Node, dims: int) -> Node:
    """x with ones behind the batch, so that it has `dims` dimensions."""
    assert x.shape is not None
    for _ in range(dims - len(x.shape)):
        shape = x.shape
        x = new.call(aten.unsqueeze.default, x, 1, shape=(shape[0], 1, *shape[1:]), dtype=x.dtype)
        assert x.shape is not None
    return x
