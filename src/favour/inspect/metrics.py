"""How good predictions are, given the truth.

Class probabilities. For N inputs with probabilities p_n over C classes and true labels y_n:

    accuracy = 1/N Σ_n [argmax_c p_nc = y_n]
    nll      = −1/N Σ_n log p_n,y_n
    brier    = 1/N Σ_n Σ_c (p_nc − [c = y_n])²                   between 0 and 2
    ece      = Σ_b |B_b|/N · |accuracy(B_b) − confidence(B_b)|
    pavpu    = 1/N (right and certain + wrong and uncertain)

where confidence is max_c p_nc and B_b holds the inputs whose confidence lies in [b/bins, (b + 1)/bins); the
last bin includes 1, which is where a float32 softmax puts many inputs. `adaptive_ece` has bins of equal size
instead. Lower is better for all but accuracy and pavpu.

Detection: `auroc`, `aupr` and `fpr95` judge a score that should be higher for unusual inputs. Selection: with inputs
accepted in the order of their uncertainty, risk(k) is the mean loss of the first k of N and coverage k/N; `aurc` is
the mean of risk over k.

Regression with predictive mean μ and standard deviation σ, u = (y − μ)/σ, φ and Φ the standard normal's:

    gaussian_nll = ½ mean(log 2πσ² + u²)
    crps         = mean σ [u(2Φ(u) − 1) + 2φ(u) − 1/√π]
    coverage     = the fraction of y between two bounds
    regression_calibration_error = mean over levels q of |fraction of {Φ(u) ≤ q} − q|

Everything is summed in float64, whatever the dtype given. A tie in uncertainty counts as any order of the tied
inputs, on average.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy.typing as npt
import torch
from torch import Tensor

from favour.belief.covariance.checks import check_finite
from favour.classify.targets import Array, checked_labels
from favour.errors import InvalidValue, ShapeMismatch
from favour.extras import require


def accuracy(probabilities: Array, labels: Array) -> float:
    """The fraction of inputs whose most probable class is the true one; the first class wins a tie.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    p, y = checked_labels(probabilities, labels)
    return (p.argmax(1) == y).double().mean().item()


def nll(probabilities: Array, labels: Array) -> float:
    """The negative log-likelihood −1/N Σ_n log p_n,y_n in nats; infinite if a true class has probability 0.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1])), 4)
    0.6931
    """
    p, y = checked_labels(probabilities, labels)
    return -p.gather(1, y[:, None]).log().mean().item()


def brier(probabilities: Array, labels: Array) -> float:
    """The Brier score 1/N Σ_n Σ_c (p_nc − [c = y_n])², summed over classes: 0 is perfect, 2 the worst.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    p, y = checked_labels(probabilities, labels)
    hit = torch.nn.functional.one_hot(y, p.shape[1])  # (N, C)
    return (p - hit).square().sum(1).mean().item()


def ece(probabilities: Array, labels: Array, bins: int = 15) -> float:
    """The expected calibration error with `bins` bins of equal width.

    Σ_b |B_b|/N · |accuracy(B_b) − confidence(B_b)|; since both are means over B_b, this is
    1/N Σ_b |Σ_{n ∈ B_b} (hit_n − confidence_n)|, and empty bins need no special case. It depends on the
    number of bins, and for few inputs it is biased upwards.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.
        bins: the number of bins, at least 1.

    >>> round(ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1])), 4)
    0.25
    """
    if bins < 1:
        raise InvalidValue(f"`bins` is {bins}; at least 1 is required.")
    p, y = checked_labels(probabilities, labels)
    confidence, guess = p.max(1)
    # Interior boundaries only: confidence 1 then falls into the last bin.
    boundaries = torch.arange(1, bins, dtype=p.dtype, device=p.device) / bins
    which = torch.bucketize(confidence, boundaries, right=True)  # (N,), 0 … bins − 1
    gap = torch.zeros(bins, dtype=p.dtype, device=p.device).index_add(0, which, (guess == y).to(p) - confidence)
    return gap.abs().sum().item() / len(y)


def adaptive_ece(probabilities: Array, labels: Array, bins: int = 15) -> float:
    """The calibration error with bins of equal size: inputs sorted by confidence, cut into `bins` runs.

    Runs differ in length by at most one; with fewer inputs than bins every input is a bin.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.
        bins: the number of bins, at least 1.

    >>> round(adaptive_ece(torch.tensor([[0.75, 0.25], [0.75, 0.25]]), torch.tensor([0, 1]), bins=1), 4)
    0.25
    """
    if bins < 1:
        raise InvalidValue(f"`bins` is {bins}; at least 1 is required.")
    p, y = checked_labels(probabilities, labels)
    confidence, guess = p.max(1)
    order = confidence.argsort(stable=True)
    gap = ((guess == y).to(p) - confidence)[order]
    return sum(part.sum().abs().item() for part in gap.tensor_split(min(bins, len(y)))) / len(y)


def pavpu(probabilities: Array, labels: Array, uncertainty: Array, threshold: float | None = None) -> float:
    """Accuracy versus uncertainty: the fraction that is right and certain, or wrong and uncertain.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.
        uncertainty: (N,), any score that grows with uncertainty.
        threshold: Certain is what does not exceed it; the median by default.

    >>> p = torch.tensor([[0.9, 0.1], [0.6, 0.4]])
    >>> pavpu(p, torch.tensor([0, 1]), torch.tensor([0.1, 0.7]), threshold=0.5)
    1.0
    """
    p, y = checked_labels(probabilities, labels)
    u = checked_vector("uncertainty", uncertainty, len(y)).to(p.device)
    certain = u <= (u.median() if threshold is None else threshold)
    return ((p.argmax(1) == y) == certain).double().mean().item()


# ---- detection: does the score tell unusual inputs from usual ones?


def auroc(scores: Array, unusual: Array) -> float:
    """The area under the ROC curve: the chance that an unusual input scores higher than a usual one, ties ½.

    Args:
        scores: (N,), higher for unusual inputs.
        unusual: (N,), True or 1 where the input is unusual; both kinds are needed.

    >>> auroc(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1]))
    1.0
    """
    s, t = _detection(scores, unusual)
    return float(require("sklearn.metrics", "sklearn").roc_auc_score(t, s))


def aupr(scores: Array, unusual: Array) -> float:
    """The area under the precision–recall curve as average precision, unusual inputs positive; see `auroc`.

    >>> aupr(torch.tensor([0.1, 0.2, 0.9]), torch.tensor([0, 0, 1]))
    1.0
    """
    s, t = _detection(scores, unusual)
    return float(require("sklearn.metrics", "sklearn").average_precision_score(t, s))


def fpr95(scores: Array, unusual: Array, tpr: float = 0.95) -> float:
    """The fraction of usual inputs flagged at the highest threshold that flags at least 95% of the unusual ones.

    >>> fpr95(torch.tensor([0.1, 0.5, 0.4, 0.9]), torch.tensor([0, 0, 1, 1]))
    0.5
    """
    if not 0 < tpr <= 1:
        raise InvalidValue(f"`tpr` is {tpr}; it must be above 0 and at most 1.")
    s, t = _detection(scores, unusual)
    false, true, _ = require("sklearn.metrics", "sklearn").roc_curve(t, s, drop_intermediate=False)
    return float(false[(true >= tpr).argmax()])


# ---- selection: what is the risk when only the most certain inputs are answered?


def risk_coverage(uncertainty: Array, losses: Array) -> tuple[Tensor, Tensor]:
    """Coverage k/N and the mean loss of the k least uncertain inputs, k = 1 … N, (N,) each.

    Args:
        uncertainty: (N,).
        losses: (N,): 0 and 1 for right and wrong classes, or any loss ≥ 0.

    >>> risk_coverage(torch.tensor([0.3, 0.1]), torch.tensor([1.0, 0.0]))[1]
    tensor([0.0000, 0.5000], dtype=torch.float64)
    """
    u = checked_vector("uncertainty", uncertainty)
    loss = checked_vector("losses", losses, len(u)).to(u.device)
    order = u.argsort(stable=True)
    _, group, size = u[order].unique_consecutive(return_inverse=True, return_counts=True)
    shared = loss.new_zeros(len(size)).index_add(0, group, loss[order]) / size  # a tie in any order, on average
    k = torch.arange(1, len(u) + 1, dtype=torch.float64, device=u.device)
    return k / len(u), shared[group].cumsum(0) / k


def aurc(uncertainty: Array, losses: Array) -> float:
    """The area under the risk–coverage curve, 1/N Σ_k risk(k): the lower, the better the uncertainty sorts.

    >>> aurc(torch.tensor([0.3, 0.1]), torch.tensor([1.0, 0.0]))
    0.25
    """
    return risk_coverage(uncertainty, losses)[1].mean().item()


def coverage_at_risk(uncertainty: Array, losses: Array, risk: float) -> float:
    """The largest coverage whose risk is at most `risk`, such as .005 or .01; 0 if there is none.

    >>> coverage_at_risk(torch.tensor([0.3, 0.1]), torch.tensor([1.0, 0.0]), 0.01)
    0.5
    """
    covered, mean = risk_coverage(uncertainty, losses)
    met = covered[mean <= risk]
    return met.max().item() if len(met) else 0.0


# ---- regression


def coverage(lower: Array, upper: Array, y: Array) -> float:
    """The fraction of y with lower ≤ y ≤ upper; all of one shape.

    >>> coverage(torch.tensor([0.0, 0.0]), torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0]))
    0.5
    """
    low, high, target = _alike(lower=lower, upper=upper, y=y)
    return ((low <= target) & (target <= high)).double().mean().item()


def gaussian_nll(mean: Array, stddev: Array, y: Array) -> float:
    """The mean of −log N(y; μ, σ²) in nats, over all entries; σ > 0 includes the observation noise.

    >>> round(gaussian_nll(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.9189
    """
    u, sigma = _standardised(mean, stddev, y)
    return (0.5 * (u.square() + math.log(2 * math.pi)) + sigma.log()).mean().item()


def crps(mean: Array, stddev: Array, y: Array) -> float:
    """The continuous ranked probability score ∫ (F(t) − [y ≤ t])² dt of N(μ, σ²), averaged; in units of y.

    >>> round(crps(torch.zeros(1), torch.ones(1), torch.zeros(1)), 4)
    0.2337
    """
    u, sigma = _standardised(mean, stddev, y)
    density = torch.exp(-0.5 * u.square()) / math.sqrt(2 * math.pi)
    return (sigma * (u * torch.erf(u / math.sqrt(2)) + 2 * density - 1 / math.sqrt(math.pi))).mean().item()


def regression_calibration_error(mean: Array, stddev: Array, y: Array, levels: Sequence[float] | None = None) -> float:
    """How far the fraction of y below the q-quantile of N(μ, σ²) is from q, averaged over the levels q.

    Args:
        mean, stddev, y: Of one shape; σ > 0 includes the observation noise.
        levels: .05, .1, … .95 by default.

    >>> regression_calibration_error(torch.zeros(2), torch.ones(2), torch.tensor([-1.0, 1.0]), levels=[0.5])
    0.0
    """
    u, _ = _standardised(mean, stddev, y)
    place = torch.special.ndtr(u).flatten()
    q = torch.tensor(list(levels or [k / 20 for k in range(1, 20)]), dtype=torch.float64, device=u.device)
    return ((place.unsqueeze(-1) <= q).double().mean(0) - q).abs().mean().item()


# ---- checks


def checked_vector(name: str, values: Array, size: int | None = None) -> Tensor:
    v = torch.as_tensor(values).detach().double()
    if v.ndim != 1 or len(v) == 0 or (size is not None and len(v) != size):
        need = "(N,) with N ≥ 1" if size is None else f"({size},)"
        raise ShapeMismatch(f"`{name}` has shape {tuple(v.shape)}; {need} is required.")
    check_finite(name, v)
    return v


def _detection(scores: Array, unusual: Array) -> tuple[npt.NDArray, npt.NDArray]:
    s = checked_vector("scores", scores)
    t = checked_vector("unusual", unusual, len(s))
    if not ((t == 0) | (t == 1)).all():
        raise InvalidValue("`unusual` holds other values than 0 and 1; 1 marks the unusual inputs.")
    if not 0 < t.sum() < len(t):
        raise InvalidValue(
            f"`unusual` is {int(t[0])} for all {len(t)} inputs; detection needs some inputs of both kinds."
        )
    return s.cpu().numpy(), t.cpu().numpy()


def _alike(**arrays: Array) -> list[Tensor]:
    """The arrays as float64, all finite and of one shape, which is not empty; (N, 1) beside (N,) is taken as (N,)."""
    tensors = {name: torch.as_tensor(a).detach().double() for name, a in arrays.items()}
    if {t.ndim for t in tensors.values()} == {1, 2}:
        tensors = {name: t.squeeze(1) if t.shape[1:] == (1,) else t for name, t in tensors.items()}
    shapes = {name: tuple(t.shape) for name, t in tensors.items()}
    if len(set(shapes.values())) > 1 or 0 in next(iter(shapes.values())):
        raise ShapeMismatch(f"shapes {shapes} are required to be the same, with at least one entry.")
    for name, t in tensors.items():
        check_finite(name, t)
    first = next(iter(tensors.values()))
    return [t.to(first.device) for t in tensors.values()]


def _standardised(mean: Array, stddev: Array, y: Array) -> tuple[Tensor, Tensor]:
    mu, sigma, target = _alike(mean=mean, stddev=stddev, y=y)
    if (sigma <= 0).any():
        raise InvalidValue(
            f"`stddev` of shape {tuple(sigma.shape)} has entries of {sigma.min():.4g}; all must be above 0. Add the "
            "observation noise: `belief.with_noise(variance)`."
        )
    return (target - mu) / sigma, sigma
