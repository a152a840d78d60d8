"""Covariances of weights that can be trained: unconstrained parameters, and the Gaussians they stand for.

    Diagonal    e^{2ρ}
    Rows        e^{2ρ} + F_iᵀF_i
    Kronecker   two matrices LLᵀ, L = diag(e^ρ)(I + R), R strictly lower triangular
    Rotated     e^{2ρ} in fixed bases
    Full        LLᵀ
    latents     factors (K, *shape) of the part that all layers share

Factors are parameters times the size they begin with, so that one step size serves all.

`of(gaussian)` begins at a Gaussian, so a fit can begin at any posterior (a Laplace approximation's, say).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from favour.errors import InvalidType, InvalidValue
from favour.posterior import Diagonal, Full, Gaussian, Kronecker, Posterior, Rotated, Rows
from favour.posterior.posterior import Key


class Spread(nn.Module):
    """Unconstrained parameters of one Gaussian."""

    def gaussian(self) -> Gaussian:
        """The Gaussian, differentiable in the parameters."""
        raise NotImplementedError


class _Diagonal(Spread):
    def __init__(self, start: Diagonal) -> None:
        super().__init__()
        self.log_std = _log_std(start.diag)

    def gaussian(self) -> Gaussian:
        return Diagonal((2 * self.log_std).exp())


class _Rows(Spread):
    def __init__(self, start: Rows) -> None:
        super().__init__()
        self.log_std = _log_std(start.diag)
        self.factor = _Scaled(start.factor, float(start.diag.mean().sqrt()))

    def gaussian(self) -> Gaussian:
        return Rows((2 * self.log_std).exp(), self.factor())


class _Kronecker(Spread):
    def __init__(self, start: Kronecker) -> None:
        super().__init__()
        self.inputs, self.outputs = _Triangle(start.inputs), _Triangle(start.outputs)

    def gaussian(self) -> Gaussian:
        return Kronecker(self.inputs(), self.outputs())


class _Rotated(Spread):
    inputs: Tensor
    outputs: Tensor

    def __init__(self, start: Rotated) -> None:
        super().__init__()
        self.log_std = _log_std(start.diag)
        self.register_buffer("inputs", start.inputs.detach().clone())
        self.register_buffer("outputs", start.outputs.detach().clone())

    def gaussian(self) -> Gaussian:
        return Rotated((2 * self.log_std).exp(), self.inputs, self.outputs)


class _Full(Spread):
    def __init__(self, start: Full) -> None:
        super().__init__()
        self.shape, self.matrix = start.shape, _Triangle(start.matrix)

    def gaussian(self) -> Gaussian:
        return Full(self.matrix(), self.shape)


class _Triangle(nn.Module):
    """A positive definite matrix LLᵀ."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__()
        tril, info = torch.linalg.cholesky_ex(matrix.detach())
        if bool(info):
            raise InvalidValue(
                f"a covariance of shape {tuple(matrix.shape)} is singular; what is learned begins above that."
            )
        self.log_diag = nn.Parameter(tril.diagonal().log())
        self.lower = nn.Parameter((tril / tril.diagonal().unsqueeze(1)).tril(-1))

    def forward(self) -> Tensor:
        eye = torch.eye(len(self.lower), dtype=self.lower.dtype, device=self.lower.device)
        tril = self.log_diag.exp().unsqueeze(1) * (eye + self.lower.tril(-1))
        return tril @ tril.mT


class _Scaled(nn.Module):
    """A factor as a parameter times a fixed size."""

    size: Tensor

    def __init__(self, start: Tensor, least: float) -> None:
        super().__init__()
        start = start.detach()
        size = max(float(start.square().mean().sqrt()) if start.numel() else 0.0, least)
        self.register_buffer("size", torch.tensor(size or 1.0, dtype=start.dtype, device=start.device))
        self.raw = nn.Parameter(start / self.size)

    def forward(self) -> Tensor:
        return self.size * self.raw


SPREADS: dict[type[Gaussian], Callable[..., Spread]] = {
    Diagonal: _Diagonal,
    Rows: _Rows,
    Kronecker: _Kronecker,
    Rotated: _Rotated,
    Full: _Full,
}


def of(gaussian: Gaussian) -> Spread:
    """Parameters that begin at a Gaussian.

    >>> of(Diagonal(torch.full((2,), 0.25))).gaussian().variance()
    tensor([0.2500, 0.2500], grad_fn=<ExpBackward0>)
    """
    if type(gaussian) not in SPREADS:
        kinds = ", ".join(kind.__name__ for kind in SPREADS)
        raise InvalidType(f"variances of a {type(gaussian).__name__} cannot be learned; those of {kinds} can.")
    return SPREADS[type(gaussian)](gaussian)


class Spreads(nn.Module):
    """A posterior's covariance as parameters.

    Args:
        start: Where to begin.
    """

    def __init__(self, start: Posterior) -> None:
        super().__init__()
        self._keys = list(start.gaussians)
        self._shared = list(start.latents)
        self.parts = nn.ModuleList(of(gaussian) for gaussian in start.gaussians.values())
        self.latents = nn.ModuleList(_Scaled(factor, 0.0) for factor in start.latents.values())

    def posterior(self) -> Posterior:
        """What the parameters stand for now."""
        gaussians: dict[Key, Gaussian] = {}
        for key, part in zip(self._keys, self.parts, strict=True):
            assert isinstance(part, Spread)
            gaussians[key] = part.gaussian()
        return Posterior(gaussians, latents={n: f() for n, f in zip(self._shared, self.latents, strict=True)})


def _log_std(variance: Tensor) -> nn.Parameter:
    if not bool((variance > 0).all()):
        raise InvalidValue(
            f"a variance tensor of shape {tuple(variance.shape)} holds zeros; variances that are learned begin above 0."
        )
    return nn.Parameter(0.5 * variance.detach().log())


# ---- where to begin


def start(
    kind: str, layers: Mapping[str, nn.Module], stds: Mapping[str, float], rank: int, generator: torch.Generator
) -> Posterior:
    """The posterior that a fit begins at.

    Args:
        kind: `"mean_field"`, `"rows"`, `"low_rank"` or `"last_layer"`.
        layers: Linear and convolutional layers by path, in the order they run.
        stds: Standard deviation of each layer's weights to begin with.
        rank: r of `"rows"`, K of `"low_rank"`.
        generator: For factors, which are stationary at zero.
    """
    if kind == "last_layer":
        path, layer = list(layers.items())[-1]
        return _kronecker(path, layer, stds[path])
    gaussians: dict[Key, Gaussian] = {}
    latents: dict[str, Tensor] = {}
    for path, layer in layers.items():
        prefix, std = f"{path}." if path else "", stds[path]
        for name in ("weight", "bias"):
            parameter = getattr(layer, name)
            if parameter is None:
                continue
            like = parameter.detach()
            if kind == "mean_field" or (kind == "rows" and name == "bias"):
                gaussians[prefix + name] = Diagonal(torch.full_like(like, std**2))
                continue
            noise = torch.randn((rank, *like.shape), generator=generator, dtype=like.dtype).to(like.device)
            factor = std * math.sqrt(0.5 / max(rank, 1)) * noise
            half = Diagonal(torch.full_like(like, 0.5 * std**2))
            if kind == "rows":
                gaussians[prefix + name] = Rows(half.diag, factor)
            else:
                gaussians[prefix + name] = half
                latents[prefix + name] = factor
    return Posterior(gaussians, latents=latents)


def _kronecker(path: str, layer: nn.Module, std: float) -> Posterior:
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    m, n = weight.shape[0], weight[0].numel() + (bias is not None)
    eye = torch.eye(max(m, n), dtype=weight.dtype, device=weight.device)
    gaussian = Kronecker(std * eye[:n, :n], std * eye[:m, :m])
    prefix = f"{path}." if path else ""
    key: Key = f"{prefix}weight" if bias is None else (f"{prefix}weight", f"{prefix}bias")
    return Posterior({key: gaussian})
