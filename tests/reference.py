"""Slow, obvious references in numpy and scipy. Never imports favour.

Everything is about one input at a time (no batch axis), in float64:

    dense_matrix      the matrix of an affine operation, from basis vectors
    gaussian_moments  integrals of a scalar function against a Gaussian
    weight_covariance the covariance of a weight matrix, entry by entry, for each kind of posterior
    linear            mean and covariance of Wx + b, the paper's equation (1) in loops
    dropout           mean and covariance of D∘x by total variance
    network           layer after layer of the two, and of affine maps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from scipy import special, stats
from torch import Tensor

Array = np.ndarray


def dense_matrix(op: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """G with op(at + δ) = op(at) + Gδ for an affine op: (outputs, inputs), both flattened."""
    base = op(at)
    columns = []
    for j in range(at.numel()):
        step = torch.zeros_like(at)
        step.view(-1)[j] = 1
        columns.append((op(at + step) - base).reshape(-1))
    return torch.stack(columns, 1) if columns else base.new_zeros(base.numel(), 0)


def gaussian_moments(
    f: Callable[[Array], Array], mean: float, variance: float, kinks: Sequence[float] = ()
) -> tuple[float, float, float]:
    """E[f(x)], Var f(x) and Cov(f(x), x)/variance for x ~ N(mean, variance), by Gauss–Legendre quadrature.

    Pieces of half a standard deviation out to 14 of them, cut where f is not smooth.
    """
    sigma = float(np.sqrt(variance))
    edges = mean + sigma * np.linspace(-14, 14, 57)
    edges = np.unique(np.concatenate([edges, [k for k in kinks if edges[0] < k < edges[-1]]]))
    nodes, weights = special.roots_legendre(16)
    half, middle = np.diff(edges) / 2, (edges[1:] + edges[:-1]) / 2
    x = (middle[:, None] + half[:, None] * nodes).ravel()
    w = (half[:, None] * weights).ravel() * stats.norm(mean, sigma).pdf(x)
    y = f(x)
    first = np.sum(w * y)
    centred = y - first
    return first, np.sum(w * centred**2), np.sum(w * centred * (x - mean)) / variance


def weight_covariance(kind: str, tensors: dict[str, Array]) -> Array:
    """Cov(W_ij, W_kl) as a matrix over row-major entries (i, j), (k, l), from the kind's definition."""
    m, n = (len(tensors["outputs"]), len(tensors["inputs"])) if kind == "kronecker" else tensors["diag"].shape[:2]
    if kind == "full":
        return np.asarray(tensors["matrix"])
    covariance = np.zeros((m * n, m * n))
    for i in range(m):
        for j in range(n):
            for k in range(m):
                for l in range(n):  # noqa: E741  (the indices of equation 1)
                    if kind == "kronecker":
                        entry = tensors["outputs"][i, k] * tensors["inputs"][j, l]
                    else:
                        entry = tensors["diag"][i, j] if (i, j) == (k, l) else 0.0
                        if kind == "rows" and i == k:
                            entry += sum(f[i, j] * f[i, l] for f in tensors["factor"])
                    covariance[i * n + j, k * n + l] = entry
    return covariance


def linear(
    mean: Array,
    covariance: Array,
    weight: Array,
    bias: Array | None = None,
    weight_covariance: Array | None = None,
    bias_covariance: Array | None = None,
    joint: bool = False,
) -> tuple[Array, Array]:
    """Mean and covariance of y_t = W x_t + b over positions t, for random x, W and b, x independent of both.

        Cov(y_ti, y_sk) = Σ_jl W_ij W_kl Cov(x_tj, x_sl) + Σ_jl Cov(W_ij, W_kl) E[x_tj x_sl] + Cov(b_i, b_k)

    Args:
        mean: (T, n), or (n,) for one position.
        covariance: (T·n, T·n), positions slowest.
        weight: (m, n).
        bias: (m,).
        weight_covariance: (m·n, m·n), rows slowest; with `joint`, of [W | b], (m(n + 1), m(n + 1)).
        bias_covariance: (m, m).
        joint: The bias is the last column of the random matrix: a weight on a constant 1.

    Returns:
        (T, m) and (T·m, T·m), or (m,) and (m, m).
    """
    flat = mean.ndim == 1
    x = mean.reshape(-1, mean.shape[-1])
    W, b = weight, np.zeros(len(weight)) if bias is None else bias
    T, n, m = len(x), x.shape[1], len(W)
    y = np.stack([W @ x[t] + b for t in range(T)])
    block = np.kron(np.eye(T), W)
    result = block @ covariance @ block.T
    known = n + 1 if joint else n

    def second(t: int, j: int, s: int, l: int) -> float:  # noqa: E741
        """E[x_tj x_sl], where entry n is the constant 1."""
        a, c = (1.0 if i == n else x[p, i] for p, i in ((t, j), (s, l)))
        return a * c + (covariance[t * n + j, s * n + l] if j < n and l < n else 0.0)

    for t in range(T):
        for s in range(T):
            moments = np.array([[second(t, j, s, l) for l in range(known)] for j in range(known)])  # noqa: E741
            for i in range(m):
                for k in range(m):
                    if weight_covariance is not None:
                        rows = slice(i * known, (i + 1) * known), slice(k * known, (k + 1) * known)
                        result[t * m + i, s * m + k] += np.sum(weight_covariance[rows] * moments)
                    if bias_covariance is not None:
                        result[t * m + i, s * m + k] += bias_covariance[i, k]
    return (y[0] if flat else y), result


def dropout(mean: Array, covariance: Array, p: Array | float) -> tuple[Array, Array]:
    """x_i D_i with D_i = 0 or 1/q_i: Var[x_i D_i] = E[x_i²] E[D_i²] − E[x_i]², covariances unchanged."""
    rates = np.broadcast_to(p, mean.shape)
    result = covariance.copy()
    for i in range(len(mean)):
        q = 1 - rates[i]
        result[i, i] = (covariance[i, i] + mean[i] ** 2) / q - mean[i] ** 2  # E[D²] = 1/q
    return mean, result


def affine(mean: Array, covariance: Array, scale: Array, shift: Array) -> tuple[Array, Array]:
    """scale∘x + shift."""
    return scale * mean + shift, scale[:, None] * covariance * scale[None, :]


def network(layers: Sequence[tuple[str, dict[str, Any]]], mean: Array, covariance: Array) -> tuple[Array, Array]:
    """A network without activations: layers (`linear`, `dropout` or `affine`, arguments) one after the other.

    Exact: the draws of a layer are independent of its input, so the law of total covariance applies to each.
    """
    functions = {"linear": linear, "dropout": dropout, "affine": affine}
    for name, arguments in layers:
        mean, covariance = functions[name](mean, covariance, **arguments)
    return mean, covariance
