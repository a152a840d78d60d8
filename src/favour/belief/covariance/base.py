"""Covariance structures for a batch of Gaussians: the interface, and what all of them share.

| symbol | meaning                                                | shape                |
|--------|--------------------------------------------------------|----------------------|
| B      | batch, always the first dimension of a mean            |                      |
| event  | all other dimensions of the mean, possibly none        | n = number of elements |
| F      | fold axis: many vectors treated at once, always first  |                      |
| Λ, λ   | diagonal part, λ ≥ 0, zeros allowed                    | (B, *event)          |
| U, u_k | factor columns, rank axis first                        | (rank, B, *event)    |
| Q, C   | orthonormal directions and the covariance along them   | (k, B, *event), (B, k, k) |
| D, P   | marginal variances off the directions; P = I − QQᵀ     | (B, *event)          |

    DiagonalPlusFactor   Σ = Λ + UUᵀ                O(n r) to multiply or draw, O(n r² + r³) to solve
    Dense                Σ stored                   O(n²), O(n³)
    Directional          Σ = QCQᵀ + PDP             O(n k), O(n k² + k³)

Vectors come back in the dtype they were given in; log-determinants and quadratic forms in at least float32.

Inside compiled or exported code nothing can branch on values: there a zero in λ or D makes solves and roots
infinite or NaN, where eager code falls back to a dense solve for that row or raises `NoDensity`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from favour.belief.covariance.checks import check_finite
from favour.belief.covariance.precision import Precision, refuse_singular, symmetric_root, widen
from favour.errors import ShapeMismatch
from favour.graph.tracing import traced

if TYPE_CHECKING:
    from favour.belief.covariance.dense import Dense
    from favour.belief.covariance.diagonal_plus_factor import DiagonalPlusFactor

Self = TypeVar("Self", bound="Covariance")


def flatten_event(t: Tensor, lead: int) -> Tensor:
    """Flattens all but the first `lead` dimensions into one; a scalar event becomes length 1."""
    return t.unsqueeze(-1) if t.dim() == lead else t.flatten(lead)


def per_row(c: Tensor, dims: int) -> Tensor:
    """c, a number or one per batch row, shaped to multiply a tensor with `dims` dimensions, batch first."""
    return c.reshape(-1, *[1] * (dims - 1)) if c.dim() else c


class Covariance(ABC):
    """A batch of covariance matrices Σ over one event shape; see the module docstring for the structures.

    Vectors carry a fold axis first, `(F, B, *event)`.
    """

    _axes: ClassVar[dict[str, int]]  # tensor fields and the position of their batch axis

    @property
    @abstractmethod
    def event_shape(self) -> torch.Size:
        """Shape of one batch element of the mean."""

    @property
    @abstractmethod
    def rank(self) -> int:
        """Directions resolved beyond a diagonal: factor columns, basis vectors, or n if dense."""

    @property
    @abstractmethod
    def noise_size(self) -> int:
        """How many standard normals one draw uses up."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """Marginal variances, (B, *event)."""

    @abstractmethod
    def dense(self) -> Tensor:
        """Σ as (B, n, n)."""

    @abstractmethod
    def submatrix(self, entries: Tensor) -> Tensor:
        """Σ of these m entries of the flattened event alone, (B, m, m): never n × n unless stored so."""

    @abstractmethod
    def _matmul(self, v: Tensor) -> Tensor: ...  # here and below vectors are (B, F, n)

    @abstractmethod
    def _gram(self, g: Tensor) -> Tensor: ...

    @abstractmethod
    def _from_noise(self, eps: Tensor) -> Tensor: ...

    @abstractmethod
    def _root_matmul(self, v: Tensor) -> Tensor: ...

    @abstractmethod
    def _precision(self) -> tuple[Precision, Tensor]: ...  # with a mask of singular rows

    @abstractmethod
    def _scale(self: Self, c: Tensor) -> Self: ...

    @abstractmethod
    def add_diagonal(self, variance: float | Tensor) -> Covariance:
        """Σ + diag(variance), variance ≥ 0: a number, or anything that broadcasts to (B, *event)."""

    @abstractmethod
    def check_values(self) -> None:
        """Raises `InvalidValue` for NaN, infinities and negative variances. Reads values: eager code only."""

    # ---- shared behaviour

    @property
    def _main(self) -> Tensor:  # the first field, whose batch axis is 0
        return getattr(self, next(iter(self._axes)))

    @property
    def batch_size(self) -> int:
        """B."""
        return self._main.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        """dtype of the stored tensors."""
        return self._main.dtype

    @property
    def device(self) -> torch.device:
        """Device of the stored tensors."""
        return self._main.device

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name."""
        return {name: getattr(self, name) for name in self._axes}

    def mapped(self: Self, f: Callable[[Tensor, int], Tensor]) -> Self:
        new = object.__new__(type(self))
        for name, axis in self._axes.items():
            setattr(new, name, f(getattr(self, name), axis))
        return new

    @classmethod
    def cat(cls: type[Self], parts: Sequence[Self]) -> Self:
        """Covariances of one structure, joined along the batch."""
        first = parts[0]
        new = object.__new__(type(first))
        for name, axis in first._axes.items():
            setattr(new, name, torch.cat([getattr(part, name) for part in parts], axis))
        return new

    def __getitem__(self: Self, rows: slice | Tensor) -> Self:
        """Selects batch rows with a slice, an index tensor or a mask; the batch dimension stays."""
        return self.mapped(lambda t, axis: t[(slice(None),) * axis + (rows,)])

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """`torch.Tensor.to` on every tensor."""
        return self.mapped(lambda t, _: t.to(*args, **kwargs))

    def detach(self: Self) -> Self:
        """Detaches every tensor from the autograd graph."""
        return self.mapped(lambda t, _: t.detach())

    def _fold(self, v: Tensor) -> Tensor:
        if not traced() and v.shape[1:] != (self.batch_size, *self.event_shape):
            need = ("F", self.batch_size, *self.event_shape)
            raise ShapeMismatch(
                f"vectors of shape {tuple(v.shape)} do not fit this covariance, which takes "
                f"({', '.join(map(str, need))}): fold axis, batch, event. For one vector use `v[None]`."
            )
        return flatten_event(v, 2).transpose(0, 1)

    def _unfold(self, v: Tensor, dtype: torch.dtype) -> Tensor:
        return v.transpose(0, 1).reshape(v.shape[1], v.shape[0], *self.event_shape).to(dtype)

    def scale(self: Self, c: float | Tensor) -> Self:
        """c·Σ for c ≥ 0, a number or one per batch row, (B,)."""
        c = torch.as_tensor(c, dtype=self.dtype, device=self.device)
        if not traced():
            check_finite("c", c, nonnegative=True)
            if c.dim() and c.shape != (self.batch_size,):
                raise ShapeMismatch(f"`c` has shape {tuple(c.shape)}; give a number or ({self.batch_size},).")
        return self._scale(c)

    def matmul(self, v: Tensor) -> Tensor:
        """Σv for v of shape (F, B, *event)."""
        return self._unfold(self._matmul(self._fold(v)), v.dtype)

    def gram(self, g: Tensor) -> Tensor:
        """g Σ gᵀ, (B, F, F), for g of shape (F, B, *event)."""
        return self._gram(self._fold(g))

    def linear(self, weight: Tensor) -> Dense:
        """Covariance WΣWᵀ of Wx, exact; weight (m, n) acts on the flattened event. O(B (m n r + m² n))."""
        from favour.belief.covariance.dense import Dense  # a subclass of this class, so not importable before it

        g = weight.unsqueeze(0).expand(self.batch_size, -1, -1)
        return Dense(self._gram(g))

    def from_noise(self, eps: Tensor) -> Tensor:
        """Turns standard normals (F, B, noise_size) into deviations (F, B, *event) with covariance Σ."""
        return self._unfold(self._from_noise(eps.transpose(0, 1)), eps.dtype)

    def draw(self, sample_shape: Sequence[int] = (), generator: torch.Generator | None = None) -> Tensor:
        """Random deviations with mean 0 and covariance Σ, (*sample_shape, B, *event), differentiable in Σ."""
        folds = torch.Size(sample_shape).numel()
        size = (folds, self.batch_size, self.noise_size)
        # the overload with a generator, even None, cannot trace symbolic sizes
        options: dict[str, Any] = {} if generator is None else {"generator": generator}
        eps = torch.randn(size, dtype=self.dtype, device=self.device, **options)
        return self.from_noise(eps).reshape(*sample_shape, self.batch_size, *self.event_shape)

    def root_matmul(self, v: Tensor) -> Tensor:
        """Sv for one n × n root S with SSᵀ = Σ (not symmetric in general), v of shape (F, B, *event)."""
        return self._unfold(self._root_matmul(self._fold(v)), v.dtype)

    def sqrt_matmul(self, v: Tensor) -> Tensor:
        """Σ^½ v with the symmetric PSD root. O(n³) by eigendecomposition, except for a pure diagonal."""
        root = symmetric_root(widen(self.dense()))
        return self._unfold(widen(self._fold(v)) @ root, v.dtype)

    def as_diagonal_plus_factor(self) -> DiagonalPlusFactor:
        """The same Σ as 0 + UUᵀ, U the n columns of the root S: n × n numbers per row."""
        from favour.belief.covariance.diagonal_plus_factor import DiagonalPlusFactor  # likewise a subclass

        n = flatten_event(self.diagonal(), 1).shape[-1]
        eye = torch.eye(n, dtype=self.dtype, device=self.device).expand(self.batch_size, -1, -1)
        factor = self._unfold(self._root_matmul(eye), self.dtype)
        return DiagonalPlusFactor(torch.zeros_like(self.diagonal()), factor)

    def precision(self) -> Precision:
        """Factorises Σ once for several solves. Raises `NoDensity` (eager code) where a row is singular."""
        precision, singular = self._precision()
        if not traced() and singular.any():
            refuse_singular(singular)
        return precision

    @property
    def _scalar_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def solve(self, v: Tensor) -> Tensor:
        """Σ⁻¹v for v of shape (F, B, *event)."""
        folded = widen(self._fold(v))
        return self._unfold(self.precision().solve(folded), v.dtype)

    def logdet(self) -> Tensor:
        """log det Σ, (B,)."""
        return self.precision().log_determinant.to(self._scalar_dtype)

    def density_terms(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """vᵀΣ⁻¹v, (F, B), and log det Σ, (B,), from one factorisation; v is (F, B, *event)."""
        folded = widen(self._fold(v))
        precision = self.precision()
        quadratic = precision.quadratic(folded).transpose(0, 1)
        return quadratic.to(self._scalar_dtype), precision.log_determinant.to(self._scalar_dtype)


def pytree_node(cls: type[Self]) -> type[Self]:
    """Class decorator: registers the tensor fields as pytree children, for torch.compile and torch.export."""

    def unflatten(leaves: Any, _: Any) -> Self:
        new = object.__new__(cls)  # leaves may be placeholders of any kind: no checks
        for name, leaf in zip(cls._axes, leaves, strict=True):
            setattr(new, name, leaf)
        return new

    register_pytree_node(
        cls,
        lambda c: ([getattr(c, name) for name in cls._axes], None),
        unflatten,
        serialized_type_name=f"favour.{cls.__name__}",
        flatten_with_keys_fn=lambda c: ([(GetAttrKey(name), getattr(c, name)) for name in cls._axes], None),
    )
    return cls
