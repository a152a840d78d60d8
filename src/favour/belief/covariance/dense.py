"""`Dense`: Σ stored as such, (B, n, n).

Sv, Σv, gΣgᵀ       matrix products, O(n²) per vector
root               S = diag(σ) L, LLᵀ the correlations; O(n³)
Σ + diag(v), cΣ    entry by entry
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from favour.belief.covariance.base import Covariance, flatten_event, per_row, pytree_node
from favour.belief.covariance.checks import check_batched, check_finite
from favour.belief.covariance.precision import Cholesky, Precision, correlations, psd_root, widen
from favour.errors import InvalidValue, ShapeMismatch
from favour.graph.tracing import traced


@pytree_node
class Dense(Covariance):
    """Σ stored as such.

    Args:
        matrix: (B, n, n), symmetric PSD.
        event_shape: event dimensions with n elements; (n,) if left out.

    Whether a stored matrix is singular can be told only up to n·eps of its dtype, relative to unit variances:
    in bfloat16 a correlation above 0.9 can already count as singular for solves. Keep it in float32 or wider.

    Example:
        >>> Dense(torch.eye(4).expand(3, 4, 4), (2, 2)).diagonal().shape
        torch.Size([3, 2, 2])
    """

    # Held as (B, *event, *event), so that every shape can be read off the tensor.
    _axes: ClassVar[dict[str, int]] = {"blocks": 0}

    def __init__(self, matrix: Tensor, event_shape: Sequence[int] | None = None):
        event = tuple(matrix.shape[-1:]) if event_shape is None else tuple(event_shape)
        if not traced():
            check_batched("covariance", matrix)
            n = torch.Size(event).numel()
            if tuple(matrix.shape[1:]) != (n, n):
                raise ShapeMismatch(
                    f"`covariance` has shape {tuple(matrix.shape)}; event {event} has {n} elements "
                    f"and needs (batch, {n}, {n})."
                )
        self.blocks = matrix.reshape(matrix.shape[0], *event, *event)

    @property
    def event_shape(self) -> torch.Size:
        return self.blocks.shape[1 : 1 + (self.blocks.dim() - 1) // 2]

    @property
    def rank(self) -> int:
        return self.matrix.shape[-1]

    @property
    def noise_size(self) -> int:
        return self.matrix.shape[-1]

    @property
    def matrix(self) -> Tensor:
        """Σ, (B, n, n)."""
        d = len(self.event_shape)
        return flatten_event(self.blocks.flatten(1, d), 2) if d else self.blocks[:, None, None]

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(self.batch_size, *self.event_shape)

    def dense(self) -> Tensor:
        return self.matrix

    def submatrix(self, entries: Tensor) -> Tensor:
        return self.matrix[:, entries][:, :, entries]

    def _matmul(self, v: Tensor) -> Tensor:
        return v @ self.matrix.mT

    def _gram(self, g: Tensor) -> Tensor:
        return g @ self.matrix @ g.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        return eps @ psd_root(self.matrix).to(eps.dtype).mT

    def _root_matmul(self, v: Tensor) -> Tensor:
        return widen(v) @ psd_root(self.matrix).mT

    def cholesky(self) -> Tensor:
        """Lower triangular L with LLᵀ = Σ, (B, n, n). Raises `NoDensity` (eager code) where Σ is singular."""
        precision = self.precision()
        assert isinstance(precision, Cholesky)
        return (precision.scale.unsqueeze(-1) * precision.tril).to(self._scalar_dtype)

    def _precision(self) -> tuple[Precision, Tensor]:
        precision = Cholesky(self.matrix, torch.finfo(self.dtype).eps)
        return precision, precision.singular

    def _scale(self, c: Tensor) -> Dense:
        return Dense(self.matrix * per_row(c, 3), self.event_shape)

    def add_diagonal(self, variance: float | Tensor) -> Dense:
        added = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        added = flatten_event(added.expand(self.batch_size, *self.event_shape), 1)
        return Dense(self.matrix + torch.diag_embed(added), self.event_shape)

    def check_values(self) -> None:
        check_finite("covariance", self.matrix)
        check_finite("the diagonal of covariance", self.diagonal(), nonnegative=True)
        scale, correlation = correlations(widen(self.matrix))
        gap = (correlation - correlation.mT).abs().flatten(1).amax(-1) if correlation.numel() else scale.new_zeros(0)
        if (gap > 10 * torch.finfo(self.dtype).eps ** 0.5).any():
            row = int(gap.argmax())
            raise InvalidValue(
                f"`covariance` {tuple(self.matrix.shape)} is not symmetric at batch index {row} (entries "
                f"differ by {float(gap[row]):.2g}). Pass `(S + S.mT) / 2`."
            )
