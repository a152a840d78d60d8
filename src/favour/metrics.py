"""How good class probabilities are, given the true labels.

For N inputs with probabilities p_n over C classes and true labels y_n:

    accuracy = 1/N Σ_n [argmax_c p_nc = y_n]
    nll      = −1/N Σ_n log p_n,y_n
    brier    = 1/N Σ_n Σ_c (p_nc − [c = y_n])²                   between 0 and 2
    ece      = Σ_b |B_b|/N · |accuracy(B_b) − confidence(B_b)|

where confidence is max_c p_nc and B_b holds the inputs whose confidence lies in [b/bins, (b + 1)/bins); the
last bin includes 1, which is where a float32 softmax puts many inputs. Lower is better for all but accuracy.

Everything is summed in float64, whatever the dtype of the probabilities.
"""

from __future__ import annotations

import numpy.typing as npt
import torch
from torch import Tensor

from favour.errors import InvalidType, InvalidValue, ShapeMismatch

Array = Tensor | npt.NDArray  # a tensor or a numpy array


def accuracy(probabilities: Array, labels: Array) -> float:
    """The fraction of inputs whose most probable class is the true one; the first class wins a tie.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.4, 0.6]]), torch.tensor([0, 0]))
    0.5
    """
    p, y = _checked(probabilities, labels)
    return (p.argmax(1) == y).double().mean().item()


def nll(probabilities: Array, labels: Array) -> float:
    """The negative log-likelihood −1/N Σ_n log p_n,y_n in nats; infinite if a true class has probability 0.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> round(nll(torch.tensor([[0.5, 0.5]]), torch.tensor([1])), 4)
    0.6931
    """
    p, y = _checked(probabilities, labels)
    return -p.gather(1, y[:, None]).log().mean().item()


def brier(probabilities: Array, labels: Array) -> float:
    """The Brier score 1/N Σ_n Σ_c (p_nc − [c = y_n])², summed over classes: 0 is perfect, 2 the worst.

    Args:
        probabilities: (N, C), rows summing to one.
        labels: (N,), integers in 0 … C − 1.

    >>> brier(torch.tensor([[0.5, 0.5]]), torch.tensor([1]))
    0.5
    """
    p, y = _checked(probabilities, labels)
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
    p, y = _checked(probabilities, labels)
    confidence, guess = p.max(1)
    # Interior boundaries only: confidence 1 then falls into the last bin.
    boundaries = torch.arange(1, bins, dtype=p.dtype, device=p.device) / bins
    which = torch.bucketize(confidence, boundaries, right=True)  # (N,), 0 … bins − 1
    gap = torch.zeros(bins, dtype=p.dtype, device=p.device).index_add(
        0, which, (guess == y).to(p) - confidence
    )
    return gap.abs().sum().item() / len(y)


def _checked(probabilities: Array, labels: Array) -> tuple[Tensor, Tensor]:
    """Probabilities as float64 and labels as int64 on one device, or an error that says what is wrong."""
    p, y = torch.as_tensor(probabilities).detach(), torch.as_tensor(labels).detach()
    if not p.is_floating_point():
        raise InvalidType(f"`probabilities` has dtype {p.dtype}; a floating-point dtype is required.")
    if y.is_floating_point() or y.is_complex() or y.dtype == torch.bool:
        raise InvalidType(f"`labels` has dtype {y.dtype}; integer class indices are required.")
    if p.ndim != 2 or p.numel() == 0:
        raise ShapeMismatch(
            f"`probabilities` has shape {tuple(p.shape)}; (N, C) with N ≥ 1 and C ≥ 1 is required. "
            "Flatten other axes into the first."
        )
    if y.shape != p.shape[:1]:
        raise ShapeMismatch(
            f"`labels` has shape {tuple(y.shape)} and `probabilities` {tuple(p.shape)}; labels of shape "
            f"({p.shape[0]},) are required. Pass class indices, not one-hot rows."
        )
    rounding = max(1e-4, 2 * torch.finfo(p.dtype).eps)  # a softmax in bfloat16 sums to one within 2⁻⁷
    p, y = p.double(), y.to(p.device, torch.int64)
    if not p.isfinite().all():
        raise InvalidValue(
            f"`probabilities` of shape {tuple(p.shape)} contains {int((~p.isfinite()).sum())} values "
            "that are NaN or infinite. Look for them in the logits first."
        )
    sums = p.sum(1)
    if p.min() < 0 or (sums - 1).abs().max() > rounding:
        raise InvalidValue(
            f"`probabilities` of shape {tuple(p.shape)} has a least entry of {p.min():.4g} and row sums from "
            f"{sums.min():.4g} to {sums.max():.4g}; entries ≥ 0 and row sums of 1 are required. "
            "Logits need a softmax first."
        )
    if y.min() < 0 or y.max() >= p.shape[1]:
        raise InvalidValue(
            f"`labels` runs from {int(y.min())} to {int(y.max())}, but `probabilities` of shape "
            f"{tuple(p.shape)} has classes 0 to {p.shape[1] - 1}."
        )
    return p, y
