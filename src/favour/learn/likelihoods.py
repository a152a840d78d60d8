r"""Likelihoods p(y | f) of observations given a network's outputs, and their means over a belief f ~ N(μ, Σ).

With v the variances of Σ, s² the noise and r = y − μ:

    gaussian         E[−log p] = ½ log 2πs² + (r² + v)/(2s²)                        exact, variances only
                     −log E[p] = ½ log 2π(v + s²) + r²/(2(v + s²))
    heteroscedastic  outputs (m, h), h = log s²; c = Cov(m, h). Tilting by e^−h moves m by −c:
                     E[−log p] = ½ (log 2π + μ_h + e^(−μ_h + v_h/2) ((r + c)² + v_m))   exact, 2 × 2 covariance
                     −log E[p]: m is integrated given h, then h by quadrature
    poisson          log rate f:  E[−log p] = e^(μ + v/2) − yμ + log y!             exact, variances only
    bernoulli        logit f:     E[−log p] = E[log(1 + e^f)] − yμ                  quadrature, variances only
    student_t        scale s, ν degrees of freedom: E[log(1 + (y − f)²/(νs²))]      quadrature, variances only
    categorical      see `favour.learn.categorical`                                 covariance

Quadrature is the trapezoidal rule of `favour.learn.quadrature`. By Jensen −log E[p] ≤ E[−log p]: the first scores a
prediction, the second is the term of the bound log p(y) ≥ −E[−log p] − KL that learning maximises.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.belief import Belief
from favour.classify.targets import fitting
from favour.errors import InvalidType, InvalidValue, ShapeMismatch
from favour.learn.quadrature import nodes

LOG_2PI = math.log(2 * math.pi)


class Likelihood(ABC):
    """p(y | f). `noise` is the variance s² where there is one, broadcastable to the observations.

    Attributes:
        name: What users call it.
        noisy: Whether it has a noise variance.
        covariance: Whether its losses read covariances between outputs; else variances only.
        classes: Whether targets are labels.
    """

    name: ClassVar[str]
    noisy: ClassVar[bool] = False
    covariance: ClassVar[bool] = False
    classes: ClassVar[bool] = False

    @abstractmethod
    def targets(self, y: Tensor, like: Tensor) -> Tensor:
        """Targets that fit outputs `like` (B, *event), checked: shapes always, values in eager code."""

    @abstractmethod
    def log_prob(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        """log p(y | f) of outputs (…, B, *event), (…, B)."""

    @abstractmethod
    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        """E[−log p(y | f)], (B,)."""

    @abstractmethod
    def predictive(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        """−log E[p(y | f)], (B,)."""

    def noise_shape(self, event: tuple[int, ...]) -> tuple[int, ...]:
        """Of one noise variance for each output."""
        return event


def rows(values: Tensor) -> Tensor:
    """Sums over the event, (B,)."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values


class _EachOutput(Likelihood):
    """Outputs that are independent given f: everything is a sum over them."""

    def targets(self, y: Tensor, like: Tensor) -> Tensor:
        y = fitting(y, like, "y").to(like.dtype)
        if not torch.compiler.is_compiling():
            self._check_values(y)
        return y

    def _check_values(self, y: Tensor) -> None: ...

    @abstractmethod
    def each(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        """−log p of every entry."""

    def log_prob(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        values = -self.each(f, y, noise)
        return values.sum(tuple(range(values.dim() - y.dim() + 1, values.dim()))) if y.dim() > 1 else values

    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        f, w = nodes(belief.mean, belief.variance)
        return rows((w * self.each(f, y, noise)).sum(0))

    def predictive(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        f, w = nodes(belief.mean, belief.variance)
        return rows(-torch.logsumexp(w.log() - self.each(f, y, noise), 0))


class Gaussian(_EachOutput):
    """y = f + ε, ε ~ N(0, s²)."""

    name, noisy = "gaussian", True

    def each(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        s = required(self, noise)
        return 0.5 * (LOG_2PI + s.log() + (y - f).square() / s)

    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        s = required(self, noise)
        return rows(0.5 * (LOG_2PI + s.log() + ((y - belief.mean).square() + belief.variance) / s))

    def predictive(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        total = belief.variance + required(self, noise)
        return rows(0.5 * (LOG_2PI + total.log() + (y - belief.mean).square() / total))


@dataclass(frozen=True)
class StudentT(_EachOutput):
    """y = f + s·t, t of ν degrees of freedom: outliers cost little.

    Attributes:
        df: ν > 0.
    """

    name, noisy = "student_t", True
    df: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.df < math.inf:
            raise InvalidValue(f"`df` is {self.df}; degrees of freedom are positive.")

    def each(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        s, df = required(self, noise), self.df
        constant = math.lgamma(0.5 * df) - math.lgamma(0.5 * (df + 1)) + 0.5 * math.log(math.pi * df)
        return constant + 0.5 * s.log() + 0.5 * (df + 1) * torch.log1p((y - f).square() / (df * s))


class Bernoulli(_EachOutput):
    """y ∈ {0, 1} with logit f; shares between 0 and 1 are taken as such."""

    name, classes = "bernoulli", True

    def _check_values(self, y: Tensor) -> None:
        if bool(((y < 0) | (y > 1)).any()):
            bad = float(y[(y < 0) | (y > 1)].flatten()[0])
            raise InvalidValue(f"`y` holds {bad:.4g}; likelihood 'bernoulli' takes numbers from 0 to 1.")

    def each(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        return F.softplus(f) - y * f


class Poisson(_EachOutput):
    """Counts y with log rate f."""

    name = "poisson"

    def _check_values(self, y: Tensor) -> None:
        bad = (y < 0) | (y != y.round())
        if bool(bad.any()):
            raise InvalidValue(
                f"`y` holds {float(y[bad].flatten()[0]):.4g}; likelihood 'poisson' takes counts 0, 1, 2, …"
            )

    def each(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        return f.exp() - y * f + torch.lgamma(y + 1)

    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        rate = (belief.mean + 0.5 * belief.variance).exp()
        return rows(rate - y * belief.mean + torch.lgamma(y + 1))


class Heteroscedastic(Likelihood):
    """y = m + e^(h/2) ε: the first half of the outputs are means, the second half log-variances of the noise."""

    name, covariance = "heteroscedastic", True

    def targets(self, y: Tensor, like: Tensor) -> Tensor:
        if like.dim() != 2 or like.shape[1] % 2:
            raise ShapeMismatch(
                f"likelihood 'heteroscedastic' takes outputs (batch, 2d): d means and d log-variances; these are "
                f"{tuple(like.shape)}."
            )
        return fitting(y, like[:, : like.shape[1] // 2], "y").to(like.dtype)

    def log_prob(self, f: Tensor, y: Tensor, noise: Tensor | None) -> Tensor:
        m, h = f.chunk(2, -1)
        return -0.5 * (LOG_2PI + h + (y - m).square() * (-h).exp()).sum(-1)

    def expected(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        (m, h), (v, w), c = *_halves(belief), _between(belief)
        square = (y - m + c).square() + v
        return 0.5 * (LOG_2PI + h + (0.5 * w - h).exp() * square).sum(1)

    def predictive(self, belief: Belief, y: Tensor, noise: Tensor | None) -> Tensor:
        (m, h), (v, w), c = *_halves(belief), _between(belief)
        slope = c / w.clamp(min=torch.finfo(w.dtype).tiny)  # of m given h
        at, weights = nodes(h, w)
        total = at.exp() + (v - slope * c).clamp(min=0)
        squares = (y - m - slope * (at - h)).square()
        return -torch.logsumexp(weights.log() - 0.5 * (LOG_2PI + total.log() + squares / total), 0).sum(1)


def _halves(belief: Belief) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    m, h = belief.mean.chunk(2, 1)
    v, w = belief.variance.chunk(2, 1)
    return (m, h), (v, w)


def _between(belief: Belief) -> Tensor:
    """Cov(m_i, h_i), (B, d)."""
    d = belief.mean.shape[1] // 2
    return belief.covariance_matrix[:, :d, d:].diagonal(dim1=1, dim2=2)


def required(likelihood: Likelihood, noise: Tensor | None) -> Tensor:
    """The noise of a likelihood that has one."""
    if noise is None:
        raise InvalidValue(f"likelihood {likelihood.name!r} needs `noise`, the variance of the observations' noise.")
    return noise


def no_labels(y: Tensor, name: str) -> None:
    """Raise for labels that are no whole numbers."""
    if y.is_floating_point() or y.dtype == torch.bool or y.is_complex():
        raise InvalidType(f"`y` has dtype {y.dtype}; likelihood {name!r} takes whole numbers, the labels.")


def by_name(known: Mapping[str, type[Likelihood]], likelihood: str | Likelihood) -> Likelihood:
    """The likelihood itself, or that of a name."""
    if isinstance(likelihood, Likelihood):
        return likelihood
    if likelihood not in known:
        raise InvalidValue(
            f"`likelihood` is {likelihood!r}; choose one of {', '.join(known)}, or one of favour.losses."
        )
    return known[likelihood]()
