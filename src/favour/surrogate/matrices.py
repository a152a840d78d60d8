"""Maps that mix entries by the numbers of a tensor: matrices, contractions, and one matrix for each axis.

Matrix        y_i = Σ_j W_ij x_j over the last axis, one W for all inputs and places
Contraction   einsum with a known tensor, a matrix for each input (and place) where that tensor has a batch
Separable     y = (M₁ ⊗ … ⊗ M_d) x over the last d axes,     (A⊗B)∘(C⊗D) = (A∘C)⊗(B∘D)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from favour.surrogate.linear_map import Factor, LinearMap, Rows, Unavailable, meet

FOLD = "Z"


@dataclass(frozen=True, eq=False)
class Kept:
    """A weight, and what is made of it once and kept until it changes.

    Attributes:
        weight: W.
        make: `make(name, function, costly)` is `function(W)`, kept under the name; see `Context.cached`.
        tf32: Products may round their factors to TF32 (eager code on a GPU).
    """

    weight: Tensor
    make: Callable[[str, Callable[[Tensor], Any], bool], Any]
    tf32: bool = False

    def power(self, n: int) -> Tensor:
        """Wⁿ entry by entry, in the dtype of products."""
        name = {1: "short", 2: "square"}.get(n, f"power{n}")
        return self.make(name, lambda w: w if n == 1 else w.square() if n == 2 else w**n, False)

    def factors(self, q: int, shape: Sequence[int]) -> tuple[Tensor, Tensor]:
        """`low_rank` of W seen in a shape (m, n)."""
        return self.make(f"svd{q}", lambda w: low_rank(w.reshape(shape), q), True)


def passing(weight: Tensor, tf32: bool = False) -> Kept:
    """A weight of which nothing is kept."""
    return Kept(weight, lambda name, function, costly: function(weight), tf32)


@contextmanager
def allow_tf32() -> Iterator[None]:
    """Let float32 matrix products on a GPU round their factors to TF32 for a moment."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _product(d: Tensor, matrix: Tensor, tf32: bool) -> Tensor:
    """d Wᵀ over the last axis, in the dtype of W and converted back."""
    if d.ndim > 2 and d.stride(0) < d.stride(1):  # stored batch first: keep it so
        return _product(d.transpose(0, 1), matrix, tf32).transpose(0, 1)
    if tf32 and not torch.compiler.is_compiling():  # a switch of the process, which cannot be traced
        with allow_tf32():
            return F.linear(d, matrix)
    if d.dtype == matrix.dtype:
        return F.linear(d, matrix)
    # Converted back at once: a compiler folds that into the next element-wise operation.
    return F.linear(d.to(matrix.dtype), matrix).to(d.dtype)


class Matrix(LinearMap):
    """G = Wⁿ, entry by entry, over the last axis."""

    alike = thin = weighted = True

    def __init__(self, kept: Kept, n: int = 1) -> None:
        self.kept, self.n = kept, n
        self.weight = kept.power(n)

    def apply(self, d: Tensor) -> Tensor:
        return _product(d, self.weight, self.kept.tf32)

    def transpose(self, g: Tensor) -> Tensor:
        return _product(g, self.weight.T, self.kept.tf32)

    def square(self, v: Tensor) -> Tensor:
        w = self.weight
        one = self.n == 1 and v.ndim == 2 and v.shape[0] == 1 and v.dtype == w.dtype and v.device.type == "cpu"
        if one and torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            # Compiled code keeps no squares between calls: one pass over W, where W∘W would be written first.
            return (v.unsqueeze(-2) * w.square()).sum(-1)
        return _product(v, self.kept.power(2 * self.n), self.kept.tf32)

    def power(self, n: int) -> LinearMap:
        return Matrix(self.kept, self.n * n)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if not isinstance(other, Matrix):
            return other.hadamard(self) if isinstance(other, LowRankMatrix) else meet(self, other)
        if other.kept is self.kept:
            return Matrix(self.kept, self.n + other.n)
        if self.weight.shape != other.weight.shape:
            return Unavailable("matrices between other tensors")
        product = self.weight * other.weight
        return Matrix(passing(product, self.kept.tf32))

    def diagonal(self) -> Factor | Unavailable:
        m, n = self.weight.shape
        return self.weight.diagonal() if m == n else Unavailable("a matrix that is not square")

    def low_rank(self, q: int) -> LinearMap:
        if q >= min(self.weight.shape) or self.n != 1:
            return self
        return LowRankMatrix(self, *self.kept.factors(q, self.weight.shape))


class LowRankMatrix(LinearMap):
    """G = AB for products, A (m, q) with orthonormal columns in the order of its singular values, B (q, n).

    Squares of entries are those of the whole matrix.
    """

    alike = thin = weighted = True

    def __init__(self, whole: Matrix, left: Tensor, right: Tensor) -> None:
        self.whole, self.left, self.right = whole, left, right

    def apply(self, d: Tensor) -> Tensor:
        tf32 = self.whole.kept.tf32
        return _product(_product(d, self.right, tf32), self.left, tf32)

    def transpose(self, g: Tensor) -> Tensor:
        tf32 = self.whole.kept.tf32
        return _product(_product(g, self.left.T, tf32), self.right.T, tf32)

    def square(self, v: Tensor) -> Tensor:
        return self.whole.square(v)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        return self.whole.hadamard(other.whole if isinstance(other, LowRankMatrix) else other)


def low_rank(weight: Tensor, q: int) -> tuple[Tensor, Tensor]:
    """The best rank-q factors A (m, q), with orthonormal columns, and B (q, n) in Frobenius norm."""
    left, values, right = torch.linalg.svd(weight.float() if weight.dtype.itemsize < 4 else weight, full_matrices=False)
    return left[:, :q].to(weight.dtype), (values[:q, None] * right[:q]).to(weight.dtype)


class Contraction(LinearMap):
    """δ ↦ einsum(f"{ia},{ib}->{io}", δ, y) for a known y; one letter is one axis.

    Every entry has one path: letters of x that the result lacks are summed over, and y holds them all.
    """

    def __init__(self, y: Tensor, ia: str, ib: str, io: str, shape: Sequence[int]) -> None:
        sizes = dict(zip(ib, y.shape, strict=True))
        widened = [c for c, size in zip(ia, shape, strict=True) if size == 1 and sizes.get(c, 1) != 1]
        summed = [c for c in widened if c not in io]
        if summed:  # an entry of x that meets several of y on the way to one result meets their sum
            y = y.sum([ib.index(c) for c in summed], keepdim=True)
            widened = [c for c in widened if c in io]
        self.y, self.ia, self.ib, self.io, self.shape = y, ia, ib, io, tuple(shape)
        self._widened = [ia.index(c) + 1 for c in widened]
        # Every axis of x survives and no axis is added: each entry of x feeds one entry of the result.
        self.one_per_column = set(io) <= set(ia) and not widened
        self.one_per_row = set(ia) <= set(io)
        self.alike = self.thin = ia[:1] not in ib

    def apply(self, d: Tensor) -> Tensor:
        return torch.einsum(f"{FOLD}{self.ia},{self.ib}->{FOLD}{self.io}", d, self.y)

    def transpose(self, g: Tensor) -> Tensor:
        wide = torch.einsum(f"{FOLD}{self.io},{self.ib}->{FOLD}{self.ia}", g, self.y)
        return wide.sum(self._widened, keepdim=True) if self._widened else wide

    def square(self, v: Tensor) -> Tensor:
        return torch.einsum(f"{self.ia},{self.ib}->{self.io}", v, self.y.square())

    def power(self, n: int) -> LinearMap:
        return self._with(self.y**n)

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(other, Contraction) and (self.ia, self.ib, self.io) == (other.ia, other.ib, other.io):
            return self._with(self.y * other.y)
        return meet(self, other)

    def rows(self, take: Rows, like: Tensor) -> LinearMap:
        if self.alike:
            return self
        at = self.ib.index(self.ia[0])
        return self._with(take(self.y.movedim(at, 0)).movedim(0, at))

    def _with(self, y: Tensor) -> Contraction:
        return Contraction(y, self.ia, self.ib, self.io, self.shape)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.ia},{self.ib}->{self.io})"


class Separable(LinearMap):
    """One matrix (rows, columns) for each of the last axes."""

    alike = thin = channelwise = True

    def __init__(self, matrices: Sequence[Tensor]) -> None:
        self.matrices = tuple(matrices)

    def apply(self, d: Tensor) -> Tensor:
        return _along_axes(d, self.matrices)

    def transpose(self, g: Tensor) -> Tensor:
        return _along_axes(g, [m.mT for m in self.matrices])

    def hadamard(self, other: LinearMap) -> LinearMap | Unavailable:
        if isinstance(other, Separable) and len(other.matrices) == len(self.matrices):
            return Separable([a * b for a, b in zip(self.matrices, other.matrices, strict=True)])
        return meet(self, other)


def _along_axes(t: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    for i, matrix in enumerate(matrices):
        dim = i - len(matrices)
        t = (t.transpose(dim, -1) @ matrix.to(t.dtype).mT).transpose(dim, -1)
    return t
