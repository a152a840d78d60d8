"""`Directional`: Σ = QCQᵀ + PDP with QᵀQ = I and P = I − QQᵀ.

Σv = QC(Qᵀv) + P(D(Pv))                          O(n k)
gΣgᵀ = (gQ)C(gQ)ᵀ + (gP)D(gP)ᵀ
draw = PD^½x + QC^½y                             x, y standard normal, n + k of them
S = PD^½ + QC^½Q₁ᵀ                               a root; D^-½Q = Q₁R; O(n k²)
Σ⁻¹ = QC⁻¹Qᵀ + (PDP)⁺                            as PQ = 0; see `favour.belief.covariance.precision`
Σ + vI = Q(C + vI)Qᵀ + P(D + vI)P
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from favour.belief.covariance.base import flatten_event, per_row, pytree_node
from favour.belief.covariance.checks import check_batched, check_finite, check_like
from favour.belief.covariance.dense import Dense
from favour.belief.covariance.precision import Cholesky, Complement, Precision, psd_root, square_root, widen
from favour.belief.covariance.structured import Structured
from favour.errors import InvalidValue, ShapeMismatch
from favour.graph.tracing import traced


@pytree_node
class Directional(Structured):
    """Σ = QCQᵀ + (I − QQᵀ) diag(d) (I − QQᵀ): full along k directions, marginal variances elsewhere.

    Args:
        diag: d ≥ 0, (B, *event). Its part along the directions is projected out.
        basis: Q, (k, B, *event), orthonormal over the flattened event for every batch element.
        core: C, (B, k, k), symmetric PSD.

    Example:
        >>> basis = torch.tensor([[[1.0, 0.0, 0.0]]])
        >>> Directional(torch.ones(1, 3), basis, torch.tensor([[[5.0]]])).diagonal()
        tensor([[5., 1., 1.]])
    """

    _axes: ClassVar[dict[str, int]] = {"diag": 0, "basis": 1, "core": 0}

    def __init__(self, diag: Tensor, basis: Tensor, core: Tensor):
        if not traced():
            check_batched("diag", diag)
            check_like("basis", basis, diag)
            check_batched("core", core)
            k, n = basis.shape[0], diag.shape[1:].numel()
            if core.shape != (diag.shape[0], k, k) or k > n:
                raise ShapeMismatch(
                    f"`core` has shape {tuple(core.shape)}; {k} directions in {n} dimensions and a batch of "
                    f"{diag.shape[0]} need {(diag.shape[0], k, k)} and at most {n} directions."
                )
        self.diag, self.basis, self.core = diag, basis, core

    @property
    def _vectors(self) -> Tensor:
        return self.basis

    @property
    def flat_diag(self) -> Tensor:
        d = flatten_event(self.diag, 1)
        return torch.ones_like(d) if self.rank == d.shape[-1] else d  # k = n: P = 0 and any d > 0 will do

    def _project(self, v: Tensor) -> Tensor:
        return v - (v @ self.flat_factor) @ self.flat_factor.mT

    def diagonal(self) -> Tensor:
        # (PDP)_ii = d_i (1 − 2h_i) + q_iᵀ(QᵀDQ)q_i with h_i = ‖q_i‖², q_i the i-th row of Q
        q, d = self.flat_factor, self.flat_diag
        middle = self.core + (q * d.unsqueeze(-1)).mT @ q
        out = d * (1 - 2 * q.square().sum(-1)) + ((q @ middle) * q).sum(-1)
        if self.rank == d.shape[-1]:
            out = ((q @ self.core) * q).sum(-1)
        return out.clamp(min=0).reshape(self.diag.shape)

    def dense(self) -> Tensor:
        eye = torch.eye(self.flat_diag.shape[-1], dtype=self.dtype, device=self.device)
        return self._gram(eye.expand(self.batch_size, -1, -1))

    def submatrix(self, entries: Tensor) -> Tensor:
        # (PDP)_ij = δ_ij d_i − (d_i + d_j) q_i·q_j + q_iᵀ(QᵀDQ)q_j
        u, d = self.flat_factor, self.flat_diag
        q, diag = u[:, entries], d[:, entries]
        if self.rank == d.shape[-1]:
            return q @ self.core @ q.mT
        middle = self.core + (u * d.unsqueeze(-1)).mT @ u
        return torch.diag_embed(diag) - (diag.unsqueeze(-1) + diag.unsqueeze(-2)) * (q @ q.mT) + q @ middle @ q.mT

    def _matmul(self, v: Tensor) -> Tensor:
        rest = self._project(self._project(v) * self.flat_diag.unsqueeze(-2))
        return (v @ self.flat_factor) @ self.core.mT @ self.flat_factor.mT + rest

    def _gram(self, g: Tensor) -> Tensor:
        a, p = g @ self.flat_factor, self._project(g)
        return a @ self.core @ a.mT + (p * self.flat_diag.unsqueeze(-2)) @ p.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        n = self.flat_diag.shape[-1]
        along = eps[..., n:] @ psd_root(self.core).to(eps.dtype).mT
        return self._project(square_root(self.flat_diag).unsqueeze(-2) * eps[..., :n]) + along @ self.flat_factor.mT

    def _structured_root_matmul(self, v: Tensor) -> Tensor:
        """S = PD^½ + Q C^½ Q₁ᵀ with D^-½Q = Q₁R; the cross terms vanish as PD^½Q₁ = PQR⁻¹ = 0. O(n k²)."""
        wide = self.mapped(lambda t, _: widen(t))
        top, _ = torch.linalg.qr(wide.flat_factor * wide.flat_diag.rsqrt().unsqueeze(-1))
        along = v @ top @ psd_root(self.core).mT @ wide.flat_factor.mT
        return wide._project(v * wide.flat_diag.sqrt().unsqueeze(-2)) + along

    def _structured_precision(self) -> tuple[Precision, Tensor]:
        core = Cholesky(self.core, torch.finfo(self.dtype).eps)
        return Complement(widen(self.flat_diag), widen(self.flat_factor), core), core.singular

    def _scale(self, c: Tensor) -> Directional:
        return Directional(self.diag * per_row(c, self.diag.dim()), self.basis, self.core * per_row(c, 3))

    def add_diagonal(self, variance: float | Tensor) -> Directional | Dense:
        """Σ + diag(variance): stays directional for one variance per row, v I = v QQᵀ + v PP; else dense."""
        v = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        if any(s != 1 for s in v.shape[max(0, v.dim() - len(self.event_shape)) :]):
            return Dense(self.dense(), self.event_shape).add_diagonal(v)
        eye = torch.eye(self.rank, dtype=self.dtype, device=self.device)
        return Directional(self.diag + v, self.basis, self.core + v.reshape(-1, 1, 1) * eye)

    def check_values(self) -> None:
        check_finite("diag", self.diag, nonnegative=True)
        check_finite("basis", self.basis)
        Dense(self.core).check_values()
        q = widen(self.flat_factor)
        gap = (q.mT @ q - torch.eye(self.rank, dtype=q.dtype, device=q.device)).abs()
        if (gap > torch.finfo(self.dtype).eps ** 0.5).any():
            raise InvalidValue(
                f"`basis` {tuple(self.basis.shape)} is not orthonormal (QᵀQ is off by "
                f"{float(gap.max()):.2g}). Orthonormalise the directions with torch.linalg.qr."
            )
