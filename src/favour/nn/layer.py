"""What all random layers share: when they draw, and the Kullback–Leibler term of their weights.

A Bayesian layer keeps the *mean* of its weights as the ordinary parameters `weight` and `bias`, so the
mean forward is that of the plain layer, and its spread as further, unconstrained parameters. With a prior
N(0, s²) on every weight,

    KL(N(μ, Σ) ‖ N(0, s²I)) = ½ [ (tr Σ + μᵀμ)/s² − N + N log s² − log det Σ ]

which for a diagonal Σ = diag(e^{2ρ}) is Σ_a log s − ρ_a + (e^{2ρ_a} + μ_a²)/(2s²) − ½.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import InvalidValue
from ..posterior import Diagonal, Gaussian, Key


class StochasticLayer(nn.Module):
    """A layer whose forward may draw random numbers.

    Attributes:
        sampling: True: draw in training mode, use the means in eval mode. False: always use the means;
            Favour sets this on a private copy of a model to see its mean forward only.
    """

    sampling: bool = True
    _forced: bool | None = None  # set by the context manager `sampling`

    @property
    def live(self) -> bool:
        """Whether the next forward draws."""
        return self.sampling and (self.training if self._forced is None else self._forced)

    def kl(self, prior_std: float | None = None) -> Tensor:
        """The layer's term of the variational objective, a scalar."""
        raise NotImplementedError


class BayesLayer(StochasticLayer):
    """A layer with Gaussian weights: parameters `weight` and `bias` are their means.

    A subclass defines `draw` (one draw of the weights), `favour_posterior` and `kl`.
    """

    weight: Tensor
    bias: Any  # a Tensor or None
    prior_std: float

    def draw(self) -> tuple[Tensor, Tensor | None]:
        """One draw of (weight, bias), shared by a whole batch; differentiable in means and spreads."""
        raise NotImplementedError

    def favour_posterior(self) -> Mapping[Key, Gaussian]:
        """Local parameter name (or the pair) → Gaussian, differentiable in the spread parameters."""
        raise NotImplementedError

    def current(self) -> tuple[Tensor, Tensor | None]:
        """A draw of (weight, bias) when the layer is live, else their means."""
        return self.draw() if self.live else (self.weight, self.bias)

    def _prior_std(self, prior_std: float | None) -> float:
        return self.prior_std if prior_std is None else positive("prior_std", prior_std)


class MeanFieldLayer(BayesLayer):
    """Independent Gaussian weights with standard deviations exp(`weight_log_std`) and exp(`bias_log_std`)."""

    weight_log_std: nn.Parameter
    bias_log_std: nn.Parameter | None

    def _add_spread(self, prior_std: float, initial_std: float, share: float = 1.0) -> None:
        """`share`: of the variance of a weight, what is independent."""
        self.prior_std = positive("prior_std", prior_std)
        log_std = math.log(positive("initial_std", initial_std))
        self.weight_log_std = nn.Parameter(torch.full_like(self.weight, log_std + 0.5 * math.log(share)))
        bias_log_std = None if self.bias is None else nn.Parameter(torch.full_like(self.bias, log_std))
        self.register_parameter("bias_log_std", bias_log_std)

    def draw(self) -> tuple[Tensor, Tensor | None]:
        return perturb(self.weight, self.weight_log_std), draw_bias(self.bias, self.bias_log_std)

    def favour_posterior(self) -> Mapping[Key, Gaussian]:
        gaussians: dict[Key, Gaussian] = {"weight": Diagonal(torch.exp(2 * self.weight_log_std))}
        if self.bias_log_std is not None:
            gaussians["bias"] = Diagonal(torch.exp(2 * self.bias_log_std))
        return gaussians

    def kl(self, prior_std: float | None = None) -> Tensor:
        """KL of the weights from N(0, prior_std²), in O(number of weights)."""
        prior_std = self._prior_std(prior_std)
        total = mean_field_kl(self.weight, self.weight_log_std, prior_std)
        if self.bias is not None and self.bias_log_std is not None:
            total = total + mean_field_kl(self.bias, self.bias_log_std, prior_std)
        return total


def perturb(mean: Tensor, log_std: Tensor) -> Tensor:
    """mean + exp(log_std) ∘ z with a fresh z ~ N(0, I)."""
    return mean + log_std.exp() * torch.randn_like(mean)


def draw_bias(mean: Tensor | None, log_std: Tensor | None) -> Tensor | None:
    """A draw of a mean-field bias that may be absent."""
    return None if mean is None or log_std is None else perturb(mean, log_std)


def mean_field_kl(mean: Tensor, log_std: Tensor, prior_std: float) -> Tensor:
    """Σ log s − ρ + (e^{2ρ} + μ²)/(2s²) − ½."""
    second_moment = torch.exp(2 * log_std) + mean.square()
    return (math.log(prior_std) - 0.5 - log_std + second_moment / (2 * prior_std**2)).sum()


def positive(name: str, value: float) -> float:
    """`value`, if it is positive and finite."""
    if not 0 < value < math.inf:
        raise InvalidValue(f"`{name}` is {value}; a positive, finite number is required.")
    return float(value)


@contextmanager
def sampling(model: nn.Module, enabled: bool = True) -> Iterator[None]:
    """Force Favour's random layers in `model` to draw, or not, whatever their training flags.

    For Monte Carlo in eval mode: norms keep their running statistics while weights and dropout masks are
    drawn. Acts on the layers of `favour.nn` only, and yields to a layer's own `sampling = False`.
    `torch.nn.Dropout` is governed by its training flag as ever.

    Example:
        >>> import favour.nn
        >>> layer = favour.nn.BayesLinear(3, 2).eval()
        >>> x = torch.ones(1, 3)
        >>> with favour.nn.sampling(layer):
        ...     bool((layer(x) == layer(x)).all())
        False
        >>> bool((layer(x) == layer(x)).all())
        True
    """
    layers = [module for module in model.modules() if isinstance(module, StochasticLayer)]
    before = [layer._forced for layer in layers]
    try:
        for layer in layers:
            layer._forced = enabled
        yield
    finally:
        for layer, forced in zip(layers, before, strict=True):
            layer._forced = forced


def kl(model: nn.Module, prior_std: float | None = None) -> Tensor:
    """Σ over the random layers of `model` of their KL terms, a layer used under several names once.

    Args:
        model: Any module.
        prior_std: Overrides every layer's own prior standard deviation.

    Example:
        >>> import favour.nn
        >>> layer = favour.nn.BayesLinear(3, 2)
        >>> bool(kl(nn.Sequential(layer, nn.ReLU())) == layer.kl())
        True
    """
    terms = [module.kl(prior_std) for module in model.modules() if isinstance(module, StochasticLayer)]
    if terms:
        return torch.stack([term.to(terms[0]) for term in terms]).sum()
    return torch.zeros(())
