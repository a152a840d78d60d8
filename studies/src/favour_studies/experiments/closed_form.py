"""The paper's closed form of the Jensen–Shannon divergence, judged outside its range too."""

from __future__ import annotations

import warnings

from torch import Tensor

import favour
from favour import scores
from favour.errors import OutOfRange


def closed_form(belief: favour.Belief) -> Tensor:
    """The lemma's value, (B,); it holds for small covariances, and how it fails for large ones is part of the results.

    >>> import torch
    >>> closed_form(favour.Belief(torch.zeros(1, 2), diag=torch.full((1, 2), 80.0)))
    tensor([20.])
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRange)
        return scores.jsd(belief, estimator="lemma")
