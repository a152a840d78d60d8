"""Class probabilities from draws of the last layers only, the belief propagated up to them.

Strong dropout skews the logits, which a Gaussian cannot say. But the last layers, the *head*, are small, and what the
reverse sweep knows, the mean μ and covariance Σ of the logits, need not be sampled. With n = A·M draws k = (a, m),

    x_a = head up to its last dropout or random layer, A times          masks and normal nodes are fixed tables
    d_k = W (mask_k ∘ x_a)                                              M times for each a: W is masked, not x
    z_k = μ + L L_d⁻¹ (d_k − d̄)                                         LLᵀ = Σ, L_d L_dᵀ the covariance of d
    p   = 1/n Σ_k softmax(z_k)

The third line gives the draws the mean and covariance of the belief, so only their shape, skewness and more, comes
from sampling, and most of the sampling noise is gone. Every unit is dropped in the same number of masks, and tables
are shared by all inputs: the result is a deterministic function of the input, draws are products of matrices, and no
random number is made when predicting. A last layer with mean-field weights adds √(S²x² + s²)·ε for S² and s² the
variances of weights and biases, which is the exact law of its output given x, one input at a time.

The head begins as early as its cost allows, at most that of a forward pass: before the first draw if possible, else
behind a node that everything uncertain passes, where the forward sweep's belief is drawn from as a Gaussian: with
independent entries, or with the correlations that `rank` keeps.
Cost is counted: multiplications, and `_ENTRY` of them for each entry that an operation writes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour import predictive
from favour.belief import Belief
from favour.capture.node import DROPOUTS, Graph, Node, replace_nodes
from favour.covariance import square_root
from favour.covariance.precision import psd_root
from favour.errors import UnsupportedOperation
from favour.masked import MaskedLinear
from favour.methods.choice import multiplications
from favour.methods.engine import infer
from favour.plan import mark_uncertain
from favour.posterior.gaussians import Diagonal
from favour.predictive import mirrored_normals
from favour.tensors import check_inputs
from favour.tracing import constant
from favour.value import Value

if TYPE_CHECKING:
    from favour.predictor import Predictor

aten = torch.ops.aten

DRAWS = 192  # n
BUDGETS = (1.0, 32.0)  # forward passes: by default, and where the user asks for the head and that is not enough
OUTER = (24, 8)  # A, the first that can be afforded; what 24 x 8 draws are worth: benchmarks/decisions.py
_ENTRY = 16
_CONVOLUTION = 2  # its multiplications take this many times as long as those of a matrix product (measured on LeNet)
_PASSES = 3  # over the logits of all draws: to gather, to match and to exponentiate them
_HELD = (2**24, 2**20)  # numbers in one layer of the draws at once: what keeps a GPU busy, what fits a CPU's cache
_CONVOLUTIONS = {aten.conv1d.default, aten.conv2d.default, aten.conv2d.padding, aten.conv3d.default}
_CHANNELS = {aten.feature_dropout.default}
_KNOWN = {aten.dropout.default, torch.ops.favour.dropout.default, *_CHANNELS}


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
        normals: Entries drawn from a normal by node, `cut` and layers with random weights, `last` apart.
        outer, inner: A and M.
        width: Most numbers per input and draw held at once.
        cost: In forward passes.
        seed: Of the tables, the predictor's own.
    """

    graph: Graph
    cut: Node | None
    reads: list[Node]
    tail: list[Node]
    last: Node | None
    folded: dict[Node, Node]
    normals: dict[Node, int]
    outer: int
    inner: int
    width: int
    cost: float
    seed: int

    @property
    def worthwhile(self) -> bool:
        """Whether draws take at most as long as a forward pass."""
        return self.cost <= BUDGETS[0]


def find_head(predict: Predictor) -> Head | None:
    """The head of a predictor's network, None if it has none; found once for each graph."""
    known = predict._head
    if known is None or known[0] is not predict.graph:
        if torch.compiler.is_compiling():
            return None
        predict._head = known = (predict.graph, _find(predict))
    return known[1]


def _find(predict: Predictor) -> Head | None:
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
    planned = predict._plan(frozenset(), posterior)
    known = {step.node.name for step in planned.steps} | {n.name for n in planned.leaves}
    needed = _ancestors(output)
    order = [n for n in graph.nodes if n in needed]
    users = graph.users()
    forward = sum(_cost(n) for n in order if n.kind == "call")
    found: list[Head] = []
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
        drawn = [n for n in tail if n.target in DROPOUTS]
        if not all(n.target in _KNOWN and _fixed(n) for n in drawn) or not (drawn or weights):
            continue
        layers = [n for n in tail if any(s in weights for s in n.inputs)]
        if not all(_mean_field(n, weights, posterior, users) for n in layers):
            continue
        reads = [s for s in {s for n in tail for s in n.inputs} if s not in late and s.kind == "call"]
        if any(n.name not in known for n in reads):
            continue
        folded = {user: d for d in drawn for user in users[d] if _foldable(d, user, users)}
        last = output if output.target is aten.linear.default and (output in folded or output in layers) else None
        silent = {*folded.values(), *([] if last is None else [last])}
        run = [n for n in tail if n not in silent]
        normals = {n: _size(n) for n in ([] if cut is None else [cut]) + [n for n in layers if n is not last]}
        width = max(_size(n) for n in [*run, output] if n.shape is not None)
        for outer in OUTER if last is not None else (DRAWS, DRAWS // 2, *OUTER):
            inner = 1 if last is None else DRAWS // outer
            once = sum(_cost(n) for n in run) + 2 * _ENTRY * sum(normals.values())
            classes = _size(output)
            each = 0 if last is None else multiplications(last) * (2 if last in layers else 1)
            each += _PASSES * _ENTRY * classes + 2 * classes**2
            cost = outer * (once + inner * each) / max(1, forward)
            found.append(
                Head(graph, cut, reads, run, last, folded, normals, outer, inner, width, cost, predict.settings.seed)
            )
    affordable = (head for budget in BUDGETS for head in found if head.cost <= budget)
    return next(affordable, min(found, key=lambda head: head.cost, default=None))


def _cost(node: Node) -> float:
    """Of one call and input, in multiplications."""
    if node.shape is None or getattr(node.target, "is_view", False):
        return 0
    return multiplications(node) * (_CONVOLUTION if node.target in _CONVOLUTIONS else 1) + _ENTRY * _size(node)


def _size(node: Node) -> int:
    return math.prod(s for s in (node.shape or ())[1:] if isinstance(s, int))


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


def _foldable(dropout: Node, user: Node, users: Mapping[Node, list[Node]]) -> bool:
    """W(mask ∘ x) = (W ∘ mask)x where one linear layer and nobody else reads what was dropped, one row per input."""
    return (
        user.target is aten.linear.default
        and len(users[dropout]) == 1
        and user.args[0] is dropout
        and len(dropout.shape or ()) == 2
    )


def _mean_field(node: Node, weights: set[Node], posterior: Any, users: Mapping[Node, list[Node]]) -> bool:
    """Whether the outputs are independent given the input: a linear layer, independent weights of its own."""
    if node.target is not aten.linear.default or len(node.shape or ()) != 2:
        return False
    own = [s for s in node.inputs if s in weights]
    return all(
        isinstance(posterior.gaussian(str(s.target)), Diagonal)
        and str(s.target) not in posterior.latents
        and len(users[s]) == 1
        and s in node.args[1:]
        for s in own
    )


# ---- tables


@functools.cache
def _shuffled(n: int, size: int, seed: int) -> npt.NDArray:
    """A permutation of 0 … n − 1 in each column, and in the last row uniform numbers, (n + 1, size)."""
    random = np.random.Generator(np.random.PCG64(seed + 1))
    ranks = random.permuted(np.broadcast_to(np.arange(n, dtype=np.float32)[:, None], (n, size)), axis=0)
    return np.concatenate([ranks, random.random((1, size), dtype=np.float32)])


# A constant in compiled code, and in exported code as it is made outside torch; in one piece, since the compiler
# takes two constants from one function for the same.
@constant
def _tables(ranks: tuple[tuple[int, int], ...], normals: tuple[tuple[int, int], ...], seed: int) -> Tensor:
    """All tables, one after the other: `_shuffled` and `normal_nodes`, for the sizes given."""
    parts = [_shuffled(n, size, 1000 * seed + i).ravel() for i, (n, size) in enumerate(ranks)]
    parts += [mirrored_normals(n, size).astype(np.float32).ravel() for n, size in normals]
    return torch.from_numpy(np.concatenate([np.zeros(0, np.float32), *parts]))


def _masks(node: Node, p: Any, table: Tensor, dtype: torch.dtype) -> Tensor:
    """Scaled masks (n, *event) from a table (n + 1, size): every unit is dropped ⌊pn + u⌋ times; each has mean one."""
    n = table.shape[0] - 1
    event = _mask_event(node)
    table = table.reshape(n + 1, *event)
    rate = p.to(table) if isinstance(p, Tensor) else float(p)
    dropped = torch.floor(rate * n + table[n]).clamp(max=n - 1)
    return ((table[:n] >= dropped) * (n / (n - dropped))).to(dtype)


def _mask_event(node: Node) -> tuple[int, ...]:
    event = tuple(int(s) for s in (node.shape or ())[1:])
    return (event[0], *[1] * (len(event) - 1)) if node.target in _CHANNELS else event


# ---- drawing


def draws(predict: Predictor, *args: Any, **kwargs: Any) -> Tensor:
    """Draws of the logits, (n, B, C), with the mean and covariance of the predictor's belief.

    `favour.scores` takes them like samples: `jsd(draws(predict, x))` keeps what a Gaussian loses.

    Raises:
        UnsupportedOperation: The network has no head, as the module's docstring defines it.

    Example:
        >>> import favour
        >>> model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 3))
        >>> draws(favour.compile(model, torch.randn(2, 4)), torch.randn(5, 4)).shape
        torch.Size([192, 5, 3])
    """
    return torch.cat([z.permute(2, 0, 1) for z in _drawn(predict, args, kwargs)], 1)


def _drawn(predict: Predictor, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Draws (B, C, n), by slices of the batch."""
    head = find_head(predict)
    if head is None:
        raise UnsupportedOperation(
            "this network has no last layers to sample apart from the rest: they need one output (B, C), and dropout "
            "(element-wise or by channel) or a linear layer with mean-field weights that everything uncertain passes. "
            "Use estimator='nodes'."
        )
    leaves = predict._leaves(args, kwargs)
    if not torch.compiler.is_compiling():
        predict.refresh()
        check_inputs(predict.graph, leaves)
    posterior = predict.posterior()
    results = []
    for part in predict._slices(leaves, posterior):
        kept: dict[str, Any] = {n.name: None for n in [*head.reads, *([] if head.cut is None else [head.cut])]}
        plan, bound, sources = predict._bound(part, posterior)
        choice = predict._choices[frozenset(name for name, _ in sources)]
        (belief,) = infer(plan, bound, predict.settings, choice, predict._context(), sources, predict._starts, kept)
        values, _ = predict._values(part, posterior)
        env = {node: values[node.name] for node in head.graph.nodes if node.kind != "call"}
        env |= {node: kept[node.name] for node in head.reads}
        variances: dict[Node, Tensor] = {}
        for layer in (*head.normals, *([] if head.last is None else [head.last])):
            for node in layer.inputs:
                gaussian = posterior.gaussian(str(node.target)) if node.kind in ("parameter", "buffer") else None
                if gaussian is not None:
                    variances[node] = gaussian.variance()
        at_cut = None if head.cut is None else kept[head.cut.name]
        results.append(_matched(_tail(head, env, variances, at_cut, belief), belief))
    return results


def _tail(
    head: Head, env: dict[Node, Any], variances: Mapping[Node, Tensor], at_cut: Value | None, belief: Belief
) -> Tensor:
    """Draws d_k of the logits, (B, C, n), up to the bias of the last layer."""
    like, outer, inner = belief.mean, head.outer, head.inner
    graph, last = head.graph, head.last
    dropouts = [n for n in (*head.tail, *head.folded.values()) if n.target in DROPOUTS]
    ending = None if last is None else head.folded.get(last)
    random_last = last is not None and any(s in variances for s in last.inputs)
    rank = 0 if at_cut is None or at_cut.factor is None else at_cut.factor.shape[0]
    counts = [outer * inner if node is ending else outer for node in dropouts]
    ranks = tuple((n, math.prod(_mask_event(node))) for n, node in zip(counts, dropouts, strict=True))
    normals = ((outer, sum(head.normals.values()) + rank), (outer * inner, _size(last) if last and random_last else 0))
    flat = _tables(ranks, normals, head.seed).to(like.device)
    *cut_tables, normal, ending_normal = flat.split([(n + 1) * k for n, k in ranks] + [n * k for n, k in normals])
    masks: dict[Node, Tensor] = {}
    for node, table, (n, _) in zip(dropouts, cut_tables, ranks, strict=True):
        p = env[node.args[1]] if isinstance(node.args[1], Node) else node.args[1]
        mask = _masks(node, p, table.reshape(n + 1, -1), like.dtype)
        masks[node] = mask.reshape(outer, inner, -1) if node is ending else mask
    *drawn, latent = normal.to(like).reshape(outer, -1).split([*head.normals.values(), rank], 1)
    pieces = dict(zip(head.normals, drawn, strict=True))
    if last is not None and random_last:
        pieces[last] = ending_normal.to(like).reshape(outer, inner, -1)

    def once(mask: dict[str, Tensor], eps: dict[str, Tensor], columns: Tensor) -> Tensor:
        local = dict(env)
        if head.cut is not None and at_cut is not None:
            x = at_cut.mean
            if at_cut.diag is not None:
                x = x + square_root(at_cut.diag) * eps[head.cut.name].reshape(x.shape[1:])
            if rank and at_cut.factor is not None:
                x = x + torch.tensordot(columns, at_cut.factor, 1)
            local[head.cut] = x
        for node in head.tail:
            given = replace_nodes(node.args, lambda n: local.get(n) if n in head.folded.values() else local[n])
            if node.name in mask:
                local[node] = given[0] * mask[node.name]
            elif node in head.folded or node.name in eps:
                layer = MaskedLinear.of(node, local, head.folded.get(node), mask, variances)
                local[node] = layer.one(eps.get(node.name))
            else:
                local[node] = node.target(*given, **replace_nodes(node.kwargs, local.__getitem__))
        if last is None:
            return local[graph.outputs[0]].unsqueeze(-1)
        return MaskedLinear.of(last, local, ending, mask, variances).many(eps.get(last.name))

    by_name = {n.name: t for n, t in masks.items()}
    noise = {n.name: t for n, t in pieces.items()}
    run = torch.func.vmap(once)
    chunk = outer
    if not torch.compiler.is_compiling():
        held = max(head.width, inner * belief.mean.shape[1]) * max(1, belief.batch_size)
        chunk = min(outer, max(1, _HELD[like.device.type == "cpu"] // held))
    parts = []
    for i in range(0, outer, chunk):
        some = slice(i, i + chunk)
        z = run({k: t[some] for k, t in by_name.items()}, {k: t[some] for k, t in noise.items()}, latent[some])
        parts.append(z.permute(1, 2, 0, 3).flatten(2))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _matched(d: Tensor, belief: Belief) -> Tensor:
    """The draws (B, C, n), shifted and mapped linearly to have the belief's mean and covariance."""
    d = d - d.mean(2, keepdim=True)
    n, c = d.shape[2], d.shape[1]
    mean = belief.mean.unsqueeze(-1)
    if n <= 2 * c:  # too few draws for a covariance: variances only
        own = d.square().mean(2)
        flat = own <= 0
        scale = belief.stddev / torch.where(flat, 1, own).sqrt()
        return mean + d * scale.unsqueeze(-1)
    own = d @ d.mT / n
    own = own + torch.diag_embed((own.diagonal(dim1=-2, dim2=-1) <= 0).to(own.dtype))  # an output that never varies
    target, source = psd_root(belief.covariance_matrix), psd_root(own)
    # L L_d⁻¹ in the working dtype: it is small, the draws are many.
    turn = torch.linalg.solve_triangular(source, target, upper=False, left=False)
    return torch.baddbmm(mean.to(d.dtype), turn.to(d.dtype), d)


def probabilities(
    predict: Predictor, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str
) -> Tensor:
    """`Predictor.probabilities`: from the head where that is worthwhile, else from the belief alone."""
    if estimator in ("auto", "head"):
        plain = not any(isinstance(t, Belief) for t in pytree.tree_leaves((args, kwargs), is_leaf=_is_belief))
        head = find_head(predict) if plain else None
        if estimator == "head" or (head is not None and head.worthwhile):
            if not plain:
                raise UnsupportedOperation("an input is itself a Belief; the head is sampled for plain inputs only.")
            parts = _drawn(predict, args, kwargs)
            kind = predictive.check_event(tuple(parts[0].shape[1:2]), kind)
            return torch.cat([predictive.mean_link(kind, z) for z in parts])
        estimator = "nodes"
    return predictive.probabilities(predict(*args, **kwargs), kind=kind, estimator=estimator)


def _is_belief(t: Any) -> bool:
    return isinstance(t, Belief)
