"""Is one method worse than another on these inputs, or could it be chance? A paired bootstrap.

Test inputs are drawn with replacement, the same for both methods and for all repeats; the difference of a measure,
averaged over repeats, is taken anew each time. Its 2.5% and 97.5% quantiles bound the difference:

    worse         the whole interval is on the bad side of 0
    better        on the good side
    not worse     it holds 0

A resampled set is a vector of counts, so a mean over inputs is a product with a matrix of counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

LEVEL = 0.95
_CHUNK = 100


def counts(n: int, resamples: int, generator: torch.Generator) -> Iterator[Tensor]:
    """How often each of n inputs is drawn, (≤ 100, n) at a time."""
    for first in range(0, resamples, _CHUNK):
        rows = min(_CHUNK, resamples - first)
        drawn = torch.randint(n, (rows, n), generator=generator)
        yield torch.zeros(rows, n, dtype=torch.float64).scatter_add_(1, drawn, torch.ones(rows, n, dtype=torch.float64))


def verdict(metric: str, better: str, mean: float, other: float, differences: Tensor, **names: Any) -> dict[str, Any]:
    """The entry of a result file."""
    tail = (1 - LEVEL) / 2
    low, high = differences.quantile(torch.tensor([tail, 1 - tail], dtype=differences.dtype)).tolist()
    bad, good = (low > 0, high < 0) if better == "lower" else (high < 0, low > 0)
    return {
        "metric": metric,
        "better": better,
        "ours_mean": mean,
        "theirs_mean": other,
        "difference": mean - other,
        "low": low,
        "high": high,
        "level": LEVEL,
        "draws": len(differences),
        "verdict": "worse" if bad else "better" if good else "not worse",
        **names,
    }


def tally(judged: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """How many of the verdicts are not "worse", and the others with what they are off by; settings by name."""
    worse = [
        {"setting": name} | {k: entry[k] for k in ("difference", "low", "high")}
        for name, entry in judged
        if entry["verdict"] == "worse"
    ]
    return {"settings": len(judged), "not_worse": len(judged) - len(worse), "worse": worse}


def means(ours: Tensor, theirs: Tensor, resamples: int, seed: int) -> Tensor:
    """Resampled differences of a mean over inputs, (resamples,), from (N,) values averaged over repeats."""
    difference = (ours - theirs).double()
    parts = counts(len(difference), resamples, torch.Generator().manual_seed(seed))
    return torch.cat([c @ difference for c in parts]) / len(difference)


def _gaps(p: Tensor, y: Tensor, bins: int = 15) -> Tensor:
    """hit − confidence of each input in the column of its bin, (N, bins); see `favour.metrics.ece`."""
    confidence, guess = p.double().max(1)
    boundaries = torch.arange(1, bins, dtype=torch.float64) / bins
    which = torch.bucketize(confidence, boundaries, right=True)
    return torch.zeros(len(p), bins, dtype=torch.float64).scatter_(
        1, which.unsqueeze(1), ((guess == y).double() - confidence).unsqueeze(1)
    )


def ece(ours: Sequence[Tensor], theirs: Sequence[Tensor], y: Tensor, resamples: int, seed: int) -> Tensor:
    """Resampled differences of the calibration error; probabilities (N, C) for each repeat."""
    gaps = [(_gaps(a, y), _gaps(b, y)) for a, b in zip(ours, theirs, strict=True)]
    parts = []
    for c in counts(len(y), resamples, torch.Generator().manual_seed(seed)):
        per = [((c @ a).abs().sum(1) - (c @ b).abs().sum(1)) / len(y) for a, b in gaps]
        parts.append(torch.stack(per).mean(0))
    return torch.cat(parts)


def weighted_auroc(usual: Tensor, unusual: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of counts (R, N) and (R, M) that gives R areas under the ROC curve, ties ½.

    The area is the chance that an unusual input scores above a usual one: for each unusual one the number of usual
    ones below it, from running sums over the sorted distinct scores.
    """
    values, place = torch.cat([usual, unusual]).double().unique(return_inverse=True)
    low, high = place[: len(usual)], place[len(usual) :]

    def area(count: Tensor, other: Tensor) -> Tensor:
        at = torch.zeros(len(count), len(values), dtype=torch.float64).index_add_(1, low, count)
        below = at.cumsum(1) - 0.5 * at
        return (other * below[:, high]).sum(1) / (count.sum(1) * other.sum(1))

    return area


def auroc(
    ours: Sequence[tuple[Tensor, Tensor]], theirs: Sequence[tuple[Tensor, Tensor]], resamples: int, seed: int
) -> Tensor:
    """Resampled differences of the area; (usual scores, unusual scores) for each repeat; the two kinds drawn apart."""
    areas = [(weighted_auroc(*a), weighted_auroc(*b)) for a, b in zip(ours, theirs, strict=True)]
    random = torch.Generator().manual_seed(seed)
    usual, unusual = len(ours[0][0]), len(ours[0][1])
    parts = []
    for c, d in zip(counts(usual, resamples, random), counts(unusual, resamples, random), strict=True):
        parts.append(torch.stack([a(c, d) - b(c, d) for a, b in areas]).mean(0))
    return torch.cat(parts)
