"""Outputs that are probabilities already: how they are told from logits by their values, and how they are used.

A softmax of probabilities is nearly uniform: [.99, .01] becomes [.73, .27]. Means that are nonnegative and sum to one
in every row are probabilities, since logits do so by accident only; a single number between 0 and 1 may be either.
The mean of a belief over probabilities is E[softmax(z)], the class probabilities that one wants, so it is used as it
is: cut to [0, 1] and, where rows sum to one but for the error of a propagated mean, divided by their sum.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.errors import InvalidValue, ShapeMismatch
from favour.graph.tracing import traced

GIVEN = "probabilities"  # the `kind` of outputs that are probabilities already
TIGHT, LOOSE = 1e-3, 0.05  # how far rows may be from a sum of one: nothing else is known, or the graph says [0, 1]
ENOUGH = 16  # numbers in [0, 1] that are hardly logits


def sums_to_one(mean: Tensor, tolerance: float = TIGHT) -> bool:
    """Whether all rows (B, C), or (…, C) of draws, are nonnegative and sum to one. Reads values.

    False for no rows, and where all numbers are 0 or 1: one-hot logits are written by hand, no network is that certain.

    >>> sums_to_one(torch.tensor([[0.25, 0.75]])), sums_to_one(torch.tensor([[0.25, 0.7]]))
    (True, False)
    """
    if mean.dim() < 2 or mean.shape[-1] < 2 or not mean.numel():
        return False
    tolerance = max(tolerance, 4 * torch.finfo(mean.dtype).eps)
    far = torch.maximum((mean.sum(-1) - 1).abs().amax(), -mean.amin())
    return bool(far <= tolerance) and not bool(((mean == 0) | (mean == 1)).all())


def look_normalised(mean: Tensor) -> bool:
    """Whether the means of a belief are those of probabilities, as far as means alone can say.

    Where a network divides by a sum or clamps, the means that are propagated through it miss one by a little; over
    several inputs logits do not come as near either.

    >>> p = torch.tensor([[0.25, 0.75], [0.5, 0.48], [0.1, 0.91], [0.6, 0.4]])
    >>> look_normalised(p.repeat(2, 1)), look_normalised(p)
    (True, False)
    """
    return sums_to_one(mean, LOOSE if mean.dim() == 2 and mean.numel() >= ENOUGH and mean.shape[0] >= 4 else TIGHT)


def between_zero_and_one(mean: Tensor) -> bool:
    """Whether there are enough numbers, all in [0, 1], to take them for probabilities rather than logits."""
    return mean.numel() >= ENOUGH and bool((mean.amin() >= 0) & (mean.amax() <= 1))


def as_given(mean: Tensor, kind: str | None = None, known: bool = False) -> Tensor:
    """Probabilities from outputs (B, *event) that are probabilities already.

    Args:
        mean: Of a belief over them.
        kind: How they belong together: `"softmax"`, one class of C; `"binary"`, that of class 1 of two; `"multilabel"`,
            questions of their own; `"ordinal"`, P(y > k); None or `"probabilities"` for what their shape and sum say.
        known: Whether rows are known to sum to one, but for what a propagated mean is off.

    Raises:
        InvalidValue: They lie outside [0, 1], or do not sum to one where `kind` says so.

    >>> as_given(torch.tensor([[0.2]]))
    tensor([[0.8000, 0.2000]])
    """
    single = tuple(mean.shape[1:]) in ((), (1,))
    if (kind == "binary" and not single) or (kind == "softmax" and (single or mean.dim() != 2)):
        raise ShapeMismatch(f"probabilities of shape {tuple(mean.shape)} do not fit kind {kind!r}; leave `kind` out.")
    p = mean.clamp(0, 1)
    if traced():
        sums = known or kind == "softmax"
    else:
        if mean.numel() and not bool((mean - p).abs().amax() <= LOOSE):
            raise InvalidValue(
                f"outputs between {mean.amin().item():.3g} and {mean.amax().item():.3g} are no probabilities; kind "
                f"{kind!r} was asked for. For logits say what they are: 'softmax', 'binary', 'multilabel', 'ordinal'."
            )
        sums = known or (kind in (None, "softmax", GIVEN) and mean.dim() == 2 and sums_to_one(mean, LOOSE))
        if kind == "softmax" and mean.numel() and not sums:
            raise InvalidValue(
                "the model's outputs lie in [0, 1] and do not sum to one, so they are no probabilities of exclusive "
                "classes; use kind='multilabel' for one probability per output."
            )
    if single and kind != "multilabel":
        p = p.reshape(-1, 1)
        return torch.cat([1 - p, p], -1)
    if kind == "ordinal":
        above = torch.cummin(p.flatten(1), -1).values
        edge = torch.ones_like(above[:, :1])
        return torch.cat([edge, above], -1) - torch.cat([above, torch.zeros_like(edge)], -1)
    return p / p.sum(-1, keepdim=True) if sums else p
