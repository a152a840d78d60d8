"""A belief corrected by draws of its own network: what `predict.refine` returns, and its mathematics.

With draws f_k of the network and ℓ_k of the belief's linear part at the same masks and weights
(`favour.methods.control`: E ℓ = 0, Cov ℓ = K known),

    mean         f̄ − ℓ̄                    standard error² = Var(f − ℓ)/n
    covariance   K + S_f − S_ℓ            S the samples' covariances, over n − 1

have no bias, whatever the belief got wrong. The share of variance left, Var(f − ℓ)/Var f, says how many more draws
plain sampling needs for the same mean. With a_k, b_k the deviations of f_k and ℓ_k from their averages, an entry of the
covariance is an average of a_i a_j − b_i b_j, whose spread over draws gives its standard error.

A covariance without bias need not be positive: with few draws an eigenvalue, even a variance, may come out below
zero. Nothing is cut off but in `Refined.belief()`, which is a `Belief` and has to be positive.

**Combined** (`combine=True`), errors are smaller and biased:

- ℓ gets a coefficient, by regression of f on ℓ over all inputs and outputs together. Each half of the draws takes the
  other half's, so that this adds no bias, and a linear part that does not help is left out.
- The belief's own answer is weighed in. Its squared error b² in units of Var f is estimated by the distance from the
  corrected one less that one's squared error v, over all inputs and outputs together; the weight of the corrected
  answer is b²/(b² + v), and none is moved by more than one standard error. With fewer than three numbers to judge
  by nothing is weighed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from favour.belief.belief import Belief
from favour.belief.covariance import Dense, square_root

FEWEST_HALVES = 8  # draws, below which coefficients are not worth their own error

_MANY = 1_000_000


@dataclass(frozen=True, eq=False)
class Refined:
    """A corrected belief; `.belief()` is one that scores, intervals and densities take.

    Attributes:
        mean: (batch, *event).
        covariance_matrix: (batch, n, n) over the flattened event.
        mean_error: Standard errors of the mean, (batch, *event).
        covariance_error: Standard errors of the covariance's entries, (batch, n, n).
        share: Of the variance of one draw what is left to be averaged, Var(f − ℓ)/Var f over all inputs and outputs.
        n: Number of draws.
        analytic: The belief before.
        missing: Draws (modules and parameters) that its linear part does not follow: plain samples for these.
        combined: The belief before was weighed in: smaller errors, which are no longer free of bias.
    """

    mean: Tensor
    covariance_matrix: Tensor = field(repr=False)
    mean_error: Tensor = field(repr=False)
    covariance_error: Tensor = field(repr=False)
    share: float
    n: int
    analytic: Belief = field(repr=False)
    missing: tuple[str, ...] = ()
    combined: bool = False

    @property
    def worth(self) -> float:
        """How many plain samples have a mean as good as this."""
        return self.n / self.share if self.share else math.inf

    @property
    def event_shape(self) -> torch.Size:
        return self.mean.shape[1:]

    @property
    def variance(self) -> Tensor:
        """(batch, *event); without bias, and so perhaps below zero where draws are few."""
        return self._diagonal(self.covariance_matrix)

    @property
    def variance_error(self) -> Tensor:
        """Standard errors of the variances."""
        return self._diagonal(self.covariance_error)

    @property
    def stddev(self) -> Tensor:
        """Square roots of the variances; 0 where one is below zero."""
        return square_root(self.variance.clamp_min(0))

    def belief(self) -> Belief:
        """The Gaussian with this mean and the nearest positive covariance: eigenvalues below zero become zero."""
        values, vectors = torch.linalg.eigh(self.covariance_matrix)
        nearest = (vectors * values.clamp_min(0).unsqueeze(-2)) @ vectors.mT
        return Belief(self.mean, covariance=Dense((nearest + nearest.mT) / 2, self.event_shape))

    def _diagonal(self, matrix: Tensor) -> Tensor:
        return matrix.diagonal(dim1=-2, dim2=-1).reshape(self.mean.shape)

    def __str__(self) -> str:
        spread = self.stddev
        live = spread > 0
        ratios = self.mean_error[live] / spread[live]
        moved = ((self.mean - self.analytic.mean).abs()[live] / spread[live]).double()
        size = f"{ratios.double().mean():.2g}" if len(ratios) else "0"
        worth = f"{self.worth:.0f}" if self.worth < _MANY else f"more than {_MANY:,}"
        made = "Combined from a belief and" if self.combined else "A belief corrected by"
        lines = [
            f"{made} {self.n} draws of its network, {len(self.mean)} inputs: means known to {size} standard deviations,"
            f" as by {worth} plain samples ({self.share:.1%} of the variance left)."
        ]
        if len(moved):
            lines.append(f"Means moved by {moved.mean():.2g} standard deviations on average, {moved.max():.2g} at most")
        if self.missing:
            lines.append(f"Not followed, so sampled plainly: {', '.join(self.missing)}.")
        return "\n".join(lines)


def refined(
    f: Tensor, line: Tensor, known: Tensor, analytic: Belief, combine: bool, missing: tuple[str, ...] = ()
) -> Refined:
    """Correct a belief.

    Args:
        f: Draws of the network, (n, batch, *event), n ≥ 2.
        line: Of ℓ, (n, batch, n_event).
        known: Cov ℓ, (batch, n_event, n_event).
        analytic: The belief before.
        combine: Weigh it in.
        missing: Draws that ℓ does not follow.
    """
    n, dtype = len(f), analytic.dtype
    centre = (analytic.mean.flatten(1) if analytic.mean.ndim > 1 else analytic.mean.unsqueeze(1)).double()
    rows = f.double().reshape(n, *centre.shape) - centre
    line, known = line.double(), known.double()
    if combine and n >= FEWEST_HALVES:
        halves = rows[::2], rows[1::2]
        lines = line[::2], line[1::2]
        slopes = _slope(halves[1], lines[1]), _slope(halves[0], lines[0])
        lines = lines[0] * slopes[0], lines[1] * slopes[1]
        estimates = [estimate(a, b, s * s * known) for a, b, s in zip(halves, lines, slopes, strict=True)]
        w = len(halves[0]) / n
        mean, covariance = (w * a + (1 - w) * b for a, b in zip(estimates[0][:2], estimates[1][:2], strict=True))
        mean_error, error = (
            torch.hypot(w * a, (1 - w) * b) for a, b in zip(estimates[0][2:], estimates[1][2:], strict=True)
        )
        share = _share(torch.cat(halves), torch.cat(lines))
    else:
        mean, covariance, mean_error, error = estimate(rows, line, known)
        share = _share(rows, line)
    if combine:
        spread = covariance.diagonal(dim1=-2, dim2=-1).clamp_min(0)
        mean, mean_error = _weighed(mean, mean_error, spread)
        covariance, error = _weighed_matrices(covariance, analytic.covariance_matrix.double(), error)
    rounding = torch.finfo(dtype).eps * centre.abs()  # of the network's own arithmetic
    shape = analytic.mean.shape
    return Refined(
        (mean + centre).reshape(shape).to(dtype),
        covariance.to(dtype),
        torch.maximum(mean_error, rounding).reshape(shape).to(dtype),
        error.to(dtype),
        share,
        n,
        analytic,
        missing,
        combine,
    )


def estimate(f: Tensor, line: Tensor, known: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and covariance, and standard errors of both, from draws (n, batch, e)."""
    n = len(f)
    residual = f - line
    mean = residual.mean(0)
    mean_error = (residual.var(0) / n).sqrt()
    a, b = ((t - t.mean(0)).permute(1, 0, 2) for t in (f, line))  # (batch, n, e)
    gap = (a.mT @ a - b.mT @ b) / (n - 1)
    # Σ_k (a_i a_j − b_i b_j)², without forming the products of single draws
    ab = a * b
    a, b = a.square(), b.square()
    square = (a.mT @ a - 2 * ab.mT @ ab + b.mT @ b) / n
    spread = (square - (gap * (n - 1) / n).square()).clamp_min(0)
    return mean, known + gap, mean_error, (spread * n).sqrt() / (n - 1)


def _share(f: Tensor, line: Tensor) -> float:
    whole = f.var(0).sum()
    return float((f - line).var(0).sum() / whole) if whole > 0 else 0.0


def _slope(f: Tensor, line: Tensor) -> float:
    """Of f on ℓ over all inputs and outputs, in units of each output's variance."""
    weight = f.var(0)
    weight = torch.where(weight > 0, 1 / torch.where(weight > 0, weight, 1), 0)
    a, b = f - f.mean(0), line - line.mean(0)
    size = float((b.square() * weight).sum())
    return float((a * b * weight).sum()) / size if size > 0 else 0.0


def _weighed(mean: Tensor, error: Tensor, variance: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh in the belief's own mean, which is 0 here."""
    live = (variance > 0) & (error > 0)
    if int(live.sum()) < 3:
        return mean, error
    unit = torch.where(live, variance, 1)
    v = error.square() / unit
    bias = (mean.square() / unit - v)[live].mean().clamp_min(0)
    weight = torch.where(live, bias / torch.where(live, bias + v, 1), 1)  # of the corrected mean
    moved = ((weight - 1) * mean).clamp(-error, error)
    return mean + moved, weight.sqrt() * error


def _weighed_matrices(covariance: Tensor, predicted: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """The same for each input's matrix as a whole, in the Frobenius norm."""
    noise, gap = error.square().sum((-2, -1)), (covariance - predicted).square().sum((-2, -1))
    size = (covariance.square().sum((-2, -1)) - noise).clamp_min(0)
    live = (size > 0) & (noise > 0)
    if int(live.sum()) * covariance.shape[-1] < 3:
        return covariance, error
    unit = torch.where(live, size, 1)
    v, bias = noise / unit, ((gap - noise) / unit)[live].mean().clamp_min(0)
    own_weight = torch.where(live, 1 - bias / torch.where(live, bias + v, 1), 0)
    most = (noise / torch.where(gap > 0, gap, 1)).sqrt()
    own_weight = torch.where(gap > 0, torch.minimum(own_weight, most), 0)[:, None, None]
    return covariance + own_weight * (predicted - covariance), (1 - own_weight).sqrt() * error


def together(parts: list[Refined]) -> Refined:
    """Several slices of a batch as one."""
    if len(parts) == 1:
        return parts[0]
    weights = [float(part.variance.clamp_min(0).sum()) for part in parts]
    return Refined(
        torch.cat([part.mean for part in parts]),
        torch.cat([part.covariance_matrix for part in parts]),
        torch.cat([part.mean_error for part in parts]),
        torch.cat([part.covariance_error for part in parts]),
        sum(w * part.share for w, part in zip(weights, parts, strict=True)) / (sum(weights) or 1.0),
        parts[0].n,
        Belief.cat([part.analytic for part in parts]),
        parts[0].missing,
        parts[0].combined,
    )
