"""How unusual an input is, from a belief over its logits or from draws of them. Higher is more unusual, always.

With z the random logits, p(z) = softmax(z), p̄ = E[p(z)] and H the entropy in nats:

    entropy            H(p̄)                              all uncertainty about the class
    aleatoric          E[H(p(z))]                        what remains were z known: the data is ambiguous
    epistemic, jsd     H(p̄) − E[H(p(z))] = E[KL(p(z) ‖ p̄)]        disagreement of the draws: the input is unfamiliar
    kl                 E[KL(p̄ ‖ p(z))]                   the same with the arguments exchanged
    least_confidence   1 − max_c p̄_c
    Mahalanobis        min_c √((μ − m_c)ᵀ (S + Σ)⁻¹ (μ − m_c))    m_c class means, S their shared covariance

Draws are a tensor (n, B, C) of logits, or of probabilities that sum to one, whose logarithms are logits; expectations
are averages over them. For a belief expectations are averages over fixed nodes
(`favour.classify.predictive.node_outputs`), which `jsd` mends for what is too rare for nodes; it also knows the paper's
lemma (`favour.classify.divergence`). A belief is Gaussian and the logits of a network with strong dropout are not:
`Predictor.jsd` has its divergence from draws of the last layers.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import check_finite, square_root
from favour.belief.origin import origin_of
from favour.classify.divergence import by_nodes, lemma, spread
from favour.classify.predictive import NODES, node_outputs
from favour.classify.simplex import between_zero_and_one, look_normalised, sums_to_one
from favour.errors import AmbiguousOutputs, DeprecatedName, InvalidType, InvalidValue, OutOfRange, ShapeMismatch
from favour.graph.tracing import traced

Source = Belief | Tensor
_WIDEST = 1.0  # variance up to which the lemma is used without a warning: benchmarks/scores.py
_HELD = 2**16  # numbers of draws at once, on a CPU: more make malloc return memory and fault it in again


class EntropySplit(NamedTuple):
    """Entropies in nats, (B,) each; `total` is the sum of the other two."""

    total: Tensor
    aleatoric: Tensor
    epistemic: Tensor


def jsd(source: Source, n: int | None = None, *, estimator: str = "auto", nodes: int = NODES) -> Tensor:
    """The Jensen–Shannon divergence of the class probabilities, (B,): H(E p) − E H(p), between 0 and log C.

    Args:
        source: A belief over logits, event (C,), or draws (n, B, C) of them. Draws give their own divergence, as the
            paper's equation does, which is (1 − 1/n) of its limit in expectation.
        n: For a belief, multiply by 1 − 1/n: what n draws would give. None for the limit of many.
        estimator: For a belief, `"nodes"` (that of the Gaussian, however wide), or `"lemma"` (the paper's closed form
            for small covariances, not bounded, several times cheaper). By default `Predictor.jsd` where the belief
            is a predictor's own, or rows of it, its network has last layers to draw from, and neither weights nor
            the belief have changed since; else the nodes.
        nodes: Number of nodes of the former, even. The work is O(N C (rank + 1)) for each input.

    Warns:
        OutOfRange: The lemma was asked for where standard deviations are above one logit.

    Example:
        >>> belief = Belief(torch.zeros(1, 3), diag=torch.full((1, 3), 0.01))
        >>> jsd(belief)
        tensor([0.0033])
        >>> jsd(belief, n=2)
        tensor([0.0017])
    """
    if estimator not in ("auto", "lemma", "nodes"):
        raise InvalidValue(f"`estimator` is {estimator!r}; choose 'auto', 'nodes' or 'lemma'.")
    if n is not None and n < 1:
        raise InvalidValue(f"`n` is {n}; at least one draw is required.")
    if nodes < 2 or nodes % 2:
        raise InvalidValue(f"`nodes` is {nodes}; an even number of at least 2 is required, as nodes come in pairs.")
    source = _checked(source)
    if isinstance(source, Tensor):
        if n is not None:
            raise InvalidValue("`n` belongs to a belief; draws (n, B, C) have their number in their shape.")
        return _of_draws(source, _epistemic)
    value = _lemma(source) if estimator == "lemma" else None
    if estimator == "auto" and (origin := origin_of(source)) is not None:
        value = origin.divergence()
    value = by_nodes(source, nodes) if value is None else value
    return value if n is None else value * (1 - 1 / n)


def _lemma(belief: Belief) -> Tensor:
    value = lemma(belief)
    if not traced() and value.numel():
        widest = spread(belief, value).max().item()
        if widest > _WIDEST:
            warnings.warn(
                f"the lemma is an expansion for small covariances, and the differences of logits that matter here have "
                f"standard deviations up to {math.sqrt(widest):.3g}, above 1: values reach {value.max().item():.3g} "
                f"nats, where no divergence of {belief.mean.shape[1]} classes is above "
                f"{math.log(belief.mean.shape[1]):.3g}. Use estimator='nodes', the default, or `predict.jsd(x)`.",
                OutOfRange,
                stacklevel=3,
            )
    return value


def logits(belief: Belief) -> Belief:
    """The belief over the logits of all classes: itself, or of one logit z of a binary classifier that over (0, z).

    >>> logits(Belief(torch.ones(1, 1), diag=torch.ones(1, 1))).mean
    tensor([[0., 1.]])
    """
    if tuple(belief.event_shape) not in ((), (1,)):
        return belief
    flat = Belief(belief.mean.reshape(-1, 1), covariance=belief.covariance_matrix, validate=False)
    return flat.linear(torch.tensor([[0.0], [1.0]], dtype=belief.dtype, device=belief.mean.device))


def kl(source: Source, *, nodes: int = NODES) -> Tensor:
    """The expected Kullback–Leibler divergence E[KL(p̄ ‖ p(z))], (B,), of a draw from the mean prediction.

    = Σ_c p̄_c (log p̄_c − E[log p_c(z)]). For small covariances it equals `jsd`, which is E[KL(p(z) ‖ p̄)]; for larger
    ones it weighs draws more that rule out a class. Unlike `jsd` it is unbounded.

    >>> kl(Belief(torch.zeros(1, 3), diag=torch.full((1, 3), 0.01)))
    tensor([0.0033])
    """
    return _of_draws(_checked(source), _reverse, nodes)


def entropy(source: Source, *, nodes: int = NODES) -> Tensor:
    """The entropy H(p̄) of the predicted class, (B,), in nats: between 0 and log C.

    >>> entropy(Belief.point(torch.zeros(1, 2)))
    tensor([0.6931])
    """
    return _of_draws(_checked(source), _total, nodes)


def entropy_split(source: Source, *, nodes: int = NODES) -> EntropySplit:
    """H(p̄) = E[H(p(z))] + (the rest): aleatoric and epistemic uncertainty, (B,) each.

    All three come from the same nodes or draws, so the epistemic part is never negative.

    >>> total, aleatoric, epistemic = entropy_split(Belief(torch.zeros(1, 2), diag=torch.ones(1, 2)))
    >>> torch.allclose(total, aleatoric + epistemic)
    True
    """

    def all_three(z: Tensor) -> Tensor:
        return torch.stack([_total(z), _aleatoric(z), _epistemic(z)])

    return EntropySplit(*_of_draws(_checked(source), all_three, nodes))


def least_confidence(source: Source, *, nodes: int = NODES) -> Tensor:
    """1 − max_c p̄_c, (B,): the probability of all classes but the likeliest.

    >>> least_confidence(Belief.point(torch.tensor([[0.0, 0.0], [9.0, 0.0]])))
    tensor([5.0000e-01, 1.2339e-04])
    """
    return _of_draws(_checked(source), _others, nodes)


def max_probability(source: Source, *, nodes: int = NODES) -> Tensor:
    """The former name of `least_confidence`, which it equals: it never was the probability of the likeliest class."""
    warnings.warn(
        "`scores.max_probability` gives 1 − max p and is now named `scores.least_confidence`; use that. The "
        "probability of the likeliest class is `predict.probabilities(x).amax(-1)`.",
        DeprecatedName,
        stacklevel=2,
    )
    return least_confidence(source, nodes=nodes)


def of_draws(source: Source, score: Callable[[Tensor], Tensor], *, nodes: int = NODES) -> Tensor:
    """A score of your own, of a belief over logits or of draws (n, B, C) of them.

    Args:
        source: As other scores take it.
        score: Of draws (b, C, n) of the logits of b inputs, to (…, b); it is called for some inputs at a time.
        nodes: For a belief, the number of nodes that stand for draws.

    The mean probability of the likeliest class of each draw:

    >>> confidence = of_draws(Belief.point(torch.zeros(1, 4)), lambda z: z.softmax(1).amax(1).mean(-1))
    >>> confidence
    tensor([0.2500])
    """
    return _of_draws(_checked(source), score, nodes)


# ---- scores of draws, (b, C, n) → (b,): with the draws innermost sums over classes run along whole rows of memory


def _of_draws(source: Source, score: Callable[[Tensor], Tensor], nodes: int = NODES) -> Tensor:
    """For as many inputs at a time as a CPU's cache holds."""
    z = source if isinstance(source, Tensor) else node_outputs(source, nodes)
    by_input = z.permute(1, 2, 0)
    if traced():
        return score(by_input)
    held = max(1, by_input.shape[1] * by_input.shape[2])
    rows = max(1, _HELD // held) if z.device.type == "cpu" else max(1, by_input.shape[0])
    parts = [part.contiguous() for part in by_input.split(rows)]
    if z is source and z.numel() and not torch.stack([t for p in parts for t in p.aminmax()]).isfinite().all():
        check_finite("draws", z)
    return torch.cat([score(part) for part in parts], -1)


def _mean(p: Tensor) -> tuple[Tensor, Tensor]:
    """p̄ (b, C) and its logarithm, finite where p̄ is too small for the dtype."""
    mean = p.mean(-1)
    return mean, mean.clamp(min=torch.finfo(p.dtype).tiny).log()


def _total(z: Tensor) -> Tensor:
    mean, log_mean = _mean(z.softmax(1))
    return -(mean * log_mean).sum(1)


def _aleatoric(z: Tensor) -> Tensor:
    log_p = z.log_softmax(1)
    return -torch.linalg.vecdot(log_p.exp().flatten(1), log_p.flatten(1)) / z.shape[-1]


def _epistemic(z: Tensor) -> Tensor:
    """The mean of Σ_c p log(p/q) − p + q at q = p̄, where every summand is at least 0.

    As a divergence, not as a difference of entropies; and with −p + q, whose mean is 0, so that rounding of log q
    counts to second order only: draws that nearly agree would lose their digits to it. With d = log(p/q) the latter is
    −q(eᵈ − 1), which is small where p is near 1 and where d is small alike.
    """
    log_p = z.log_softmax(1)
    p = log_p.exp()
    q, log_q = _mean(p)
    d = log_p - log_q.unsqueeze(-1)  # at most log n
    t = (0.5 * d).tanh()  # eᵈ − 1 = 2t/(1 − t): runtimes that lack expm1 take eᵈ and subtract
    rest = (q * (2 * t / (1 - t)).sum(-1)).sum(-1)
    return (torch.linalg.vecdot(p.flatten(1), d.flatten(1)) - rest).clamp(min=0) / z.shape[-1]


def _reverse(z: Tensor) -> Tensor:
    log_p = z.log_softmax(1)
    mean, log_mean = _mean(log_p.exp())
    return (mean * (log_mean - log_p.mean(-1))).sum(1).clamp(min=0)


def _others(z: Tensor) -> Tensor:
    p = z.softmax(1).mean(-1)
    return p.scatter(-1, p.argmax(-1, keepdim=True), 0).sum(-1)


def _checked(source: Source) -> Source:
    """In at least float32, or an error that says what is wrong."""
    if isinstance(source, Belief):
        if len(source.event_shape) != 1 or source.event_shape[0] < 2:
            raise ShapeMismatch(
                f"scores are made from logits of C ≥ 2 classes, event (C,); this belief has mean "
                f"{tuple(source.mean.shape)}. For a binary classifier with one logit z use the belief over (0, z): "
                "`belief.linear(torch.tensor([[0.0], [1.0]]))`."
            )
        if not traced():
            _check_logits(source.mean)
        return source.to(torch.promote_types(source.dtype, torch.float32))
    if not isinstance(source, Tensor) or not source.is_floating_point():
        kind = getattr(source, "dtype", type(source).__name__)
        raise InvalidType(f"a Belief or a floating-point tensor of draws (n, B, C) is required, got {kind}.")
    if source.dim() != 3 or source.shape[-1] < 2 or source.shape[0] < 1:
        raise ShapeMismatch(f"draws have shape {tuple(source.shape)}; (n, B, C) with n ≥ 1 and C ≥ 2 is required.")
    source = source.to(torch.promote_types(source.dtype, torch.float32))
    if not traced() and sums_to_one(source[0]) and sums_to_one(source):
        return source.clamp(min=torch.finfo(source.dtype).tiny).log()  # softmax(log p) = p
    return source


def _check_logits(mean: Tensor) -> None:
    if look_normalised(mean):
        raise InvalidValue(
            "the means of this belief are nonnegative and sum to one: the model has taken a softmax already, and "
            "scores are made from logits. Use `predict.logits(x)` in place of `predict(x)`."
        )
    if between_zero_and_one(mean):
        warnings.warn(
            "all means of this belief lie in [0, 1], which suggests that the model has taken a sigmoid already: scores "
            "take a softmax of logits. Use `predict.logits(x)` in place of `predict(x)` if that is so.",
            AmbiguousOutputs,
            stacklevel=4,
        )


class Mahalanobis:
    """The distance of an output (or of features) from the nearest class of the training set.

    Class c has mean m_c; all share the covariance S of the training outputs around their class means. An input whose
    output is itself uncertain is measured with S + Σ.

    Args:
        shrinkage: Adds this fraction of the mean variance tr(S)/n to every variance, so that S has an inverse.

    Example:
        >>> outputs = torch.tensor([[0.0, 0.0], [0.0, 2.0], [8.0, 0.0], [10.0, 2.0]])
        >>> rate = Mahalanobis().fit(outputs, torch.tensor([0, 0, 1, 1]))
        >>> rate.score(torch.tensor([[0.0, 1.0], [5.0, 5.0]]))[0]
        tensor(0.)
    """

    means: Tensor  # (K, n), float64
    covariance: Tensor  # (n, n), float64

    def __init__(self, shrinkage: float = 1e-6):
        if not shrinkage >= 0:
            raise InvalidValue(f"`shrinkage` is {shrinkage}; it must be at least 0.")
        self.shrinkage = shrinkage

    def fit(self, outputs: Source, labels: Tensor) -> Mahalanobis:
        """Class means and shared covariance.

        Args:
            outputs: Training outputs or features, a belief (whose means are used) or a tensor (N, *event).
            labels: (N,), whole numbers from 0; every class up to the largest has members.

        Raises:
            InvalidValue: A class without members, NaN, or fewer inputs than classes plus one.
        """
        mean = _flat_points(outputs)
        labels = torch.as_tensor(labels, device=mean.device)
        if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
            raise InvalidType(f"`labels` has dtype {labels.dtype}; integer class indices are required.")
        if labels.shape != mean.shape[:1]:
            raise ShapeMismatch(f"`labels` has shape {tuple(labels.shape)}; ({mean.shape[0]},) is required.")
        if labels.numel() and labels.min() < 0:
            raise InvalidValue(f"`labels` holds {int(labels.min())}; classes are numbered from 0.")
        counts = torch.bincount(labels.long())
        empty = (counts == 0).nonzero().flatten().tolist()
        if empty:
            raise InvalidValue(
                f"no input of class {empty[:5]}{' …' if len(empty) > 5 else ''} among {len(labels)} (largest label "
                f"{len(counts) - 1}); a class without members has no mean. Renumber the labels or add inputs."
            )
        if len(labels) <= len(counts):
            raise InvalidValue(f"{len(labels)} inputs in {len(counts)} classes leave no spread; more are required.")
        total = mean.new_zeros(len(counts), mean.shape[1]).index_add(0, labels.long(), mean)
        self.means = total / counts.unsqueeze(-1)
        rest = mean - self.means[labels.long()]
        scatter = rest.mT @ rest / (len(labels) - len(counts))
        size = scatter.diagonal().mean().clamp(min=torch.finfo(scatter.dtype).tiny)
        self.covariance = scatter + self.shrinkage * size * torch.eye(len(scatter), dtype=scatter.dtype).to(scatter)
        return self

    def score(self, source: Source) -> Tensor:
        """The distance from the nearest class, (B,).

        Args:
            source: A belief; a tensor (B, *event) of outputs; or draws (draws, B, *event), one dimension more, whose
                mean and covariance are used. O(n³) for each input with a covariance.
        """
        if not hasattr(self, "means"):
            raise InvalidValue("`score` before `fit`: call fit(outputs, labels) with training data first.")
        covariance: Tensor | None = None
        if isinstance(source, Belief):
            mean = _flat_points(source)
            covariance = source.covariance_matrix.detach().to(mean)
            dtype = source.dtype
        else:
            dtype = source.dtype
            if source.dim() == 3 and source.shape[2] == self.means.shape[1]:
                draws = source.detach().to(self.means.dtype)
                mean = _flat_points(draws.mean(0))
                d = (draws - draws.mean(0)).permute(1, 0, 2)
                covariance = d.mT @ d / max(1, len(source) - 1)
            else:
                mean = _flat_points(source)
        if mean.shape[1] != self.means.shape[1]:
            raise ShapeMismatch(
                f"outputs have {mean.shape[1]} numbers per input, but `fit` saw {self.means.shape[1]}; give the same "
                "outputs or features to both."
            )
        centres, shared = self.means.to(mean.device), self.covariance.to(mean.device)
        gap = mean.unsqueeze(1) - centres  # (B, K, n)
        tril, info = torch.linalg.cholesky_ex(shared if covariance is None else shared + covariance)
        if info.any():
            raise InvalidValue("the shared covariance is singular; use a larger `shrinkage`.")
        white = torch.linalg.solve_triangular(tril, gap.mT, upper=False)  # (B, n, K)
        nearest = white.square().sum(-2).amin(-1)
        return square_root(nearest).to(dtype)


def _flat_points(source: Source) -> Tensor:
    t = source.mean if isinstance(source, Belief) else source
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dim() < 2:
        raise InvalidType(
            f"outputs must be a Belief or a floating-point tensor (N, *event), got {getattr(t, 'shape', type(t))}."
        )
    check_finite("outputs", t)
    return t.detach().flatten(1).to(torch.float32 if t.device.type == "mps" else torch.float64)
