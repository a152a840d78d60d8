"""Class probabilities from draws of the last layers only, the belief propagated up to them.

Strong dropout skews the logits, which a Gaussian cannot say. But what comes before the last nonlinearity, a, is a sum
of many terms and close to Gaussian, and the rest of the network, the *head*, is small:

    a_k = μ_a + S x_k,  k = 1 … N          belief at the cut, rank 2, at fixed nodes x_k
    d_k = head(a_k, mask_k)                 each unit is dropped in exactly pN of the N masks
    z_k = μ + L L_d⁻¹ (d_k − d̄)             LLᵀ = Σ the belief over the logits, L_d L_dᵀ the covariance of d
    p   = 1/N Σ_k softmax(z_k)

The third line gives the draws the mean and covariance that the reverse sweep finds, so only their shape, skewness and
more, comes from sampling: a cheap belief at the cut will do, and most of the sampling noise is gone. Nodes and masks
are fixed and the same for every input: the result is a deterministic function of the input.

The cut is the last linear layer or convolution whose result is uncertain, through which everything uncertain passes,
and after which dropout is all that is drawn.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour import predictive
from favour.belief import Belief
from favour.covariance.precision import psd_root
from favour.errors import UnsupportedOperation
from favour.methods.choice import _work
from favour.methods.settings import Settings
from favour.node import DROPOUTS, Graph, Node, replace_nodes
from favour.plan import mark_uncertain
from favour.predictive import NODES, normal_nodes

if TYPE_CHECKING:
    from favour.predictor import Predictor

aten = torch.ops.aten

_LINEAR = {aten.linear.default, aten.conv1d.default, aten.conv2d.default, aten.conv3d.default, aten.addmm.default}
_ELEMENTWISE_DROPOUT = {aten.dropout.default, torch.ops.favour.dropout.default}
_RANK = 2
STRONG = 0.3  # the dropout rate up to which a Gaussian over the logits is as good (measured at .1, .25 and .5)
_HELD = (2**24, 2**18)  # numbers in one layer of the draws at once: what keeps a GPU busy, what fits a CPU's cache


@dataclass(eq=False)
class Head:
    """Where to cut, what to run on draws, and what that needs.

    Attributes:
        graph: The graph this was found in.
        cut: The last uncertain tensor that is propagated; None if the first dropout is already the last.
        before: Calls that no draw touches, needed by the tail.
        tail: Calls to run on every draw.
        trunk: Predicts the belief at the cut.
        width: Numbers per input at the cut.
        worthwhile: Whether some dropout is strong, and N draws take at most as many multiplications as a forward pass.
    """

    graph: Graph
    cut: Node | None
    before: list[Node]
    tail: list[Node]
    trunk: Predictor | None
    width: int
    worthwhile: bool


_heads: weakref.WeakKeyDictionary[Predictor, Head | None] = weakref.WeakKeyDictionary()


def find_head(predict: Predictor) -> Head | None:
    """The head of a predictor's network, None if it has none; found once for each predictor."""
    head = _heads.get(predict)
    if predict not in _heads or (head is not None and head.graph is not predict.graph):
        _heads[predict] = head = _find(predict)
    return head


def _find(predict: Predictor) -> Head | None:
    graph, names = predict.graph, predict.posterior().names
    uncertain = mark_uncertain(graph, (), {graph.aliases.get(n, n) for n in names})
    late = set(uncertain)
    for node in graph.nodes:  # whatever reads an uncertain tensor, be it its shape only
        if node.kind == "call" and any(s in late for s in node.inputs):
            late.add(node)
    (output, *others) = graph.outputs
    if others or not isinstance(output, Node) or output not in uncertain or len(output.shape or ()) != 2:
        return None
    needed = _ancestors(output)
    order = [n for n in graph.nodes if n in needed]
    cuts: list[Node | None] = [n for n in order if n in uncertain and n.target in _LINEAR and n is not output]
    for cut in (*reversed(cuts), *([] if cuts else [None])):
        start = 0 if cut is None else order.index(cut) + 1
        tail = [n for n in order[start:] if n in late and n.kind == "call"]
        known = {cut, *tail}
        drawn = [n for n in tail if n.target in DROPOUTS]
        if any(s in late and s not in known for n in tail for s in n.inputs):  # something else crosses the cut
            continue
        if not drawn:
            continue
        if not all(n.target in _ELEMENTWISE_DROPOUT and _fixed(n) for n in drawn):
            return None
        if cut is not None and not _fixed(cut):
            return None
        reads = {a for n in tail for a in _ancestors(n)} - late
        before = [n for n in order if n.kind == "call" and n in reads]
        width = math.prod(int(s) for s in ((cut or drawn[0]).shape or ())[1:])
        work = NODES * (sum(_work(n) for n in tail) + (_RANK + 2) * width)
        trunk = None if cut is None else _trunk(predict, cut)
        strong = any(isinstance(n.args[1], int | float) and n.args[1] > STRONG for n in drawn)
        worthwhile = strong and work <= sum(_work(n) for n in order)
        return Head(graph, cut, before, tail, trunk, width, worthwhile)
    return None


def _ancestors(node: Node) -> set[Node]:
    found, open_ = {node}, [node]
    while open_:
        for source in open_.pop().inputs:
            if source not in found:
                found.add(source)
                open_.append(source)
    return found


def _fixed(node: Node) -> bool:
    """Whether all sizes but the batch are numbers."""
    return node.shape is not None and len(node.shape) > 1 and all(isinstance(s, int) for s in node.shape[1:])


def _trunk(predict: Predictor, cut: Node) -> Predictor:
    """A predictor of the cut, still without tensors."""
    g = predict.graph
    spec = pytree.tree_structure(0)
    graph = Graph(g.nodes, g.inputs, [cut], g.in_spec, spec, g.fixed, g.constants, g.aliases)
    graph.prune()
    settings = Settings("dplr", _RANK, 0, predict.settings.activation, memory=predict.settings.memory)
    return type(predict)(graph, settings, predict.given, None)


def _follow(trunk: Predictor, predict: Predictor) -> None:
    """Share what the whole predictor holds now; it may have moved to another device since."""
    trunk.given, trunk.store, trunk._linked = predict.given, predict.store, predict._linked
    trunk._owners, trunk._spreads = predict._owners, predict._spreads


def head_outputs(predict: Predictor, args: tuple, kwargs: Mapping[str, Any], belief: Belief, n: int = NODES) -> Tensor:
    """Draws of the logits, (n, B, C), with the mean and covariance of `belief`, the predictor's own.

    Raises:
        UnsupportedOperation: The network has no head, as the module's docstring defines it.
    """
    head = find_head(predict)
    if head is None:
        raise UnsupportedOperation(
            "this network has no last layers to sample apart from the rest: they need a linear layer or convolution "
            "that everything uncertain passes, then element-wise dropout and no random weights. Use estimator='nodes'."
        )
    values, _ = predict._values(predict._leaves(args, kwargs), predict.posterior())
    env: dict[Node, Any] = {node: values[node.name] for node in head.graph.nodes if node.kind != "call"}
    for node in head.before:
        env[node] = node.target(
            *replace_nodes(node.args, env.__getitem__), **replace_nodes(node.kwargs, env.__getitem__)
        )
    dropouts = [node for node in head.tail if node.target in DROPOUTS]
    masks = [_masks(node, env, n, seed).to(belief.mean) for seed, node in enumerate(dropouts)]
    at_cut: Belief | None = None
    if head.trunk is not None:
        _follow(head.trunk, predict)
        at_cut = head.trunk(*args, **kwargs)
        nodes = normal_nodes(n, at_cut.covariance.noise_size).to(at_cut.mean)
    output = head.graph.outputs[0]

    def once(drawn: Tensor | None, drawn_masks: list[Tensor]) -> Tensor:
        local = dict(env)
        if head.cut is not None:
            local[head.cut] = drawn
        mask = dict(zip(dropouts, drawn_masks, strict=True))
        for node in head.tail:
            given = replace_nodes(node.args, local.__getitem__)
            if node in mask:
                local[node] = given[0] * mask[node]
            else:
                local[node] = node.target(*given, **replace_nodes(node.kwargs, local.__getitem__))
        return local[output]

    pieces = []
    chunk = max(1, _HELD[belief.device.type == "cpu"] // max(1, head.width * belief.batch_size))
    for first in range(0, n, chunk):
        some = slice(first, first + chunk)
        draws = None
        if at_cut is not None:
            eps = nodes[some].unsqueeze(1).expand(-1, at_cut.mean.shape[0], -1)
            draws = at_cut.mean + at_cut.covariance.from_noise(eps)
        dims = (None if draws is None else 0, 0)
        pieces.append(torch.func.vmap(once, dims)(draws, [mask[some] for mask in masks]))
    return _matched(torch.cat(pieces), belief)


def _masks(node: Node, env: Mapping[Node, Any], n: int, seed: int) -> Tensor:
    """Scaled masks (n, *event): every unit is dropped in round(pn) of them, so each has mean one."""
    p = node.args[1]
    event = tuple(int(s) for s in (node.shape or ())[1:])
    rate = torch.as_tensor(env[p] if isinstance(p, Node) else p, dtype=torch.float64).cpu().numpy()
    shuffled = np.random.Generator(np.random.PCG64(seed + 1)).random((n, *event)).argsort(0)
    dropped = np.minimum(np.rint(np.broadcast_to(rate, event) * n), n - 1)
    return torch.from_numpy((shuffled >= dropped) * (n / (n - dropped)))


def _matched(z: Tensor, belief: Belief) -> Tensor:
    """The draws, shifted and mapped linearly to have the belief's mean and covariance."""
    d = z - z.mean(0)
    n, c = z.shape[0], z.shape[2]
    if n <= 2 * c:  # too few draws for a covariance: variances only
        scale = belief.stddev / d.square().mean(0).sqrt().clamp(min=torch.finfo(z.dtype).tiny)
        return belief.mean + d * scale
    own = torch.einsum("nbi,nbj->bij", d, d) / n
    own = own + torch.diag_embed((own.diagonal(dim1=-2, dim2=-1) <= 0).to(own.dtype))  # an output that never varies
    white = torch.linalg.solve_triangular(psd_root(own), d.permute(1, 2, 0).to(torch.float64), upper=False)
    return belief.mean + (psd_root(belief.covariance_matrix) @ white).permute(2, 0, 1).to(z.dtype)


def probabilities(
    predict: Predictor, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str
) -> Tensor:
    """`Predictor.probabilities`: from the head where that is worthwhile, else from the belief alone."""
    belief = predict(*args, **kwargs)
    if estimator not in ("auto", "head"):
        return predictive.probabilities(belief, kind=kind, estimator=estimator)
    kind = predictive.check_kind(belief, kind)
    plain = not any(isinstance(t, Belief) for t in pytree.tree_leaves((args, kwargs), is_leaf=_is_belief))
    if estimator == "auto":
        head = None if torch.compiler.is_compiling() or not plain else find_head(predict)
        if head is None or not head.worthwhile:
            return predictive.probabilities(belief, kind=kind)
    elif not plain:
        raise UnsupportedOperation("an input is itself a Belief; the head is sampled for plain inputs only.")
    return predictive.LINKS[kind](head_outputs(predict, args, kwargs, belief)).mean(0)


def _is_belief(t: Any) -> bool:
    return isinstance(t, Belief)
