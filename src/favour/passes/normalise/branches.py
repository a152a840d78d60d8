"""Both outcomes of a draw of two values, through everything that stays within its unit.

A dropped token takes a long step, over which no line describes a norm, and neither does it describe a batch norm and a
ReLU behind dropped entries. But as long as nothing mixes the units that are drawn for (an entry, a channel, a token),
a function f of a unit x with D ∈ {0, 1/q}, P(D = 0) = p, has two outcomes and no more,

    y₁ = f(kept x),   y₀ = f(fallen),        y = y₀ + D·q(y₁ − y₀)        for every draw,

so both are carried through f and closed behind it by the same kind of dropout: of q(y₁ − y₀), which gives

    E y = q E y₁ + p y₀,    Cov[y | x] = pq (y₁ − y₀)(y₁ − y₀)ᵀ

in place of a linearised f. `favour.graph.traits.Draw.outcomes` says what is kept (x/q) and what falls (0); alpha
dropout falls to a number below 0 and is rescaled. y₁ has its moments in its own branch, and y₀ is certain.

A *region* is what reads one draw and otherwise only what is certain, operation by operation along `Traits.mixes`: no
dimension that tells units apart may be mixed. It ends at the last operation through which everything in it passes. It
is worth it where an operation in it is curved, or a maximum follows, which sees two-valued units as such if they are
shifted alike (`favour.passes.normalise.commuting`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from favour.graph.node import Graph, Node, nodes_in, rewired
from favour.passes.rewriting import Builder, Shape, replace_node
from favour.rules.registry import RULES

aten = torch.ops.aten


def branch(graph: Graph, uncertain: Collection[Node], reads_units: Callable[[Node], bool]) -> None:
    """Rewrite `graph` in place.

    Args:
        graph: The graph.
        uncertain: Its random nodes.
        reads_units: Whether a node takes units of two values as they are: a maximum.
    """
    for drop in [n for n in graph.nodes if n in uncertain and n.draw is not None]:
        region = _region(graph, uncertain, drop)
        if region is None:
            continue
        body = [n for n in region if n is not drop]
        end = region[-1]
        readers = graph.users()[end]
        met = len(readers) == 1 and end not in set(nodes_in(graph.outputs)) and reads_units(readers[0])
        bends = [n for n in body if not _affine(n, uncertain)]
        single = len(body) == 1 and drop.draw is not None and drop.draw.falls  # a function alone is simply put in front
        if (bends and not (single and body[0].traits.elementwise)) or (met and (body or not _falls(drop))):
            _close(graph, drop, body, end)


def _falls(node: Node) -> bool:
    return node.draw is not None and node.draw.falls


def _units(drop: Node) -> set[int] | None:
    """The dimensions along which units are told apart."""
    if drop.draw is None or drop.shape is None or drop.draw.outcomes is None or not isinstance(drop.rate, float | int):
        return None
    if drop.draw.channels:
        return {0, 1} if len(drop.shape) > 2 else None
    return {0} | {i for i, size in enumerate(drop.shape) if size != 1}


def _region(graph: Graph, uncertain: Collection[Node], drop: Node) -> list[Node] | None:
    """The draw and what stays within its units, up to the last node through which all of it passes."""
    units = _units(drop)
    if units is None or drop.shape is None:
        return None
    ndim = len(drop.shape)
    inside: list[Node] = [drop]
    known = {drop}
    for node in graph.nodes[graph.nodes.index(drop) + 1 :]:
        if known.isdisjoint(node.inputs):
            continue
        if _stays(node, uncertain, known, units, ndim):
            inside.append(node)
            known.add(node)
    users, outputs = graph.users(), set(nodes_in(graph.outputs))
    for end in reversed(inside):
        behind = _before(end, known)
        closed = all(n is end or (n not in outputs and behind.issuperset(users[n])) for n in behind)
        if closed:
            return [n for n in inside if n in behind]
    return None


def _before(end: Node, known: Collection[Node]) -> set[Node]:
    """Nodes of a region that one is made of, with itself."""
    ancestors, waiting = {end}, [end]
    while waiting:
        for source in waiting.pop().inputs:
            if source in known and source not in ancestors:
                ancestors.add(source)
                waiting.append(source)
    return ancestors


def _stays(node: Node, uncertain: Collection[Node], known: Collection[Node], units: set[int], ndim: int) -> bool:
    """Whether an operation keeps units apart and reads nothing else that is random."""
    if node.kind != "call" or node.draw is not None or node.shape is None or len(node.shape) != ndim:
        return False
    if node.dtype is None or not node.dtype.is_floating_point:
        return False
    if any(s in uncertain and s not in known for s in node.inputs):
        return False
    read = [s for s in node.inputs if s in known]
    if any(s.shape is None or any(s.shape[i] != node.shape[i] for i in units) for s in read):
        return False
    if node.traits.elementwise:
        return True
    first = read[0]
    mixes = node.traits.mixes
    if mixes is None or len(read) > 1 or not node.args or node.args[0] is not first:
        return False
    return units.isdisjoint(mixes(first.shape, *node.args[1:], **node.kwargs))


def _affine(node: Node, uncertain: Collection[Node]) -> bool:
    """Whether an operation of a region is affine in what is random."""
    entry = RULES.get(node.target)
    if node.traits.affine:
        random = [i for i, a in enumerate(node.args) if isinstance(a, Node) and a in uncertain]
        return len(random) == 1 and random[0] in node.traits.affine
    return entry is not None and entry.exactness == "exact"


def _close(graph: Graph, drop: Node, body: list[Node], end: Node) -> None:
    """y₀ + D·q(y₁ − y₀) in place of the last node of a region."""
    assert drop.draw is not None and drop.draw.outcomes is not None and drop.shape is not None
    p = drop.rate
    gain, shift, rest = drop.draw.outcomes(p)
    x, shape = drop.args[0], end.shape
    assert shape is not None
    new = Builder(end)
    new.dtype = drop.dtype
    kept = new.call(aten.mul.Tensor, x, gain, shape=drop.shape)
    if shift:
        kept = new.call(aten.add.Tensor, kept, shift, shape=drop.shape)
    fallen = _constant(new, drop, body, rest)
    one, none = _copied(new, body, {drop: kept}), _copied(new, body, {drop: fallen})
    y1, y0 = one.get(end, kept), none.get(end, fallen)
    certain = not body and not rest
    apart = y1 if certain else new.call(aten.sub.Tensor, y1, y0, shape=shape)
    apart = new.call(aten.mul.Tensor, apart, 1 - p, shape=shape)
    made = _drawn(new, drop, apart, p, shape)
    if not certain:
        made = new.call(aten.add.Tensor, made, y0, shape=shape)
    replace_node(graph, end, made, new.nodes)


def _drawn(new: Builder, drop: Node, x: Node, p: float, shape: Shape) -> Node:
    """D∘x with D drawn as `drop` draws it."""
    assert drop.draw is not None and drop.shape is not None
    target = aten.feature_dropout.default if drop.draw.channels else aten.dropout.default
    if drop.draw.channels or drop.shape == shape:
        made = new.call(target, x, p, True, shape=shape)
        drawn = made
    else:  # one draw for many entries
        ones = new.call(aten.ones_like.default, drop.args[0], shape=drop.shape)
        drawn = new.call(target, ones, p, True, shape=drop.shape)
        made = new.call(aten.mul.Tensor, x, drawn, shape=shape)
    drawn.module, drawn.where, drawn.drawn = drop.module, drop.where, drop.origin
    return made


def _constant(new: Builder, drop: Node, body: list[Node], value: float) -> Node:
    """A fallen unit, which is alike for all: one entry along every dimension that operations do not ask the size of."""
    assert drop.shape is not None
    kept = {i for n in body if not n.traits.elementwise for i in _mixed(n)}
    by_channel = any(n.traits.norm is not None and n.traits.norm.channels for n in body) or any(
        isinstance(a, Node) and not n.traits.affine for n in body if n.traits.elementwise for a in n.args[1:]
    )
    kept |= {1} if by_channel else set()
    sizes = [s if i in kept else 1 for i, s in enumerate(drop.shape)]
    if all(isinstance(s, int) for s in sizes):
        return new.call(aten.new_full.default, drop.args[0], sizes, value, shape=tuple(sizes))
    return new.call(aten.full_like.default, drop.args[0], value, shape=drop.shape)


def _copied(new: Builder, body: list[Node], known: dict[Node, Node]) -> dict[Node, Node]:
    """The body on another argument."""
    made = dict(known)
    for node in body:
        again = rewired(node, lambda n: made.get(n, n))
        again.name = f"{new.like.name}_{len(new.nodes)}"
        again.shape = _shape(again)
        new.nodes.append(again)
        made[node] = again
    return made


def _shape(node: Node) -> Shape:
    """Of an operation that stays within units, whose arguments may be smaller now."""
    shapes = [n.shape for n in node.inputs if n.shape is not None]
    if not node.traits.elementwise:
        assert node.args[0].shape is not None and node.shape is not None
        first = list(node.args[0].shape)
        last = node.shape[-1] if len(first) - 1 in _mixed(node) else first[-1]
        return (*first[:-1], last)
    ndim = max(map(len, shapes))
    wide = [(1,) * (ndim - len(s)) + tuple(s) for s in shapes]
    return tuple([next((s for s in sizes if s != 1), 1) for sizes in zip(*wide, strict=True)])


def _mixed(node: Node) -> Collection[int]:
    mixes = node.traits.mixes
    return () if mixes is None else mixes(node.args[0].shape, *node.args[1:], **node.kwargs)
