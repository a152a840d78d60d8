"""How far a belief is from draws, and how well that is known.

With n draws of mean m̂, covariance S, variances ŝ² and fourth central moments k̂, and a belief N(μ, Σ):

    z of a mean          (μ − m̂) / √(ŝ²/n)
    z of a variance      (Σ_ii − ŝ²) / √((k̂ − ŝ⁴)/n)

z beyond ±3 or so is no accident of sampling. But with n large enough every approximation is found out, so verdicts
are about the size of the errors, after subtracting what the samples' own error contributes on average:

    mean error           √ mean (z² − 1)/n                          in standard deviations of the output
    variance error       √ mean [(Σ_ii − ŝ²)² − (k̂ − ŝ⁴)/n] / ŝ⁴    relative
    covariance error     √ [(‖Σ − S‖² − e)/(‖S‖² − e)]              relative, Frobenius; d = draw − m̂ and
                                                                    e = (mean ‖d‖⁴ − ‖S‖²)/n

Sums of powers are taken around the belief's own mean, in double precision, draw by draw, so nothing but a few chosen
outputs of every draw is held. Standard errors come from leaving out one of `GROUPS` groups of draws at a time: draws
are independent of each other whatever the inputs share.
"""

from __future__ import annotations

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import Directional, flatten_event, square_root
from favour.belief.refined import estimate

OUTPUTS = 64  # covariances are compared for so many outputs at most
GROUPS = 10


class Tally:
    """Sums over draws, for some rows of a batch.

    Args:
        belief: Over these rows.
        claimed: Compare covariances as far as the belief claims to know them: along its directions, if it has some.
        variances: Compare variances alone.
    """

    def __init__(self, belief: Belief, claimed: bool = False, variances: bool = False) -> None:
        self.belief, self.variances = belief, variances
        self.mean = belief.mean.double()
        n = flatten_event(self.mean, 1).shape[1]
        step = -(-n // OUTPUTS)
        self.entries = torch.arange(0, n, max(1, step), device=belief.device)
        self.basis: Tensor | None = None
        if claimed and isinstance(belief.covariance, Directional):
            self.basis = flatten_event(belief.covariance.basis, 2).double()  # (k, B, n)
            self.covariance = belief.covariance.core.double()
        else:
            self.covariance = belief.covariance.submatrix(self.entries).double()  # (B, m, m)
        self.n = 0
        self._sums = [torch.zeros_like(self.mean) for _ in range(4)]
        self._kept: list[Tensor] = []

    def add(self, draws: Tensor) -> None:
        """Count draws (k, B, *event)."""
        d = draws.double() - self.mean
        power = d
        for total in self._sums:
            total += power.sum(0)
            power = power * d
        self.n += len(draws)
        flat = flatten_event(d, 2)
        kept = flat[..., self.entries] if self.basis is None else torch.einsum("sbn,kbn->sbk", flat, self.basis)
        self._kept.append(kept)

    def chosen(self) -> Tensor:
        """The chosen outputs, or directions, of every draw less the belief's mean, (n, B, m)."""
        return torch.cat(self._kept)

    def statistics(self) -> dict[str, Tensor]:
        """Per input, double precision; everything has the batch first."""
        n, mean = self.n, self.mean
        shift, second, third, fourth = (total / n for total in self._sums)
        variance = (second - shift.square()).clamp(min=0) * n / (n - 1)
        central = fourth - 4 * shift * third + 6 * shift.square() * second - 3 * shift.square().square()
        # Rounding of the network's own dtype is no error of the belief: it bounds every standard error from below.
        least = torch.finfo(self.belief.dtype).eps * (1 + mean.abs())
        variance = torch.where(variance > least.square(), variance, 0)
        mean_se = torch.maximum((variance / n).sqrt(), least)
        variance_se = torch.maximum(square_root((central - variance.square()).clamp(min=0)) / n**0.5, least.square())
        predicted = self.belief.variance.double()
        gap, noise, size = _covariance_terms(self.covariance, self.chosen(), self.variances)
        return {
            "mean": mean,
            "stddev": square_root(predicted),
            "sampled_mean": mean + shift,
            "sampled_stddev": variance.sqrt(),
            "mean_z": -shift / mean_se,
            "mean_gap": shift.square() - mean_se.square(),
            "variance_z": (predicted - variance) / variance_se,
            "variance_gap": (predicted - variance).square() - variance_se.square(),
            "covariance_gap": gap,
            "covariance_noise": noise,
            "covariance_size": size,
            "plain_noise": noise,
        }

    def corrected(self, draws: Tensor, line: Tensor, known: Tensor) -> dict[str, Tensor]:
        """`statistics` of all draws, with a control variate (`favour.belief.refined`).

        Args:
            draws: All that were added, (n, B, *event).
            line: Of the control variate at these draws, (n, B, outputs).
            known: Its covariance, (B, outputs, outputs).
        """
        plain, at = self.statistics(), self.entries
        draws = flatten_event(draws.double() - self.mean, 2)
        shift, matrix, mean_se, matrix_se = estimate(draws, line.double(), known.double())
        raw, event = plain["sampled_stddev"].square(), self.mean.shape
        diagonal, variance_se = (m.diagonal(dim1=-2, dim2=-1).reshape(event) for m in (matrix, matrix_se))
        # Without bias, and so below zero now and then where draws are few.
        variance = torch.where(raw > 0, torch.where(diagonal > 0, diagonal, raw), 0)
        least = torch.finfo(self.belief.dtype).eps * (1 + self.mean.abs())
        shift, mean_se = shift.reshape(event), torch.maximum(mean_se.reshape(event), least)
        variance_se = torch.maximum(variance_se, least.square())
        gap = self.belief.variance.double() - variance
        some, noise = matrix[:, at][:, :, at], matrix_se[:, at][:, :, at].square().sum((-2, -1))
        size = some.square().sum((-2, -1))
        return plain | {
            "sampled_mean": self.mean + shift,
            "sampled_stddev": variance.sqrt(),
            "mean_z": -shift / mean_se,
            "mean_gap": shift.square() - mean_se.square(),
            "variance_z": gap / variance_se,
            "variance_gap": gap.square() - variance_se.square(),
            "covariance_gap": (self.covariance - some).square().sum((-2, -1)),
            "covariance_noise": noise,
            "covariance_size": torch.maximum(size - noise, 0.1 * size),
        }

    def errors(self) -> tuple[Tensor, Tensor]:
        """Over all rows and chosen outputs: squared errors of mean and covariance, the latter relative to the larger
        of Σ and S, and the mean over rows of log(tr Σ / tr S); (3,), and how large each is beyond doubt, (3,).

        Two standard errors are taken off the squares, two and a half off the logarithm. A single draw far out spoils
        standard errors; a ratio of variances that stays beyond e whichever group of draws is left out needs none.
        """
        draws = self.chosen()
        whole = _errors(self.covariance, draws, self.variances)
        groups = draws[: len(draws) // GROUPS * GROUPS].unflatten(0, (GROUPS, -1))
        others = [torch.cat([*groups[:i], *groups[i + 1 :]]) for i in range(GROUPS)]
        left_out = torch.stack([_errors(self.covariance, some, self.variances) for some in others])
        spread = ((left_out - left_out.mean(0)).square().sum(0) * (GROUPS - 1) / GROUPS).sqrt()
        logs = left_out[:, 2]
        least = torch.where((logs > 0).all() | (logs < 0).all(), logs.abs().amin() - 1, 0)
        doubtless = torch.maximum(whole[2].abs() - 2.5 * spread[2], least)
        return whole, torch.cat([whole[:2] - 2 * spread[:2], doubtless.reshape(1)])


def _covariance_terms(covariance: Tensor, draws: Tensor, variances: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """‖Σ − S‖², e and ‖S‖² − e for each row, of the diagonals alone if `variances`; `draws` are (n, B, m)."""
    n = len(draws)
    d = (draws - draws.mean(0)).transpose(0, 1)  # (B, n, m)
    if variances:
        sampled = d.square().sum(1) / (n - 1)
        size, fourth = sampled.square().sum(-1), d.square().square().mean(1).sum(-1)
        gap = (covariance.diagonal(dim1=-2, dim2=-1) - sampled).square().sum(-1)
    else:
        sampled = d.mT @ d / (n - 1)
        size, fourth = sampled.square().sum((-2, -1)), d.square().sum(-1).square().mean(-1)
        gap = (covariance - sampled).square().sum((-2, -1))
    noise = (fourth - size).clamp(min=0) / n
    return gap, noise, torch.maximum(size - noise, 0.1 * size)


def _errors(covariance: Tensor, draws: Tensor, variances: bool) -> Tensor:
    n = len(draws)
    shift = draws.mean(0)
    variance = (draws - shift).square().sum(0) / (n - 1)
    live = variance > 0
    means = (shift.square() / torch.where(live, variance, 1) - 1 / n)[live]
    gap, noise, size = _covariance_terms(covariance, draws, variances)
    predicted = covariance.diagonal(dim1=-2, dim2=-1)
    predicted_size = predicted.square().sum(-1) if variances else covariance.square().sum((-2, -1))
    rows = size > 0
    # Relative to the larger of the two: a ratio to S alone has no use for its own standard error where S is small.
    shares = ((gap - noise) / torch.where(rows, torch.maximum(size, predicted_size), 1))[rows]
    totals = predicted.sum(-1), variance.sum(-1)
    both = (totals[0] > 0) & (totals[1] > 0)
    logs = (totals[0][both] / totals[1][both]).log()
    zero = draws.new_zeros(())
    return torch.stack([part.mean() if len(part) else zero for part in (means, shares, logs)])
