"""`Structured`: a diagonal λ and k vectors u_k, stored in O(n k) numbers per batch row.

The fast inverses and roots divide by λ. A row with a zero in λ is treated as dense instead, where it costs
O(n³): Σ can be nonsingular as long as no more than k of its λ are zero, since

    rank Σ ≤ #{i : λ_i > 0} + k                     so more than k zeros mean a singular Σ
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from favour.belief.covariance.base import Covariance, flatten_event
from favour.belief.covariance.dense import Dense
from favour.belief.covariance.precision import ByRows, Precision, refuse_singular, scatter, widen
from favour.graph.tracing import traced


class Structured(Covariance):
    """A diagonal `diag` and k vectors stored vector axis first; what its two subclasses share."""

    diag: Tensor

    @property
    @abstractmethod
    def _vectors(self) -> Tensor: ...  # (k, B, *event)

    @abstractmethod
    def _structured_root_matmul(self, v: Tensor) -> Tensor: ...  # for λ > 0, in the working dtype

    @abstractmethod
    def _structured_precision(self) -> tuple[Precision, Tensor]: ...

    @property
    def event_shape(self) -> torch.Size:
        return self.diag.shape[1:]

    @property
    def rank(self) -> int:
        return self._vectors.shape[0]

    @property
    def noise_size(self) -> int:
        return self.flat_diag.shape[-1] + self.rank

    @property
    def flat_diag(self) -> Tensor:
        return flatten_event(self.diag, 1)  # (B, n)

    @property
    def flat_factor(self) -> Tensor:
        return flatten_event(self._vectors, 2).permute(1, 2, 0)  # (B, n, k)

    def _split(self) -> list[tuple[Tensor, Covariance]] | None:
        """Rows with all λ > 0 as they are, the others dense; None if there are no others (or compiling)."""
        if traced():
            return None
        zero = (self.flat_diag <= 0).any(-1)
        if not zero.any():
            return None
        rows, dense_rows = (~zero).nonzero().flatten(), zero.nonzero().flatten()
        wide = self[dense_rows].mapped(lambda t, _: widen(t))
        return [(rows, self[rows]), (dense_rows, Dense(wide.dense(), self.event_shape))]

    def _root_matmul(self, v: Tensor) -> Tensor:
        if (parts := self._split()) is not None:
            return scatter([(i, part._root_matmul(v[i])) for i, part in parts], v.shape[0])
        return self._structured_root_matmul(widen(v))

    def _precision(self) -> tuple[Precision, Tensor]:
        if not traced():
            # k vectors repair at most k zeros; found out before anything of size n × n exists
            hopeless = (self.flat_diag <= 0).sum(-1) > self.rank
            if hopeless.any():
                refuse_singular(hopeless)
        if (parts := self._split()) is None:
            return self._structured_precision()
        done = [(rows, *part._precision()) for rows, part in parts]
        singular = scatter([(rows, s) for rows, _, s in done], self.batch_size)
        return ByRows(self.batch_size, [(rows, p) for rows, p, _ in done]), singular
