"""Covariances of one parameter tensor.

A Gaussian here is zero-mean: it describes the deviation δ of a parameter W from its mean, which is stored
elsewhere. With i, k counting outputs (rows), j, l inputs (columns) and r the rank:

    Diagonal    Cov(W_ij, W_kl) = [i=k][j=l] diag_ij                            any shape
    Rows        Cov(W_ij, W_kl) = [i=k] ([j=l] diag_ij + Σ_r factor_rij factor_ril)   rows independent
    Kronecker   Cov(W_ij, W_kl) = outputs_ik · inputs_jl                        outputs (m, m), inputs (n, n)
    Rotated     Cov(W_ij, W_kl) = Σ_ab outputs_ia outputs_ka diag_ab inputs_jb inputs_lb   diagonal in other bases
    Full        Cov(W_ij, W_kl) = matrix[i·n + j, k·n + l]                      any shape, row-major

For a linear weight the shape is (m, n) = (out_features, in_features).

Draws (`Gaussian.push`): Diagonal √diag ∘ z; Rows √diag ∘ z + Σ_r ε_ri factor_ri; Kronecker B Z Aᵀ with
BBᵀ = outputs, AAᵀ = inputs; Rotated outputs (√diag ∘ Z) inputsᵀ; Full R z with RRᵀ = matrix. The roots
R = V√max(λ, 0) come from an eigendecomposition, so singular matrices are fine.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.errors import ShapeMismatch
from favour.surrogate.checks import require_finite, require_floating, require_psd, require_variance
from favour.surrogate.gaussian import Blocks, Gaussian, Image, Keep, psd_root, standard_normal
from favour.surrogate.linear_map import partners
from favour.surrogate.moments import Moments
from favour.surrogate.noise import DenseNoise, DiagonalNoise, Noise


class ByRows(Gaussian, saved=False):
    """Kinds with independent rows, whose noises are diagonal over outputs."""

    by_rows = True

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        if not mean:
            x = Moments(torch.zeros_like(x.mean), x.variance, x.diag, x.blocks)
        between = partial(self._pairs, x)
        return [DiagonalNoise(self.rows_between(x, x), label, between=between)]

    def spread(self, diag: Tensor, label: str) -> Noise:
        def between(c: Tensor | None, q: int) -> Noise:
            assert c is not None
            return self.spread(F.pad(c, (0, diag.shape[-1] - c.shape[-1])).flatten(0, 1), label)

        return DiagonalNoise(F.linear(diag, self.variance()), label, between=between)

    def _pairs(self, x: Moments, c: Tensor | None, q: int) -> Noise:
        """diag of E[J(x_a) Σ_w J(x_b)ᵀ] for pairs of inputs with C_ab = c, (q, batch, m)."""
        c = None if c is None else F.pad(c, (0, x.mean.shape[-1] - c.shape[-1]))  # a constant 1 varies with nothing
        product = partners(x.mean, q) * x.mean
        return DiagonalNoise(self._paired(x, product, c, q).flatten(0, 1))

    @abstractmethod
    def _paired(self, x: Moments, product: Tensor, c: Tensor | None, q: int) -> Tensor:
        """The same as numbers, `product` the means' products between inputs, (q, batch, m)."""


def _shared(x: Moments, other: Moments) -> list[tuple[Tensor, Tensor]]:
    """Pairs of columns that belong to the same latent variables."""
    mine, theirs = x.blocks or {}, other.blocks or {}
    return [(mine[name], theirs[name]) for name in mine if name in theirs]


def _second(x: Moments, other: Moments) -> Tensor:
    """E[x ∘ x′]."""
    if x is other:
        return x.second
    return x.mean * other.mean + sum((p * q).sum(0) for p, q in _shared(x, other))


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(ByRows):
    """Independent entries (mean-field), for a parameter of any shape.

    Attributes:
        diag: Variances ≥ 0, of the parameter's shape.

    Example:
        >>> Diagonal(torch.full((2, 3), 0.25)).sample(5).shape
        torch.Size([5, 2, 3])
    """

    diag: Tensor
    independent = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.diag.shape)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.shape

    def push(self, z: Tensor) -> Tensor:
        return z * self.diag.sqrt()

    def pull(self, w: Tensor) -> Tensor:
        return w * self.diag.sqrt()

    def held(self, keep: Keep) -> Gaussian:
        return Scaled(self.diag.sqrt())

    def variance(self) -> Tensor:
        return self.diag

    def transposed(self) -> Gaussian:
        return Image(self, lambda w: w.mT, lambda w: w.mT, self.shape[::-1], Diagonal(self.diag.mT))

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        second, diag = a.square(), blocks(self.diag)
        second = second.squeeze(0) if second.shape[0] == 1 else second.sum(0)
        if diag.shape[0] == 1 or diag.shape[1] <= second.shape[3]:  # no copy, or one of no more than the result
            return diag @ second
        return torch.einsum("gmn,bgnt->bgmt", diag, second)

    def column_covariances(self) -> Tensor:
        return self.diag.mT.diag_embed()

    def rows_between(self, x: Moments, other: Moments) -> Tensor:
        return F.linear(_second(x, other), self.diag)

    def _paired(self, x: Moments, product: Tensor, c: Tensor | None, q: int) -> Tensor:
        return F.linear(product if c is None else product + c, self.diag)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.diag.sqrt() * standard_normal((n, *self.shape), self.diag, generator)

    def covariance(self) -> Tensor:
        return self.diag.flatten().diag_embed()

    def check_shapes(self, name: str) -> None:
        require_floating(name, self.tensors())

    def check_values(self, name: str) -> None:
        require_variance(name, "variance", self.diag)


@dataclass(frozen=True, eq=False, repr=False)
class Rows(ByRows):
    """Independent rows, each with a diagonal-plus-low-rank covariance diag_i + Σ_r factor_ri factor_riᵀ.

    Rows run along the first axis; a parameter with more than two axes has its other axes flattened into
    the row.

    Attributes:
        diag: (m, n), ≥ 0.
        factor: (r, m, n), rank axis first.

    Example:
        >>> rows = Rows(torch.zeros(2, 3), torch.ones(1, 2, 3))
        >>> rows.covariance()[0].tolist()
        [1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    """

    diag: Tensor
    factor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.diag.shape)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (math.prod(self.shape) + self.factor.shape[0] * self.shape[0],)

    def push(self, z: Tensor) -> Tensor:
        sigma, factor = self.diag.flatten(1).sqrt(), self.factor.flatten(2)  # (m, n), (r, m, n)
        r, m, n = factor.shape
        normals, common = z[..., : m * n].unflatten(-1, (m, n)), z[..., m * n :].unflatten(-1, (r, m))
        rows = normals * sigma + torch.einsum("...rm,rmn->...mn", common, factor)
        return rows.reshape(*z.shape[:-1], *self.shape)

    def pull(self, w: Tensor) -> Tensor:
        sigma, factor = self.diag.flatten(1).sqrt(), self.factor.flatten(2)
        rows = w.reshape(*w.shape[: w.ndim - len(self.shape)], *sigma.shape)
        common = torch.einsum("...mn,rmn->...rm", rows, factor)
        return torch.cat([(rows * sigma).flatten(-2), common.flatten(-2)], -1)

    def variance(self) -> Tensor:
        return self.diag + self.factor.square().sum(0)

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        seen = torch.einsum("rgmn,pbgnt->rpbgmt", blocks(self.factor), a)
        diagonal = torch.einsum("gmn,bgnt->bgmt", blocks(self.diag), a.square().sum(0))
        return diagonal + seen.square().sum((0, 1))

    def rows_between(self, x: Moments, other: Moments) -> Tensor:
        total = F.linear(_second(x, other), self.diag)
        for f in self.factor:  # (m, n)
            total = total + F.linear(x.mean, f) * F.linear(other.mean, f)
            for p, q in _shared(x, other):
                total = total + (F.linear(p, f) * F.linear(q, f)).sum(0)
            if x is other and x.diag is not None:
                total = total + F.linear(x.diag, f.square())
        return total

    def _paired(self, x: Moments, product: Tensor, c: Tensor | None, q: int) -> Tensor:
        total = F.linear(product if c is None else product + c, self.diag)
        for f in self.factor:
            seen = F.linear(x.mean, f)
            total = total + partners(seen, q) * seen
            total = total if c is None else total + F.linear(c, f.square())
        return total

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        independent = self.diag.sqrt() * standard_normal((n, *self.shape), self.diag, generator)
        rank, m = self.factor.shape[:2]
        latents = standard_normal((n, rank, m), self.factor, generator)  # each row has its own
        return independent + torch.einsum("sri,ri...->si...", latents, self.factor)

    def covariance(self) -> Tensor:
        diag, factor = self.diag.flatten(1), self.factor.flatten(2)
        return torch.block_diag(*(diag.diag_embed() + torch.einsum("rij,ril->ijl", factor, factor)))

    def check_shapes(self, name: str) -> None:
        require_floating(name, self.tensors())
        if self.diag.dim() < 2 or self.factor.shape[1:] != self.diag.shape:
            raise ShapeMismatch(
                f"posterior of `{name}`: Rows got `diag` of shape {tuple(self.diag.shape)} and `factor` of "
                f"shape {tuple(self.factor.shape)}; it needs (m, n) and (rank, m, n)."
            )

    def check_values(self, name: str) -> None:
        require_variance(name, "diag", self.diag)
        require_finite(name, "factor", self.factor)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, rank {self.factor.shape[0]})"


@dataclass(frozen=True, eq=False, repr=False)
class Full(Gaussian):
    """Any covariance at all, stored densely: O(N²) memory for N entries.

    Attributes:
        matrix: (N, N), symmetric positive semi-definite, entries in row-major order of the parameter.
        shape: Shape of the parameter, N entries in all.

    Example:
        >>> Full(torch.eye(6), (2, 3)).variance().shape
        torch.Size([2, 3])
    """

    matrix: Tensor
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", tuple(int(size) for size in self.shape))

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.matrix.shape[0],)

    def push(self, z: Tensor) -> Tensor:
        return Rooted(psd_root(self.matrix), self.shape).push(z)

    def pull(self, w: Tensor) -> Tensor:
        return Rooted(psd_root(self.matrix), self.shape).pull(w)

    def held(self, keep: Keep) -> Gaussian:
        return Rooted(keep("root", self.matrix, psd_root), self.shape)

    def variance(self) -> Tensor:
        return self.matrix.diagonal().reshape(self.shape)

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        entries = blocks(torch.arange(self.matrix.shape[0], device=a.device).reshape(self.shape))  # (g, m, n)
        covariances = self.matrix[entries.unsqueeze(-1), entries.unsqueeze(-2)]  # (g, m, n, n)
        return torch.einsum("gmij,pbgit,pbgjt->bgmt", covariances, a, a)

    def column_covariances(self) -> Tensor:
        m, n = self.shape
        return self.matrix.reshape(m, n, m, n).diagonal(dim1=1, dim2=3).permute(2, 0, 1)

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        m, n = self.shape
        covariances, a = self.matrix.reshape(m, n, m, n), x.points(mean)
        matrix = torch.einsum("minj,pbi,pbj->bmn", covariances, a, a)
        if x.diag is not None:
            matrix = matrix + torch.einsum("mini,bi->bmn", covariances, x.diag)
        return [DenseNoise(matrix, None, label)]

    def covariance(self) -> Tensor:
        return self.matrix

    def check_shapes(self, name: str) -> None:
        require_floating(name, self.tensors())
        entries = math.prod(self.shape)
        if tuple(self.matrix.shape) != (entries, entries):
            raise ShapeMismatch(
                f"posterior of `{name}`: Full got `matrix` of shape {tuple(self.matrix.shape)} for a "
                f"parameter of shape {self.shape}; it needs ({entries}, {entries})."
            )

    def check_values(self, name: str) -> None:
        require_psd(name, "matrix", self.matrix)


@dataclass(frozen=True, eq=False, repr=False)
class Scaled(Gaussian, saved=False):
    """σ ∘ z: what `Diagonal` draws, σ at hand."""

    sigma: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.sigma.shape)

    latent_shape = shape

    def push(self, z: Tensor) -> Tensor:
        return z * self.sigma

    def pull(self, w: Tensor) -> Tensor:
        return w * self.sigma


@dataclass(frozen=True, eq=False, repr=False)
class Rooted(Gaussian, saved=False):
    """root z: what `Full` draws, its root (N, k) at hand."""

    root: Tensor
    shape: tuple[int, ...]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (self.root.shape[1],)

    def push(self, z: Tensor) -> Tensor:
        return (z @ self.root.mT).reshape(*z.shape[:-1], *self.shape)

    def pull(self, w: Tensor) -> Tensor:
        return w.flatten(w.ndim - len(self.shape)) @ self.root if self.shape else w.unsqueeze(-1) @ self.root
