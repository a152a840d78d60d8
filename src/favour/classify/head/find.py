"""Where the head begins, and what it costs.

The earliest node is taken whose draws cost at most a forward pass: before the first draw if possible, else behind a
node that everything uncertain passes. Cost is counted: multiplications, and `_ENTRY` of them for each entry that an
operation writes. The factors are those of LeNet's layers on a CPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from favour.classify.head.masked import Tables
from favour.errors import InvalidValue
from favour.graph.node import Graph, Node, nodes_in
from favour.graph.tracing import traced
from favour.methods.cost import multiplications
from favour.passes.marking import mark_uncertain
from favour.program.propagator import Propagator
from favour.rules.registry import RULES

aten = torch.ops.aten

BUDGETS = (1.0, 32.0)  # forward passes: by default, and where the user asks for the head and that is not enough
SHAPES = ((40, 4), (24, 8), (8, 24))  # A and M, the first that can be afforded: benchmarks/decisions.py
DRAWS = math.prod(SHAPES[0])  # n, where a forward pass affords them
SINGLE = (192, 96, 24, 8)  # A where M is 1
_LEAST = 96  # draws: eight were off by .13 in a probability that nodes had within .02
_SCORING = (2.0, 2**24)  # forward passes, or multiplications: about half a millisecond of one core of a CPU
_MOST = 2560  # draws for a score: benchmarks/scores.py
_ENTRY = 16
_POOLED = 64  # for each entry that a pooling layer reads
_SHORT = (
    256  # a convolution's multiplications take 1 + _SHORT/(numbers in a window) times as long as a matrix product's
)
_PASSES = 3  # over the logits of all draws: to gather, to match and to exponentiate them


@dataclass(eq=False)
class Head:
    """Where to cut, what to run on draws, and how many.

    Attributes:
        graph: The graph this was found in.
        cut: The node whose belief is drawn from; None if the head begins before the first draw.
        reads: Results that no draw touches and the tail reads.
        tail: Calls to run on draws, but for folded dropouts and `last`.
        last: The linear layer that ends the network, if its draws can be folded into its weights.
        folded: Dropouts by the linear layer that alone reads them.
        dropouts: All of them, folded or among `tail`.
        normals: Entries drawn from a normal by node, `cut` and layers with random weights, `last` apart.
        random_last: `last` has random weights.
        leaves: Parameters, inputs and constants that the head reads.
        batched: Every call in `tail` acts on (A, B, *event) as on (B, *event).
        outer, inner: A and M.
        width: Most numbers per input and draw held at once.
        cost: In forward passes, counted. Compiled code is near the count at every batch; eager code makes some
            twenty-five calls into torch beside, which with a single input take longer than a forward pass of LeNet.
        forward: A forward pass, in multiplications.
        seed: Of the tables, the predictor's own.
        tables: The last ones made, see `favour.classify.head.tables`.
    """

    graph: Graph
    cut: Node | None
    reads: list[Node]
    tail: list[Node]
    last: Node | None
    folded: dict[Node, Node]
    dropouts: list[Node]
    normals: dict[Node, int]
    random_last: bool
    leaves: list[Node]
    batched: bool
    outer: int
    inner: int
    width: int
    cost: float
    forward: float
    seed: int
    tables: Tables | None = None

    @property
    def worthwhile(self) -> bool:
        """Whether draws take at most as long as a forward pass, and are enough to be better than nodes."""
        return self.cost <= BUDGETS[0] and self.outer * self.inner >= _LEAST

    @property
    def for_scores(self) -> int:
        """Draws for a score, which ranks inputs that are nearly alike: as many as `_SCORING` forward passes or so many
        multiplications afford, 0 if that is less than `DRAWS`."""
        each = self.cost / (self.outer * self.inner)
        afforded = int(max(_SCORING[0], _SCORING[1] / self.forward) / each)
        return 0 if afforded < DRAWS else min(afforded, _MOST)


def find_head(predict: Propagator, n: int | None = None) -> Head | None:
    """The head of a predictor's network, None if it has none; found once for each graph and number of draws.

    Args:
        predict: The predictor.
        n: At least so many draws, instead of what a forward pass affords. Where it begins does not change.
    """
    if predict.method.unchecked():  # its law is not that of draws of the last layers
        return None
    program = predict.program
    if traced() and not program.knows("heads"):
        return None
    return program.once("heads", lambda: Heads(_find(predict))).with_draws(n)


class Heads:
    """The head of one graph, by the number of draws; None for as many as a forward pass affords."""

    def __init__(self, head: Head | None) -> None:
        self._by_draws: dict[int | None, Head | None] = {None: head}

    def with_draws(self, n: int | None) -> Head | None:
        if n not in self._by_draws:
            self._by_draws[n] = _enlarged(self._by_draws[None], n)
        return self._by_draws[n]

    def forget(self) -> None:
        """Drop what was derived from the values of tensors."""
        for head in self._by_draws.values():
            if head is not None:
                head.tables = None


def _enlarged(head: Head | None, n: int | None) -> Head | None:
    """The same head with at least n draws, as many for each of A as by default."""
    if n is None or isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidValue(f"`draws` is {n!r}; a whole number of at least 1 is required, or None.")
    if head is None:
        return None
    outer = 2 * -(-n // (2 * head.inner))  # even: normal nodes come in mirrored pairs
    return replace(head, outer=outer, cost=head.cost * outer / head.outer, tables=None)


def _find(predict: Propagator) -> Head | None:
    graph, posterior = predict.graph, predict.posterior()
    random = {graph.aliases.get(n, n) for n in posterior.names}
    uncertain = mark_uncertain(graph, (), random)
    late = set(uncertain)
    for node in graph.nodes:  # whatever reads an uncertain tensor, be it its shape only
        if node.kind == "call" and any(s in late for s in node.inputs):
            late.add(node)
    (output, *others) = graph.outputs
    if others or not isinstance(output, Node) or output not in uncertain or len(output.shape or ()) != 2:
        return None
    if not _fixed(output):
        return None
    planned = predict.plain_plan
    known = {step.node.name for step in planned.steps} | {n.name for n in planned.leaves}
    needed = _ancestors(output)
    order = [n for n in graph.nodes if n in needed]
    users = graph.users()
    forward = sum(_cost(n) for n in order if n.kind == "call")
    heads: list[Head] = []
    cuts: list[Node | None] = [n for n in order if n.kind == "call" and n in uncertain and _fixed(n)]
    for cut in (None, *cuts):
        if cut is output or (cut is not None and cut.name not in known):
            continue
        start = 0 if cut is None else order.index(cut) + 1
        tail = [n for n in order[start:] if n in late and n.kind == "call"]
        inside = {cut, *tail}
        weights = {s for n in tail for s in n.inputs if s in late and s.kind in ("parameter", "buffer")}
        if any(s in late and s not in inside and s not in weights for n in tail for s in n.inputs):
            continue
        drawn = [n for n in tail if n.draw is not None]
        if not all(_falls(n) and _fixed(n) for n in drawn) or not (drawn or weights):
            continue
        layers = [n for n in tail if any(s in weights for s in n.inputs)]
        if not all(_mean_field(n, weights, posterior, users) for n in layers):
            continue
        reads = [s for s in {s for n in tail for s in n.inputs} if s not in late and s.kind == "call"]
        if any(n.name not in known for n in reads):
            continue
        folded = {user: d for d in drawn for user in users[d] if _foldable(d, user, users)}
        last = output if output.target is aten.linear.default and (output in folded or output in layers) else None
        dropouts = [*(n for n in drawn if n not in folded.values()), *folded.values()]
        silent = {*folded.values(), *([] if last is None else [last])}
        run = [n for n in tail if n not in silent]
        normals = {n: size(n) for n in ([] if cut is None else [cut]) + [n for n in layers if n is not last]}
        width = max(size(n) for n in [*run, output] if n.shape is not None)
        read = {s for n in tail for s in n.inputs if s.kind != "call"}
        leaves = [n for n in graph.nodes if n in read]
        batched = all(_batched(n, inside) for n in run if n not in folded and n not in layers)
        for outer, inner in SHAPES if last is not None else ((n, 1) for n in SINGLE):
            once = sum(_cost(n) for n in run) + 2 * _ENTRY * sum(normals.values())
            classes = size(output)
            each = 0 if last is None else multiplications(last) * (2 if last in layers else 1)
            each += _PASSES * _ENTRY * classes + 2 * classes**2
            cost = outer * (once + inner * each) / max(1.0, forward)
            heads.append(
                Head(
                    graph,
                    cut,
                    reads,
                    run,
                    last,
                    folded,
                    dropouts,
                    normals,
                    last in layers,
                    leaves,
                    batched,
                    outer,
                    inner,
                    width,
                    cost,
                    max(1.0, forward),
                    predict.numerics.seed,
                )
            )
    affordable = (head for budget in BUDGETS for head in heads if head.cost <= budget)
    return next(affordable, min(heads, key=lambda head: head.cost, default=None))


def _cost(node: Node) -> float:
    """Of one call and input, in multiplications."""
    if node.shape is None or getattr(node.target, "is_view", False):
        return 0
    work = float(multiplications(node))
    kernel = node.args[1] if 1 in node.traits.weights and len(node.args) > 1 else None
    sizes = kernel.shape if isinstance(kernel, Node) and kernel.shape is not None else ()
    whole = [s for s in sizes if isinstance(s, int)]
    if len(sizes) > 2 and len(whole) == len(sizes):  # a convolution's: a product of tensors has the batch in both
        work *= 1 + _SHORT / math.prod(whole[1:])
    if node.traits.pool is not None and isinstance(node.args[0], Node):
        work += _POOLED * size(node.args[0])
    return work + _ENTRY * size(node)


def size(node: Node) -> int:
    return math.prod(s for s in (node.shape or ())[1:] if isinstance(s, int))


def _ancestors(node: Node) -> set[Node]:
    ancestors, open_ = {node}, [node]
    while open_:
        for source in open_.pop().inputs:
            if source not in ancestors:
                ancestors.add(source)
                open_.append(source)
    return ancestors


def _fixed(node: Node) -> bool:
    """Whether all sizes but the batch are numbers."""
    return node.shape is not None and len(node.shape) > 1 and all(isinstance(s, int) for s in node.shape[1:])


def _batched(node: Node, drawn: set[Node | None]) -> bool:
    """Whether an axis of draws in front of the first argument stays there: element-wise, or a linear layer."""
    if _falls(node):
        return True
    rule = RULES.get(node.target)
    known = node.target is aten.linear.default or (rule is not None and rule.pointwise is not None)
    return known and node.args[0] in drawn and not any(s in drawn for s in nodes_in((node.args[1:], node.kwargs)))


def _falls(node: Node) -> bool:
    """Whether a call multiplies by 0 or 1/(1 − p), of which there are tables."""
    return node.draw is not None and node.draw.falls


def _foldable(dropout: Node, user: Node, users: Mapping[Node, list[Node]]) -> bool:
    """W(mask ∘ x) = (W ∘ mask)x where one linear layer and nobody else reads what was dropped, one row per input."""
    return (
        user.target is aten.linear.default
        and len(users[dropout]) == 1
        and user.args[0] is dropout
        and _falls(dropout)
        and len(dropout.shape or ()) == 2
    )


def _mean_field(node: Node, weights: set[Node], posterior: Any, users: Mapping[Node, list[Node]]) -> bool:
    """Whether the outputs are independent given the input: a linear layer, independent weights of its own."""
    if node.target is not aten.linear.default or len(node.shape or ()) != 2:
        return False
    layer_weights = [s for s in node.inputs if s in weights]
    return all(
        (gaussian := posterior.gaussian(str(s.target))) is not None
        and gaussian.independent
        and str(s.target) not in posterior.latents
        and len(users[s]) == 1
        and s in node.args[1:]
        for s in layer_weights
    )
