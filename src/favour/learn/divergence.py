r"""The Kullback–Leibler divergence of a posterior over parameters from a Gaussian prior with independent entries.

With q = N(μ, Σ) over N numbers and the prior N(c, diag(s²)),

    KL(q ‖ prior) = ½ [ Σ_a (Σ_aa + (μ_a − c_a)²)/s_a² − N + Σ_a log s_a² − log det Σ ]

so a posterior enters by its marginal variances and its log-determinant alone. For the kinds of `favour.Posterior`:

    Diagonal    Σ log v
    Rows        Σ_i log det D_i + log det(I_r + F_i D_i⁻¹ F_iᵀ)                       D_i + F_iᵀF_i, determinant lemma
    Kronecker   n log det outputs + m log det inputs                                  (m, m) ⊗ (n, n)
    Rotated     Σ log diag + 2n log |det outputs| + 2m log |det inputs|              square bases; else densely
    Full        from a Cholesky factor
    latents     log det Σ₀ + log det(I_K + Lᵀ Σ₀⁻¹ L)                                 Σ₀ + LLᵀ, across layers

An unknown kind is taken densely. A singular posterior has no density: its divergence is infinite.

Empirical Bayes. The s that minimises the divergence, and so maximises the bound, for a group g of N_g numbers is

    s_g² = 1/N_g Σ_a (Σ_aa + (μ_a − c_a)²),      after which   KL = ½ [Σ_g N_g log s_g² − log det Σ].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from favour.errors import InvalidValue, UnknownName
from favour.posterior import Diagonal, Full, Gaussian, Kronecker, Posterior, Rotated, Rows

GROUPS = ("parameter", "layer", "shared")
Prior = float | str | Tensor | Mapping[str, float | Tensor]


def kl(
    posterior: Posterior | Mapping[str, Tensor],
    prior: Prior = 1.0,
    *,
    parameters: nn.Module | Mapping[str, Tensor] | None = None,
    centre: Mapping[str, Tensor] | None = None,
) -> Tensor:
    """KL(posterior ‖ prior) in nats, a scalar that is differentiable in everything.

    Args:
        posterior: Over named parameters.
        prior: Standard deviation s of independent Gaussian weights: a number, one number or tensor for each name, or
            `"parameter"`, `"layer"` or `"shared"` for empirical Bayes, the best s in closed form, one for each
            parameter, for each module or for all together.
        parameters: The model, or tensors by name: the means of what `posterior.means` does not name.
        centre: Means c of the prior by name; 0 where there is none.

    Raises:
        UnknownName: A parameter has no mean, or no prior.
        InvalidValue: A prior that is not positive.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> same = {"weight": torch.ones(1, 2)}
        >>> float(kl(Posterior(same, means={"weight": torch.zeros(1, 2)}), 1.0))
        0.0
        >>> bool(kl(same, "layer", parameters=model) <= kl(same, 1.0, parameters=model))
        True
    """
    posterior = Posterior.wrap(posterior)
    named = _named(posterior, parameters)
    second = second_moments(posterior, named, centre or {})
    stds = standard_deviations(posterior, second, prior)
    logdet = log_det(posterior, named)
    terms = [(second[n] / stds[n].square() - 1 + 2 * stds[n].log()).expand(second[n].shape).sum() for n in second]
    if not terms:
        return torch.zeros(())
    return 0.5 * (torch.stack([t.to(logdet) for t in terms]).sum() - logdet)


def prior_std(
    posterior: Posterior | Mapping[str, Tensor],
    groups: str = "layer",
    *,
    parameters: nn.Module | Mapping[str, Tensor] | None = None,
    centre: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """The standard deviations of the prior that empirical Bayes gives, by parameter name; see `kl`.

    >>> found = prior_std({"weight": torch.full((1, 2), 3.0)}, parameters={"weight": torch.ones(1, 2)})
    >>> found["weight"]
    tensor(2.)
    """
    posterior = Posterior.wrap(posterior)
    second = second_moments(posterior, _named(posterior, parameters), centre or {})
    return standard_deviations(posterior, second, groups)


def second_moments(
    posterior: Posterior, named: Mapping[str, Tensor], centre: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """E[(θ − c)²] by name."""
    moments = {}
    for name, variance in posterior.variances(named).items():
        shift = named[name] - centre[name] if name in centre else named[name]
        moments[name] = variance + shift.square()
    return moments


def standard_deviations(posterior: Posterior, second: Mapping[str, Tensor], prior: Prior) -> dict[str, Tensor]:
    """s of every parameter, of a shape that broadcasts to it."""
    if isinstance(prior, str):
        if prior not in GROUPS:
            raise InvalidValue(f"`prior` is {prior!r}; choose one of {', '.join(GROUPS)}, numbers or tensors.")
        members: dict[str, list[str]] = {}
        for name in second:
            group = {"parameter": name, "layer": name.rpartition(".")[0], "shared": ""}[prior]
            members.setdefault(group, []).append(name)
        shared: dict[str, Tensor] = {}
        for names in members.values():
            total = torch.stack([second[n].sum() for n in names]).sum()
            std = (total / sum(second[n].numel() for n in names)).sqrt()
            shared |= dict.fromkeys(names, std)
        return shared
    priors = prior if isinstance(prior, Mapping) else dict.fromkeys(second, prior)
    missing = [name for name in second if name not in priors]
    if missing:
        raise UnknownName(f"`prior` has no standard deviation for {', '.join(f'`{n}`' for n in missing)}.")
    stds = {name: torch.as_tensor(priors[name]).to(second[name]) for name in second}
    if not torch.compiler.is_compiling():
        for name, std in stds.items():
            if not bool(((std > 0) & std.isfinite()).all()):
                raise InvalidValue(
                    f"`prior` of `{name}` is {priors[name]}; a standard deviation is positive and finite."
                )
    return stds


def _named(posterior: Posterior, parameters: nn.Module | Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """Means by name."""
    if isinstance(parameters, nn.Module):
        parameters = dict(parameters.named_parameters(remove_duplicate=False))
    named = dict(parameters or {}) | dict(posterior.means)
    missing = [name for name in posterior.names if name not in named]
    if missing:
        raise UnknownName(
            f"the posterior has no means for {', '.join(f'`{n}`' for n in missing)}; pass `parameters`, the model or "
            "tensors by name."
        )
    return {name: named[name] for name in dict.fromkeys((*posterior.names, *posterior.means))}


# ---- log-determinants


def log_det(posterior: Posterior, named: Mapping[str, Tensor]) -> Tensor:
    """log det of the whole posterior; −∞ where it is singular.

    Args:
        posterior: Over named parameters.
        named: Their means, which tell the shapes.
    """
    parts = [log_determinant(gaussian) for gaussian in posterior.gaussians.values()]
    latents = dict(posterior.latents)
    if not latents:
        return torch.stack([p.to(parts[0]) for p in parts]).sum() if parts else torch.zeros(())
    like = next(iter(latents.values()))
    if any(posterior.key(name) is None for name in latents):
        return like.new_tensor(-math.inf)  # what only latents cover varies in K directions alone
    gram = torch.eye(posterior.latent_rank, dtype=like.dtype, device=like.device)
    for key, gaussian in posterior.gaussians.items():
        factor = _factor_of(key, latents, named)
        if factor is not None:
            gram = gram + gram_inverse(gaussian, factor).to(gram)
    return torch.stack([p.to(gram) for p in parts]).sum() + _log_det_psd(gram)


def _factor_of(key: str | tuple[str, str], latents: Mapping[str, Tensor], named: Mapping[str, Tensor]) -> Tensor | None:
    """The columns (K, m, n) or (K, *shape) at a key; those of [W | b] for a pair."""
    if isinstance(key, str):
        return latents.get(key)
    weight, bias = key
    if weight not in latents and bias not in latents:
        return None
    k = next(latents[n].shape[0] for n in key if n in latents)
    zero = named[weight].new_zeros
    left = latents[weight] if weight in latents else zero(k, *named[weight].shape)
    right = latents[bias] if bias in latents else zero(k, *named[bias].shape)
    return torch.cat([left.flatten(2), right.unsqueeze(-1)], -1)


def log_determinant(gaussian: Gaussian) -> Tensor:
    """log det of one Gaussian's covariance; −∞ where it is singular."""
    special = _of_kind(gaussian, LOG_DETERMINANTS)
    return _log_det_psd(gaussian.covariance()) if special is None else special(gaussian)


def gram_inverse(gaussian: Gaussian, factor: Tensor) -> Tensor:
    """Lᵀ Σ⁻¹ L of columns (K, *shape), (K, K)."""
    special = _of_kind(gaussian, GRAM_INVERSES)
    if special is not None:
        return special(gaussian, factor)
    flat = factor.flatten(1)
    return flat @ torch.linalg.solve(gaussian.covariance(), flat.mT)


def _of_kind(gaussian: Gaussian, table: Mapping[type[Gaussian], Callable[..., Tensor]]) -> Callable[..., Tensor] | None:
    return next((function for kind, function in table.items() if isinstance(gaussian, kind)), None)


def _kronecker_log_det(gaussian: Kronecker) -> Tensor:
    m, n = gaussian.shape
    return n * _log_det_psd(gaussian.outputs) + m * _log_det_psd(gaussian.inputs)


def _rotated_log_det(gaussian: Rotated) -> Tensor:
    m, n = gaussian.shape
    if tuple(gaussian.diag.shape) != (m, n):
        return _log_det_psd(gaussian.covariance())
    bases = n * torch.linalg.slogdet(gaussian.outputs)[1] + m * torch.linalg.slogdet(gaussian.inputs)[1]
    return gaussian.diag.log().sum() + 2 * bases


def _diagonal_gram(gaussian: Diagonal, factor: Tensor) -> Tensor:
    flat = factor.flatten(1)
    return (flat / gaussian.diag.flatten()) @ flat.mT


def _rows_gram(gaussian: Rows, factor: Tensor) -> Tensor:
    columns, scaled = gaussian.factor.flatten(2), factor.flatten(2) / gaussian.diag.flatten(1)  # (r, m, n), (K, m, n)
    across = torch.einsum("kij,rij->irk", scaled, columns)  # F D⁻¹ L of each row
    inner = torch.linalg.solve(_capacitance(gaussian), across)
    return torch.einsum("kij,lij->kl", scaled, factor.flatten(2)) - torch.einsum("irk,irl->kl", across, inner)


def _kronecker_gram(gaussian: Kronecker, factor: Tensor) -> Tensor:
    half = torch.linalg.solve(gaussian.outputs, torch.linalg.solve(gaussian.inputs, factor.mT).mT)
    return torch.einsum("kij,lij->kl", half, factor)


# Plain tables: `functools.singledispatch` cannot be compiled.
LOG_DETERMINANTS: dict[type[Gaussian], Callable[[Any], Tensor]] = {
    Diagonal: lambda g: g.diag.log().sum(),
    Rows: lambda g: g.diag.log().sum() + _log_det_psd(_capacitance(g)).sum(),
    Kronecker: _kronecker_log_det,
    Rotated: _rotated_log_det,
    Full: lambda g: _log_det_psd(g.matrix),
}
GRAM_INVERSES: dict[type[Gaussian], Callable[[Any, Tensor], Tensor]] = {
    Diagonal: _diagonal_gram,
    Rows: _rows_gram,
    Kronecker: _kronecker_gram,
}


def _capacitance(rows: Rows) -> Tensor:
    """I_r + F_i D_i⁻¹ F_iᵀ of every row, (m, r, r)."""
    factor = rows.factor.flatten(2)
    scaled = factor / rows.diag.flatten(1)
    eye = torch.eye(len(factor), dtype=factor.dtype, device=factor.device)
    return eye + torch.einsum("rij,qij->irq", scaled, factor)


def _log_det_psd(matrix: Tensor) -> Tensor:
    """log det of PSD matrices (…, N, N) by Cholesky; −∞ where that fails."""
    wide = matrix if matrix.dtype == torch.float64 else matrix.float()
    tril, info = torch.linalg.cholesky_ex(wide)
    logs = 2 * tril.diagonal(dim1=-2, dim2=-1).log().sum(-1)
    return torch.where(info == 0, logs, -math.inf).to(matrix.dtype)
