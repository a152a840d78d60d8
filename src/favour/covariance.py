"""Covariance structures for a batch of Gaussians.

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

Inverses (λ > 0). With Z = Λ^-½ U and the QR decomposition [Z; I] = [Q₁; Q₂] R, so that RᵀR = I + ZᵀZ,

    Σ⁻¹ = Λ^-½ (I − Q₁Q₁ᵀ) Λ^-½                     Woodbury; Q₁ = Z R⁻¹
    vᵀΣ⁻¹v = ‖w − Q₁c‖² + ‖Q₂c‖²                    w = Λ^-½ v, c = Q₁ᵀw: squares only, never negative
    log det Σ = Σ log λ + 2 Σ log |R_ii|            determinant lemma

[Z; I] has full column rank whatever U is, so QR neither fails nor has an undefined derivative, and its
condition number is the square root of that of I + ZᵀZ. The same with Y = D^-½ Q = Q₁R inverts PDP on the
range of P: (PDP)⁺ = D^-½ (I − Q₁Q₁ᵀ) D^-½ and its pseudo-determinant is det D · det(QᵀD⁻¹Q).

Precision: factorisations run in float64 (float32 on devices without it). Vectors come back in the dtype they
were given in; log-determinants and quadratic forms in at least float32.

Inside compiled or exported code nothing can branch on values: there a zero in λ or D makes solves and roots
infinite or NaN, where eager code falls back to a dense solve for that row or raises `NoDensity`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, register_pytree_node

from favour.errors import InvalidType, InvalidValue, NoDensity, ShapeMismatch

Self = TypeVar("Self", bound="Covariance")


def flatten_event(t: Tensor, lead: int) -> Tensor:
    """Flattens all but the first `lead` dimensions into one; a scalar event becomes length 1."""
    return t.unsqueeze(-1) if t.dim() == lead else t.flatten(lead)


def square_root(v: Tensor) -> Tensor:
    """√v for v ≥ 0, with derivative 0 instead of infinity where v = 0, and 0 where v < 0 by rounding."""
    positive = v > 0
    return torch.where(positive, torch.where(positive, v, 1).sqrt(), 0)


def check_finite(name: str, t: Tensor, nonnegative: bool = False) -> None:
    """Raises `InvalidValue`, naming argument and index, for NaN, infinite or (if asked) negative entries."""
    bad = ~torch.isfinite(t)
    if nonnegative:
        bad |= t < 0
    if bad.any():
        index = tuple(bad.nonzero()[0].tolist())
        need = "finite and ≥ 0" if nonnegative else "finite"
        raise InvalidValue(
            f"`{name}` {tuple(t.shape)} holds {t[index].item()} at index {index} ({int(bad.sum())} bad in "
            f"all); it must be {need}."
        )


def _work(t: Tensor) -> Tensor:
    return t.to(torch.float32 if t.device.type == "mps" else torch.float64)


def _refuse(singular: Tensor) -> NoReturn:
    rows = singular.nonzero().flatten().tolist()
    raise NoDensity(
        f"{len(rows)} of {singular.shape[0]} covariances in the batch are singular to rounding (rows "
        f"{rows[:5]}{', …' if len(rows) > 5 else ''}), so there is no density, inverse or log-determinant. "
        "Add independent noise with `belief.with_noise(variance)`, or use sample(), variance and "
        "covariance_matrix, which need none."
    )


# ------------------------------------------------------------ factorised inverses


class _Precision(ABC):
    """Σ⁻¹, factorised once. Vectors are (B, F, n) in the working dtype."""

    log_determinant: Tensor  # (B,), of Σ

    @abstractmethod
    def solve(self, v: Tensor) -> Tensor: ...  # (B, F, n)

    @abstractmethod
    def quadratic(self, v: Tensor) -> Tensor: ...  # (B, F)


class _Cholesky(_Precision):
    """Σ = S L Lᵀ S with S = diag(σ) and L the Cholesky factor of the correlations, hence free of scale."""

    def __init__(self, matrix: Tensor, eps: float):
        self.scale, correlation = _correlation(_work(matrix))
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


class _Woodbury(_Precision):
    """(Λ + UUᵀ)⁻¹, see the module docstring. O(n r² + r³)."""

    def __init__(self, lam: Tensor, u: Tensor):  # (B, n), (B, n, r)
        self.whitener = lam.rsqrt().unsqueeze(-2)
        q, r = _stacked_qr(u * self.whitener.mT)
        self.top, self.bottom = q[..., : lam.shape[-1], :], q[..., lam.shape[-1] :, :]
        self.log_determinant = lam.log().sum(-1) + 2 * r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)

    def solve(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT) * self.whitener

    def quadratic(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        c = w @ self.top
        return (w - c @ self.top.mT).square().sum(-1) + (c @ self.bottom.mT).square().sum(-1)


class _Complement(_Precision):
    """(QCQᵀ + PDP)⁻¹ = QC⁻¹Qᵀ + (PDP)⁺, see the module docstring. O(n k² + k³)."""

    def __init__(self, d: Tensor, q: Tensor, core: _Cholesky):  # (B, n), (B, n, k)
        self.whitener, self.basis, self.core = d.rsqrt().unsqueeze(-2), q, core
        self.top, r = torch.linalg.qr(q * self.whitener.mT)
        rest = d.log().sum(-1) + 2 * r.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1)
        self.log_determinant = core.log_determinant + rest

    def solve(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT) * self.whitener + self.core.solve(
            v @ self.basis
        ) @ self.basis.mT

    def quadratic(self, v: Tensor) -> Tensor:
        w = v * self.whitener
        return (w - (w @ self.top) @ self.top.mT).square().sum(-1) + self.core.quadratic(v @ self.basis)


class _ByRows(_Precision):
    """Different factorisations for different batch rows."""

    def __init__(self, batch: int, parts: Sequence[tuple[Tensor, _Precision]]):
        self.parts = parts
        self.log_determinant = _scatter([(i, p.log_determinant) for i, p in parts], batch)

    def solve(self, v: Tensor) -> Tensor:
        return _scatter([(i, p.solve(v[i])) for i, p in self.parts], v.shape[0])

    def quadratic(self, v: Tensor) -> Tensor:
        return _scatter([(i, p.quadratic(v[i])) for i, p in self.parts], v.shape[0])


def _scatter(parts: Sequence[tuple[Tensor, Tensor]], batch: int) -> Tensor:
    out = parts[0][1].new_zeros(batch, *parts[0][1].shape[1:])
    for rows, values in parts:
        out = out.index_copy(0, rows, values)
    return out


def _per_row(c: Tensor, dims: int) -> Tensor:
    return c.reshape(-1, *[1] * (dims - 1)) if c.dim() else c


def _correlation(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """σ and S⁻¹ΣS⁻¹ with unit diagonal, also where σ = 0: multiplying by σ again gives 0 there."""
    scale = square_root(matrix.diagonal(dim1=-2, dim2=-1))
    inverse = torch.where(scale > 0, 1 / torch.where(scale > 0, scale, 1), 0)
    correlation = matrix * inverse.unsqueeze(-1) * inverse.unsqueeze(-2)
    return scale, correlation + torch.diag_embed((scale <= 0).to(matrix.dtype))


def _root(matrix: Tensor) -> Tensor:
    """A root S of a PSD matrix (B, n, n), SSᵀ = Σ, singular ones included; in the working dtype.

    Cholesky of the correlations, shrunk towards I by n·eps: rounding moves eigenvalues by less than that,
    so the factorisation exists, and marginal variances stay exact. Rows that are indefinite beyond rounding
    get (eager code) the eigenvalue root with negative eigenvalues cut off.
    """
    shrink = matrix.shape[-1] * torch.finfo(matrix.dtype).eps
    scale, correlation = _correlation(_work(matrix))
    eye = torch.eye(matrix.shape[-1], dtype=correlation.dtype, device=matrix.device)
    tril, info = torch.linalg.cholesky_ex((correlation + shrink * eye) / (1 + shrink))
    root = scale.unsqueeze(-1) * tril
    if not torch.compiler.is_compiling() and (info != 0).any():
        rows = info.nonzero().flatten()
        root = root.index_copy(0, rows, _symmetric_root(_work(matrix[rows])))
    return root


def _symmetric_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return (vectors * square_root(values).unsqueeze(-2)) @ vectors.mT


def _stacked_qr(z: Tensor) -> tuple[Tensor, Tensor]:
    """QR of [Z; I]; z is (B, n, r)."""
    eye = torch.eye(z.shape[-1], dtype=z.dtype, device=z.device).expand(z.shape[0], -1, -1)
    q, r = torch.linalg.qr(torch.cat([z, eye], dim=-2))
    return q, r


# ------------------------------------------------------------ structures


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
    def _matmul(self, v: Tensor) -> Tensor: ...  # here and below vectors are (B, F, n)

    @abstractmethod
    def _gram(self, g: Tensor) -> Tensor: ...

    @abstractmethod
    def _from_noise(self, eps: Tensor) -> Tensor: ...

    @abstractmethod
    def _root_matmul(self, v: Tensor) -> Tensor: ...

    @abstractmethod
    def _precision(self) -> tuple[_Precision, Tensor]: ...  # with a mask of singular rows

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

    def _map(self: Self, f: Callable[[Tensor, int], Tensor]) -> Self:
        new = object.__new__(type(self))
        for name, axis in self._axes.items():
            setattr(new, name, f(getattr(self, name), axis))
        return new

    def __getitem__(self: Self, rows: slice | Tensor) -> Self:
        """Selects batch rows with a slice, an index tensor or a mask; the batch dimension stays."""
        return self._map(lambda t, axis: t[(slice(None),) * axis + (rows,)])

    def to(self: Self, *args: Any, **kwargs: Any) -> Self:
        """`torch.Tensor.to` on every tensor."""
        return self._map(lambda t, _: t.to(*args, **kwargs))

    def detach(self: Self) -> Self:
        """Detaches every tensor from the autograd graph."""
        return self._map(lambda t, _: t.detach())

    def _fold(self, v: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and v.shape[1:] != (self.batch_size, *self.event_shape):
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
        if not torch.compiler.is_compiling():
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
        root = _symmetric_root(_work(self.dense()))
        return self._unfold(_work(self._fold(v)) @ root, v.dtype)

    def as_diagonal_plus_factor(self) -> DiagonalPlusFactor:
        """The same Σ as 0 + UUᵀ, U the n columns of the root S: n × n numbers per row."""
        n = flatten_event(self.diagonal(), 1).shape[-1]
        eye = torch.eye(n, dtype=self.dtype, device=self.device).expand(self.batch_size, -1, -1)
        factor = self._unfold(self._root_matmul(eye), self.dtype)
        return DiagonalPlusFactor(torch.zeros_like(self.diagonal()), factor)

    def precision(self) -> _Precision:
        """Factorises Σ once for several solves. Raises `NoDensity` (eager code) where a row is singular."""
        precision, singular = self._precision()
        if not torch.compiler.is_compiling() and singular.any():
            _refuse(singular)
        return precision

    @property
    def _scalar_dtype(self) -> torch.dtype:
        return torch.promote_types(self.dtype, torch.float32)

    def solve(self, v: Tensor) -> Tensor:
        """Σ⁻¹v for v of shape (F, B, *event)."""
        folded = _work(self._fold(v))
        return self._unfold(self.precision().solve(folded), v.dtype)

    def logdet(self) -> Tensor:
        """log det Σ, (B,)."""
        return self.precision().log_determinant.to(self._scalar_dtype)

    def density_terms(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """vᵀΣ⁻¹v, (F, B), and log det Σ, (B,), from one factorisation; v is (F, B, *event)."""
        folded = _work(self._fold(v))
        precision = self.precision()
        quadratic = precision.quadratic(folded).transpose(0, 1)
        return quadratic.to(self._scalar_dtype), precision.log_determinant.to(self._scalar_dtype)


class _Structured(Covariance):
    """A diagonal `diag` and k vectors stored vector axis first; what its two subclasses share."""

    diag: Tensor

    @property
    @abstractmethod
    def _vectors(self) -> Tensor: ...  # (k, B, *event)

    @abstractmethod
    def _structured_root_matmul(self, v: Tensor) -> Tensor: ...  # for λ > 0, in the working dtype

    @abstractmethod
    def _structured_precision(self) -> tuple[_Precision, Tensor]: ...

    @property
    def event_shape(self) -> torch.Size:
        return self.diag.shape[1:]

    @property
    def rank(self) -> int:
        return self._vectors.shape[0]

    @property
    def noise_size(self) -> int:
        return self._lam.shape[-1] + self.rank

    @property
    def _lam(self) -> Tensor:
        return flatten_event(self.diag, 1)  # (B, n)

    @property
    def _u(self) -> Tensor:
        return flatten_event(self._vectors, 2).permute(1, 2, 0)  # (B, n, k)

    def _split(self) -> list[tuple[Tensor, Covariance]] | None:
        """Rows with all λ > 0 as they are, the others dense; None if there are no others (or compiling)."""
        if torch.compiler.is_compiling():
            return None
        zero = (self._lam <= 0).any(-1)
        if not zero.any():
            return None
        rows, dense_rows = (~zero).nonzero().flatten(), zero.nonzero().flatten()
        wide = self[dense_rows]._map(lambda t, _: _work(t))
        return [(rows, self[rows]), (dense_rows, Dense(wide.dense(), self.event_shape))]

    def _root_matmul(self, v: Tensor) -> Tensor:
        if (parts := self._split()) is not None:
            return _scatter([(i, part._root_matmul(v[i])) for i, part in parts], v.shape[0])
        return self._structured_root_matmul(_work(v))

    def _precision(self) -> tuple[_Precision, Tensor]:
        if not torch.compiler.is_compiling():
            # k vectors repair at most k zeros; found out before anything of size n × n exists
            hopeless = (self._lam <= 0).sum(-1) > self.rank
            if hopeless.any():
                _refuse(hopeless)
        if (parts := self._split()) is None:
            return self._structured_precision()
        done = [(rows, *part._precision()) for rows, part in parts]
        singular = _scatter([(rows, s) for rows, _, s in done], self.batch_size)
        return _ByRows(self.batch_size, [(rows, p) for rows, p, _ in done]), singular


class DiagonalPlusFactor(_Structured):
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
        if not torch.compiler.is_compiling():
            check_batched("diag", diag)
            _check_like("factor", factor, diag)
        self.diag, self.factor = diag, factor

    @property
    def _vectors(self) -> Tensor:
        return self.factor

    def diagonal(self) -> Tensor:
        return self.diag + self.factor.square().sum(0)

    def dense(self) -> Tensor:
        return torch.diag_embed(self._lam) + self._u @ self._u.mT

    def _matmul(self, v: Tensor) -> Tensor:
        return v * self._lam.unsqueeze(-2) + (v @ self._u) @ self._u.mT

    def _gram(self, g: Tensor) -> Tensor:
        a = g @ self._u
        return (g * self._lam.unsqueeze(-2)) @ g.mT + a @ a.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        n = self._lam.shape[-1]
        return square_root(self._lam).unsqueeze(-2) * eps[..., :n] + eps[..., n:] @ self._u.mT  # Λ^½ x + U y

    def _root_matmul(self, v: Tensor) -> Tensor:
        if self.rank == 0:
            return v * square_root(self._lam).unsqueeze(-2)
        return super()._root_matmul(v)

    def _structured_root_matmul(self, v: Tensor) -> Tensor:
        """S = Λ^½ (I + Z (I + K)⁻¹ Zᵀ), K lower triangular with KKᵀ = I + ZᵀZ. O(n r² + r³).

        SSᵀ = Σ because M = (I + K)⁻¹ solves M + Mᵀ + M ZᵀZ Mᵀ = I. Unlike the eigenvalue root of I + ZᵀZ it
        has a derivative also where eigenvalues coincide (two zero columns, say).
        """
        lam = _work(self._lam)
        z = _work(self._u) * lam.rsqrt().unsqueeze(-1)
        r = _stacked_qr(z)[1]
        k = (r * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-1)).mT
        eye = torch.eye(self.rank, dtype=z.dtype, device=z.device)
        middle = torch.linalg.solve_triangular(k + eye, (v @ z).mT, upper=False).mT
        return (v + middle @ z.mT) * lam.sqrt().unsqueeze(-2)

    def sqrt_matmul(self, v: Tensor) -> Tensor:
        """Σ^½ v with the symmetric PSD square root: O(n) for rank 0, else O(n³) by eigendecomposition."""
        return self.root_matmul(v) if self.rank == 0 else super().sqrt_matmul(v)

    def _structured_precision(self) -> tuple[_Precision, Tensor]:
        lam = _work(self._lam)
        return _Woodbury(lam, _work(self._u)), torch.zeros(lam.shape[0], dtype=torch.bool, device=lam.device)

    def _scale(self, c: Tensor) -> DiagonalPlusFactor:
        rows = _per_row(c, self.diag.dim())
        return DiagonalPlusFactor(self.diag * rows, self.factor * square_root(rows))

    def add_diagonal(self, variance: float | Tensor) -> DiagonalPlusFactor:
        added = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        return DiagonalPlusFactor(self.diag + added, self.factor)

    def check_values(self) -> None:
        check_finite("diag", self.diag, nonnegative=True)
        check_finite("factor", self.factor)


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
        if not torch.compiler.is_compiling():
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

    def _matmul(self, v: Tensor) -> Tensor:
        return v @ self.matrix.mT

    def _gram(self, g: Tensor) -> Tensor:
        return g @ self.matrix @ g.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        return eps @ _root(self.matrix).to(eps.dtype).mT

    def _root_matmul(self, v: Tensor) -> Tensor:
        return _work(v) @ _root(self.matrix).mT

    def cholesky(self) -> Tensor:
        """Lower triangular L with LLᵀ = Σ, (B, n, n). Raises `NoDensity` (eager code) where Σ is singular."""
        precision = self.precision()
        assert isinstance(precision, _Cholesky)
        return (precision.scale.unsqueeze(-1) * precision.tril).to(self._scalar_dtype)

    def _precision(self) -> tuple[_Precision, Tensor]:
        precision = _Cholesky(self.matrix, torch.finfo(self.dtype).eps)
        return precision, precision.singular

    def _scale(self, c: Tensor) -> Dense:
        return Dense(self.matrix * _per_row(c, 3), self.event_shape)

    def add_diagonal(self, variance: float | Tensor) -> Dense:
        added = torch.as_tensor(variance, dtype=self.dtype, device=self.device)
        added = flatten_event(added.expand(self.batch_size, *self.event_shape), 1)
        return Dense(self.matrix + torch.diag_embed(added), self.event_shape)

    def check_values(self) -> None:
        check_finite("covariance", self.matrix)
        check_finite("the diagonal of covariance", self.diagonal(), nonnegative=True)
        scale, correlation = _correlation(_work(self.matrix))
        gap = (
            (correlation - correlation.mT).abs().flatten(1).amax(-1)
            if correlation.numel()
            else scale.new_zeros(0)
        )
        if (gap > 10 * torch.finfo(self.dtype).eps ** 0.5).any():
            row = int(gap.argmax())
            raise InvalidValue(
                f"`covariance` {tuple(self.matrix.shape)} is not symmetric at batch index {row} (entries "
                f"differ by {float(gap[row]):.2g}). Pass `(S + S.mT) / 2`."
            )


class Directional(_Structured):
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
        if not torch.compiler.is_compiling():
            check_batched("diag", diag)
            _check_like("basis", basis, diag)
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
    def _lam(self) -> Tensor:
        d = flatten_event(self.diag, 1)
        return torch.ones_like(d) if self.rank == d.shape[-1] else d  # k = n: P = 0 and any d > 0 will do

    def _project(self, v: Tensor) -> Tensor:
        return v - (v @ self._u) @ self._u.mT

    def diagonal(self) -> Tensor:
        # (PDP)_ii = d_i (1 − 2h_i) + q_iᵀ(QᵀDQ)q_i with h_i = ‖q_i‖², q_i the i-th row of Q
        q, d = self._u, self._lam
        middle = self.core + (q * d.unsqueeze(-1)).mT @ q
        out = d * (1 - 2 * q.square().sum(-1)) + ((q @ middle) * q).sum(-1)
        if self.rank == d.shape[-1]:
            out = ((q @ self.core) * q).sum(-1)
        return out.clamp(min=0).reshape(self.diag.shape)

    def dense(self) -> Tensor:
        eye = torch.eye(self._lam.shape[-1], dtype=self.dtype, device=self.device)
        return self._gram(eye.expand(self.batch_size, -1, -1))

    def _matmul(self, v: Tensor) -> Tensor:
        rest = self._project(self._project(v) * self._lam.unsqueeze(-2))
        return (v @ self._u) @ self.core.mT @ self._u.mT + rest

    def _gram(self, g: Tensor) -> Tensor:
        a, p = g @ self._u, self._project(g)
        return a @ self.core @ a.mT + (p * self._lam.unsqueeze(-2)) @ p.mT

    def _from_noise(self, eps: Tensor) -> Tensor:
        n = self._lam.shape[-1]
        along = eps[..., n:] @ _root(self.core).to(eps.dtype).mT
        return self._project(square_root(self._lam).unsqueeze(-2) * eps[..., :n]) + along @ self._u.mT

    def _structured_root_matmul(self, v: Tensor) -> Tensor:
        """S = PD^½ + Q C^½ Q₁ᵀ with D^-½Q = Q₁R; the cross terms vanish as PD^½Q₁ = PQR⁻¹ = 0. O(n k²)."""
        wide = self._map(lambda t, _: _work(t))
        top, _ = torch.linalg.qr(wide._u * wide._lam.rsqrt().unsqueeze(-1))
        along = v @ top @ _root(self.core).mT @ wide._u.mT
        return wide._project(v * wide._lam.sqrt().unsqueeze(-2)) + along

    def _structured_precision(self) -> tuple[_Precision, Tensor]:
        core = _Cholesky(self.core, torch.finfo(self.dtype).eps)
        return _Complement(_work(self._lam), _work(self._u), core), core.singular

    def _scale(self, c: Tensor) -> Directional:
        return Directional(self.diag * _per_row(c, self.diag.dim()), self.basis, self.core * _per_row(c, 3))

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
        q = _work(self._u)
        gap = (q.mT @ q - torch.eye(self.rank, dtype=q.dtype, device=q.device)).abs()
        if (gap > torch.finfo(self.dtype).eps ** 0.5).any():
            raise InvalidValue(
                f"`basis` {tuple(self.basis.shape)} is not orthonormal (QᵀQ is off by "
                f"{float(gap.max()):.2g}). Orthonormalise the directions with torch.linalg.qr."
            )


def check_batched(name: str, t: Tensor) -> None:
    if not isinstance(t, Tensor) or not t.dtype.is_floating_point:
        raise InvalidType(
            f"`{name}` must be a floating-point tensor, got {getattr(t, 'dtype', type(t).__name__)}."
        )
    if t.dim() == 0:
        raise ShapeMismatch(f"`{name}` has no batch dimension; use `{name}.unsqueeze(0)`.")


def _check_like(name: str, t: Tensor, like: Tensor) -> None:
    check_batched(name, t)
    if t.shape[1:] != like.shape:
        need = ", ".join(map(str, ("rank", *like.shape)))
        raise ShapeMismatch(
            f"`{name}` has shape {tuple(t.shape)}; with `diag` {tuple(like.shape)} it must be ({need}), the "
            "rank axis first."
        )
    if t.dtype != like.dtype or t.device != like.device:
        raise InvalidType(
            f"`{name}` is {t.dtype} on {t.device} but `diag` {like.dtype} on {like.device}; they must agree."
        )


def _register(cls: type[Covariance]) -> None:
    def unflatten(leaves: Any, _: Any) -> Covariance:
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


for _cls in (DiagonalPlusFactor, Dense, Directional):
    _register(_cls)
