"""Draws of the logits: the tail of the graph on fixed tables, then the belief's moments.

A draws of everything up to the last dropout or random layer are made in one go, as an axis in front of the batch where
all operations let it stay there (`Head.batched`), else with `torch.func.vmap`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.covariance import square_root
from favour.belief.origin import Origin, remember
from favour.classify import predictive, scores
from favour.classify.head.find import DRAWS, Head, find_head
from favour.classify.head.masked import FEWEST, MaskedLinear
from favour.classify.head.match import weighed, weight_of
from favour.classify.head.tables import tables
from favour.classify.simplex import GIVEN
from favour.errors import FavourError, InvalidValue, UnsupportedOperation
from favour.graph.example import plain
from favour.graph.interpreter import call, interpret
from favour.graph.node import Node
from favour.graph.tracing import traced
from favour.posterior import Posterior
from favour.program.propagator import Propagator
from favour.surrogate.value import Value, mean_of

_HELD = (2**24, 2**18)  # numbers in one layer of the draws at once: what keeps a GPU busy, what fits a CPU's cache
_BLOCK, _LEAST = 2**20, 128  # numbers in the logits of the draws at once, and rows at least


def draws(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], n: int | None = None) -> Tensor:
    """`Predictor.draws`."""
    return _joined(list(_drawn(predict, args, kwargs, n)), 0).permute(2, 0, 1)


def probabilities(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str, n: int | None = None
) -> Tensor:
    """`Predictor.probabilities`: from the head where that is worthwhile, else from the belief alone."""
    drawn = sampled(predict, args, kwargs, estimator, n)
    if drawn is not None:
        parts = []
        for z in drawn:
            kind = kind if kind == GIVEN else predictive.check_event(tuple(z.shape[1:2]), kind)
            parts.append(predictive.mean_link(kind, z))
        return _joined(parts, 0)
    estimator = "nodes" if estimator == "auto" else estimator
    belief = unwrapped(predict(*args, **kwargs))
    predictive.check_belief(belief)
    return predictive.expected(belief, predictive.check_event(tuple(belief.event_shape), kind), estimator)


def unwrapped(answer: Any) -> Any:
    """The belief of a model that returns its one output inside a dict or an object; another answer as it is."""
    leaves = pytree.tree_leaves(answer, is_leaf=_is_belief)
    return leaves[0] if len(leaves) == 1 else answer


def sampled(
    predict: Propagator,
    args: tuple,
    kwargs: Mapping[str, Any],
    estimator: str,
    n: int | None,
    *,
    scored: bool = False,
) -> Iterator[Tensor] | None:
    """Draws (b, C, n) by slices of the batch where this estimator takes the head, as many as a score takes if `scored`;
    None where the belief is asked."""
    if n is not None and estimator not in ("auto", "head"):
        raise InvalidValue(f"`draws` belongs to the head; estimator={estimator!r} makes none.")
    if estimator not in ("auto", "head"):
        return None
    if not predict.method.fixed:
        return _drawn(predict, args, kwargs, n)
    head = find_head(predict)
    asked = estimator == "head" or n is not None
    worthwhile = head is not None and (bool(head.for_scores) if scored else head.worthwhile)
    if not asked and not worthwhile:
        return None
    if scored and n is None and head is not None:
        n = head.for_scores or DRAWS
    if not _uncertain(args, kwargs):
        return _drawn(predict, args, kwargs, n)
    if asked:
        raise UnsupportedOperation("an input is itself a Belief; the head is sampled for plain inputs only.")
    return None


def divergence(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str, n: int | None
) -> Tensor:
    """`Predictor.jsd`: from the head where its draws can be afforded, else from the belief alone."""
    drawn = sampled(predict, args, kwargs, estimator, n, scored=True)
    if drawn is not None:
        parts = []
        for z in drawn:
            _check_classes(tuple(z.shape[1:2]), kind)
            parts.append(disagreement(z))
        return _joined(parts, 0)
    belief = unwrapped(predict(*args, **kwargs))
    if not isinstance(belief, Belief):
        raise UnsupportedOperation(
            f"the network's outputs are {type(belief).__name__}; `jsd` takes one output. Score one of them: "
            "`favour.scores.jsd(predict(x)[...])`."
        )
    _check_classes(tuple(belief.event_shape), kind)
    return scores.jsd(scores.logits(belief), estimator="nodes" if estimator == "auto" else estimator)


def remember_call(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], belief: Any) -> None:
    """Leave with a belief over logits how to ask the head for its divergence, where the head's draws are affordable."""
    if traced() or not isinstance(belief, Belief) or len(belief.event_shape) != 1:
        return
    head = find_head(predict) if predict.method.fixed else None
    if head is None or not head.for_scores or belief.event_shape[0] < 2 or _uncertain(args, kwargs):
        return
    changes, mean = predict.program.changes, belief.mean
    version = None if mean.is_inference() else mean._version
    # A copy: buffers are filled anew, and torch does not see what numpy writes.
    if plain(args, kwargs):
        args = tuple(t.clone() for t in args)
    else:
        args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, (args, dict(kwargs)))

    def unchanged() -> bool:
        try:
            predict.follow()
        except FavourError:  # a stale one, say
            return False
        return predict.program.changes == changes and (version is None or mean._version == version)

    remember(belief, Origin(lambda: divergence(predict, args, kwargs, None, "head", head.for_scores), unchanged))


def disagreement(z: Tensor) -> Tensor:
    """The divergence of draws (b, C, n), or of one logit (b, 1, n), (b,)."""
    both = z if z.shape[1] > 1 else torch.cat([torch.zeros_like(z), z], 1)
    return scores.jsd(both.permute(2, 0, 1))


def _check_classes(event: tuple[int, ...], kind: str | None) -> None:
    kind = predictive.check_event(event, kind)
    if kind not in ("softmax", "binary"):
        raise InvalidValue(f"outputs of kind {kind!r} are several questions; the divergence is of one choice of class.")


def _uncertain(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Whether an input is a belief."""
    if plain(args, kwargs):
        return False
    return any(isinstance(t, Belief) for t in pytree.tree_leaves((args, kwargs), is_leaf=_is_belief))


def _is_belief(t: Any) -> bool:
    return isinstance(t, Belief)


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, axis)


def _drawn(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], n: int | None) -> Iterator[Tensor]:
    """Draws (b, C, n), by slices of the batch: of the method, where it makes some, else of the head."""
    if not predict.method.fixed:
        yield from _of_method(predict, args, kwargs, n)
        return
    head = find_head(predict, n)
    if head is None:
        raise UnsupportedOperation(
            "this network has no last layers to sample apart from the rest: they need one output (B, C), and dropout "
            "(element-wise or by channel) or a linear layer with mean-field weights that everything uncertain passes. "
            "Use estimator='nodes'."
        )
    program = predict.program
    leaves, posterior = program.inputs(args, kwargs), program.posterior()
    variances = _variances(head, posterior)
    for part in program.slices(leaves, posterior):
        kept: dict[str, Any] = {n.name: None for n in [*head.reads, *([] if head.cut is None else [head.cut])]}
        bound, method = program.bind(part, posterior)
        bound.kept = kept
        leaf = {node.name: bound.values[node] for node in bound.plan.leaves}  # the plan has nodes of its own
        (belief,) = method.run(bound)
        env = {node: kept[node.name] for node in head.reads} | {n: mean_of(leaf[n.name]) for n in head.leaves}
        at_cut = None if head.cut is None else kept[head.cut.name]
        # of the network itself, and the belief had more to do than a linear layer
        network_draws = at_cut is None and head.tail
        for some in _blocks(head, belief):
            few = env if some is None else {node: _rows(node, value, some, _batch(head)) for node, value in env.items()}
            at = at_cut if some is None or at_cut is None else _rows_of(at_cut, some)
            belief_there = belief if some is None else belief[some]
            d, bias = _tail(head, few, variances, at, belief_there)
            yield weighed(d, bias, belief_there, weight_of(head.outer) if network_draws else 1.0)


def _of_method(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], n: int | None) -> Iterator[Tensor]:
    program = predict.program
    leaves, posterior = program.inputs(args, kwargs), program.posterior()
    for part in program.slices(leaves, posterior):
        bound, method = program.bind(part, posterior)
        made = method.draws(bound, n)
        if made is None or made.ndim != 3:
            raise UnsupportedOperation("draws are of class scores, one output (B, C) of the network.")
        yield made.permute(1, 2, 0)


def _blocks(head: Head, belief: Belief) -> list[slice] | list[None]:
    """Rows whose draws are made, given their moments and used before the next: what a CPU's cache holds of them."""
    held, classes = belief.mean.shape
    if traced() or held <= _LEAST or belief.mean.device.type != "cpu":
        return [None]
    rows, batch = max(_LEAST, _BLOCK // (head.outer * head.inner * classes)), _batch(head)
    if held <= rows:
        return [None]
    if any(_mixed(node, batch) for node in [*head.reads, *(n for n in head.leaves if n.kind == "input")]):
        return [None]
    return [slice(i, i + rows) for i in range(0, held, rows)]


def _batch(head: Head) -> Any:
    """The name of the batch's size."""
    return (head.graph.outputs[0].shape or (None,))[0]


def _mixed(node: Node, batch: Any) -> bool:
    """Whether rows of the batch cannot be taken from the first axis: the shape is unknown, or has it elsewhere."""
    if node.shape is None or not isinstance(batch, str):
        return True
    rest = node.shape[1:] if node.shape[:1] == (batch,) else node.shape
    return any(isinstance(s, str) and batch in s for s in rest)


def _rows(node: Node, value: Any, some: slice, batch: Any) -> Any:
    return value[some] if node.kind in ("call", "input") and (node.shape or (None,))[0] == batch else value


def _rows_of(value: Value, some: slice) -> Value:
    diag = None if value.diag is None else value.diag[some]
    return Value(value.mean[some], diag, {name: columns[:, some] for name, columns in value.blocks.items()})


def _variances(head: Head, posterior: Posterior) -> dict[Node, Tensor]:
    """Of the weights and biases that are random."""
    variances: dict[Node, Tensor] = {}
    layers = [*head.normals, *([head.last] if head.last is not None and head.random_last else [])]
    for node in (source for layer in layers for source in layer.inputs if source.kind in ("parameter", "buffer")):
        gaussian = posterior.gaussian(str(node.target))
        if gaussian is not None:
            variances[node] = gaussian.variance()
    return variances


def _tail(
    head: Head, env: dict[Node, Any], variances: Mapping[Node, Tensor], at_cut: Value | None, belief: Belief
) -> tuple[Tensor, Tensor | None]:
    """Draws d_k of the logits, (B, C, n), but for the bias of the last layer, (C,), if it has one."""
    like, outer = belief.mean, head.outer
    rank = 0 if at_cut is None or at_cut.factor is None else at_cut.factor.shape[0]
    fixed = tables(head, env, like, rank)
    kept: dict[str, Tensor] = {}
    if head.batched and not traced() and like.shape[0] > FEWEST:
        masked = {layer.name: fixed.masked(layer.name, env[layer.args[1]], d) for layer, d in head.folded.items()}
        kept = {name: w for name, w in masked.items() if w is not None}

    def once(masks: dict[str, Tensor], normals: dict[str, Tensor], kept: dict[str, Tensor], latent: Tensor) -> Tensor:
        local = dict(env)
        if head.cut is not None and at_cut is not None:
            local[head.cut] = _at_cut(at_cut, normals[head.cut.name], latent)

        def drawn(node: Node, local: Mapping[Node, Any]) -> Tensor:
            if node.name in masks:
                return local[node.args[0]] * masks[node.name]
            if node in head.folded or node.name in normals:
                layer = MaskedLinear.of(node, local, head.folded.get(node), masks, variances, kept)
                return layer.one(normals.get(node.name))
            return call(node, local)

        interpret(head.tail, local, drawn)
        if head.last is None:
            return local[head.graph.outputs[0]].unsqueeze(-1)
        layer = MaskedLinear.of(head.last, local, head.folded.get(head.last), masks, variances, kept)
        return layer.many(normals.get(head.last.name))

    run = once if head.batched else torch.func.vmap(once)
    chunk = outer
    if not traced():
        held = max(head.width, head.inner * like.shape[1]) * max(1, like.shape[0])
        chunk = max(1, _HELD[like.device.type == "cpu"] // held)
    parts = []
    for i in range(0, outer, chunk):
        some = slice(i, i + chunk)
        masks, normals, weights, latent = fixed.masks, fixed.normals, kept, fixed.latent
        if chunk < outer:
            masks, normals, weights = ({k: t[some] for k, t in of.items()} for of in (masks, normals, weights))
            latent = latent[some]
        z = run(masks, normals, weights, latent)  # (A, B, C, M)
        parts.append(z.permute(1, 2, 0, 3).flatten(2))
    return _joined(parts, 2), None if head.last is None else _bias(head.last, env)


def _bias(layer: Node, env: Mapping[Node, Any]) -> Tensor | None:
    bias: Any = layer.args[2] if len(layer.args) > 2 else None
    return None if bias is None else env[bias]


def _at_cut(value: Value, normals: Tensor, latent: Tensor) -> Tensor:
    """Draws of the belief at the cut, (A, B, *event): μ + √λ∘ε + Uy."""
    x = value.mean
    if value.diag is not None:
        x = x + square_root(value.diag) * normals
    if value.factor is not None:
        x = x + torch.tensordot(latent, value.factor, 1)
    return x
