"""Covariances between neighbouring outputs of a convolution, from what is known of its input and its kernel.

Outputs p and p + d of a channel see the input at j = s·p − pad + w·k and at j + s·d (stride s, dilation w). For inputs
with independent entries of variances v and mean μ, and a kernel of mean K̄ and covariance Σ_k, exactly

    Cov(y_p, y_{p+d}) = (K̄ · K̄(· − s·d/w)) ∗ v  +  a_pᵀ Σ_k a_{p+d}  +  Var b,          a_p the patch of μ at p:

a convolution with the product of the kernel and its shifted self (nothing where s·d is no multiple of w), and the
kernel's one draw at two positions. For a mean-field kernel of variances σ² the latter is

    a_pᵀ Σ_k a_{p+d} = σ² ∗ (μ · μ(· + s·d)),      Cov(x_j, x_{j+s·d}) added to the product where x tells it,

and for any other ¼(Q(a_p + a_{p+d}) − Q(a_p − a_{p+d})), Q(a) = aᵀ Σ_k a. What correlated inputs add to the first term
is left out.

The column is Nyström's of rank one, u = N r/√(rᵀ N r) channel by channel, with N the draws of kernel and bias and r
their standard deviations: N − uuᵀ is positive semi-definite whatever r is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from favour.posterior import Gaussian
from favour.rules.weight_space import Layout, row_variances
from favour.surrogate import LatentNoise, LinearMap, compose, scaling
from favour.surrogate.channels import ChannelCovariance, Lag, inside, shifted
from favour.surrogate.convolution import Convolution, Geometry
from favour.surrogate.matrices import passing
from favour.surrogate.value import Value


@dataclass
class Draws:
    """The draws that a convolution makes, for covariances between its outputs.

    Attributes:
        variance: σ² of a mean-field kernel, of the kernel's shape.
        patches: For the parts of other kernels their Gaussian, its layout, and patches of μ, (1, batch, g, n, *out).
        flat: The variance of the bias, the same at all positions of a channel; it broadcasts to the result.
        columns: Draws shared by every layer, (K, *shape of the result).
        latent: Draws that are independent from channel to channel.
    """

    variance: Tensor | None = None
    patches: list[tuple[Gaussian, Layout, Tensor]] = field(default_factory=list)
    flat: Tensor | None = None
    columns: Tensor | None = None
    latent: list[LatentNoise] = field(default_factory=list)


class Convolved(ChannelCovariance):
    """Of y = K ∗ x + b, for x known or with variances."""

    def __init__(self, x: Value | Tensor, kernel: Tensor, geometry: Geometry, draws: Draws, y: Tensor) -> None:
        super().__init__()
        self.x, self.kernel, self.geometry, self.draws, self.y = x, kernel, geometry, draws, y

    def _covariance(self, lag: Lag) -> Tensor:
        step = tuple([s * d for s, d in zip(self.geometry.stride, lag, strict=True)])
        parts = [*self._propagated(step), *self._drawn(lag, step)]
        return inside(total(parts).expand(self.y.shape), lag) if parts else torch.zeros_like(self.y)

    def _propagated(self, step: Lag) -> list[Tensor]:
        """(K̄ · K̄(· − step/w)) ∗ v."""
        dilation = self.geometry.dilation
        taps = tuple([-d // w for d, w in zip(step, dilation, strict=True)])
        meet = [
            d % w == 0 and abs(t) < n for d, w, t, n in zip(step, dilation, taps, self.kernel.shape[2:], strict=True)
        ]
        if not isinstance(self.x, Value) or not all(meet):
            return []
        return [self.geometry.apply(self.x.variance, self.kernel * shifted(self.kernel, taps))]

    def _drawn(self, lag: Lag, step: Lag) -> list[Tensor]:
        draws = self.draws
        parts = [] if draws.flat is None else [draws.flat]
        if draws.columns is not None:
            parts.append((draws.columns * shifted(draws.columns, lag)).sum(0))
        if draws.variance is not None:
            mean = self.x.mean if isinstance(self.x, Value) else self.x
            product = mean * shifted(mean, step)
            within = self.x.known(ChannelCovariance) if isinstance(self.x, Value) else None
            if within is not None:
                product = product + within.at(step)
            parts.append(self.geometry.apply(product, draws.variance))
        for gaussian, layout, here in draws.patches:
            there = shifted(here, lag)
            pair = [row_variances(gaussian, a.flatten(4), layout).unsqueeze(0) for a in (here + there, here - there)]
            parts.append(layout.result(pair[0] - pair[1]).squeeze(0) / 4)
        return parts

    def response(self) -> tuple[Value, LinearMap] | None:
        """Var[y | x] = σ² ∗ x² + …, so ∂Var = 2σ² ∗ (μ · δx).

        For x without a third moment, which is asked of convolutions behind convolutions only: an entry that dropout
        leaves or takes has x² = x·μ/q, and against samples nothing was gained there.
        """
        variance, geometry = self.draws.variance, self.geometry
        if not isinstance(self.x, Value) or self.x.known(ChannelCovariance) is None or variance is None:
            return None
        spread = Convolution(geometry, passing(variance), self.x.mean.shape[2:])
        return self.x, compose(spread, scaling(2 * self.x.mean))

    def _make_columns(self) -> Tensor | None:
        latent = self.draws.latent
        if not latent:
            return None
        start = positive_root(total([noise.diag() for noise in latent])).expand(self.y.shape).unsqueeze(0)
        product = total([noise.matmul(start) for noise in latent])
        norm = positive_root((product * start).flatten(3).sum(3))
        scale = torch.where(norm > 0, 1 / torch.where(norm > 0, norm, 1.0), 0.0)
        return product * scale.reshape(*norm.shape, *[1] * (product.ndim - 3))


def total(parts: Sequence[Tensor]) -> Tensor:
    return sum(parts[1:], parts[0])


def positive_root(t: Tensor) -> Tensor:
    """√t, 0 where t is not positive, with a gradient there."""
    ok = t > 0
    return torch.where(ok, torch.where(ok, t, 1.0).sqrt(), 0.0)
