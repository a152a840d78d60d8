"""SWAG: the first two moments of weights along stochastic gradient descent (Maddox et al., 2019).

With snapshots θ_1, …, θ_T of the weights, their running mean θ̄ and running mean square,

    θ ~ N(θ̄, ½ (Σ_diag + D Dᵀ/(K − 1))),     Σ_diag = mean(θ²) − θ̄²,    D = [θ_t − θ̄_t] for the last K snapshots,

θ̄_t the mean of the first t snapshots. A draw is θ̄ + Σ_diag^½ z₁/√2 + D z₂/√(2(K − 1)). D spans all layers, so its
columns are latents that all parameters share. `scale` multiplies the covariance.

Batch norms have to see the data again with the averaged weights: `torch.optim.swa_utils.update_bn(loader, model)` on
the model that comes back, before it is compiled.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from favour.adapters.adapted import Adapted
from favour.adapters.silence import without_dropout
from favour.errors import InvalidType, InvalidValue, ShapeMismatch, UnknownName
from favour.posterior import Posterior

_KEYS = ("mean", "square_mean", "deviations")


class SWAG:
    """Collects the moments while a model trains.

    Call `collect(model)` once an epoch, say, after the learning rate has settled; `update_parameters` is the same, so
    that it can stand where `torch.optim.swa_utils.AveragedModel` does. Then `favour.adapters.adapt(swag, model)`.

    Args:
        rank: K, how many deviations are kept: the last ones. 0 for the diagonal alone.

    Attributes:
        count: T, the snapshots seen.
        mean, square_mean: Running means by parameter name.
        deviations: The last K deviations, each by parameter name.

    Example:
        >>> model, swag = nn.Linear(2, 1), SWAG(rank=2)
        >>> for _ in range(3):
        ...     _ = nn.init.normal_(model.weight)
        ...     swag.collect(model)
        >>> swag
        SWAG(3 snapshots, rank 2)
        >>> from_swag(swag, model).posterior
        Posterior(weight: Diagonal(1×2), bias: Diagonal(1), 2 latents over weight, bias)
    """

    def __init__(self, rank: int = 20) -> None:
        if isinstance(rank, bool) or not isinstance(rank, int) or rank < 0 or rank == 1:
            raise InvalidValue(f"`rank` is {rank!r}; it is 0, for no low-rank part, or a whole number from 2.")
        self.rank, self.count = rank, 0
        self.mean: dict[str, Tensor] = {}
        self.square_mean: dict[str, Tensor] = {}
        self.deviations: list[dict[str, Tensor]] = []

    @torch.no_grad()
    def collect(self, model: nn.Module) -> None:
        """Take a snapshot of the parameters."""
        named = dict(model.named_parameters())
        if self.count and {n: p.shape for n, p in named.items()} != {n: m.shape for n, m in self.mean.items()}:
            raise InvalidValue(
                "this model has other parameters than the one of earlier snapshots; one SWAG, one model."
            )
        self.count += 1
        for name, p in named.items():
            if self.count == 1:
                self.mean[name], self.square_mean[name] = p.detach().clone(), p.detach().square()
            else:
                self.mean[name] = self.mean[name].lerp(p, 1 / self.count)
                self.square_mean[name] = self.square_mean[name].lerp(p.square(), 1 / self.count)
        if self.rank:
            self.deviations.append({name: p.detach() - self.mean[name] for name, p in named.items()})
            del self.deviations[: -self.rank]

    update_parameters = collect

    def __repr__(self) -> str:
        return f"SWAG({self.count} snapshot{'s' * (self.count != 1)}, rank {len(self.deviations)})"


def is_swag(obj: Any) -> bool:
    """Whether `obj` is a `SWAG`, or a mapping or object with `mean`, `square_mean` and `deviations`."""
    if isinstance(obj, Mapping):
        return all(key in obj for key in _KEYS)
    return all(hasattr(obj, key) for key in _KEYS)


def from_swag(moments: Any, model: nn.Module, *, scale: float = 1.0, keep_dropout: bool = False) -> Adapted:
    """SWAG's moments as a model and its posterior.

    Args:
        moments: A `SWAG`, or a mapping with the keys `mean` and `square_mean` (parameter name to tensor, as in a state
            dict; entries that are no parameters, such as a norm's statistics, are ignored) and `deviations` (a list of
            K ≠ 1 such mappings, possibly empty). Not modified.
        model: The network that was trained. Not modified.
        scale: Of the covariance; 1 is the ½(…) of the module's docstring.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as in the authors'
            SWAG, which evaluates in eval mode; what they call SWAG with dropout keeps it.

    Returns:
        A copy of the model with the mean weights, and the posterior.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidValue: Too few snapshots, or `scale` negative.
        UnknownName, ShapeMismatch: The moments are those of another model.
    """
    if not is_swag(moments):
        raise InvalidType(
            f"`moments` is a {type(moments).__name__}; pass a favour.adapters.SWAG, or a mapping with "
            f"{', '.join(f'`{key}`' for key in _KEYS)}."
        )
    if not 0 <= scale < math.inf:
        raise InvalidValue(f"`scale` is {scale}; a number ≥ 0 is required.")
    take = moments.__getitem__ if isinstance(moments, Mapping) else lambda key: getattr(moments, key)
    named = dict(model.named_parameters())
    if isinstance(moments, SWAG) and moments.count < 2:
        raise InvalidValue(f"{moments!r}: two snapshots at least are required; call `collect(model)` while training.")
    mean, square = (_checked(take(key), named, key) for key in ("mean", "square_mean"))
    deviations: Sequence[Mapping[str, Tensor]] = take("deviations")
    columns = [_checked(d, named, f"deviations[{i}]") for i, d in enumerate(deviations)]
    if len(columns) == 1:
        raise InvalidValue("`deviations` holds one column; 1/(K − 1) needs two or more, or none.")
    # Rounding makes mean(θ²) − θ̄² negative where a weight hardly moved.
    variances = {n: 0.5 * scale * (square[n] - mean[n].square()).clamp_min(0) for n in named}
    factor = math.sqrt(scale / (2 * (len(columns) - 1))) if columns else 0.0
    latents = {n: factor * torch.stack([c[n] for c in columns]) for n in named} if columns else {}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for name, p in twin.named_parameters():
            p.copy_(mean[name])
    return Adapted(without_dropout(twin, keep_dropout, "SWAG"), Posterior(variances, latents=latents))


def _checked(tensors: Mapping[str, Tensor], named: Mapping[str, Tensor], what: str) -> dict[str, Tensor]:
    missing = [name for name in named if name not in tensors]
    if missing:
        raise UnknownName(f"`{what}` lacks {', '.join(f'`{n}`' for n in missing)}, which the model has.")
    wrong = [n for n, p in named.items() if tensors[n].shape != p.shape]
    if wrong:
        shapes = "; ".join(f"`{n}` {tuple(tensors[n].shape)} for {tuple(named[n].shape)}" for n in wrong)
        raise ShapeMismatch(f"`{what}` does not fit the model: {shapes}.")
    return {name: tensors[name].detach() for name in named}
