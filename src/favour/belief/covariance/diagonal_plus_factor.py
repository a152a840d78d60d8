"""`DiagonalPlusFactor`: Σ = Λ + UUᵀ.

Σv = Λv + U(Uᵀv)                                 O(n r)
gΣgᵀ = gΛgᵀ + (gU)(gU)ᵀ
draw = Λ^½x + Uy                                 x, y standard normal, n + r of them
S = Λ^½ (I + Z (I + K)⁻¹ Zᵀ)                     a root; Z = Λ^-½U, KKᵀ = I + ZᵀZ; O(n r² + r³)
Σ⁻¹                                              Woodbury, see `favour.belief.covariance.precision`
cΣ = cΛ + (√c U)(√c U)ᵀ

Without columns no product with U is written: onnxruntime divides by zero in those it fuses with a transpose.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from favour.belief.covariance.base import per_row, pytree_node
from favour.belief.covariance.checks import check_batched, check_finite, check_like
from favour.belief.covariance.precision import Precision, Woodbury, square_root, stacked_qr, widen
from favour.belief.covariance.structured import Structured
from favour.graph.tracing import traced


@pytree_node
class DiagonalPlusFactor(Structured):
    """Σ = diag(λ) + Σ_k u_k u_kᵀ.

    Args:
        diag: λ ≥ 0, zeros allowed, (B, *event).
        factor: the columns u_k, (rank, B, *event); the rank may be 0 or exceed n.

    Example:
        >>> cov = DiagonalPlusFactor(torch.tensor([[1.0, 2.0]]), torch.tensor([[[1.0, 1.0]]]))
        >>> cov.dense()
        tensor([[[2., 1.],
                 [1., 3.]]])
    """

    _axes: ClassVar[dict[str, int]] = {"diag": 0, "factor": 1}

    def __init__(self, diag: Tensor, factor: Tensor):
        if not traced():
            check_batched("diag", diag)
            check_like("factor", factor, diag)
        self.diag, self.factor = diag, factor

    @property
    def _vectors(self) -> Tensor:
        return self.factor

    def diagonal(self) -> Tensor:
        return self.diag + self.factor.square().sum(0)

    def dense(self) -> Tensor:
        diagonal = torch.diag_embed(self.flat_diag)
        return diagonal + self.flat_factor @ self.flat_factor.mT if self.rank else diagonal

    def submatrix(self, entries: Tensor) -> Tensor:
        u, diagonal = self.flat_factor[:, entries], torch.diag_embed(self.flat_diag[:, entries])
        return diagonal + u @ u.mT if self.rank else diagonal

    def _matmul(self, v: Tensor) -> Tensor:
        scaled = v * self.flat_diag.unsqueeze(-2)
        return scaled + (v @ self.flat_factor) @ self.flat_factor.mT if self.rank else scaled

    def _gram(self, g: Tensor) -> Tensor:
        diagonal = (g * self.flat_diag.unsqueeze(-2)) @ g.mT
        if not self.rank:
            return diagonal
        a = g @ self.flat_factor
        return diagonal + a @ a.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        n = self.flat_diag.shape[-1]
        scaled = square_root(self.flat_diag).unsqueeze(-2) * eps[..., :n]  # Λ^½ x + U y
        return scaled + eps[..., n:] @ self.flat_factor.mT if self.rank else scaled

    def _root_matmul(self, v: Tensor) -> Tensor:
        if self.rank == 0:
            return v * square_root(self.flat_diag).unsqueeze(-2)
        return super()._root_matmul(v)

    def _structured_root_matmul(self, v: Tensor) -> Tensor:
        """S = Λ^½ (I + Z (I + K)⁻¹ Zᵀ), K lower triangular with KKᵀ = I + ZᵀZ. O(n r² + r³).

        SSᵀ = Σ because M = (I + K)⁻¹ solves M + Mᵀ + M ZᵀZ Mᵀ = I. Unlike the eigenvalue root of I + ZᵀZ it
        has a derivative also where eigenvalues coincide (two zero columns, say).
        """
        lam = widen(self.flat_diag)
        z = widen(self.flat_factor) * lam.rsqrt().unsqueeze(-1)
        r = stacked_qr(z)[1]
        k = (r * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1)).mT
        eye = torch.eye(self.rank, dtype=z.dtype, device=z.device)
        middle = torch.linalg.solve_triangular(k + eye, (v @ z).mT, upper=False).mT
        return (v + middle @ z.mT) * lam.sqrt().unsqueeze(-2)

    def sqrt_matmul(self, v: Tensor) -> Tensor:
        """Σ^½ v with the symmetric PSD square root: O(n) for rank 0, else O(n³) by eigendecomposition."""
        return self.root_matmul(v) if self.rank == 0 else super().sqrt_matmul(v)

    def _structured_precision(self) -> tuple[Precision, Tensor]:
        lam = widen(self.flat_diag)
        return Woodbury(lam, widen(self.flat_factor)), torch.zeros(lam.shape[0], dtype=torch.bool, device=lam.device)

    def _scale(self, c: Tensor) -> DiagonalPlusFactor:
        rows = per_row(c, self.diag.dim())
        return DiagonalPlusFactor(self.diag * rows, self.factor * square_root(rows))

    def add_diagonal(self, variance: float | Tensor) -> DiagonalPlusFactor:
        added = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        return DiagonalPlusFactor(self.diag + added, self.factor)

    def check_values(self) -> None:
        check_finite("diag", self.diag, nonnegative=True)
        check_finite("factor", self.factor)
