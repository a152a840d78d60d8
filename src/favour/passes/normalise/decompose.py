"""Composite operations of a captured graph, rewritten into primitive ones.

Scaled dot-product attention is one operation of aten, and four random or nonlinear steps:

    y = dropout(softmax(s·q kᵀ + mask)) v.

Written out, each step has its own rule, its dropout is a dropout like any other (the sampler draws it, overrides find
it under the module that called attention), and every method works on it.

Some code folds the batch into the rows of a matrix, (batch, T, n) to (batch·T, n), before a product with a weight, and
unfolds it afterwards. Uncertain tensors keep the batch in front, so such stretches are rewritten without the folding:
x.view(−1, n) becomes x, row-wise operations act on x as it is, and a later view of the result is the same view of the
unfolded tensor, since both hold the same numbers in the same order.

A bag of embeddings becomes a lookup and a sum, and a product with a transposed parameter a linear layer.

Several inputs of one batch may come out of the capture with a symbol each for its size. They get one name.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection

import torch

from favour.graph.node import Graph, Node, nodes_in, replace_nodes, rewired
from favour.passes.normalise.composites import expand_composite
from favour.passes.rewriting import Builder, Shape, rewrite
from favour.rules.registry import RULES

aten = torch.ops.aten


def decompose(graph: Graph) -> None:
    """Rewrite `graph` in place. Assumes that no operation writes to its arguments."""
    rewrite(graph, _without_nothing)
    rewrite(graph, expand_composite)
    rewrite(graph, _expand_attention)
    rewrite(graph, _expand_bag)
    rewrite(graph, _as_linear)
    rewrite(graph, _without_cancelled)
    unfolding = _Unfolding(graph)
    rewrite(graph, unfolding)
    unfolding.finish(graph)
    graph.prune()


def one_batch(graph: Graph) -> None:
    """Give the batch of every input the same symbol. Assumes that all inputs have the same batch."""
    symbols = [n.shape[0] for n in graph.inputs if n is not None and n.shape and isinstance(n.shape[0], str)]
    others = set(symbols[1:]) - set(symbols[:1])
    if not others:
        return
    pattern = re.compile(r"\b(" + "|".join(map(re.escape, sorted(others))) + r")\b")
    for node in graph.nodes:
        if node.shape is not None:
            node.shape = tuple(pattern.sub(symbols[0], s) if isinstance(s, str) else s for s in node.shape)


def _swap(old: Node, new: Node) -> Callable[[Node], Node]:
    return lambda node: new if node is old else node


def _without_nothing(node: Node, new: Builder) -> Node | None:
    """Tensors of shape (0,), which torch joins with tensors of any shape, left out: the start of a cache."""
    if node.target not in (aten.cat.default, aten.concat.default):
        return None
    parts = node.args[0]
    some = [p for p in parts if p.shape != (0,)]
    if len(some) in (0, len(parts)):
        return None
    if len(some) == 1:
        return new.call(aten.alias.default, some[0], shape=node.shape)
    return new.call(node.target, some, *node.args[1:], shape=node.shape, **node.kwargs)


def _without_cancelled(node: Node, new: Builder) -> Node | None:
    """(h + a + b) − h is a + b: h would count as uncertain twice."""
    if node.target is not aten.sub.Tensor or node.kwargs:
        return None
    y, h = node.args
    if not isinstance(h, Node) or not isinstance(y, Node):
        return None
    terms = _terms(y, h)
    if h not in terms or len(terms) < 2:
        return None
    terms.remove(h)
    if any(t.shape != node.shape for t in terms):
        return None
    total = terms[0]
    for term in terms[1:]:
        total = new.call(aten.add.Tensor, total, term, shape=node.shape)
    return total


def _terms(y: Node, whole: Node) -> list[Node]:
    """What a chain of sums adds up, one of them not taken apart."""
    if y is not whole and y.target is aten.add.Tensor and not y.kwargs and all(isinstance(a, Node) for a in y.args):
        return [t for a in y.args for t in _terms(a, whole)]
    return [y]


# ------------------------------------------------------------------ attention


def _expand_attention(node: Node, new: Builder) -> Node | None:
    if node.target is not aten.scaled_dot_product_attention.default:
        return None
    names = [argument.name for argument in node.target._schema.arguments]
    args = dict(zip(names, node.args, strict=False)) | node.kwargs
    q, k, v = args["query"], args["key"], args["value"]
    if args.get("enable_gqa"):
        k, v = (_repeated_heads(new, t, q.shape[-3]) for t in (k, v))
    width = q.shape[-1]
    scale = args.get("scale")
    if scale is None:
        assert isinstance(width, int)
        scale = width**-0.5
    turned = new.call(aten.transpose.int, k, -2, -1, shape=(*k.shape[:-2], k.shape[-1], k.shape[-2]))
    scaled = new.call(aten.mul.Tensor, q, scale, shape=q.shape)
    shape = (*q.shape[:-1], k.shape[-2])
    scores = new.call(aten.matmul.default, scaled, turned, shape=shape)
    scores = _masked(new, scores, args.get("attn_mask"), bool(args.get("is_causal")))
    weights = new.call(aten._safe_softmax.default, scores, -1, shape=shape)
    p = args.get("dropout_p", 0.0)
    if p:
        weights = new.call(aten.dropout.default, weights, p, True, shape=shape)
    return new.call(aten.matmul.default, weights, v, shape=(*q.shape[:-1], v.shape[-1]))


def _masked(new: Builder, scores: Node, mask: Node | None, causal: bool) -> Node:
    shape = scores.shape
    assert shape is not None
    if causal:
        sizes = [
            s if isinstance(s, int) else new.call(aten.sym_size.int, scores, i, shape=None)
            for i, s in zip((-2, -1), shape[-2:], strict=True)
        ]
        ones = new.call(aten.new_ones.default, scores, sizes, shape=shape[-2:], dtype=torch.bool)
        ones.kwargs = {"dtype": torch.bool}
        mask = new.call(aten.tril.default, ones, shape=shape[-2:], dtype=torch.bool)
    if mask is None:
        return scores
    if mask.dtype is torch.bool:
        hidden = new.call(aten.logical_not.default, mask, shape=mask.shape, dtype=torch.bool)
        return new.call(aten.masked_fill.Scalar, scores, hidden, float("-inf"), shape=shape)
    return new.call(aten.add.Tensor, scores, mask, shape=shape)


def _repeated_heads(new: Builder, x: Node, heads: int) -> Node:
    """(batch, groups, T, d) with each group repeated for the heads that share it."""
    assert x.shape is not None
    batch, groups, *rest = x.shape
    assert isinstance(groups, int)
    times = heads // groups
    if times == 1:
        return x
    wide = new.call(aten.unsqueeze.default, x, 2, shape=(batch, groups, 1, *rest))
    wide = new.call(aten.expand.default, wide, [-1, -1, times, -1, -1], shape=(batch, groups, times, *rest))
    return new.call(aten.flatten.using_ints, wide, 1, 2, shape=(batch, heads, *rest))


# ------------------------------------------------------------------ embedding


def _expand_bag(node: Node, new: Builder) -> Node | None:
    """A sum or mean over the rows of (batch, T) indices, which export flattens, as a lookup and a reduction."""
    if node.target is not operator.getitem or node.args[1] != 0:
        return None
    bag = node.args[0]
    if bag.target not in (aten.embedding_bag.padding_idx, aten.embedding_bag.default) or node.shape is None:
        return None
    names = [argument.name for argument in bag.target._schema.arguments]
    args = dict(zip(names, bag.args, strict=False)) | bag.kwargs
    flat = args["indices"]
    indices = flat.args[0] if flat.kind == "call" and flat.target in _VIEWS else None
    extra = args.get("per_sample_weights"), args.get("padding_idx"), args.get("include_last_offset") or None
    if indices is None or indices.shape is None or len(indices.shape) != 2 or any(e is not None for e in extra):
        return None
    mode = args.get("mode", 0)
    if mode not in (0, 1):
        return None
    new.like = bag
    new.dtype = node.dtype
    rows = new.call(aten.embedding.default, args["weight"], indices, shape=(*indices.shape, node.shape[-1]))
    reduce = aten.sum.dim_IntList if mode == 0 else aten.mean.dim
    return new.call(reduce, rows, [1], shape=node.shape)


_TURNS = {aten.numpy_T.default, aten.t.default, aten.mT.default, aten.transpose.int, aten.permute.default}


def _as_linear(node: Node, new: Builder) -> Node | None:
    """x Wᵀ for a parameter W, an output layer tied with an embedding say, is a linear layer."""
    if node.target not in (aten.matmul.default, aten.mm.default) or node.shape is None:
        return None
    x, turned = node.args
    if turned.kind != "call" or turned.target not in _TURNS or len(x.shape or ()) < 2:
        return None
    weight = turned.args[0]
    if weight.kind != "parameter" or len(weight.shape) != 2 or turned.shape != weight.shape[::-1]:
        return None
    axes = turned.args[1] if turned.target is aten.permute.default else turned.args[1:]
    if (axes and len({a % 2 for a in axes}) != 2) or (turned.target is aten.permute.default and axes[0] % 2 == 0):
        return None
    return new.call(aten.linear.default, x, weight, shape=node.shape)


_KEEP_SHAPE = {
    aten.to.dtype,
    aten.to.dtype_layout,
    aten.to.device,
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.dropout.default,
}


def widen_lookups(graph: Graph, uncertain: Collection[Node]) -> None:
    """Give lookups in an uncertain table the batch in front: indices (1, T) or (T,) are repeated for every input.

    Assumes that what such a lookup is added to has the batch in front already.
    """
    first = next((n for n in graph.inputs if n is not None and n.shape), None)
    if first is None or first.shape is None:
        return
    batch = first.shape[0]
    users = graph.users()
    widened: set[Node] = set()

    def expand(node: Node, new: Builder) -> Node | None:
        if node.target in _KEEP_SHAPE and node.args[0] in widened and node.shape is not None:
            node.shape = (batch, *node.shape[1:])
            widened.add(node)
        if node not in uncertain or node.target is not aten.embedding.default or node.shape is None:
            return None
        table, indices, *options = node.args
        shape = indices.shape
        broadcast = all(u.target is aten.add.Tensor and u.shape == (batch, *node.shape) for u in users.get(node, ()))
        if shape[:1] == (batch,) or not (shape[:1] == (1,) or (len(shape) == 1 and broadcast)):
            return None
        size = new.call(aten.sym_size.int, first, 0, shape=None)
        rest = shape[1:] if shape[:1] == (1,) else shape
        wide = new.call(
            aten.expand.default, indices, [size, *[-1] * len(rest)], shape=(batch, *rest), dtype=indices.dtype
        )
        if len(rest) == len(shape):
            wide.args = (indices, [size, *shape])
        result = new.call(node.target, table, wide, *options, shape=(batch, *node.shape[-len(rest) - 1 :]))
        widened.add(result)
        return result

    rewrite(graph, expand)


# ------------------------------------------------------- batch folded into rows

_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default)
# Act on each row of a matrix, or on each entry: the same with more dimensions in front.
_ROW_WISE = {
    aten.linear.default,
    aten.layer_norm.default,
    aten.dropout.default,
    torch.ops.favour.dropout.default,
    aten.contiguous.default,
}
_ENTRY_WISE = {aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor}


class _Unfolding:
    """Takes views back that fold the batch into the rows of a matrix."""

    def __init__(self, graph: Graph) -> None:
        first = next((n.shape[0] for n in graph.inputs if n is not None and n.shape), None)
        self.batch = first if isinstance(first, str) else None
        self.folded: dict[Node, Node] = {}  # by the node that replaces it: the folded one

    def __call__(self, node: Node, new: Builder) -> Node | None:
        if self.batch is None:
            return None
        sources = [s for s in node.inputs if s in self.folded]
        if node.target in _VIEWS:
            x = node.args[0]
            if self._folds(node, x) and x not in self.folded:
                copy = new.call(aten.alias.default, x, shape=x.shape)
                self.folded[copy] = node
                return copy
            return None
        if not sources:
            return None
        made = self._unfolded(node, new, sources)
        if made is None:
            return self._give_up(node, new, sources)
        self.folded[made] = node
        return made

    def _unfolded(self, node: Node, new: Builder, sources: list[Node]) -> Node | None:
        """The same operation on tensors as they were before folding, if it acts row by row."""
        x = sources[0]
        assert x.shape is not None
        lead = x.shape[:-1]
        if node.shape is None or len(node.shape) != 2 or any(s.shape is None or s.shape[:-1] != lead for s in sources):
            return None
        out = (*lead, node.shape[-1])
        if node.target in (aten.addmm.default, aten.mm.default):
            return self._product(node, new, x, out)
        entry = RULES.get(node.target)
        first = node.args[0] is x and len(sources) == 1
        plain = [s for s in node.inputs if s not in self.folded]
        if (first and (node.target in _ROW_WISE or (entry is not None and entry.pointwise is not None))) or (
            node.target in _ENTRY_WISE and all(s.shape is not None and len(s.shape) < 2 for s in plain)
        ):
            made = new.call(node.target, *node.args, shape=out)
            made.kwargs = node.kwargs
            return made
        return None

    def finish(self, graph: Graph) -> None:
        """Fold the outputs of the model again."""
        for node in [n for n in nodes_in(graph.outputs) if n in self.folded]:
            new = Builder(node)
            graph.outputs = replace_nodes(graph.outputs, _swap(node, self._fold(node, new)))
            graph.nodes += new.nodes

    def _fold(self, x: Node, new: Builder) -> Node:
        was = self.folded[x]
        assert was.shape is not None
        return new.call(aten.reshape.default, x, [-1, was.shape[-1]], shape=was.shape)

    def _folds(self, node: Node, x: Node) -> bool:
        shape, before = node.shape, x.shape
        return (
            shape is not None
            and before is not None
            and len(shape) == 2
            and len(before) > 2
            and before[0] == self.batch
            and shape[0] != self.batch
            and shape[-1] == before[-1]
            and isinstance(shape[0], str)
        )

    def _product(self, node: Node, new: Builder, x: Node, out: Shape) -> Node | None:
        bias, rows, weight = (None, *node.args) if node.target is aten.mm.default else node.args
        if rows is not x or weight in self.folded or node.kwargs:
            return None
        y = new.call(aten.matmul.default, x, weight, shape=out)
        return y if bias is None else new.call(aten.add.Tensor, y, bias, shape=out)

    def _give_up(self, node: Node, new: Builder, sources: list[Node]) -> Node | None:
        """Fold again for an operation that is not known to act row by row."""
        back = {x: self._fold(x, new) for x in sources}
        made = rewired(node, lambda n: back.get(n, n))
        new.nodes.append(made)
        return made
