"""The function that is exported: from input tensors to named outputs.

    classification   mean μ, variance diag Σ of the logits; probabilities E[softmax(z)]; jsd E[KL(p(z) ‖ p̄)]
    regression       mean μ, variance σ² of an observation; stddev σ; lower, upper = μ ∓ Φ⁻¹(½ + level/2) σ
    few outputs      covariance Σ

Expectations are taken over fixed nodes (`favour.classify.predictive`, `favour.classify.head`), so the function has no
random numbers in it: MC dropout needs a generator in the runtime, n passes, and answers differently when asked again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.confidence import check_level
from favour.classify import classes, predictive, scores
from favour.classify.calibration import Calibrated
from favour.classify.head.draw import unwrapped
from favour.classify.simplex import as_given
from favour.errors import InvalidType, InvalidValue, ReducedCovariance, UnknownName, UnsupportedOperation
from favour.exporting.exported import Port
from favour.graph.node import Node
from favour.passes.normalise.ending import Ending, ending
from favour.passes.normalise.lookups import Lookup, find_lookups, guarded, input_range, inside
from favour.predictor.predictor import Predictor
from favour.program.program import Program
from favour.program.tensors import graph_values

REGRESSION = "regression"
SMALL = 10  # most outputs whose covariance is exported by default

MEANINGS = {
    "mean": "mean of the output{}",
    "variance": "variance of the output{}",
    "covariance": "covariance between the outputs of one row",
    "probabilities": "class probabilities, the expectation of the softmax (or sigmoid)",
    "jsd": "Jensen-Shannon divergence in nats, at most log C: how much draws of it disagree; high is unfamiliar",
    "stddev": "standard deviation, the root of the variance",
    "lower": "lower end of the interval{}",
    "upper": "upper end of the interval{}",
}


@dataclass(frozen=True)
class Choices:
    """What to write. `link` is None for a regression."""

    link: str | None
    covariance: bool
    level: float
    noise: float
    output: int
    alone: bool  # whether the output is all that the model returns, which `Predictor.probabilities` needs
    inside: bool = False  # whether it ends in a softmax or sigmoid of logits that the graph has
    squashed: bool = False  # whether it is probabilities otherwise


class Answer(nn.Module):
    """Input tensors, in the order of the flattened arguments, to a dict of output tensors.

    Rows that look for what no table has are NaN throughout: a runtime would take another row, or fail for the batch.
    """

    def __init__(self, predict: Predictor | Calibrated, choices: Choices, lookups: Sequence[Lookup] = ()) -> None:
        super().__init__()
        self.predict, self.choices, self.lookups = predict, choices, list(lookups)

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        with _remembered(base_of(self.predict).program):
            named = self.answer(*tensors)
        if not self.lookups:
            return named
        good = inside(self.lookups, known(base_of(self.predict), tensors), tensors[0].shape[0])
        return {name: torch.where(good.reshape(-1, *[1] * (t.ndim - 1)), t, float("nan")) for name, t in named.items()}

    def answer(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The outputs, in which rows that look for what no table has mean nothing."""
        choices = self.choices
        args, kwargs = arguments(base_of(self.predict), tensors)
        belief = pytree.tree_leaves(self.predict(*args, **kwargs), is_leaf=_is_belief)[choices.output]
        if choices.link is None:
            belief = belief.with_noise(choices.noise)
            low, high = predictive.interval(belief, choices.level)
            named = {"mean": belief.mean, "variance": belief.variance, "stddev": belief.stddev}
            named |= {"lower": low, "upper": high}
        else:
            logits = self._logits(belief, args, kwargs)
            p = self._probabilities(logits, args, kwargs)
            named = {"mean": belief.mean, "variance": belief.variance, "probabilities": p}
            if choices.link in ("softmax", "binary") and not choices.squashed:
                named["jsd"] = self._disagreement(logits, args, kwargs)
        if choices.covariance:
            named["covariance"] = belief.covariance_matrix
        return named

    def _logits(self, belief: Belief, args: tuple, kwargs: dict[str, Any]) -> Belief:
        """The belief less the softmax or sigmoid that the output ends in; a calibrated one is without already."""
        if not self.choices.inside:
            return belief
        answer = classes.classifier(base_of(self.predict))(*args, **kwargs)
        return pytree.tree_leaves(answer, is_leaf=_is_belief)[self.choices.output]

    def _probabilities(self, logits: Belief, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        link = self.choices.link
        assert link is not None
        if self.choices.squashed:
            return as_given(logits.mean, link, link == "softmax")
        if self.choices.alone:
            return self.predict.probabilities(*args, kind=link, **kwargs)
        return predictive.expected(logits, link)

    def _disagreement(self, logits: Belief, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        if self.choices.alone and isinstance(self.predict, Predictor):
            return self.predict.jsd(*args, kind=self.choices.link, **kwargs)
        if self.choices.alone:
            return self.predict.jsd(*args, **kwargs)
        return scores.jsd(scores.logits(logits))


@contextmanager
def _remembered(program: Program) -> Iterator[None]:
    """Beliefs, probabilities and JSD of one call share their passes: what is merged later is traced once."""
    made: dict[tuple[int, ...], tuple[list[Any], list[Any]]] = {}

    def run(leaves: list[Any]) -> list[Any]:
        key = tuple(map(id, leaves))
        if key not in made:
            made[key] = leaves, type(program).run(program, leaves)  # leaves kept, so that ids are not used again
        return made[key][1]

    program.run = run  # type: ignore[method-assign]
    try:
        yield
    finally:
        del program.run


def base_of(predict: Predictor | Calibrated) -> Predictor:
    return predict.predict if isinstance(predict, Calibrated) else predict


def known(predict: Predictor, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """Inputs, parameters and constants by the names of their nodes."""
    return graph_values(predict.graph, predict.store, leaves(predict, tensors), predict.program.explicit)[0]


def _is_belief(t: Any) -> bool:
    return isinstance(t, Belief)


def arguments(predict: Predictor, tensors: Sequence[Tensor]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a call whose tensors are these; flags are those of the example."""
    return pytree.tree_unflatten(leaves(predict, tensors), predict.graph.in_spec)


def leaves(predict: Predictor, tensors: Sequence[Tensor]) -> list[Any]:
    """The same, flattened."""
    rest = iter(tensors)
    return [
        next(rest) if _is_tensor(node) else fixed
        for node, fixed in zip(predict.graph.inputs, predict.graph.fixed, strict=True)
    ]


def input_nodes(predict: Predictor) -> list[Node]:
    return [node for node in predict.graph.inputs if node is not None and _is_tensor(node)]


def _is_tensor(node: Node | None) -> bool:
    """Not None, nor a flag, which are those of the example."""
    return node is not None and node.dtype is not None


def input_ports(predict: Predictor, lookups: Sequence[Lookup] = ()) -> tuple[Port, ...]:
    """Names, dtypes and shapes of the inputs, and what whole numbers may be looked up."""
    tensors = example(predict, 2)
    values = known(predict, tensors)
    ports = []
    for node, tensor in zip(input_nodes(predict), tensors, strict=True):
        shape = tuple(s if isinstance(s, int) else None for s in node.shape or ())
        whole = not tensor.is_floating_point() and tensor.dtype is not torch.bool
        allowed = input_range(lookups, node.name, tensor, values) if lookups and whole else None
        ports.append(Port(node.name, dtype_name(node.dtype), shape, "", *_written(allowed, None in shape[1:])))
    return tuple(ports)


def _written(allowed: tuple[list[int | None], list[int | None]] | None, resizable: bool) -> tuple[Any, Any]:
    """One number for all entries where it is the same; none where entries differ and their number may change."""
    if allowed is None:
        return None, None
    if all(len(set(side)) == 1 for side in allowed):
        return allowed[0][0], allowed[1][0]
    return (None, None) if resizable else allowed


def dtype_name(dtype: torch.dtype | None) -> str:
    """Numpy's name, which is torch's own but for bfloat16."""
    name = str(dtype).removeprefix("torch.")
    if name == "bfloat16":
        raise InvalidType(
            "the predictor takes bfloat16, which numpy and onnxruntime do not; export `predict.float()` instead."
        )
    return name


def example(predict: Predictor, rows: int, lookups: Sequence[Lookup] = ()) -> list[Tensor]:
    """Made-up inputs: normal numbers, and ones where whole numbers or truth values are asked for.

    Rows that look for what no table has are replaced, by their absolute values or by zeros.
    """
    made = []
    generator = torch.Generator().manual_seed(0)
    for node in input_nodes(predict):
        batch = node.shape[0] if node.shape and isinstance(node.shape[0], str) else None
        sizes = [
            rows if s == batch else predict.program.sizes.get(s, 2) if isinstance(s, str) else s
            for s in node.shape or ()
        ]
        dtype = node.dtype or torch.float32
        made.append(
            torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype)
            if dtype.is_floating_point
            else torch.ones(sizes, dtype=dtype)
        )
    for change in (torch.abs, torch.zeros_like) if lookups else ():
        good = inside(lookups, known(predict, made), rows)
        made = [torch.where(good.reshape(-1, *[1] * (t.ndim - 1)), t, change(t)) if t.ndim else t for t in made]
    return made


def private(predict: Predictor | Calibrated) -> Predictor | Calibrated:
    """A copy on the CPU that is not linked to the model, without a memory budget (which would slice the batch)."""
    if isinstance(predict, Calibrated):
        if predict.source_scales is not None:
            raise UnsupportedOperation(
                "a predictor calibrated with `sources=True` attributes the variance in every call, which is not "
                "exported; calibrate with sources=False."
            )
        base = private(predict.predict)
        assert isinstance(base, Predictor)
        scale, temperature, noise = (t.detach().cpu() for t in (predict.scale, predict.temperature, predict.noise))
        return Calibrated(base, scale, temperature, noise, None, predict.before, predict.after, predict.classes)
    if not isinstance(predict, Predictor):
        raise InvalidType(
            f"`export` takes a predictor of `favour.compile`, `favour.load` or `favour.calibrate`, got "
            f"{type(predict).__name__}."
        )
    if not predict.graph.batched:
        raise UnsupportedOperation(
            "a predictor of `batched=False` takes one event a call, and a file takes a batch of rows: not exported."
        )
    method = predict.program.asked.written(predict.plain_plan)
    if not method.fixed:
        raise UnsupportedOperation(
            f"method={method.name!r} makes random numbers, of which an exported graph has none; compile with "
            "method='adjoint', or with many outputs method='diag' or 'dplr', and export that."
        )
    if method.name != predict.method.name:
        warnings.warn(
            f"this predictor corrects a sweep of variances by draws (method={predict.method.name!r}), of which an "
            f"exported graph has none: the file holds method={method.name!r}, whose variances are further off, and no "
            "correlations. `favour.check` of a predictor compiled with that method says how far; method='dplr' "
            "or 'adjoint' keep correlations.",
            ReducedCovariance,
            stacklevel=3,
        )
    graph = guarded(predict.graph, find_lookups(predict.graph))
    numerics = replace(predict.numerics, memory=None)
    kept = None if method.name == predict.method.name else method
    return Predictor(predict.program.clone(device="cpu", outputs=graph, numerics=numerics, method=kept))


def choose(
    predict: Predictor | Calibrated,
    kind: str | None,
    level: float,
    noise: float,
    covariance: bool | None,
    output: str | int | None,
) -> tuple[Choices, Belief]:
    """The user's choices, checked against what the predictor answers to an example."""
    base = base_of(predict)
    args, kwargs = arguments(base, example(base, 2))
    answer = predict(*args, **kwargs)
    index, belief = _output(answer, output)
    event = tuple(belief.event_shape)
    end = Ending()
    if isinstance(predict, Predictor):
        end = classes.ending_of(base, args, kwargs) if len(base.graph.outputs) == 1 else ending(base.graph, index)
    squashed = False
    if kind in (None, *predictive.KINDS):
        kind, squashed = classes.reading(end, belief, kind)
    if kind is None:
        kind = "softmax" if len(event) == 1 and event[0] > 1 else REGRESSION
    if kind not in (*predictive.KINDS, REGRESSION):
        raise InvalidValue(f"`kind` is {kind!r}; choose one of {', '.join((*predictive.KINDS, REGRESSION))}.")
    link = None if kind == REGRESSION else predictive.check_event(event, kind)
    check_level(level)
    if not noise >= 0:
        raise InvalidValue(f"`noise` is {noise}; a variance of at least 0 is required.")
    if link is not None and noise:
        raise InvalidValue(f"`noise` is {noise}, an observation noise; classes have none. Leave it out.")
    small = len(event) == 1 and 1 < event[0] <= SMALL
    alone = isinstance(unwrapped(answer), Belief)
    inside = link is not None and end.logits is not None
    squashed = link is not None and squashed
    return Choices(
        link, small if covariance is None else covariance, level, noise, index, alone, inside, squashed
    ), belief


def _named(answer: Any) -> list[tuple[str, Any]]:
    """The leaves of a structure with their names; numbers, where a class of the model's does not say names."""
    try:
        leaves = pytree.tree_flatten_with_path(answer, is_leaf=_is_belief)[0]
    except ValueError:
        return [(str(i), leaf) for i, leaf in enumerate(pytree.tree_leaves(answer, is_leaf=_is_belief))]
    return [
        (".".join(str(getattr(k, "key", getattr(k, "idx", getattr(k, "name", k)))) for k in path), leaf)
        for path, leaf in leaves
    ]


def _output(answer: Any, wanted: str | int | None) -> tuple[int, Belief]:
    """The index among the flattened outputs and the belief of the one that is wanted."""
    beliefs = {}
    for index, (name, leaf) in enumerate(_named(answer)):
        if isinstance(leaf, Belief) and bool((leaf.variance > 0).any()):
            beliefs[name] = index, leaf
    if not beliefs:
        raise UnsupportedOperation(
            "no output of this predictor is uncertain: it has neither dropout nor a posterior. Export the model "
            "itself with torch.onnx.export."
        )
    if wanted is None:
        if len(beliefs) > 1:
            raise InvalidValue(
                f"the model has {len(beliefs)} outputs ({', '.join(beliefs)}); choose one with `output`."
            )
        return next(iter(beliefs.values()))
    if str(wanted) not in beliefs:
        raise UnknownName(f"there is no uncertain output `{wanted}`; choose one of {', '.join(beliefs) or '(single)'}.")
    return beliefs[str(wanted)]
