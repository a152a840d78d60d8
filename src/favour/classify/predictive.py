"""From a belief over outputs to a prediction: class probabilities, quantiles and intervals.

Classification. With z ~ N(μ, Σ) the logits, the class probabilities are p = E[softmax(z)].

    nodes       p ≈ 1/N Σ_k softmax(μ + S x_k)        SSᵀ = Σ, x_k fixed nodes, the same for every input
    probit      p_i ∝ 1 / Σ_j exp(−m_ij / √(1 + π s_ij/8))     m_ij = μ_i − μ_j, s_ij = Var(z_i − z_j)
    bridge      p = α / Σα, Dirichlet(α) with α_i = (1 − 2/C + e^μ_i Σ_j e^−μ_j / C²) / Σ_ii     (Laplace bridge)

The nodes come in pairs ±x and are linearly transformed to have exactly the identity as covariance, so the rule is
exact for polynomials of degree three whatever Σ is: p is right up to O(ε⁴), ε the scale of the standard deviations.
Two classes have one logit difference, and one logit a scalar mean E[σ(z)]: there a trapezoidal rule is used.

`probit` replaces the logistic function by a normal distribution function with the same slope at 0, σ(z) ≈ Φ(z√(π/8)),
whose Gaussian mean is closed, in each pair of classes: good for two classes (error below .02), for more up to .07 off
at standard deviations around 1. `bridge` inverts the Laplace approximation of a Dirichlet in the softmax basis, on
logits shifted to sum to zero and rescaled so that their mean variance is √(C/2). It is crude where Σ is small.

Regression. With observation noise of variance s², y ~ N(μ, σ² + s²), σ² the variance of the belief:

    quantile of q       μ + Φ⁻¹(q) √(σ² + s²)
    two outputs         (m, h) with h = log s²: E[s²] = exp(μ_h + σ_h²/2)
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.confidence import check_level
from favour.belief.covariance import check_finite, flatten_event, square_root
from favour.belief.covariance.precision import widen
from favour.classify.simplex import GIVEN, as_given, between_zero_and_one, look_normalised
from favour.classify.targets import fitting
from favour.errors import AmbiguousOutputs, InvalidType, InvalidValue, ShapeMismatch
from favour.graph.tracing import constant, traced

KINDS = ("softmax", "binary", "multilabel", "ordinal")
ESTIMATORS = ("nodes", "probit", "bridge")
NODES = 128
_ROWS = 2**24  # numbers that may be held at once, in eager code


def probabilities(belief: Belief, *, kind: str | None = None, estimator: str = "nodes", nodes: int = NODES) -> Tensor:
    """Class probabilities from a belief over logits.

    Args:
        belief: Over the logits.
        kind: `"softmax"` (the default for two or more outputs): event (C,), one class of C. `"binary"`: event () or
            (1,), one logit for class 1 of two. `"multilabel"`: any event, every output a question of its own.
            `"ordinal"`: event (K − 1,), output k the logit of "above class k", K ordered classes.
            `"probabilities"`: what the model returns are probabilities already, and their means are used as they are.
        estimator: `"nodes"`, `"probit"` or `"bridge"` (softmax only); see the module's docstring.
        nodes: N, even, of `"nodes"`. The work is O(N C (rank + 1)) for each input.

    Returns:
        (B, C), (B, 2), (B, *event) and (B, K) for the four kinds of logits; but for `"multilabel"` rows sum to one.

    Warns:
        AmbiguousOutputs: The means look like probabilities, of which a softmax or sigmoid would be wrong. Without a
            `kind` those that sum to one are used as they are. `Predictor.probabilities` reads the graph instead.

    Raises:
        InvalidType: Not a belief.
        ShapeMismatch: The event does not fit `kind`. One output and no `kind` may as well be a regression.
        InvalidValue: Unknown `kind` or `estimator`.

    Example:
        >>> belief = Belief(torch.tensor([[2.0, 0.0]]), diag=torch.tensor([[4.0, 4.0]]))
        >>> probabilities(belief)
        tensor([[0.7261, 0.2739]])
        >>> belief.mean.softmax(-1)
        tensor([[0.8808, 0.1192]])
    """
    check_belief(belief)
    if kind == GIVEN:
        return as_given(belief.mean, kind)
    if not traced() and _looks_given(belief, kind):
        return as_given(belief.mean)
    return expected(belief, check_event(tuple(belief.event_shape), kind), estimator, nodes)


def expected(belief: Belief, kind: str, estimator: str = "nodes", nodes: int = NODES) -> Tensor:
    """`probabilities` of what is known to be logits."""
    if estimator not in ESTIMATORS or (estimator == "bridge" and kind != "softmax"):
        raise InvalidValue(
            f"`estimator` is {estimator!r} for kind {kind!r}; choose one of {', '.join(ESTIMATORS)} (bridge: softmax "
            "only)."
        )
    if nodes < 2 or nodes % 2:
        raise InvalidValue(f"`nodes` is {nodes}; an even number of at least 2 is required, as nodes come in pairs.")
    dtype = belief.dtype
    belief = belief.to(torch.promote_types(dtype, torch.float32))
    if kind == "multilabel":
        return _sigmoid_mean(belief.mean, belief.variance, estimator).to(dtype)
    if kind == "binary":
        p = _sigmoid_mean(flatten_event(belief.mean, 1), flatten_event(belief.variance, 1), estimator)
        return _two(p).to(dtype)
    if kind == "ordinal":
        if estimator == "probit":
            above = _sigmoid_mean(flatten_event(belief.mean, 1), flatten_event(belief.variance, 1), estimator)
            return _ordered(above).to(dtype)
        return _by_nodes(belief, "ordinal", nodes).to(dtype)
    if estimator == "bridge":
        return _bridge(belief.mean, belief.covariance_matrix).to(dtype)
    if belief.mean.shape[1] == 2 or estimator == "probit":
        return _pairwise(belief, estimator).to(dtype)
    return _by_nodes(belief, "softmax", nodes).to(dtype)


def check_belief(belief: Belief) -> None:
    """Raises `InvalidType` for anything else."""
    if not isinstance(belief, Belief):
        raise InvalidType(
            f"class probabilities are made from a Belief over logits, got {type(belief).__name__}. "
            "Plain logits need `softmax`; draws of them `draws.softmax(-1).mean(0)`."
        )


def _looks_given(belief: Belief, kind: str | None) -> bool:
    """Whether to use means as probabilities; warns where they look so, whatever is done."""
    if kind is None and len(belief.event_shape) == 1 and look_normalised(belief.mean):
        warnings.warn(
            "the means of this belief are nonnegative and sum to one, so the model has taken a softmax already: they "
            "are used as they are. Say kind='probabilities' if that is right and kind='softmax' if they are logits; "
            "`predict.probabilities(x)` knows by the model's graph.",
            AmbiguousOutputs,
            stacklevel=3,
        )
        return True
    bare = kind is None and len(belief.event_shape) == 1
    if (bare or kind in ("binary", "multilabel")) and between_zero_and_one(belief.mean):
        taken = "a softmax is taken of them (kind='softmax' says so)" if bare else f"kind {kind!r} takes one of them"
        warnings.warn(
            f"all means of this belief lie in [0, 1], which suggests that the model has taken a sigmoid already; "
            f"{taken}, as logits need. If they are probabilities, say kind='probabilities'; "
            "`predict.probabilities(x)` knows by the model's graph.",
            AmbiguousOutputs,
            stacklevel=3,
        )
    return False


def check_event(event: tuple[int, ...], kind: str | None) -> str:
    """`kind`, or what it is by default for outputs of this shape; raises where the two do not fit."""
    if kind not in (None, *KINDS):
        raise InvalidValue(f"`kind` is {kind!r}; choose one of {', '.join((*KINDS, GIVEN))}.")
    single = event in ((), (1,))
    if kind is None and single:
        raise ShapeMismatch(
            f"this belief has one output per input (event {event}), as a regression has, and a regression has no "
            "class probabilities. For the logit of a binary classifier pass kind='binary'; for a regression use "
            "`favour.classify.predictive.interval`."
        )
    kind = kind or "softmax"
    fits = {"softmax": len(event) == 1 and not single, "binary": single, "multilabel": True, "ordinal": len(event) < 2}
    if not fits[kind]:
        need = {"softmax": "(C,) with C ≥ 2", "binary": "() or (1,)", "ordinal": "(K − 1,)"}[kind]
        raise ShapeMismatch(
            f"kind {kind!r} needs a belief with event {need}; this one has outputs (batch, *{event}). Other layouts: "
            "`belief.linear(...)`, or kind='multilabel' for one probability per output."
        )
    return kind


# ---- nodes


@functools.cache
def mirrored_normals(count: int, dim: int) -> npt.NDArray:
    """Nodes (count, dim) in pairs ±x with identity covariance; unit variances only where dim > count/2.

    Pseudo-random before the whitening: scrambled Sobol points are no better after it (measured in ten dimensions).
    """
    x = np.random.Generator(np.random.PCG64(0)).standard_normal((count // 2, dim))
    if 0 < dim <= count // 2:
        x = np.linalg.solve(np.linalg.cholesky(x.T @ x * 2 / count), x.T).T
    else:
        x /= np.sqrt(np.mean(x**2, axis=0))
    return np.concatenate([x, -x])


# Compiled code takes the table as a constant; `torch.export` does so because it is made outside torch.
@constant
def normal_nodes(count: int, dim: int) -> Tensor:
    """Equally weighted nodes for the standard normal in `dim` dimensions, (count, dim), float64.

    >>> x = normal_nodes(64, 3)
    >>> torch.allclose(x.T @ x / 64, torch.eye(3, dtype=torch.float64))
    True
    """
    return torch.from_numpy(mirrored_normals(count, dim).copy())


@constant
def _trapezoid() -> Tensor:
    """Nodes at distance h = .2 out to ±6.4 and their weights for the standard normal, (2, 65)."""
    x = np.linspace(-6.4, 6.4, 65)
    w = np.exp(-0.5 * x**2)
    return torch.from_numpy(np.stack([x, w / w.sum()]))


def node_outputs(belief: Belief, nodes: int = NODES) -> Tensor:
    """The belief at fixed nodes, (nodes, B, *event): draws without randomness, equally weighted.

    >>> node_outputs(Belief.point(torch.zeros(2, 3)), 8).shape
    torch.Size([8, 2, 3])
    """
    size = belief.covariance.noise_size
    x = normal_nodes(nodes, size).to(belief.mean)
    return belief.mean + belief.covariance.from_noise(x.unsqueeze(1).expand(-1, belief.mean.shape[0], -1))


def _by_nodes(belief: Belief, kind: str, nodes: int) -> Tensor:
    if not traced():
        rows = max(1, _ROWS // (nodes * belief.covariance.noise_size))
        if belief.batch_size > rows:
            parts = range(0, belief.batch_size, rows)
            return torch.cat([_by_nodes(belief[i : i + rows], kind, nodes) for i in parts])
    return mean_link(kind, node_outputs(belief, nodes).permute(1, 2, 0))


# ---- one dimension, and closed forms


def _sigmoid_mean(mean: Tensor, variance: Tensor, estimator: str) -> Tensor:
    """E[σ(z)] element by element.

    The trapezoidal rule errs by about e^(−2πd/h), d = π/s the distance of the logistic function's poles from the real
    line where z has standard deviation s: 10⁻⁹ for s ≤ 4, 10⁻⁴ for s = 10. Gauss–Hermite quadrature is far behind.
    """
    probit = torch.sigmoid(mean * torch.rsqrt(1 + variance * (math.pi / 8)))
    if estimator == "probit":
        return probit
    x, w = _trapezoid().to(mean)
    return (torch.sigmoid(mean.unsqueeze(-1) + square_root(variance).unsqueeze(-1) * x) * w).sum(-1)


def pair_variances(matrix: Tensor) -> Tensor:
    """Var(z_i − z_j) = Σ_ii + Σ_jj − 2Σ_ij, (B, C, C)."""
    v = matrix.diagonal(dim1=-2, dim2=-1)
    return (v.unsqueeze(-1) + v.unsqueeze(-2) - 2 * matrix).clamp(min=0)


def _pairwise(belief: Belief, estimator: str) -> Tensor:
    """From P(class i rather than j) = E[σ(z_i − z_j)]: exact up to quadrature for two classes."""
    mean, spread = belief.mean, pair_variances(belief.covariance_matrix)
    if mean.shape[1] == 2:
        p = _sigmoid_mean(mean[:, 1:] - mean[:, :1], spread[:, 0, 1:], estimator)
        return _two(p)
    gap = (mean.unsqueeze(-1) - mean.unsqueeze(-2)) * torch.rsqrt(1 + spread * (math.pi / 8))
    return torch.softmax(-torch.logsumexp(-gap, -1), -1)  # 1/Σ_j e^(−gap_ij), normalised


def _bridge(mean: Tensor, matrix: Tensor) -> Tensor:
    c = mean.shape[1]
    # z less its own mean, which the softmax does not notice: (I − 11ᵀ/C) on both sides of Σ.
    mean = mean - mean.mean(-1, keepdim=True)
    shared = matrix.mean(-1)
    variance = matrix.diagonal(dim1=-2, dim2=-1) - 2 * shared + shared.mean(-1, keepdim=True)
    variance = variance.clamp(min=torch.finfo(mean.dtype).tiny)
    scale = (variance.mean(-1, keepdim=True) / math.sqrt(c / 2)).clamp(min=torch.finfo(mean.dtype).eps)
    mean, variance = mean * scale.rsqrt(), variance / scale
    grown = mean + torch.logsumexp(-mean, -1, keepdim=True) - 2 * math.log(c)
    rest = grown.new_tensor(math.log1p(-2 / c)) if c > 2 else grown.new_tensor(-math.inf)
    return torch.softmax(torch.logaddexp(grown, rest) - variance.log(), -1)


def _ordered(above: Tensor) -> Tensor:
    """P(y = k) from P(y > k), (…, K − 1) → (…, K); a chance that grows with k is cut to the smallest before it."""
    above = torch.cummin(above, -1).values
    edge = torch.ones_like(above[..., :1])
    return torch.cat([edge, above], -1) - torch.cat([above, torch.zeros_like(edge)], -1)


def _two(p: Tensor) -> Tensor:
    """(…, 1) → (…, 2)."""
    return torch.cat([1 - p, p], -1)


def mean_link(kind: str, z: Tensor) -> Tensor:
    """Probabilities from draws of logits, (B, C, n) → (B, classes): the mean over draws of what `kind` says.

    With the draws innermost the softmax is taken over whole rows of memory, several times faster than over short ones.
    """
    if kind == "softmax":
        return z.softmax(1).mean(2)
    if kind == GIVEN:
        return z.mean(2)
    p = z.movedim(2, 0).sigmoid()
    if kind == "multilabel":
        return p.mean(0)
    return _two(p.mean(0)) if kind == "binary" else _ordered(p).mean(0)


# ---- regression


def quantile(belief: Belief, q: float, noise: float | Tensor = 0.0) -> Tensor:
    """The q-quantile of an observation y = output + noise, (B, *event).

    Args:
        belief: Over the outputs.
        q: Between 0 and 1.
        noise: Variance s² of the observation noise, broadcastable to (B, *event).

    >>> quantile(Belief(torch.zeros(1, 1), diag=torch.ones(1, 1)), 0.975)
    tensor([[1.9600]])
    """
    check_level(q)
    z = float(torch.special.ndtri(torch.tensor(q, dtype=torch.float64)))
    noisy = belief.with_noise(noise)
    return noisy.mean + z * noisy.stddev


def interval(belief: Belief, level: float = 0.95, noise: float | Tensor = 0.0) -> tuple[Tensor, Tensor]:
    """Bounds that hold an observation with probability `level`, each (B, *event); `noise` as for `quantile`.

    >>> low, high = interval(Belief.point(torch.zeros(1, 1)), 0.95, noise=4.0)
    >>> round(high.item(), 4)
    3.9199
    """
    return belief.with_noise(noise).confidence_interval(level)


def heteroscedastic(belief: Belief) -> Belief:
    """The belief over an observation from a network with two outputs, its mean and the log of its noise variance.

    y = m + √e^h · ε has mean μ_m and, with h Gaussian, variance Σ_mm + exp(μ_h + Σ_hh/2).

    Args:
        belief: Event (2,): (m, h).

    Returns:
        Event (1,); Gaussian with the moments of y, whose tails are heavier.

    >>> heteroscedastic(Belief(torch.zeros(1, 2), diag=torch.ones(1, 2))).variance
    tensor([[2.6487]])
    """
    if tuple(belief.event_shape) != (2,):
        raise ShapeMismatch(
            f"a heteroscedastic belief has event (2,), mean and log-variance; this one has mean "
            f"{tuple(belief.mean.shape)}."
        )
    mean, variance = belief.mean, belief.variance
    noise = torch.exp(mean[:, 1:] + 0.5 * variance[:, 1:])
    return Belief(mean[:, :1], variance[:, :1] + noise, validate=False)


def fit_noise(belief: Belief, y: Tensor) -> Tensor:
    """The observation-noise variance s² ≥ 0 with the greatest likelihood Π N(y; μ, σ² + s²), (*event).

    One number per output, by refining a grid over log s².

    Args:
        belief: Predictions for held-out inputs.
        y: Their targets, (B, *event).

    >>> fit_noise(Belief.point(torch.zeros(4, 1)), torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]))
    tensor([2.5000])
    """
    if belief.batch_size == 0:
        raise ShapeMismatch("no observations to fit the noise to.")
    y = fitting(y, belief.mean, "`y`")
    check_finite("predictions", belief.mean)
    squared = (widen(y.detach()) - widen(belief.mean.detach())).square()
    variance = widen(belief.variance.detach())
    top = squared.amax(0).clamp(min=torch.finfo(squared.dtype).tiny).log()
    low, high = top - 30.0, top + 1.0  # the optimum is at most max (y − μ)²
    for _ in range(8):
        steps = torch.linspace(0, 1, 33, dtype=top.dtype, device=top.device).reshape(-1, *[1] * top.dim())
        grid = low + (high - low) * steps  # (33, *event)
        total = variance + grid.exp().unsqueeze(1)  # (33, B, *event)
        best = (total.log() + squared / total).sum(1).argmin(0, keepdim=True)
        centre, width = grid.gather(0, best).squeeze(0), (high - low) / 16
        low, high = centre - width, centre + width
    return torch.where(centre < top - 29.0, 0, centre.exp()).to(belief.dtype)
