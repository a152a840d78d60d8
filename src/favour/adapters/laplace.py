"""laplace-torch: a Gaussian at the mode, θ ~ N(θ̂, P⁻¹), with P the curvature of the loss plus a prior precision.

| Hessian structure | precision P                               | here                                              |
|-------------------|-------------------------------------------|---------------------------------------------------|
| `diag`            | diag(p)                                   | `Diagonal(1/p)`                                   |
| `kron`, matrices  | A ⊗ B + δI, A of outputs and B of inputs  | `Rotated`: eigenbases of A and B, 1/(a_i b_j + δ) |
| `kron`, biases    | A + δI                                    | `Full`                                            |
| `lowrank`         | U diag(l) Uᵀ + diag(d)                    | columns of P^−½, shared by all layers             |
| `full`            | any                                       | columns of P^−½; `Full` where it is one layer     |

The first three are exact at any size. The inverse of a low-rank *precision* is a diagonal *minus* a low-rank matrix:
with W = d^−½ U l^½ = A s Bᵀ (a thin SVD),

    P⁻¹ = d^−½ (I − A diag(s²/(1 + s²)) Aᵀ) d^−½ = RRᵀ,     R = d^−½ (I + A diag((1 + s²)^−½ − 1) Aᵀ),

which is no diagonal plus few columns. R has as many columns as there are parameters, P² numbers, so these two are for
small networks and for last layers.

A last-layer Laplace is the same over the parameters of the last layer, a subnetwork Laplace the same over some entries.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from favour.adapters.adapted import COLUMNS, Adapted, dense, names_of, split
from favour.adapters.silence import without_dropout
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.posterior import Full, Gaussian, Posterior, Rotated

_REFIT = "refit with hessian_structure='kron' or 'diag', or subset_of_weights='last_layer'"


def is_laplace(obj: Any) -> bool:
    """Whether `obj` has what laplace-torch's classes have."""
    return not isinstance(obj, nn.Module) and all(
        hasattr(type(obj), name) or name in getattr(obj, "__dict__", ())
        for name in ("fit", "prior_precision", "likelihood", "n_data")
    )


def from_laplace(la: Any, *, columns: int = COLUMNS, keep_dropout: bool = False, linearised: bool = True) -> Adapted:
    """A fitted `laplace.Laplace` as a model and its posterior.

    Args:
        la: Diagonal, Kronecker, low-rank or full; over all weights, a subnetwork or the last layer. Not modified.
        columns: The most parameters that a low-rank or full posterior over several layers may have.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as in all of
            laplace-torch's predictions, which run the network in eval mode.
        linearised: Predict with the network linearised at the mode, laplace-torch's own default (`pred_type="glm"`):
            `favour.compile` then takes `method="linearised"`. With False, or any other method, beliefs are those of
            draws of the weights (`pred_type="nn"`).

    Returns:
        The model it was fitted to (for a last layer laplace-torch's own copy of it; where dropout is silenced a copy
        that shares its tensors) and the posterior, whose means are those of the fit. A belief is about the network's
        output; for a regression's observations add the noise with `predict.with_noise(la.sigma_noise**2)`.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidType: Not a Laplace approximation.
        InvalidValue: Not fitted, or its precision is not positive.
        UnsupportedOperation: A functional Laplace, which has no posterior over weights, or one too large.
    """
    if not is_laplace(la):
        raise InvalidType(f"`la` is a {type(la).__name__}; pass what `laplace.Laplace(model, ...)` returned.")
    kind = type(la).__name__
    if not hasattr(type(la), "posterior_precision"):
        raise UnsupportedOperation(
            f"{kind} is a Gaussian over functions; only posteriors over weights can be propagated. Use "
            "hessian_structure='diag', 'kron', 'lowrank' or 'full'."
        )
    mean = getattr(la, "mean", None)
    if not la.n_data or not isinstance(mean, Tensor) or mean.ndim != 1:
        raise InvalidValue(f"this {kind} is not fitted; call `la.fit(train_loader)` first.")
    extractor = getattr(la.model, "last_layer", None)
    last = isinstance(extractor, nn.Module) and hasattr(la.model, "forward_with_features")
    model = la.model.model if last else la.model
    parameters = list(extractor.parameters()) if isinstance(extractor, nn.Module) and last else list(la.params)
    names = names_of(model, parameters, f"this {kind}")
    shapes = {name: p.shape for name, p in zip(names, parameters, strict=True)}
    model = without_dropout(model, keep_dropout, "laplace-torch")
    means = split(mean, shapes)
    with torch.no_grad():
        precision = la.posterior_precision
        if hasattr(precision, "eigenvectors"):
            return Adapted(model, Posterior(_kronecker(precision, shapes), means=means, linearised=linearised))
        part = la.backend.subnetwork_indices if hasattr(la, "n_params_subnet") else None
        if isinstance(precision, Tensor) and precision.ndim == 1:
            variance = _whole(_inverse(precision).unsqueeze(0), part, len(mean)).squeeze(0)
            return Adapted(model, Posterior(split(variance, shapes), means=means, linearised=linearised))
        count = len(mean) if part is None else len(part)
        if count > columns and len(shapes) > 2:
            raise UnsupportedOperation(
                f"this {kind} couples {count} parameters of {len(shapes)} tensors, which takes {count} columns, "
                f"{count**2 * 4 / 2**30:.1f} GiB; the limit is `columns={columns}`. To go on, {_REFIT}."
            )
        root = _low_rank_root(*precision) if isinstance(precision, tuple) else _full_root(precision)
        root = _whole(root.mT, part, len(mean)).mT.to(mean.dtype)
    return Adapted(model, dense(root, shapes, means, linearised))


def _inverse(precision: Tensor) -> Tensor:
    if not bool((precision > 0).all()):
        raise InvalidValue(
            f"the posterior precision, of shape {tuple(precision.shape)}, has entries that are not positive, the least "
            f"{float(precision.min()):.3g}; give a positive `prior_precision` (see `la.optimize_prior_precision()`)."
        )
    return precision.reciprocal()


def _kronecker(precision: Any, shapes: dict[str, torch.Size]) -> dict[str, Gaussian]:
    """Tensor by tensor from the eigendecomposed factors of the curvature and the prior precisions δ."""
    gaussians: dict[str, Gaussian] = {}
    blocks = zip(shapes.items(), precision.eigenvalues, precision.eigenvectors, precision.deltas, strict=True)
    for (name, shape), values, vectors, delta in blocks:
        values, vectors = [v.detach() for v in values], [v.detach() for v in vectors]
        if len(values) == 1:
            (basis,) = vectors
            gaussians[name] = Full(basis * _inverse(values[0] + delta) @ basis.mT, tuple(shape))
            continue
        damping = delta.sqrt() if precision.damping else torch.zeros_like(delta)
        combined = torch.outer(values[0] + damping, values[1] + damping)
        variances = _inverse(combined if precision.damping else combined + delta)
        gaussians[name] = Rotated(variances, vectors[1].clone(), vectors[0].clone())
    return gaussians


def _low_rank_root(curvature: tuple[Tensor, Tensor], diagonal: Tensor) -> Tensor:
    """R of the module's docstring, (P, P), in double precision."""
    U, values = (t.detach().double() for t in curvature)
    if bool((values < 0).any()):
        raise InvalidValue(
            f"the low-rank curvature has negative eigenvalues, the least {float(values.min()):.3g}; a posterior needs "
            "a positive semi-definite one. Train to a minimum or use a Gauss–Newton backend."
        )
    scale = _inverse(diagonal.detach().double()).sqrt().unsqueeze(1)
    A, s, _ = torch.linalg.svd(scale * U * values.sqrt(), full_matrices=False)
    identity = torch.eye(len(A), dtype=A.dtype, device=A.device)
    return scale * (identity + A * (torch.rsqrt(1 + s.square()) - 1) @ A.mT)


def _full_root(precision: Tensor) -> Tensor:
    """L^−ᵀ, (P, P), for P = LLᵀ, in double precision."""
    L, info = torch.linalg.cholesky_ex(precision.detach().double())
    if int(info):
        raise InvalidValue(
            f"the posterior precision, of shape {tuple(precision.shape)}, is not positive definite; give a larger "
            "`prior_precision` (see `la.optimize_prior_precision()`)."
        )
    identity = torch.eye(len(L), dtype=L.dtype, device=L.device)
    return torch.linalg.solve_triangular(L.mT, identity, upper=True)


def _whole(rows: Tensor, part: Tensor | None, count: int) -> Tensor:
    """Rows (K, size of the subnetwork) over all parameters, zero where a parameter is certain."""
    if part is None:
        return rows
    whole = rows.new_zeros(rows.shape[0], count)
    whole[:, part.to(rows.device)] = rows
    return whole
