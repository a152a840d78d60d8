"""Inverses and roots of covariance matrices, for vectors of shape (B, F, n).

Cholesky. With S = diag(σ) and Σ = SRS, R the correlations and R = LLᵀ,

    Σ⁻¹ = S⁻¹ L⁻ᵀ L⁻¹ S⁻¹                           scale of Σ has no influence on the pivots
    log det Σ = 2 Σ log σ_i + 2 Σ log L_ii

Woodbury (λ > 0). With Z = Λ^-½ U and the QR decomposition [Z; I] = [Q₁; Q₂] R, so that RᵀR = I + ZᵀZ,

    Σ⁻¹ = Λ^-½ (I − Q₁Q₁ᵀ) Λ^-½                     for Σ = Λ + UUᵀ; Q₁ = Z R⁻¹
    vᵀΣ⁻¹v = ‖w − Q₁c‖² + ‖Q₂c‖²                    w = Λ^-½ v, c = Q₁ᵀw: squares only, never negative
    log det Σ = Σ log λ + 2 Σ log |R_ii|            determinant lemma

[Z; I] has full column rank whatever U is, so QR neither fails nor has an undefined derivative, and its
condition number is the square root of that of I + ZᵀZ.

Complement (D > 0). The same with Y = D^-½ Q = Q₁R inverts PDP on the range of P = I − QQᵀ:

    (PDP)⁺ = D^-½ (I − Q₁Q₁ᵀ) D^-½                  pseudo-determinant det D · det(QᵀD⁻¹Q)

Precision: factorisations run in float64 (float32 on devices without it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NoReturn

import torch
from torch import Tensor

from favour.errors import NoDensity
from favour.graph.tracing import traced


def square_root(v: Tensor) -> Tensor:
    """√v for v ≥ 0, with derivative 0 instead of infinity where v = 0, and 0 where v < 0 by rounding."""
    positive = v > 0
    return torch.where(positive, torch.where(positive, v, 1).sqrt(), 0)


def widen(t: Tensor) -> Tensor:
    """t in the dtype in which factorisations run."""
    return t.to(torch.float32 if t.device.type == "mps" else torch.float64)


def refuse_singular(singular: Tensor) -> NoReturn:
    """Raises `NoDensity` for the rows of the batch that the mask (B,) marks."""
    rows = singular.nonzero().flatten().tolist()
    raise NoDensity(
        f"{len(rows)} of {singular.shape[0]} covariances in the batch are singular to rounding (rows "
        f"{rows[:5]}{', …' if len(rows) > 5 else ''}), so there is no density, inverse or log-determinant. "
        "Add independent noise with `belief.with_noise(variance)`, or use sample(), variance and "
        "covariance_matrix, which need none."
    )


class Precision(ABC):
    """Σ⁻¹, factorised once. Vectors are (B, F, n) in the working dtype."""

    log_determinant: Tensor  # (B,), of Σ

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor: ...  # (B, F, n)

    @abstractmethod
    def quadratic(self, v: Tensor) -> Tensor: ...  # (B, F)


class Cholesky(Precision):
    """Σ = S L Lᵀ S with S = diag(σ) and L the Cholesky factor of the correlations, hence free of scale."""

    def __init__(self, matrix: Tensor, eps: float):
        self.scale, correlation = correlations(widen(matrix))
        self.tril, info = torch.linalg.cholesky_ex(correlation)
        pivots = self.tril.diagonal(dim1=-2, dim2=-1)
        # 1/tr R⁻¹ is at most the smallest eigenvalue of the correlations R, and entries stored with relative
        # error eps/2 leave that eigenvalue uncertain by n·eps/2. tr R⁻¹ = ‖L⁻¹‖².
        eye = torch.eye(matrix.shape[-1], dtype=self.tril.dtype, device=matrix.device).expand_as(self.tril)
        inverse = torch.linalg.solve_triangular(self.tril.detach(), eye, upper=False)
        singular = inverse.square().sum((-2, -1)) * (eps * matrix.shape[-1]) >= 1
        self.singular = singular | (info != 0) | (self.scale <= 0).any(-1)
        self.log_determinant = 2 * (self.scale.log() + pivots.log()).sum(-1)

    def solve(self, v: Tensor) -> Tensor:
        x = torch.cholesky_solve((v / self.scale.unsqueeze(-2)).mT, self.tril)
        return x.mT / self.scale.unsqueeze(-2)

    def quadratic(self, v: Tensor) -> Tensor:
        scaled = (v / self.scale.unsqueeze(-2)).mT
        return torch.linalg.solve_triangular(self.tril, scaled, upper=False).square().sum(-2)


class Woodbury(Precision):
    """(Λ + UUᵀ)⁻¹, see the module docstring. O(n r² + r³)."""

    def __init__(self, lam: Tensor, u: Tensor):  # (B, n), (B, n, r)
        self.whitener = lam.rsqrt().unsqueeze(-2)
        q, r = stacked_qr(u * self.whitener.mT)
        self.top, self.bottom = q[..., : lam.shape[-1], :], q[..., lam.shape[-1] :, :]
        self.log_determinant = lam.log().sum(-1) + 2 * r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def solve(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT) * self.whitener

    def quadratic(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        c = w @ self.top
        return (w - c @ self.top.mT).square().sum(-1) + (c @ self.bottom.mT).square().sum(-1)


class Complement(Precision):
    """(QCQᵀ + PDP)⁻¹ = QC⁻¹Qᵀ + (PDP)⁺, see the module docstring. O(n k² + k³)."""

    def __init__(self, d: Tensor, q: Tensor, core: Cholesky):  # (B, n), (B, n, k)
        self.whitener, self.basis, self.core = d.rsqrt().unsqueeze(-2), q, core
        self.top, r = torch.linalg.qr(q * self.whitener.mT)
        rest = d.log().sum(-1) + 2 * r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        self.log_determinant = core.log_determinant + rest

    def solve(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT) * self.whitener + self.core.solve(v @ self.basis) @ self.basis.mT

    def quadratic(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT).square().sum(-1) + self.core.quadratic(v @ self.basis)


class ByRows(Precision):
    """Different factorisations for different batch rows."""

    def __init__(self, batch: int, parts: Sequence[tuple[Tensor, Precision]]):
        self.parts = parts
        self.log_determinant = scatter([(i, p.log_determinant) for i, p in parts], batch)

    def solve(self, v: Tensor) -> Tensor:
        return scatter([(i, p.solve(v[i])) for i, p in self.parts], v.shape[0])

    def quadratic(self, v: Tensor) -> Tensor:
        return scatter([(i, p.quadratic(v[i])) for i, p in self.parts], v.shape[0])


def scatter(parts: Sequence[tuple[Tensor, Tensor]], batch: int) -> Tensor:
    """Puts (row indices, values of those rows) together into one tensor with `batch` rows."""
    out = parts[0][1].new_zeros(batch, *parts[0][1].shape[1:])
    for rows, values in parts:
        out = out.index_copy(0, rows, values)
    return out


def correlations(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """σ and S⁻¹ΣS⁻¹ with unit diagonal, also where σ = 0: multiplying by σ again gives 0 there."""
    scale = square_root(matrix.diagonal(dim1=-2, dim2=-1))
    inverse = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1), 0)
    correlation = matrix * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    return scale, correlation + torch.diag_embed((scale <= 0).to(matrix.dtype))


def psd_root(matrix: Tensor) -> Tensor:
    """A root S of a PSD matrix (B, n, n), SSᵀ = Σ, singular ones included; in the working dtype.

    The Cholesky factor of (Σ + sD)/(1 + s), D the diagonal of Σ and s = 8n·eps: of the correlations shrunk towards I.
    Rounding moves eigenvalues by less than that, also where Σ is a sum of many products in the working dtype, so the
    factorisation exists, and marginal variances stay exact.
    Cholesky's relative errors do not depend on the scales of the outputs, so correlations need not be formed, and
    outputs of no variance get a pivot so large that nothing else depends on them. Rows that are indefinite beyond
    rounding get (eager code) the eigenvalue root with negative eigenvalues cut off.
    """
    wide = widen(matrix)
    variance = wide.diagonal(dim1=-2, dim2=-1)
    flat = variance <= 0
    pivots = torch.where(flat, torch.finfo(wide.dtype).max ** 0.5, variance)
    eye = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    shrunk = wide / (1 + 8 * matrix.shape[-1] * torch.finfo(matrix.dtype).eps)
    tril, info = torch.linalg.cholesky_ex(torch.where(eye, pivots.unsqueeze(-1), shrunk))
    root = tril.masked_fill(flat.unsqueeze(-1), 0)
    if not traced() and info.any():
        rows = info.nonzero().flatten()
        root = root.index_copy(0, rows, symmetric_root(widen(matrix[rows])))
    return root


def symmetric_root(matrix: Tensor) -> Tensor:
    """The symmetric root V diag(√max(e, 0)) Vᵀ of VEVᵀ, e the eigenvalues; matrix is (B, n, n)."""
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * square_root(values).unsqueeze(-2)) @ vectors.mT


def stacked_qr(z: Tensor) -> tuple[Tensor, Tensor]:
    """QR of [Z; I]; z is (B, n, r)."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
    q, r = torch.linalg.qr(torch.cat([z, eye], dim=-2))
    return q, r
