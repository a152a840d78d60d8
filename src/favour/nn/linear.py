"""Linear layers y = Wx + b with Gaussian weights of three kinds.

    BayesLinear       W_ij ~ N(W̄_ij, σ_ij²), all independent
    RowBayesLinear    rows independent, Cov(W_i) = D_i + F_iᵀF_i, D_i diagonal, F_i of shape (r, n)
    FullBayesLinear   [W | b] ~ N([W̄ | b̄], LLᵀ), L lower triangular

The determinant lemma gives log det(D + FᵀF) = Σ log D + log det(I_r + F D⁻¹ Fᵀ), so the KL term of a row
costs O(n r² + r³) and no n × n matrix is formed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import InvalidValue
from ..posterior import Full, Gaussian, Key, Rows
from .layer import BayesLayer, MeanFieldLayer, positive


class _FromLinear(nn.Linear):
    @classmethod
    def from_linear(cls, linear: nn.Linear, std: float, **options: Any) -> Self:
        """A Bayesian layer centred on a copy of `linear`'s weights.

        Args:
            linear: The layer to copy; it is not changed.
            std: Marginal standard deviation of every weight.
            **options: Further arguments of the constructor.
        """
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            initial_std=std,  # type: ignore[call-arg]
            device=linear.weight.device,
            dtype=linear.weight.dtype,
            **options,
        )
        with torch.no_grad():
            layer.weight.copy_(linear.weight)
            if linear.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer.train(linear.training)


class BayesLinear(MeanFieldLayer, _FromLinear):
    """A linear layer with independent Gaussian weights (mean-field).

    Args:
        in_features: n.
        out_features: m.
        bias: Whether to add a bias, Gaussian too.
        prior_std: Standard deviation s of the prior N(0, s²), for `kl`.
        initial_std: Standard deviation of every weight before training.
        local_reparametrisation: In training mode draw the outputs, y ~ N(W̄x + b̄, W_σ²x² + b_σ²), instead
            of the weights: gradients of lower variance, but the noise is then independent between the
            examples (and the positions) of a batch. Draws forced in eval mode always draw weights.

    Example:
        >>> BayesLinear(3, 2)(torch.ones(5, 3)).shape
        torch.Size([5, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        prior_std: float = 1.0,
        initial_std: float = 0.02,
        local_reparametrisation: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.local_reparametrisation = local_reparametrisation
        self._add_spread(prior_std, initial_std)

    def forward(self, x: Tensor) -> Tensor:
        """x (…, n) → (…, m): one draw of the weights for the whole batch when live, else the mean forward."""
        if self.live and self.training and self.local_reparametrisation:
            bias_variance = None if self.bias_log_std is None else torch.exp(2 * self.bias_log_std)
            variance = F.linear(x.square(), torch.exp(2 * self.weight_log_std), bias_variance)
            # √ has no derivative at 0 (x = 0 without bias); clamp's is 0 there.
            std = variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt()
            return F.linear(x, self.weight, self.bias) + std * torch.randn_like(std)
        return F.linear(x, *self.current())


class RowBayesLinear(MeanFieldLayer, _FromLinear):
    """A linear layer with independent rows of diagonal-plus-low-rank covariance; the bias is mean-field.

    Cov(W_i) = diag(e^{2·weight_log_std_i}) + Σ_k weight_factor_ki weight_factor_kiᵀ.

    Args:
        in_features: n.
        out_features: m.
        rank: r ≥ 0.
        bias: Whether to add a bias.
        prior_std: Standard deviation s of the prior N(0, s²), for `kl`.
        initial_std: Marginal standard deviation before training; half of the variance is in the (random)
            factor, on average, since a zero factor is a stationary point.

    Example:
        >>> layer = RowBayesLinear(3, 2, rank=1)
        >>> layer.favour_posterior()["weight"]
        Rows(2×3, rank 1)
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        rank: int = 2,
        bias: bool = True,
        prior_std: float = 1.0,
        initial_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        if rank < 0:
            raise InvalidValue(f"`rank` is {rank}; an integer ≥ 0 is required.")
        self.rank = rank
        self._add_spread(prior_std, initial_std, share=0.5 if rank else 1.0)
        factor_std = initial_std * math.sqrt(0.5 / max(rank, 1))
        self.weight_factor = nn.Parameter(factor_std * torch.randn_like(self.weight.expand(rank, -1, -1)))

    def forward(self, x: Tensor) -> Tensor:
        """x (…, n) → (…, m): one draw of the weights for the whole batch when live, else the mean forward."""
        return F.linear(x, *self.current())

    def draw(self) -> tuple[Tensor, Tensor | None]:
        latents = torch.randn_like(self.weight_factor[..., :1])  # (r, m, 1): each row has its own
        weight, bias = super().draw()
        return weight + (latents * self.weight_factor).sum(0), bias

    def favour_posterior(self) -> Mapping[Key, Gaussian]:
        return {**super().favour_posterior(), "weight": Rows(torch.exp(2 * self.weight_log_std), self.weight_factor)}

    def kl(self, prior_std: float | None = None) -> Tensor:
        """KL of the weights from N(0, prior_std²), in O(m(n r² + r³)) through the determinant lemma."""
        s, total = self._prior_std(prior_std), super().kl(prior_std)
        if self.rank:
            # What the factor adds to the mean-field term: tr(FᵀF)/(2s²) − ½ log det(I_r + F D⁻¹ Fᵀ), per row.
            scaled = self.weight_factor * torch.exp(-self.weight_log_std)
            scaled = scaled if scaled.dtype == torch.float64 else scaled.float()
            capacitance = torch.einsum("rij,qij->irq", scaled, scaled)  # (m, r, r)
            capacitance = capacitance + torch.eye(self.rank, dtype=scaled.dtype, device=scaled.device)
            half_log_det = torch.linalg.cholesky(capacitance).diagonal(dim1=-2, dim2=-1).log().sum()
            total = total + self.weight_factor.square().sum() / (2 * s**2) - half_log_det.to(total.dtype)
        return total


class FullBayesLinear(BayesLayer, _FromLinear):
    """A linear layer with a full covariance over [W | b], LLᵀ, for small layers.

    L = strict lower triangle of `scale_lower` + diag(exp(`scale_log_diag`)), of size N = m(n + 1), or mn
    without bias; entries in row-major order of the augmented matrix [W | b].

    Args:
        in_features: n.
        out_features: m.
        bias: Whether to add a bias, correlated with the weights.
        prior_std: Standard deviation s of the prior N(0, s²), for `kl`.
        initial_std: Standard deviation before training; the weights start out uncorrelated.

    Example:
        >>> layer = FullBayesLinear(3, 2)
        >>> layer.favour_posterior()
        {('weight', 'bias'): Full(2×4)}
    """

    MAX_ENTRIES = 4096

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        prior_std: float = 1.0,
        initial_std: float = 0.02,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        entries = out_features * (in_features + bool(bias))
        if entries > self.MAX_ENTRIES:
            raise InvalidValue(
                f"FullBayesLinear({in_features}, {out_features}) has {entries} weights, so a covariance "
                f"of {entries} × {entries}; at most {self.MAX_ENTRIES} weights are allowed. Use "
                "RowBayesLinear or BayesLinear."
            )
        super().__init__(in_features, out_features, bias=bias, device=device, dtype=dtype)
        self.prior_std = positive("prior_std", prior_std)
        log_std = math.log(positive("initial_std", initial_std))
        self.scale_log_diag = nn.Parameter(self.weight.new_full((entries,), log_std))
        self.scale_lower = nn.Parameter(self.weight.new_zeros(entries, entries))

    def scale_tril(self) -> Tensor:
        """The Cholesky factor L (N, N) of the covariance."""
        return self.scale_lower.tril(-1) + self.scale_log_diag.exp().diag_embed()

    def forward(self, x: Tensor) -> Tensor:
        """x (…, n) → (…, m): one draw of the weights for the whole batch when live, else the mean forward."""
        return F.linear(x, *self.current())

    def draw(self) -> tuple[Tensor, Tensor | None]:
        deviation = self.scale_tril() @ torch.randn_like(self.scale_log_diag)
        if self.bias is None:
            return self.weight + deviation.view_as(self.weight), None
        augmented = deviation.view(self.out_features, self.in_features + 1)
        return self.weight + augmented[:, :-1], self.bias + augmented[:, -1]

    def favour_posterior(self) -> Mapping[Key, Gaussian]:
        scale = self.scale_tril()
        covariance = scale @ scale.mT
        if self.bias is None:
            return {"weight": Full(covariance, tuple(self.weight.shape))}
        return {("weight", "bias"): Full(covariance, (self.out_features, self.in_features + 1))}

    def kl(self, prior_std: float | None = None) -> Tensor:
        """KL of the weights from N(0, prior_std²); tr LLᵀ = Σ L², log det LLᵀ = 2 Σ log diag L."""
        s = self._prior_std(prior_std)
        squares = self.weight.square().sum() + self.scale_tril().square().sum()
        if self.bias is not None:
            squares = squares + self.bias.square().sum()
        return squares / (2 * s**2) + (math.log(s) - 0.5 - self.scale_log_diag).sum()
