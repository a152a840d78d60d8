"""The noises of a surrogate: covariances of random draws, matrix-free.

A noise is *one random draw*. Most draws touch one operation; a Bayesian parameter that is used twice touches two. Such
noises carry a `key`: noises with equal keys are linear images of the same latent standard normal vector z_key,

    n_a = B_a z_key,   n_b = B_b z_key,   so Cov[n_a, n_b] = B_a B_bᵀ,

and methods keep them together: forward ones align their columns, the reverse sweep adds their covectors Bᵀg before
taking the Gram matrix.

**Skewed draws.** With ε of variance one and third cumulant T, an output that moves by aε + ½c(ε² − 1) has the
covariance of one that moves by (a + ½cT)ε, up to what ½c alone gives: for two values of ε that is their secant, and
exact. A draw that knows its third cumulants takes covectors with curvatures (`Noise.secant_gram`).

**Between inputs.** Inputs of a batch that meet the same draws are correlated (`favour.methods.across`). Consecutive
inputs form groups of q, and what holds between an input and its partners is (q, batch, *event): entry (a, (g, b)) is
about inputs a and b of group g. Maps carry covariances between inputs by `LinearMap.between`, noises state theirs by
`between`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from favour.surrogate.gram import diagonal_columns, flat, inner, root, weighted_gram
from favour.surrogate.linear_map import LinearMap, Unavailable, partners, scaled

Between = Callable[["Tensor | None", int], "Noise"]


class Noise(ABC):
    """The covariance N of one random draw, matrix-free.

    Attributes:
        label: Where the draw comes from (a module path or parameter name), for attribution.
        key: Draws with the same key are the same draw; None means a draw of its own.
        between: (C, q) ↦ N_ab as a noise of q·batch pairs of inputs that meet one draw, given C_ab = Cov(x_a, x_b)
            entry by entry, (q, *shape of x), or None for a known x. N_aa = N. None where the noise is what a
            nonlinearity leaves over, or where the rule does not say.
        cumulants: κ₃ and κ₄ of every element's draw, each (batch, *event), when called; None for a Gaussian.
    """

    label: str = ""
    key: Hashable | None = None
    between: Between | None = None
    cumulants: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def skewed(self) -> bool:
        """Whether curvatures change what the draw does to an output."""
        return False

    def bent(self, g: Tensor, c: Tensor | None) -> Tensor:
        """Covectors g with curvatures c taken into account, where every element draws for itself; else g."""
        return g

    def pulled(self, g: Tensor, c: Tensor | None = None) -> Tensor:
        """Covectors at independent draws of variance one, (F, batch, …), with curvatures c taken into account."""
        return inner(g, self.columns()).transpose(0, 1)

    def secant_gram(self, g: Tensor, c: Tensor) -> Tensor:
        """`gram` of covectors g with curvatures c taken into account."""
        pulled = self.pulled(g, c)
        return inner(pulled, pulled)

    @abstractmethod
    def diag(self) -> Tensor:
        """Marginal variances, (batch, *event)."""

    @abstractmethod
    def matmul(self, v: Tensor) -> Tensor:
        """N v for v of shape (F, batch, *event)."""

    @abstractmethod
    def columns(self) -> Tensor:
        """C of shape (k, batch, *event) with N = Σ_k c_k c_kᵀ. As large as the draw's dimension."""

    def gram(self, g: Tensor) -> Tensor:
        """g N gᵀ, (batch, F, F), for covectors g of shape (F, batch, *event)."""
        return inner(g, self.matmul(g))


@dataclass(eq=False)
class DiagonalNoise(Noise):
    """N = diag(variance): every element draws for itself.

    Attributes:
        variance: (batch, *event).
        skew: ½κ₃/κ₂ of every element's draw, (batch, *event), when called; None where it is 0 or not known.
    """

    variance: Tensor
    label: str = ""
    key: None = None
    between: Between | None = None
    skew: Callable[[], Tensor] | None = None
    cumulants: Callable[[], tuple[Tensor, Tensor]] | None = None

    @property
    def skewed(self) -> bool:
        return self.skew is not None

    def bent(self, g: Tensor, c: Tensor | None) -> Tensor:
        return g if c is None or self.skew is None else g + scaled(c, self.skew())

    def pulled(self, g: Tensor, c: Tensor | None = None) -> Tensor:
        return scaled(self.bent(g, c), root(self.variance))

    def secant_gram(self, g: Tensor, c: Tensor) -> Tensor:
        return self.gram(self.bent(g, c))

    def diag(self) -> Tensor:
        return self.variance

    def matmul(self, v: Tensor) -> Tensor:
        return v * self.variance

    def gram(self, g: Tensor) -> Tensor:
        return weighted_gram(g, self.variance)

    def columns(self) -> Tensor:
        return diagonal_columns(root(self.variance))


@dataclass(eq=False)
class DenseNoise(Noise):
    """N = scale_b · matrix over the last axis: matrix (batch or 1, m, m), output (batch, m).

    `scale` (batch,) serves weight covariances A ⊗ B, whose noise is tr(A E[xxᵀ])·B.
    """

    matrix: Tensor
    scale: Tensor | None = None
    label: str = ""
    key: None = None
    between: Between | None = None

    def _scaled(self, v: Tensor) -> Tensor:
        return v if self.scale is None else v * self.scale.unsqueeze(-1)

    def diag(self) -> Tensor:
        diagonal = self.matrix.diagonal(dim1=-2, dim2=-1)
        return self._scaled(diagonal) if self.scale is not None else diagonal

    def matmul(self, v: Tensor) -> Tensor:
        return self._scaled(torch.einsum("bmn,fbn->fbm", self.matrix.expand(v.shape[1], -1, -1), v))

    def columns(self) -> Tensor:
        values, vectors = torch.linalg.eigh(self.matrix)
        columns = (vectors * root(values).unsqueeze(-2)).permute(2, 0, 1)  # (m, batch or 1, m)
        if self.scale is None:
            return columns
        return columns * root(self.scale).unsqueeze(-1)


@dataclass(eq=False)
class RotatedNoise(Noise):
    """N = P diag(variance) Pᵀ over the last axis: basis P (m, k), variance (batch, *places, k)."""

    variance: Tensor
    basis: Tensor
    label: str = ""
    key: None = None
    between: Between | None = None

    def diag(self) -> Tensor:
        return self.variance @ self.basis.square().mT

    def matmul(self, v: Tensor) -> Tensor:
        return v @ self.basis * self.variance @ self.basis.mT

    def gram(self, g: Tensor) -> Tensor:
        return weighted_gram(g @ self.basis, self.variance)

    def columns(self) -> Tensor:
        return diagonal_columns(root(self.variance)) @ self.basis.mT


@dataclass(eq=False)
class LatentNoise(Noise):
    """n = B z with z ~ N(0, I) of shape `latent_shape`: B by its columns' action, shared through `key`.

    Attributes:
        push: z ↦ Bz, (F, batch, *latent_shape) to (F, batch, *event).
        pull: g ↦ Bᵀg, the other way.
        variances: diag(BBᵀ), (batch, *event).
        drawn: z is drawn by the network, so that inputs may share it: N_ab = B_a B_bᵀ, of which `between` has to give
            the diagonal only.
    """

    push: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]
    variances: Tensor
    latent_shape: tuple[int, ...]
    key: Hashable | None = None
    label: str = ""
    drawn: bool = False
    between: Between | None = None

    def diag(self) -> Tensor:
        return self.variances

    def matmul(self, v: Tensor) -> Tensor:
        return self.push(self.pull(v))

    def gram(self, g: Tensor) -> Tensor:
        pulled = self.pull(g)
        return inner(pulled, pulled)

    def columns(self) -> Tensor:
        batch = self.variances.shape[0]
        ones = self.variances.new_ones((batch, *self.latent_shape))
        return self.push(diagonal_columns(ones))

    def pulled(self, g: Tensor, c: Tensor | None = None) -> Tensor:
        return self.pull(g)


class ImageNoise(LatentNoise):
    """n = B z for a linear map B and independent z of variance one that need not be Gaussian.

    Args:
        image: B.
        latent: An empty fold of z, (0, batch, *latent shape), for its shape.
        label: See `Noise`.
        drawn_cumulants: κ₃ and κ₄ of z, which broadcast to (batch, *latent shape), when called; None for a Gaussian.
        between: See `Noise`.
        drawn: See `LatentNoise`.
    """

    def __init__(
        self,
        image: LinearMap,
        latent: Tensor,
        label: str,
        *,
        drawn_cumulants: Callable[[], tuple[Tensor, Tensor]] | None = None,
        between: Between | None = None,
        drawn: bool = False,
    ) -> None:
        variances = image.square(latent.new_ones(latent.shape[1:]))
        super().__init__(image.apply, image.transpose, variances, tuple(latent.shape[2:]), None, label, drawn, between)
        self.image, self.drawn_cumulants, self._latent = image, drawn_cumulants, latent
        if drawn_cumulants is not None:
            self.cumulants = self._cumulants

    def _cumulants(self) -> tuple[Tensor, Tensor]:
        assert self.drawn_cumulants is not None
        powers = self.image.power(3), self.image.power(4)
        third, fourth = (
            G.apply(k.expand(1, *self._latent.shape[1:])).squeeze(0)
            for G, k in zip(powers, self.drawn_cumulants(), strict=True)
            if isinstance(G, LinearMap)
        )
        return third, fourth

    @property
    def skewed(self) -> bool:
        return self.drawn_cumulants is not None

    def pulled(self, g: Tensor, c: Tensor | None = None) -> Tensor:
        pulled = self.pull(g)
        if c is None or self.drawn_cumulants is None:
            return pulled
        squared = self.image.power(2)
        # Along a draw, the output curves by Σ_t B_tk² c_t.
        return (
            pulled
            if isinstance(squared, Unavailable)
            else pulled + 0.5 * self.drawn_cumulants()[0] * squared.transpose(c)
        )


def factor_noise(columns: Tensor, key: Hashable | None, label: str) -> LatentNoise:
    """n = Σ_k c_k z_k with explicit columns (k, batch, *event)."""
    k = columns.shape[0]
    rows = flat(columns)

    def push(z: Tensor) -> Tensor:
        return torch.einsum("fbk,kbn->fbn", z, rows).reshape(z.shape[0], *columns.shape[1:])

    def pull(g: Tensor) -> Tensor:
        return torch.einsum("fbn,kbn->fbk", flat(g), rows)

    def between(c: Tensor | None, q: int) -> Noise:
        return products(columns, q)

    drawn = key is not None
    return LatentNoise(push, pull, columns.square().sum(0), (k,), key, label, drawn, between if drawn else None)


def products(columns: Tensor, q: int) -> DiagonalNoise:
    """Σ_k c_k(a) ∘ c_k(b) for columns (k, batch, *event)."""
    theirs = partners(columns.transpose(0, 1), q).movedim(2, 0)  # (k, q, batch, *event)
    return DiagonalNoise((theirs * columns.unsqueeze(1)).sum(0).expand(q, *columns.shape[1:]).flatten(0, 1))


def constant_between(variance: Tensor) -> Between:
    """A draw that adds the same to every input: N_ab = N, for variances (batch, *event)."""
    return lambda c, q: DiagonalNoise(variance.expand(q, *variance.shape).flatten(0, 1))


def diagonal_latent(scale: Tensor, key: Hashable, label: str) -> LatentNoise:
    """n = scale ∘ z: the draws z, one per output element, are shared through `key`."""
    return LatentNoise(lambda z: z * scale, lambda g: g * scale, scale.square(), tuple(scale.shape[1:]), key, label)
