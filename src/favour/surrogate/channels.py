"""What is known of the covariance between entries of one channel, where a method carries variances only.

Neighbouring outputs of a convolution see the same inputs through the same kernel, so they are far from independent:
the largest of four of them is not the largest of four independent ones, and their average varies nearly as much as
each. Entries of a channel that dropout takes together fall together. A value (batch, channels, *space) of a sweep that
carries variances may therefore come with its `ChannelCovariance`, which tells on request

    at(d)       Cov(x_c(p), x_c(p + d)) for a lag d ≠ 0 along the last axes,
    columns()   u with Cov(x_c) ⪰ u_c u_cᵀ + a diagonal, channel by channel: each channel has a latent of its own,
    response()  ∂Var[x | z]/∂z, what an earlier value z does to the *spread* of x.

Nothing is computed before it is asked for. Covariances across channels are not told: who asks (pooling, the draws of a
mean-field kernel) never sees two channels together. A lag (d_1, …, d_k) and its negative tell the same,
C_−d(p) = C_d(p − d).

**The response.** The draws of a kernel add noise to y = K ∗ z whose variance, σ² ∗ z², depends on z: there is a third
moment κ(y, y, z) = Cov(Var[y | z], z) although the noise is uncorrelated with z. A function of y then follows z also
through the spread of its argument, to first order

    E[f(y) | z] ≈ E f + E[f′]·K̄ ∗ (z − E z) + ½E[f″]·∂Var[y | z]/∂z·(z − E z),         ∂E[f]/∂Var = ½E[f″],

in all channels and positions alike. (For a ReLU behind a wide kernel posterior, ½E[f″] = φ(μ/σ)/2σ, that is as much as
the second term.)
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.generic import Generic
from favour.surrogate.linear_map import Factor, LinearMap, Scaling, Unavailable, compose
from favour.surrogate.noise import DiagonalNoise
from favour.surrogate.value import Value

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


class ChannelCovariance(Carried):
    """Covariances within the channels of one value.

    Attributes:
        whole: The columns tell all of it: Cov(x_c) = Σ_k u_kc u_kcᵀ + a diagonal.
    """

    title = "covariances within channels"
    whole: bool = False

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

    def response(self) -> tuple[Value, LinearMap] | None:
        """An earlier value z and δz ↦ δVar[x | z], or None where there is nothing to tell."""
        return None

    @classmethod
    def after(cls, y: Any) -> Self | Unavailable | None:
        """A diagonal map scales them, other maps that keep channels apart carry the columns; all else ends them."""
        known = find(y.maps[0][0].carried, cls) if y.maps else None
        if known is None:
            return None
        G = y.maps[0][1]
        if len(y.maps) > 1:
            return Unavailable("two uncertain tensors meet")
        if not all([isinstance(noise, DiagonalNoise) for noise in y.noises]):
            return Unavailable("the operation draws for many entries at once")
        if isinstance(G, Scaling):
            return Scaled(known, G.factor, y.mean.ndim - 2, linear=not y.noises)  # type: ignore[return-value]
        if y.mean.ndim <= 2:
            return None  # a channel is one entry
        if not (known.whole and G.channelwise and known.columns() is not None):
            return Unavailable(
                f"{G} mixes channels" if known.whole else f"{G} mixes entries whose columns tell not all"
            )
        return Mapped(known, G, y.mean)  # type: ignore[return-value]

    def through(self, variance: Tensor, G: LinearMap) -> Tensor | None:
        """(G∘G)(v − Σu²) + Σ(Gu)², where the columns tell all of it and G keeps channels apart."""
        if isinstance(G, Scaling) or not (self.whole and G.channelwise):
            return None
        u = self.columns()
        if u is None:
            return None
        return G.square((variance - u.square().sum(0)).clamp_min(0)) + G.apply(u).square().sum(0)

    @abstractmethod
    def _covariance(self, lag: Lag) -> Tensor: ...

    @abstractmethod
    def _make_columns(self) -> Tensor | None: ...


class Scaled(ChannelCovariance):
    """Of s∘x + independent noise, s broadcasting to x: Cov = s(p) s(p + d) Cov(x(p), x(p + d)).

    `linear` says that there is no noise.
    """

    def __init__(self, x: ChannelCovariance, factor: Factor, space: int, linear: bool = False) -> None:
        super().__init__()
        self.x, self.factor, self.linear, self.whole = x, factor, linear, x.whole
        self.flat = not isinstance(factor, Tensor) or all(
            [n == 1 for n in factor.shape[max(factor.ndim - space, 0) :]]  # the same at every position
        )

    def _covariance(self, lag: Lag) -> Tensor:
        factor = self.factor
        there = shifted(factor, lag) if isinstance(factor, Tensor) and not self.flat else factor
        return self.x.at(lag) * factor * there

    def _make_columns(self) -> Tensor | None:
        u = self.x.columns()
        return None if u is None else u * self.factor

    def response(self) -> tuple[Value, LinearMap] | None:
        response = self.x.response() if self.linear else None
        if response is None:
            return None
        z, spread = response
        return z, spread.scaled_after(self.factor**2)


class Fallen(ChannelCovariance):
    """Of channels that fall together: one draw for all entries of a channel, in the columns u.

    Args:
        columns: (rank, batch, channels, *space).
        x: What was known before the draws, scaled by them.
    """

    def __init__(self, columns: Tensor, x: ChannelCovariance | None) -> None:
        super().__init__()
        self.draws, self.x, self.whole = columns, x, x is None or x.whole

    def _covariance(self, lag: Lag) -> Tensor:
        products = (self.draws * shifted(self.draws, lag)).sum(0)
        return products if self.x is None else products + self.x.at(lag)

    def _make_columns(self) -> Tensor:
        known = None if self.x is None else self.x.columns()
        return self.draws if known is None else torch.cat([self.draws, known])


class Mapped(ChannelCovariance):
    """Of Gx + independent noise for a map that keeps channels apart: what the columns tell.

    Args:
        x: The argument's.
        G: The map.
        like: The result's mean.
    """

    def __init__(self, x: ChannelCovariance, G: LinearMap, like: Tensor) -> None:
        super().__init__()
        self.x, self.G, self.like, self.whole = x, G, like, x.whole and G.one_per_column

    def _covariance(self, lag: Lag) -> Tensor:
        u = self.columns()
        return torch.zeros_like(self.like) if u is None else (u * shifted(u, lag)).sum(0)

    def _make_columns(self) -> Tensor | None:
        u = self.x.columns()
        return None if u is None else self.G.apply(u)

    def response(self) -> tuple[Value, LinearMap] | None:
        """The spread of what is mapped, as if the entries that feed one result were one.

        Where several paths lead from z to a result, their squares are added: what one takes off another is not known.
        """
        response = self.x.response() if self.G.one_per_column else None
        if response is None:
            return None
        (z, spread), G = response, self.G
        made = compose(G, spread)
        if isinstance(made.power(2), Unavailable):
            made = Generic(made.apply, made.transpose, lambda v: G.square(spread.square(v)), alike=made.alike)
        return z, made
