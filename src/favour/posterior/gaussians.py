"""Covariances of one parameter tensor.

A Gaussian here is zero-mean: it describes the deviation δ of a parameter W from its mean, which is stored
elsewhere. With i, k counting outputs (rows), j, l inputs (columns) and r the rank:

    Diagonal    Cov(W_ij, W_kl) = [i=k][j=l] diag_ij                            any shape
    Rows        Cov(W_ij, W_kl) = [i=k] ([j=l] diag_ij + Σ_r factor_rij factor_ril)   rows independent
    Kronecker   Cov(W_ij, W_kl) = outputs_ik · inputs_jl                        outputs (m, m), inputs (n, n)
    Rotated     Cov(W_ij, W_kl) = Σ_ab outputs_ia outputs_ka diag_ab inputs_jb inputs_lb   diagonal in other bases
    Full        Cov(W_ij, W_kl) = matrix[i·n + j, k·n + l]                      any shape, row-major

For a linear weight the shape is (m, n) = (out_features, in_features).

Draws: Diagonal √diag ∘ z; Rows √diag ∘ z + Σ_r ε_ri factor_ri; Kronecker B Z Aᵀ with
BBᵀ = outputs, AAᵀ = inputs; Rotated outputs (√diag ∘ Z) inputsᵀ; Full R z with RRᵀ = matrix. The roots
R = V√max(λ, 0) come from an eigendecomposition, so singular matrices are fine.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from ..errors import InvalidType, InvalidValue, ShapeMismatch


class Gaussian(ABC):
    """The covariance of one parameter tensor; see the module docstring for the kinds.

    Subclasses are frozen dataclasses whose fields are tensors (and plain tuples of integers).
    """

    if TYPE_CHECKING:

        @property
        def shape(self) -> tuple[int, ...]:
            """Shape of the parameter described."""

    @abstractmethod
    def variance(self) -> Tensor:
        """Marginal variances, of shape `shape`."""

    @abstractmethod
    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        """`n` zero-mean deviations, of shape (n, *shape)."""

    @abstractmethod
    def covariance(self) -> Tensor:
        """The dense (N, N) covariance of the parameter flattened row-major; for tests and small layers."""

    @abstractmethod
    def check_shapes(self, name: str) -> None:
        """Raise `ShapeMismatch` or `InvalidType`, naming `name`, if the fields do not fit together."""

    @abstractmethod
    def _check_values(self, name: str) -> None: ...

    def validate(self, name: str) -> None:
        """Check shapes, and in eager mode the values: finite, variances ≥ 0, matrices symmetric and PSD.

        Args:
            name: What the error messages call this parameter.
        """
        self.check_shapes(name)
        if not torch.compiler.is_compiling():
            self._check_values(name)

    def tensors(self) -> dict[str, Tensor]:
        """The tensor fields by name."""
        return {k: v for k, v in self._fields().items() if isinstance(v, Tensor)}

    def settings(self) -> dict[str, Any]:
        """The fields that are not tensors, JSON-able."""
        return {k: list(v) for k, v in self._fields().items() if not isinstance(v, Tensor)}

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Self:
        """A copy whose tensors are on `device` with `dtype`; None leaves either as it is."""
        moved = {k: v.to(device=device, dtype=dtype) for k, v in self.tensors().items()}
        return dataclasses.replace(self, **moved)  # type: ignore[type-var]

    def _fields(self) -> Mapping[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}  # type: ignore[arg-type]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({'×'.join(map(str, self.shape)) or 'scalar'})"


@dataclass(frozen=True, eq=False, repr=False)
class Diagonal(Gaussian):
    """Independent entries (mean-field), for a parameter of any shape.

    Attributes:
        diag: Variances ≥ 0, of the parameter's shape.

    Example:
        >>> Diagonal(torch.full((2, 3), 0.25)).sample(5).shape
        torch.Size([5, 2, 3])
    """

    diag: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.diag.shape)

    def variance(self) -> Tensor:
        return self.diag

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        return self.diag.sqrt() * standard_normal((n, *self.shape), self.diag, generator)

    def covariance(self) -> Tensor:
        return self.diag.flatten().diag_embed()

    def check_shapes(self, name: str) -> None:
        _require_floating(name, self)

    def _check_values(self, name: str) -> None:
        _require_variance(name, "variance", self.diag)


@dataclass(frozen=True, eq=False, repr=False)
class Rows(Gaussian):
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

    def variance(self) -> Tensor:
        return self.diag + self.factor.square().sum(0)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        independent = self.diag.sqrt() * standard_normal((n, *self.shape), self.diag, generator)
        rank, m = self.factor.shape[:2]
        latents = standard_normal((n, rank, m), self.factor, generator)  # each row has its own
        return independent + torch.einsum("sri,ri...->si...", latents, self.factor)

    def covariance(self) -> Tensor:
        diag, factor = self.diag.flatten(1), self.factor.flatten(2)
        return torch.block_diag(*(diag.diag_embed() + torch.einsum("rij,ril->ijl", factor, factor)))

    def check_shapes(self, name: str) -> None:
        _require_floating(name, self)
        if self.diag.dim() < 2 or self.factor.shape[1:] != self.diag.shape:
            raise ShapeMismatch(
                f"posterior of `{name}`: Rows got `diag` of shape {tuple(self.diag.shape)} and `factor` of "
                f"shape {tuple(self.factor.shape)}; it needs (m, n) and (rank, m, n)."
            )

    def _check_values(self, name: str) -> None:
        _require_variance(name, "diag", self.diag)
        _require_finite(name, "factor", self.factor)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, rank {self.factor.shape[0]})"


@dataclass(frozen=True, eq=False, repr=False)
class Kronecker(Gaussian):
    """A matrix Gaussian, Cov(W_ij, W_kl) = outputs_ik · inputs_jl (as Kronecker-factored Laplace gives).

    Attributes:
        inputs: (n, n), symmetric positive semi-definite.
        outputs: (m, m), symmetric positive semi-definite.

    Example:
        >>> Kronecker(torch.eye(3), 2 * torch.eye(2)).variance().tolist()
        [[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]
    """

    inputs: Tensor
    outputs: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs.shape[0], self.inputs.shape[0]

    def variance(self) -> Tensor:
        return torch.outer(self.outputs.diagonal(), self.inputs.diagonal())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        z = standard_normal((n, *self.shape), self.inputs, generator)
        return psd_root(self.outputs) @ z @ psd_root(self.inputs).mT

    def covariance(self) -> Tensor:
        return torch.kron(self.outputs, self.inputs)  # row-major: the output index varies slowest

    def check_shapes(self, name: str) -> None:
        _require_floating(name, self)
        for what, matrix in self.tensors().items():
            if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
                raise ShapeMismatch(
                    f"posterior of `{name}`: Kronecker got `{what}` of shape {tuple(matrix.shape)}; it needs "
                    f"a square matrix, (n, n) for `inputs` and (m, m) for `outputs`."
                )

    def _check_values(self, name: str) -> None:
        _require_psd(name, "inputs", self.inputs)
        _require_psd(name, "outputs", self.outputs)


@dataclass(frozen=True, eq=False, repr=False)
class Rotated(Gaussian):
    """Independent entries in other bases of inputs and outputs, W = outputs Z inputsᵀ with Z_ab ~ N(0, diag_ab).

    Kronecker-factored Laplace is of this kind: the curvature A ⊗ B plus a prior precision δ has the eigenvectors of A
    and B, and the eigenvalues a_b b_a + δ, whose inverses are no outer product. `Kronecker` is the case of diag = vuᵀ.

    Attributes:
        diag: (k, l), ≥ 0.
        inputs: (n, l), the input basis in its columns; not necessarily orthonormal.
        outputs: (m, k), the output basis in its columns.

    Example:
        >>> Rotated(torch.ones(2, 3), torch.eye(3), 2 * torch.eye(2)).variance().tolist()
        [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]
    """

    diag: Tensor
    inputs: Tensor
    outputs: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.outputs.shape[0], self.inputs.shape[0]

    def variance(self) -> Tensor:
        return self.outputs.square() @ self.diag @ self.inputs.square().mT

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        z = standard_normal((n, *self.diag.shape), self.diag, generator)
        return self.outputs @ (self.diag.sqrt() * z) @ self.inputs.mT

    def covariance(self) -> Tensor:
        basis = torch.kron(self.outputs, self.inputs)
        return basis * self.diag.flatten() @ basis.mT

    def check_shapes(self, name: str) -> None:
        _require_floating(name, self)
        shapes = [tuple(t.shape) for t in (self.diag, self.inputs, self.outputs)]
        if any(len(s) != 2 for s in shapes) or (shapes[2][1], shapes[1][1]) != shapes[0]:
            raise ShapeMismatch(
                f"posterior of `{name}`: Rotated got `diag`, `inputs` and `outputs` of shapes "
                f"{', '.join(map(str, shapes))}; it needs (k, l), (n, l) and (m, k)."
            )

    def _check_values(self, name: str) -> None:
        _require_variance(name, "diag", self.diag)
        _require_finite(name, "inputs", self.inputs)
        _require_finite(name, "outputs", self.outputs)


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

    def variance(self) -> Tensor:
        return self.matrix.diagonal().reshape(self.shape)

    def sample(self, n: int, generator: torch.Generator | None = None) -> Tensor:
        z = standard_normal((n, self.matrix.shape[0]), self.matrix, generator)
        return (z @ psd_root(self.matrix).mT).reshape(n, *self.shape)

    def covariance(self) -> Tensor:
        return self.matrix

    def check_shapes(self, name: str) -> None:
        _require_floating(name, self)
        entries = math.prod(self.shape)
        if tuple(self.matrix.shape) != (entries, entries):
            raise ShapeMismatch(
                f"posterior of `{name}`: Full got `matrix` of shape {tuple(self.matrix.shape)} for a "
                f"parameter of shape {self.shape}; it needs ({entries}, {entries})."
            )

    def _check_values(self, name: str) -> None:
        _require_psd(name, "matrix", self.matrix)


KINDS: dict[str, type[Gaussian]] = {kind.__name__: kind for kind in (Diagonal, Rows, Kronecker, Rotated, Full)}


def standard_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normals with the dtype and device of `like`, drawn where the generator lives."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, dtype=like.dtype, device=device, generator=generator).to(like.device)


def psd_root(matrix: Tensor) -> Tensor:
    """R with RRᵀ = matrix (…, N, N), for a singular PSD matrix too: R = V√max(λ, 0).

    Differentiable where the eigenvalues are distinct and positive.
    """
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()  # eigh has no half-precision kernels
    values, vectors = torch.linalg.eigh(wide)
    return (vectors * values.clamp_min(0).sqrt().unsqueeze(-2)).to(matrix.dtype)


def _require_floating(name: str, gaussian: Gaussian) -> None:
    for what, tensor in gaussian.tensors().items():
        if not tensor.is_floating_point():
            raise InvalidType(
                f"posterior of `{name}`: `{what}` has dtype {tensor.dtype}; a floating-point tensor is required."
            )


def _require_finite(name: str, what: str, tensor: Tensor) -> None:
    bad = int((~torch.isfinite(tensor)).sum())
    if bad:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(tensor.shape)} has {bad} NaN or infinite "
            "entries; all must be finite."
        )


def _require_variance(name: str, what: str, tensor: Tensor) -> None:
    _require_finite(name, what, tensor)
    bad = int((tensor < 0).sum())
    if bad:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(tensor.shape)} has {bad} negative entries, "
            f"the least {float(tensor.detach().min()):.3g}; pass variances, ≥ 0, not log-variances."
        )


def _require_psd(name: str, what: str, matrix: Tensor) -> None:
    """Symmetric, and no eigenvalue below −10·N·ε·max|A_ij|: a shifted Cholesky decides, O(N³/3)."""
    _require_finite(name, what, matrix)
    if matrix.numel() == 0:
        return
    wide = matrix.detach()
    wide = wide if wide.dtype == torch.float64 else wide.float()
    scale = float(wide.abs().max())
    tolerance = 10 * matrix.shape[0] * torch.finfo(matrix.dtype).eps * scale
    asymmetry = float((wide - wide.mT).abs().max())
    if asymmetry > tolerance:
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(matrix.shape)} is not symmetric, it differs "
            f"from its transpose by up to {asymmetry:.3g}; symmetrise it with (A + Aᵀ)/2."
        )
    if scale == 0:
        return
    shifted = wide + tolerance * torch.eye(len(wide), dtype=wide.dtype, device=wide.device)
    if int(torch.linalg.cholesky_ex(shifted).info):
        least = float(torch.linalg.eigvalsh(wide)[0])
        raise InvalidValue(
            f"posterior of `{name}`: `{what}` of shape {tuple(matrix.shape)} is indefinite, its least "
            f"eigenvalue is {least:.3g}; a covariance must be positive semi-definite."
        )
