"""Covariances of a matrix by what they do to its sides: `Kronecker`, `Rotated`; see `favour.posterior.gaussians`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from favour.errors import ShapeMismatch
from favour.surrogate.checks import require_finite, require_floating, require_psd, require_variance
from favour.surrogate.gaussian import Blocks, Gaussian, Keep, psd_root
from favour.surrogate.moments import Moments
from favour.surrogate.noise import DenseNoise, LatentNoise, Noise, RotatedNoise


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

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.shape

    def push(self, z: Tensor) -> Tensor:
        return psd_root(self.outputs) @ z @ psd_root(self.inputs).mT

    def pull(self, w: Tensor) -> Tensor:
        return psd_root(self.outputs).mT @ w @ psd_root(self.inputs)

    def held(self, keep: Keep) -> Gaussian:
        return Sided(keep("outputs", self.outputs, psd_root), keep("inputs", self.inputs, psd_root))

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        scale = torch.einsum("pbgit,ij,pbgjt->bgt", a, self.inputs, a)
        return self.outputs.diagonal().reshape(a.shape[2], -1, 1) * scale.unsqueeze(2)

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        a = x.points(mean)
        scale = torch.einsum("pbi,ij,pbj->b", a, self.inputs, a)
        if x.diag is not None:
            scale = scale + x.diag @ self.inputs.diagonal()
        return [DenseNoise(self.outputs.unsqueeze(0), scale, label)]

    def spread(self, diag: Tensor, label: str) -> Noise:
        """(Σ_j A_jj λ_tj)·B."""
        root, scale = psd_root(self.outputs), (diag @ self.inputs.diagonal()).sqrt().unsqueeze(-1)
        variances = torch.nn.functional.linear(diag, self.variance())
        shape = tuple(variances.shape[1:])
        return LatentNoise(lambda z: z @ root.mT * scale, lambda g: g * scale @ root, variances, shape, None, label)

    def variance(self) -> Tensor:
        return torch.outer(self.outputs.diagonal(), self.inputs.diagonal())

    def covariance(self) -> Tensor:
        return torch.kron(self.outputs, self.inputs)  # row-major: the output index varies slowest

    def check_shapes(self, name: str) -> None:
        require_floating(name, self.tensors())
        for what, matrix in self.tensors().items():
            if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
                raise ShapeMismatch(
                    f"posterior of `{name}`: Kronecker got `{what}` of shape {tuple(matrix.shape)}; it needs "
                    f"a square matrix, (n, n) for `inputs` and (m, m) for `outputs`."
                )

    def check_values(self, name: str) -> None:
        require_psd(name, "inputs", self.inputs)
        require_psd(name, "outputs", self.outputs)


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

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return tuple(self.diag.shape)

    def push(self, z: Tensor) -> Tensor:
        return self.outputs @ (z * self.diag.sqrt()) @ self.inputs.mT

    def pull(self, w: Tensor) -> Tensor:
        return self.outputs.mT @ w @ self.inputs * self.diag.sqrt()

    def row_variances(self, a: Tensor, blocks: Blocks) -> Tensor:
        seen = torch.einsum("pbgit,il->pbglt", a, self.inputs).square().sum(0)
        spread = (self.outputs.square() @ self.diag).reshape(a.shape[2], -1, self.diag.shape[1])
        return torch.einsum("gml,bglt->bgmt", spread, seen)

    def noise(self, x: Moments, label: str, *, mean: bool = True) -> list[Noise]:
        second = (x.points(mean) @ self.inputs).square().sum(0)
        if x.diag is not None:
            second = second + x.diag @ self.inputs.square()
        return [RotatedNoise(second @ self.diag.mT, self.outputs, label)]

    def spread(self, diag: Tensor, label: str) -> Noise:
        return RotatedNoise(diag @ self.inputs.square() @ self.diag.mT, self.outputs, label)

    def variance(self) -> Tensor:
        return self.outputs.square() @ self.diag @ self.inputs.square().mT

    def covariance(self) -> Tensor:
        basis = torch.kron(self.outputs, self.inputs)
        return basis * self.diag.flatten() @ basis.mT

    def check_shapes(self, name: str) -> None:
        require_floating(name, self.tensors())
        shapes = [tuple(t.shape) for t in (self.diag, self.inputs, self.outputs)]
        if any(len(s) != 2 for s in shapes) or (shapes[2][1], shapes[1][1]) != shapes[0]:
            raise ShapeMismatch(
                f"posterior of `{name}`: Rotated got `diag`, `inputs` and `outputs` of shapes "
                f"{', '.join(map(str, shapes))}; it needs (k, l), (n, l) and (m, k)."
            )

    def check_values(self, name: str) -> None:
        require_variance(name, "diag", self.diag)
        require_finite(name, "inputs", self.inputs)
        require_finite(name, "outputs", self.outputs)


@dataclass(frozen=True, eq=False, repr=False)
class Sided(Gaussian, saved=False):
    """left z rightᵀ: what `Kronecker` draws, its roots at hand."""

    left: Tensor
    right: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.left.shape[0], self.right.shape[0]

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.left.shape[1], self.right.shape[1]

    def push(self, z: Tensor) -> Tensor:
        return self.left @ z @ self.right.mT

    def pull(self, w: Tensor) -> Tensor:
        return self.left.mT @ w @ self.right
