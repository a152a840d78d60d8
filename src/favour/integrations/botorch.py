"""A BoTorch model out of a predictor: Bayesian optimisation with any network.

BoTorch asks for the joint belief over q candidates at a time, X (…, q, d), differentiable in X. That is
`Predictor.joint`: one draw of the network for all q points,

    f(X) ~ N(s·μ + m, s²Σ),     Σ (q·n) × (q·n),   n outputs

with m and s the mean and scale of the targets the network was trained on. Acquisition functions draw from it or use it
in closed form; nothing else is random, so optimising them is deterministic.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from favour.errors import InvalidType, MissingExtra, ShapeMismatch, UnsupportedOperation
from favour.predictor.predictor import Predictor

try:
    with warnings.catch_warnings():  # linear_operator still uses torch.jit.script
        warnings.simplefilter("ignore", DeprecationWarning)
        from botorch.models.model import Model
        from botorch.posteriors.gpytorch import GPyTorchPosterior
        from gpytorch.distributions import (  # type: ignore[import-untyped]
            MultitaskMultivariateNormal,
            MultivariateNormal,
        )
except ModuleNotFoundError as error:
    raise MissingExtra(
        f'favour.botorch needs `{error.name}`, which is not installed: pip install "favour[botorch]"'
    ) from error

__all__ = ["FavourModel"]

JITTER = 1e-8  # of the mean variance, on the diagonal: two equal candidates make Σ singular


class FavourModel(Model):
    """A predictor as a BoTorch `Model`.

    Args:
        predict: Of a network from (batch, d) to (batch, n).
        noise: Variance of the observation noise, a number or (n,), in units of the observations; added where an
            acquisition function asks for `observation_noise=True`.
        x_mean, x_scale: The network takes (X − x_mean)/x_scale; numbers or (d,).
        y_mean, y_scale: Observations are y_mean + y_scale·output; numbers or (n,).
        masks: As in `Predictor.joint`.

    Example:
        >>> import favour
        >>> from torch import nn
        >>> net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1)).double()
        >>> model = FavourModel(favour.compile(net, torch.zeros(2, 2, dtype=torch.float64)))
        >>> posterior = model.posterior(torch.rand(5, 3, 2, dtype=torch.float64))
        >>> posterior.mean.shape, posterior.distribution.covariance_matrix.shape
        (torch.Size([5, 3, 1]), torch.Size([5, 3, 3]))
    """

    noise: Tensor
    x_mean: Tensor
    x_scale: Tensor
    y_mean: Tensor
    y_scale: Tensor

    def __init__(
        self,
        predict: Predictor,
        *,
        noise: float | Tensor = 0.0,
        x_mean: float | Tensor = 0.0,
        x_scale: float | Tensor = 1.0,
        y_mean: float | Tensor = 0.0,
        y_scale: float | Tensor = 1.0,
        masks: str = "shared",
    ) -> None:
        super().__init__()
        if not isinstance(predict, Predictor):
            raise InvalidType(f"`predict` is a {type(predict).__name__}; pass what `favour.compile` returns.")
        node = next((n for n in predict.graph.inputs if n is not None), None)
        outputs = predict.graph.outputs
        shape = getattr(outputs[0], "shape", None) if len(outputs) == 1 else None
        if (
            node is None
            or len(predict.graph.inputs) != 1
            or shape is None
            or len(shape) > 2
            or len(node.shape or ()) != 2
        ):
            raise ShapeMismatch(
                "BoTorch needs a network from (batch, d) to (batch, n), one input and one output; this predictor has "
                f"inputs of shape {[n.shape for n in predict.graph.inputs if n is not None]} and outputs of shape "
                f"{[getattr(o, 'shape', None) for o in outputs]}."
            )
        self.predict, self.masks = predict, masks
        self._n = int(shape[1]) if len(shape) == 2 else 1
        self._dtype = node.dtype or torch.float64
        constants = {"noise": noise, "x_mean": x_mean, "x_scale": x_scale, "y_mean": y_mean, "y_scale": y_scale}
        for name, value in constants.items():
            self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64))

    @classmethod
    def from_regressor(cls, regressor: Any, masks: str = "shared") -> FavourModel:
        """From a fitted `favour.sklearn.FavourRegressor`, its scales and its noise included."""
        return cls(
            regressor.predictor,
            noise=torch.as_tensor(regressor.noise_),
            x_mean=torch.as_tensor(regressor.x_mean_),
            x_scale=torch.as_tensor(regressor.x_scale_),
            y_mean=torch.as_tensor(regressor.y_mean_),
            y_scale=torch.as_tensor(regressor.y_scale_),
            masks=masks,
        )

    @property
    def num_outputs(self) -> int:
        """n."""
        return self._n

    @property
    def batch_shape(self) -> torch.Size:
        """Of the model itself: none."""
        return torch.Size([])

    def posterior(
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The joint belief over q points, X (…, q, d), as a `GPyTorchPosterior` over (…, q, n).

        Args:
            X: Points; differentiable.
            output_indices: Some of the outputs only.
            observation_noise: True adds the model's noise; a tensor (…, q or 1, n) adds its own variances.
            posterior_transform: Applied to the result.
        """
        X = self.transform_inputs(X)
        *batch, q, d = X.shape
        x = (X - self.x_mean.to(X)) / self.x_scale.to(X)
        belief = self.predict.joint(x.reshape(-1, d).to(self._dtype), group=q, masks=self.masks)
        n = self._n
        scale = self.y_scale.to(X).expand(n)
        mean = belief.mean.to(X).reshape(*batch, q, n) * scale + self.y_mean.to(X)
        across = scale.repeat(q)
        blocks = belief.covariance_matrix.to(X) * (across.unsqueeze(1) * across)
        blocks = blocks.reshape(*batch, q, n, q, n)
        if output_indices is not None:
            mean, n = mean[..., output_indices], len(output_indices)
            blocks = blocks[..., output_indices, :, :][..., output_indices]
        covariance = blocks.reshape(*batch, q * n, q * n)
        added = self._noise(observation_noise, mean, output_indices).flatten(-2)
        added = added + JITTER * covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True).detach()
        covariance = covariance + torch.diag_embed(added + torch.finfo(X.dtype).tiny)
        if n == 1:
            law = MultivariateNormal(mean.squeeze(-1), covariance)
        else:
            law = MultitaskMultivariateNormal(mean, covariance)  # points first, outputs within
        posterior = GPyTorchPosterior(law)
        return posterior if posterior_transform is None else posterior_transform(posterior)

    def _noise(self, observation_noise: bool | Tensor, mean: Tensor, output_indices: list[int] | None) -> Tensor:
        """Variances of the observation noise, (…, q, n)."""
        if isinstance(observation_noise, Tensor):
            return observation_noise.to(mean).expand(mean.shape)
        if not observation_noise:
            return torch.zeros_like(mean)
        noise = self.noise.to(mean).expand(self._n)
        return (noise if output_indices is None else noise[output_indices]).expand(mean.shape)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Model:
        """Refused: a network learns from new observations by training."""
        raise UnsupportedOperation(
            "a network cannot be conditioned on observations in closed form; train it and make a new FavourModel."
        )

    def fantasize(self, *args: Any, **kwargs: Any) -> Model:
        """Refused, as conditioning is."""
        raise UnsupportedOperation(
            "`fantasize` needs a model that can be conditioned on observations, which a network cannot; use an "
            "acquisition function without look-ahead, such as qLogExpectedImprovement or qUpperConfidenceBound."
        )
