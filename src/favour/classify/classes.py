"""A predictor as a classifier: its logits, and probabilities that are taken once.

Networks end in logits or in the probabilities made of them. What of the two a predictor returns is read off its graph
(`favour.passes.normalise.ending`):

    logits                      p = E[link(z)], link a softmax or sigmoid
    link(logits), or its log    the same of z: a second predictor of the graph without the link answers
    probabilities in [0, 1]     p = their mean, as they are

A graph that ends in something else, a quotient say, may still return probabilities: what the network computes without
its noise tells, at the first inputs of an eager call. (Means of a belief need not sum to one where the numbers do.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from favour.belief import Belief
from favour.classify import head, predictive
from favour.classify.simplex import GIVEN, LOOSE, as_given, sums_to_one
from favour.errors import InvalidValue, UnsupportedOperation
from favour.graph.node import Graph
from favour.graph.tracing import traced
from favour.methods import Method
from favour.passes.normalise.ending import SOFTMAX, Ending, ending, without_links
from favour.program.propagator import Propagator

_NO_LOGITS = (
    "the model returns probabilities that are no softmax or sigmoid of numbers in its graph, so there are no logits. "
    "Compile the part of it that makes logits: favour.compile(model, x, at='name of that module')."
)


def ending_of(predict: Propagator, args: tuple = (), kwargs: Mapping[str, Any] | None = None) -> Ending:
    """What the predictor's one output is; unknown for several. Inputs let values tell where the graph does not."""
    graph = predict.graph
    end = predict.program.once("ending", lambda: ending(graph) if len(graph.outputs) == 1 else Ending())
    has_inputs = bool(args) or bool(kwargs)
    if has_inputs and not (end.link or end.within or end.linear) and not traced():
        (values,) = plain if len(plain := _plain(predict, args, kwargs or {})) == 1 else (None,)
        if isinstance(values, Tensor) and values.numel():
            sums = values.dim() == 2 and sums_to_one(values)
            end = replace(end, within=sums, sums=sums, linear=not sums)  # asked once
            predict.program.keep("ending", end)
    return end


def _plain(predict: Propagator, args: tuple, kwargs: Mapping[str, Any]) -> list[Any]:
    with torch.no_grad():
        return predict.program.plain(predict.program.leaves(args, kwargs))


def classifier(predict: Propagator) -> Propagator:
    """The predictor to ask for class scores: without the link its outputs end in, and, where `auto` compressed very
    many outputs, one that follows what a softmax sees of them."""
    return predict.program.once("classifier", lambda: _classifier(predict))


def _classifier(predict: Propagator) -> Propagator:
    graph, by = without_links(predict.graph), predict

    def twin(graph: Graph, method: Method) -> Propagator:
        twin = type(predict)(predict.program.clone(outputs=graph, method=method))
        twin.prepare()
        return twin

    if graph is not None:
        by = twin(graph, predict.asked.over("logits"))
    if by.method.partial:
        asked = by.asked.over("classes")
        if asked is not by.asked:
            by = twin(by.graph, asked)
    return by


def logits(predict: Propagator, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """`Predictor.logits`."""
    end = ending_of(predict, args, kwargs)
    if end.within and end.logits is None:
        raise UnsupportedOperation(_NO_LOGITS)
    return classifier(predict)(*args, **kwargs)


def draws(predict: Propagator, args: tuple, kwargs: Mapping[str, Any], n: int | None) -> Tensor:
    """`Predictor.draws`."""
    end = ending_of(predict, args, kwargs)
    if end.within and end.logits is None:
        raise UnsupportedOperation(_NO_LOGITS)
    return head.draws(classifier(predict), args, kwargs, n)


def natural_kind(end: Ending, event: tuple[int, ...], kind: str | None) -> str | None:
    """What the outputs are, by the link they end in; `kind` where there is none."""
    if end.link is None:
        return kind
    single = event in ((), (1,))
    if end.link == SOFTMAX:
        fitting: tuple[str, ...] = ("softmax",)
    else:
        fitting = ("binary", "multilabel", "ordinal") if single else ("multilabel", "ordinal")
    if kind in (None, GIVEN):
        return fitting[0]
    if kind in predictive.KINDS and kind not in fitting:
        raise InvalidValue(
            f"kind {kind!r} was asked for, and the model ends in a {end.link}: its outputs are probabilities of kind "
            f"{' or '.join(map(repr, fitting))} already. Leave `kind` out; to take a further {kind!r} of them on "
            f"purpose use favour.probabilities(predict(x), kind={kind!r})."
        )
    return kind


def reading(end: Ending, belief: Belief, kind: str | None) -> tuple[str | None, bool]:
    """How outputs belong together, and whether they are probabilities already; kind None for one number's regression.

    Reads values, so for eager code; `kind` is the user's, or None.
    """
    event = tuple(belief.event_shape)
    if end.logits is not None:
        return natural_kind(end, event, kind), False
    is_probability = end.within or (not end.linear and kind in (None, "softmax") and _sums(belief))
    if kind is None and event not in ((), (1,)) and is_probability:
        kind = "softmax" if end.sums or sums_to_one(belief.mean, LOOSE) else "multilabel"
    return kind, is_probability


def probabilities(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str, n: int | None
) -> Tensor:
    """`Predictor.probabilities`."""
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or traced():
        return _probabilities(predict, args, kwargs, kind, estimator, n)
    with torch.inference_mode():  # with a single input this saves a quarter of the head's time
        p = _probabilities(predict, args, kwargs, kind, estimator, n)
    return p.clone()  # an ordinary tensor again


def _probabilities(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str, n: int | None
) -> Tensor:
    by, kind, belief = resolved(predict, args, kwargs, kind)
    if belief is not None:
        drawn = (
            head.probabilities(by, args, kwargs, GIVEN, estimator, n) if n is not None or estimator == "head" else None
        )
        return as_given(belief.mean if drawn is None else drawn, kind, ending_of(predict).sums)
    return head.probabilities(by, args, kwargs, kind, estimator, n)


def divergence(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None, estimator: str, n: int | None
) -> Tensor:
    """`Predictor.jsd`."""
    by, kind, belief = resolved(predict, args, kwargs, kind)
    if belief is not None:
        raise UnsupportedOperation(_NO_LOGITS)
    return head.divergence(by, args, kwargs, kind, estimator, n)


def resolved(
    predict: Propagator, args: tuple, kwargs: Mapping[str, Any], kind: str | None
) -> tuple[Propagator, str | None, Belief | None]:
    """Whom to ask for logits, of which kind they are, and the belief where the outputs are used as they are."""
    end = ending_of(predict, args, kwargs)
    if end.logits is not None:
        shape = predict.graph.outputs[0].shape
        return classifier(predict), natural_kind(end, tuple(shape[1:]), kind), None
    if end.within or kind == GIVEN:
        belief = predict(*args, **kwargs)
        predictive.check_belief(belief)
        return predict, kind, belief
    return classifier(predict), kind, None


def logits_of(member: Any, args: tuple, kwargs: Mapping[str, Any]) -> Belief:
    """A member's belief over logits; of a plain network that returns probabilities, their logarithms."""
    method = getattr(member, "logits", None)
    if callable(method):
        return method(*args, **kwargs)
    outputs = member(*args, **kwargs)
    if isinstance(outputs, Belief):
        return outputs
    normalised = sums_to_one(outputs)
    return Belief.point(outputs.clamp(min=torch.finfo(outputs.dtype).tiny).log() if normalised else outputs)


def _sums(belief: Belief) -> bool:
    return not traced() and len(belief.event_shape) == 1 and sums_to_one(belief.mean)
