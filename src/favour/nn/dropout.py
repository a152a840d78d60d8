"""Dropout with a rate per neuron, fixed or learned.

With keep probability q = 1 − p, element-wise and inverted, so that the mean is kept:

    y = x ∘ z / q,   z ~ Bernoulli(q)         E[y | x] = x,   Var[y | x] = x² p/q

Learned rates p = sigmoid(ℓ) need a gradient through z. In training mode z is then relaxed (the concrete
distribution),

    1 − z = sigmoid((ℓ + log u − log(1 − u)) / t),   u ~ U(0, 1)

which tends to the Bernoulli as the temperature t → 0. The objective's term per unit i, feeding the weight
column w_i under a prior N(0, s²), is up to a constant

    ‖w_i‖² / (2 s² q_i) − H(p_i),     H the entropy of a Bernoulli in nats:

the effective column is w_i/q_i with probability q_i and 0 otherwise.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidType, InvalidValue, ShapeMismatch
from ..rules.dropout import hard_dropout
from .layer import StochasticLayer, positive


class Dropout(StochasticLayer):
    """Element-wise dropout with a rate per neuron.

    The identity in eval mode, as `torch.nn.Dropout`, unless forced by `favour.nn.sampling`.

    Args:
        p: Probability to drop, in [0, 1): a float, or a tensor that broadcasts to the event x.shape[1:].
        learnable: Train the rates (through a parameter `logits`); p must then be in (0, 1). Add `kl` to
            the loss.
        temperature: Of the relaxation that learnable rates use in training mode.
        units: Number of neurons that share the rates, for `kl`; p.numel() by default.
        prior_std: Standard deviation s of the prior on the weights that follow, for `kl`.

    Attributes:
        p: The rates, a tensor.
        capturing: When True, forward is the single operation `favour::dropout(x, p, True)`, whatever the
            mode. Favour sets this on a private copy of a model before exporting it.

    Example:
        >>> layer = Dropout(torch.tensor([0.0, 0.5, 0.9]))
        >>> layer.eval()(torch.ones(1, 3))
        tensor([[1., 1., 1.]])
    """

    capturing: bool = False
    rate: Tensor | None
    logits: Tensor | None

    def __init__(
        self,
        p: float | Tensor = 0.5,
        learnable: bool = False,
        temperature: float = 0.1,
        units: int | None = None,
        prior_std: float = 1.0,
    ) -> None:
        super().__init__()
        rate = _checked_rates(p, learnable)
        self.temperature = positive("temperature", temperature)
        self.units = units
        self.prior_std = positive("prior_std", prior_std)
        self.register_buffer("rate", None if learnable else rate)
        self.register_parameter("logits", nn.Parameter(torch.logit(rate)) if learnable else None)

    @property
    def p(self) -> Tensor:
        if self.logits is None:
            assert self.rate is not None
            return self.rate
        # sigmoid rounds to 1 from ℓ ≈ 17 in float32, and q = 0 has no inverse.
        return torch.sigmoid(self.logits).clamp(max=1 - torch.finfo(self.logits.dtype).eps)

    @property
    def learnable(self) -> bool:
        """Whether the rates are trained."""
        return self.logits is not None

    def forward(self, x: Tensor) -> Tensor:
        """x (batch, *event) → the same shape."""
        p = self.p
        if p.dim() and (p.dim() >= x.dim() or not _broadcasts(p.shape, x.shape[1:])):
            raise ShapeMismatch(
                f"Dropout has rates of shape {tuple(p.shape)} and got x of shape {tuple(x.shape)}; the "
                f"rates must broadcast to the event, x.shape[1:] = {tuple(x.shape[1:])}."
            )
        if self.capturing:
            return torch.ops.favour.dropout(x, p, True)
        if not self.live:
            return x
        if self.logits is not None and self.training:
            return x * (self._relaxed_keep(x) / (1 - p)).to(x.dtype)
        return hard_dropout(x, p, True)

    def _relaxed_keep(self, x: Tensor) -> Tensor:
        assert self.logits is not None
        u = torch.rand_like(x, dtype=torch.float32).clamp(1e-7, 1 - 1e-7)
        return torch.sigmoid(-(self.logits + torch.logit(u)) / self.temperature)

    def kl(self, prior_std: float | None = None, weight: Tensor | None = None) -> Tensor:
        """The objective's term of learned rates, up to a constant (so it may be negative); 0 for fixed rates.

        Args:
            prior_std: Prior standard deviation of the weights that follow; the layer's own by default.
            weight: The weight (out, in, …) this layer feeds. Without it only −Σ H(p) is returned, which is
                the right term when those weights are Bayesian or regularised themselves.
        """
        if self.logits is None:
            return torch.zeros_like(self.p.sum())
        p = self.p
        negative_entropy = p * F.logsigmoid(self.logits) + (1 - p) * F.logsigmoid(-self.logits)
        if weight is None:
            return negative_entropy.sum() * ((self.units or p.numel()) / p.numel())
        columns = weight.square().transpose(0, 1).flatten(1).sum(1)  # ‖w_i‖², (in,)
        if p.numel() not in (1, len(columns)):
            raise ShapeMismatch(
                f"Dropout has rates of shape {tuple(p.shape)} and `weight` has shape "
                f"{tuple(weight.shape)}; it needs {p.numel()} input columns."
            )
        s = self.prior_std if prior_std is None else positive("prior_std", prior_std)
        return (negative_entropy.flatten() + columns / (2 * s**2 * (1 - p).flatten())).sum()

    def extra_repr(self) -> str:
        p = self.p.detach()
        rates = f"p={float(p):.4g}" if p.numel() == 1 else f"p of shape {tuple(p.shape)}"
        return rates + (f", learnable, temperature={self.temperature}" if self.learnable else "")


def _checked_rates(p: float | Tensor, learnable: bool) -> Tensor:
    rate = p.detach().clone() if isinstance(p, Tensor) else torch.tensor(float(p))
    if not rate.is_floating_point():
        raise InvalidType(f"`p` has dtype {rate.dtype}; a floating-point tensor is required.")
    allowed = (rate < 1) & ((rate > 0) if learnable else (rate >= 0))  # false for NaN
    if not bool(allowed.all()):
        bad = rate[~allowed].flatten()
        interval = "(0, 1) where it is learnable" if learnable else "[0, 1)"
        raise InvalidValue(
            f"`p` of shape {tuple(rate.shape)} has {len(bad)} values outside {interval}, the first {float(bad[0]):.4g}."
        )
    return rate


def _broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))
