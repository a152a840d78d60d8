"""What holds for every network whatever its weights: the contract of a predictor, checked without any reference."""

from __future__ import annotations

import torch
from torch import Tensor

import favour

ROUNDING = 1e-9  # relative, in double precision


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference relative to the largest number."""
    size = max(float(a.abs().max()), float(b.abs().max()), 1e-300) if a.numel() else 1.0
    return float((a - b).abs().max()) / size if a.numel() else 0.0


def violations(predict: favour.Predictor, x: Tensor) -> list[str]:
    """Every promise that is broken, in a sentence each."""
    with torch.no_grad():
        belief, again = predict(x), predict(x)
        alone = [predict(x[i : i + 1]) for i in range(len(x))]
        turned = predict(x.flip(0))
    matrix = belief.covariance_matrix.flatten(1).unflatten(1, (-1, belief.event_shape.numel()))
    found = []
    if not bool(belief.mean.isfinite().all() and matrix.isfinite().all()):
        return ["mean or covariance are not finite"]
    if not torch.equal(belief.mean, again.mean) or not torch.equal(
        matrix, again.covariance_matrix.reshape(matrix.shape)
    ):
        found.append("a second call gives another answer")
    least = torch.linalg.eigvalsh(matrix).amin(-1)
    size = matrix.diagonal(dim1=1, dim2=2).amax(-1)
    if bool((least < -ROUNDING * size).any()):
        found.append(
            f"the covariance is not PSD: an eigenvalue of {float((least / size).min()):.2g} of the largest variance"
        )
    if apart(matrix, matrix.mT) > ROUNDING:
        found.append("the covariance is not symmetric")
    if apart(belief.variance.reshape(len(x), -1), matrix.diagonal(dim1=1, dim2=2)) > ROUNDING:
        found.append("the variance is not the covariance's diagonal")
    for name, rows, order in (
        ("a batch of one differs from its row", alone, range(len(x))),
        ("the order of the batch matters", [turned[i : i + 1] for i in range(len(x))], reversed(range(len(x)))),
    ):
        for row, i in zip(rows, order, strict=True):
            gap = max(
                apart(row.mean[0], belief.mean[i]),
                apart(row.covariance_matrix.reshape(matrix[0].shape), matrix[i]),
            )
            if gap > 1e-7:
                found.append(f"{name}: by {gap:.2g}")
                break
    return found
