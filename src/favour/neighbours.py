"""What is known of the covariance between entries of one channel, where a method carries variances only.

Neighbouring outputs of a convolution see the same inputs through the same kernel, so they are far from independent:
the largest of four of them is not the largest of four independent ones, and their average varies nearly as much as
each. A value (batch, channels, *space) of a sweep that carries variances may therefore come with `Neighbours`, which
tell on request

    at(d)      Cov(x_c(p), x_c(p + d)) for a lag d ≠ 0 along the last axes,
    columns()  u with Cov(x_c) ⪰ u_c u_cᵀ + a diagonal, channel by channel: each channel has a latent of its own.

Nothing is computed before it is asked for. Covariances across channels are not told: whoever asks (pooling, the draws
of a mean-field kernel behind) never sees two channels together.

A lag (d_1, …, d_k) and its negative tell the same, C_−d(p) = C_d(p − d); lags are asked with their first entry that
is not 0 positive.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch.nn.functional as F
from torch import Tensor

Lag = tuple[int, ...]


def shifted(t: Tensor, lag: Lag) -> Tensor:
    """t(p + lag), 0 where that lies outside; the lag is along the last axes."""
    # Negative padding crops. A shift by more than there is leaves nothing.
    lag = tuple([max(-n, min(n, d)) for n, d in zip(t.shape[t.ndim - len(lag) :], lag, strict=True)])
    return F.pad(t, [n for d in reversed(lag) for n in (-d, d)])


def inside(t: Tensor, lag: Lag) -> Tensor:
    """t(p), 0 where p + lag lies outside."""
    sizes = t.shape[t.ndim - len(lag) :]
    lag = tuple([max(-n, min(n, d)) for n, d in zip(sizes, lag, strict=True)])
    crop = [n for d in reversed(lag) for n in (min(d, 0), -max(d, 0))]
    return F.pad(F.pad(t, crop), [-n for n in crop])


class Neighbours(ABC):
    """Covariances within the channels of one value."""

    def __init__(self) -> None:
        self._columns: list[Tensor | None] = []

    def at(self, lag: Lag) -> Tensor:
        """Cov(x(p), x(p + lag)), of x's shape, 0 where p + lag lies outside; the lag is not 0."""
        if lag < (0,) * len(lag):
            return shifted(self.at(tuple([-d for d in lag])), lag)
        return self._covariance(lag)

    def columns(self) -> Tensor | None:
        """u of shape (rank, batch, channels, *space), or None where there is none to tell."""
        if not self._columns:
            self._columns.append(self._make_columns())
        return self._columns[0]

    @abstractmethod
    def _covariance(self, lag: Lag) -> Tensor: ...

    @abstractmethod
    def _make_columns(self) -> Tensor | None: ...


class Scaled(Neighbours):
    """Of s∘x, s broadcasting to x: Cov = s(p) s(p + d) Cov(x(p), x(p + d))."""

    def __init__(self, x: Neighbours, factor: Tensor, space: int) -> None:
        super().__init__()
        self.x, self.factor = x, factor
        self.flat = all([n == 1 for n in factor.shape[max(factor.ndim - space, 0) :]])  # the same at every position

    def _covariance(self, lag: Lag) -> Tensor:
        there = self.factor if self.flat else shifted(self.factor, lag)
        return self.x.at(lag) * self.factor * there

    def _make_columns(self) -> Tensor | None:
        u = self.x.columns()
        return None if u is None else u * self.factor
