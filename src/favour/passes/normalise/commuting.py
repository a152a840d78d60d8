"""Operations put into an order in which their moments are known better.

**Functions behind dropout.** With D ∈ {0, 1/q}, f(D x) is f(0) or f(x/q), so that for every draw

    f(D x) = f(0) + D·q(f(x/q) − f(0)),          relu(D x) = D relu(x),   (D x)² = D x²/q.

On the left f meets two values far apart, which no Gaussian describes; on the right it meets x, and the rule of dropout
is exact. So functions move in front of the dropout they read.

**Maxima.** Max pooling takes no notice of a nondecreasing function that acts alike on all entries of a window,

    pool(relu(x)) = relu(pool(x)),         pool(D_c x) = D_c pool(x)   for one D_c ≥ 0 per channel,

again for every draw. So

- channel dropout moves behind the maximum, where its rule is exact (before it, neighbours that fall together look like
  independent ones),
- a nondecreasing function moves behind it, where fewer entries are left and its argument has not lost its shape, and
  so does a summand that is alike for all entries of a window,
- element-wise dropout, which does not commute, joins the maximum in one operation (`favour.rules.maxima`),
- and a maximum over maxima of what such dropout leaves is one maximum over all of it: pool(2) ∘ pool(2) = pool(4).

Only where nothing else reads what lies between: another reader would need the same draws.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from favour.graph.node import Graph, Node, argument, nodes_in
from favour.graph.traits import Argument, traits_of
from favour.passes.normalise.branches import branch
from favour.passes.normalise.ranges import bounds
from favour.passes.normalise.roots import dropped_root, root
from favour.passes.rewriting import Builder, replace_node
from favour.rules.attention import negative_entropy
from favour.rules.maxima import dropped_max_pool
from favour.rules.registry import RULES, Rule
from favour.rules.windows import per_axis

aten = torch.ops.aten

# Operations that no model contains, only plans.
JOINED: dict[Any, Rule] = {f: Rule(f, "moment-matched", "pooling") for f in (dropped_max_pool, dropped_root, root)}
JOINED[negative_entropy] = Rule(negative_entropy, "linearised", "attention")


def rule_for(target: Any) -> Rule | None:
    """The rule of an operation, of a captured model or of a plan."""
    return JOINED.get(target) or RULES.get(target)


def commute(graph: Graph, random: Callable[[Graph], Collection[Node]]) -> None:
    """Rewrite `graph` in place; `random` finds its random nodes. Assumes that draws of one call are made once."""
    uncertain = random(graph)
    for node in [n for n in graph.nodes if n in uncertain and n.kind == "call"]:
        _before_dropout(graph, node)
    graph.prune()
    branch(graph, random(graph), lambda node: node.traits.maximum)
    graph.prune()
    uncertain = random(graph)
    for outer in [n for n in reversed(graph.nodes) if n in uncertain and n.traits.maximum]:
        joined: Node | None = outer
        while joined is not None:
            joined = _join(graph, joined)
    graph.prune()
    uncertain = random(graph)
    for node in [n for n in graph.nodes if n in uncertain and n.traits.maximum]:
        _commute_one(graph, node)
    graph.prune()


def _before_dropout(graph: Graph, node: Node) -> None:
    """f(dropout(x)) as dropout of a function of x."""
    entry = RULES.get(node.target)
    drop = node.args[0] if node.args else None
    if entry is None or entry.pointwise is None or not isinstance(drop, Node) or node.inputs != [drop]:
        return
    if not _falls(drop) or len(graph.users()[drop]) > 1 or drop in set(nodes_in(graph.outputs)):
        return
    new = Builder(node)
    shape, p = node.shape, drop.rate
    others, x = node.args[1:], drop.args[0]
    if node.claims("homogeneous"):
        made = new.call(node.target, x, *others, shape=shape, **node.kwargs)
        replace_node(graph, node, _moved(new, drop, made, shape), new.nodes)
        return
    if isinstance(p, Node) or node.dtype != drop.dtype or node.dtype is None or not node.dtype.is_floating_point:
        return
    rest = node.target(torch.zeros((), dtype=torch.float64), *others, **node.kwargs).item()
    if not math.isfinite(rest):
        return
    q = 1 - p
    made = new.call(aten.mul.Tensor, x, 1 / q, shape=shape)
    made = new.call(node.target, made, *others, shape=shape, **node.kwargs)
    if rest:
        made = new.call(aten.add.Tensor, made, -rest, shape=shape)
    made = _moved(new, drop, new.call(aten.mul.Tensor, made, q, shape=shape), shape)
    if rest:
        made = new.call(aten.add.Tensor, made, rest, shape=shape)
    replace_node(graph, node, made, new.nodes)


def _commute_one(graph: Graph, pool: Node) -> None:
    users = graph.users()
    only_reader = _only_reader(graph, users)
    result, axes = _result(pool, users, only_reader), _pooled(pool)
    if result is None or axes is None:
        return
    behind, source = _unnoticed(pool.args[0], axes, only_reader)
    elements: Node | None = None
    rectified = False
    if _drops_elements(source) and only_reader(source):
        elements, source = source, source.args[0]
        while source.kind == "call" and only_reader(source) and _rectifies(source):
            rectified, source = True, source.args[0]
    new = Builder(pool)
    # Dimensions of one entry stay while what is moved acts, and go at the end.
    dropped = axes if pool.traits.reduces and not argument(pool, 2) else ()
    new.dtype, shape = result.dtype, pool.args[0].shape
    if elements is None and not behind:
        return
    assert shape is not None
    kept = tuple([1 if i in axes else s for i, s in enumerate(shape)]) if pool.traits.reduces else result.shape
    if elements is not None and not rectified:
        if behind and _rectifies(behind[-1][0]):
            behind.pop()
            rectified = True
        elif not behind and only_reader(result) and _rectifies(users[result][0]):
            result, rectified = users[result][0], True
    target, args, kwargs = pool.target, pool.args[1:], pool.kwargs
    if pool.traits.reduces:
        target, args, kwargs = aten.amax.default, (list(axes), True), {}
    if elements is not None:
        arguments: Any = (source, elements.rate, rectified, elements.module or "dropout", target, args)
        made = new.call(dropped_max_pool, *arguments, kwargs, shape=kept)
    else:
        several = traits_of(target).indices
        made = new.call(target, source, *args, shape=None if several else kept, **kwargs)
        if several:
            made = new.call(operator.getitem, made, 0, shape=kept)
    for node, at in reversed(behind):
        made = _moved(new, node, made, kept, at)
    if dropped:
        made = new.call(aten.squeeze.dims, made, list(dropped), shape=result.shape)
    replace_node(graph, result, made, new.nodes)


def _only_reader(graph: Graph, users: Mapping[Node, Sequence[Node]]) -> Callable[[Node], bool]:
    outputs = set(nodes_in(graph.outputs))
    return lambda node: len(users[node]) == 1 and node not in outputs


def _result(pool: Node, users: Mapping[Node, Sequence[Node]], only_reader: Callable[[Node], bool]) -> Node | None:
    """The node that holds the maxima; None where somebody reads their places."""
    if not pool.traits.indices:
        return pool
    if not only_reader(pool) or users[pool][0].target is not operator.getitem or users[pool][0].args[1] != 0:
        return None
    return users[pool][0]


def _unnoticed(
    source: Node, axes: tuple[int, ...], only_reader: Callable[[Node], bool]
) -> tuple[list[tuple[Node, int]], Node]:
    """Functions that a maximum takes no notice of and the argument they rise in, the last first; what they act on."""
    behind: list[tuple[Node, int]] = []
    while source.kind == "call" and only_reader(source):
        at = _rises(source, axes)
        if at is None:
            break
        behind.append((source, at))
        source = source.args[at]
    return behind, source


def _join(graph: Graph, outer: Node) -> Node | None:
    """A maximum over maxima of what dropout leaves as one over all of it, which is returned; None where it is none."""
    users = graph.users()
    if not users.get(outer) and outer not in set(nodes_in(graph.outputs)):
        return None  # joined before
    only_reader = _only_reader(graph, users)
    result, axes = _result(outer, users, only_reader), _pooled(outer)
    if result is None or axes is None:
        return None
    behind, maxima = _unnoticed(outer.args[0], axes, only_reader)
    inner = _maximum(maxima, users, only_reader)
    if inner is None or maxima.shape is None:
        return None
    inside, lowest = _pooled(inner), inner
    while not _drops_elements(lowest):
        pooled = _pooled(lowest)
        source = None if pooled is None else _unnoticed(lowest.args[0], pooled, only_reader)[1]
        deeper = None if source is None else _maximum(source, users, only_reader)
        if source is None or not (_drops_elements(source) or deeper):
            return None
        lowest = deeper or source
    target, args, kwargs = outer.target, outer.args[1:], outer.kwargs
    kept, x = result.shape, inner.args[0]
    windows = _regular(inner)
    if windows is None or inside is None or x.shape is None:
        return None
    whole = outer.traits.reduces and set(inside) <= set(axes)
    if whole:
        target, args, kwargs = aten.amax.default, (list(axes), True), {}
        kept = tuple([1 if i in axes else n for i, n in enumerate(maxima.shape)])
    elif outer.traits.pool == "adaptive":
        whole = all(n == 1 for n in per_axis(args[0], len(inside)))
    around = None if whole else _regular(outer)
    if not whole and around is None:
        return None
    new = Builder(outer)
    new.dtype = result.dtype
    if around is not None:
        both = list(
            zip(*windows, *around, strict=True)
        )  # kernel and stride of the inner windows, then of the outer ones
        args, kwargs = ([(K - 1) * s + k for k, s, K, _ in both], [S * s for _, s, _, S in both]), {}
    if whole:
        reach = [(n - 1) * s + k for n, k, s in zip(maxima.shape[2:], *windows, strict=True) if isinstance(n, int)]
        cropped = _cropped(new, x, reach, inside, only_reader)
        if cropped is None:
            return None
        x = cropped
    inner_first = all(not _by_channel(node) and node.traits.elementwise and len(node.inputs) == 1 for node, _ in behind)
    functions: list[Node] = []  # exact for two values, in front of dropout
    for node, at in reversed(behind) if inner_first else ():
        x = _moved(new, node, x, x.shape, at)
        functions.append(x)
    several = traits_of(target).indices
    joined = made = new.call(target, x, *args, shape=None if several else kept, **kwargs)
    if several:
        made = new.call(operator.getitem, made, 0, shape=kept)
    for node, at in [] if inner_first else reversed(behind):
        made = _moved(new, node, made, kept, at)
    if outer.traits.reduces and not argument(outer, 2):
        made = new.call(aten.squeeze.dims, made, list(axes), shape=result.shape)
    replace_node(graph, result, made, new.nodes)
    graph.prune()
    for node in functions:
        _before_dropout(graph, node)
    return joined


def _cropped(
    new: Builder, x: Node, reach: Sequence[int], axes: tuple[int, ...], only_reader: Callable[[Node], bool]
) -> Node | None:
    """The first entries of x along its last axes, cropped in front of dropout and what follows it; None where not."""
    assert x.shape is not None
    if tuple(x.shape[2:]) == tuple(reach):
        return x
    behind, drop = _unnoticed(x, axes, only_reader)
    if len(reach) != len(x.shape) - 2 or not _drops_elements(drop) or isinstance(drop.rate, Node):
        return None
    made, shape = drop.args[0], tuple(x.shape)
    for i, n in enumerate(reach, 2):
        shape = (*shape[:i], n, *shape[i + 1 :])
        made = new.call(aten.slice.Tensor, made, i, 0, n, shape=shape)
    made = _moved(new, drop, made, shape)
    for node, at in reversed(behind):
        made = _moved(new, node, made, shape, at)
    return made


def _maximum(maxima: Node, users: Mapping[Node, Sequence[Node]], only_reader: Callable[[Node], bool]) -> Node | None:
    """The maximum that a node holds the result of, and alone."""
    pool = maxima.args[0] if maxima.target is operator.getitem else maxima
    held = pool.kind == "call" and pool.traits.maximum and _result(pool, users, only_reader) is maxima
    return pool if held and only_reader(maxima) else None


def _regular(pool: Node) -> tuple[Sequence[int], Sequence[int]] | None:
    """Kernels and strides of windows with nothing left out between them; None for others, and for padded ones."""
    if pool.traits.pool != "regular" or pool.kwargs or (pool.shape is None and not pool.traits.indices):
        return None
    assert pool.args[0].shape is not None
    axes = len(pool.args[0].shape) - 2
    rest: list[Any] = [(), 0, 1, False]
    kernel, stride, padding, dilation, ceil = [*pool.args[1:], *rest[len(pool.args) - 2 :]]
    k = per_axis(kernel, axes)
    s = per_axis(stride, axes) if stride else k
    plain = set(per_axis(padding, axes)) == {0} and set(per_axis(dilation, axes)) == {1} and not ceil
    return (k, s) if plain and all(a >= b for a, b in zip(k, s, strict=True)) else None


def _pooled(pool: Node) -> tuple[int, ...] | None:
    """The dimensions that a maximum runs over; None where it runs over the batch."""
    shape = pool.args[0].shape
    if shape is None:
        return None
    if not pool.traits.reduces:
        return tuple(range(2, len(shape)))
    dims = argument(pool, 1)
    dims = [dims] if isinstance(dims, int) else list(dims) or range(len(shape))
    axes = tuple(sorted({d % len(shape) for d in dims}))
    return None if 0 in axes else axes


def _rises(node: Node, axes: tuple[int, ...]) -> int | None:
    """Which argument of a function the maximum does not notice: it is nondecreasing in it, alike in every window."""
    if node.shape is None:
        return None
    if _by_channel(node):
        alike = len(node.shape) > 2 and min(axes) >= 2
        return 0 if alike else None
    entry = RULES.get(node.target)
    if entry is not None and entry.pointwise is not None:
        return 0 if len(node.inputs) == 1 and node.claims("monotone") else None
    if node.target is aten.add.Tensor and not node.kwargs:
        for at, other in ((0, node.args[1]), (1, node.args[0])):
            x = node.args[at]
            if isinstance(x, Node) and x.shape == node.shape and _alike(other, len(node.shape), axes):
                return at
    return None


def _alike(x: Argument, ndim: int, axes: tuple[int, ...]) -> bool:
    """Whether a summand is the same for all entries of a window."""
    if not isinstance(x, Node):
        return True
    if x.shape is None:
        return False
    wide = (1,) * (ndim - len(x.shape)) + tuple(x.shape)
    return all(wide[i] == 1 for i in axes)


def _rectifies(node: Node) -> bool:
    """max(x, 0) is what is nondecreasing, homogeneous and never negative."""
    return bool(node.claims("homogeneous") and node.claims("monotone")) and bounds(node)[0] >= 0


def _falls(node: Node) -> bool:
    return node.draw is not None and node.draw.falls


def _drops_elements(node: Node) -> bool:
    return _falls(node) and not _by_channel(node)


def _by_channel(node: Node) -> bool:
    return node.draw is not None and node.draw.channels


def _moved(new: Builder, node: Node, x: Node, shape: Argument, at: int = 0) -> Node:
    """`node` on another argument, with its own module and line."""
    made = new.call(node.target, *node.args[:at], x, *node.args[at + 1 :], shape=shape, **node.kwargs)
    made.module, made.where, made.drawn = node.module, node.where, node.origin
    return made
