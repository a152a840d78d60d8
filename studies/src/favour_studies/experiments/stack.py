"""Many small networks side by side, so that one training step serves them all.

A network this small leaves a GPU idle. E networks of one architecture have parameters of shape (E, …) and see inputs
(E, B, …); every linear layer is one batched product,

    y_e = x_e W_eᵀ + b_e,   e = 1 … E

and since no network's loss depends on another's parameters, the gradient of the sum of the losses is each one's own.
Members may differ in their dropout rates. A Bayesian layer is trained by local reparametrisation: it draws its outputs,

    y ~ N(W̄x + b̄, W_σ²x² + b_σ²)

A batched convolution is a product with patches: (B·h·w, k·k·C) times (k·k·C, O). Patches are laid out position by
position with the channels last, so that the gradient with respect to x is k² additions of contiguous runs. On a CPU a
loop over members is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from favour_studies.experiments.models import LeNet, Perceptron, rate

# Weight of the KL term of a table's networks, chosen on validation rows (`selection`): with a few hundred rows for
# 11,000 parameters its full weight leaves little but the prior. From .001 down the likelihood hardly changes; the paper
# does not say what it did.
TABLE_KL_WEIGHT = 0.0001

Convolution = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def loop_convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """One convolution for each member: x (E, B, H, W, C), weight (E, O, C, k, k) → (E, B, h, w, O)."""
    maps = [
        F.conv2d(a.permute(0, 3, 1, 2), w, b, padding=padding).permute(0, 2, 3, 1)
        for a, w, b in zip(x, weight, bias, strict=True)
    ]
    return torch.stack(maps)


def grouped_convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """One grouped convolution, a group for each member."""
    e, b, h, w, c = x.shape
    grouped = x.permute(1, 0, 4, 2, 3).reshape(b, e * c, h, w)
    y = F.conv2d(grouped, weight.flatten(0, 1), bias.flatten(), padding=padding, groups=e)
    return y.unflatten(1, (e, -1)).permute(1, 0, 3, 4, 2)


def patch_convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """A batched product with patches."""
    if padding:
        x = F.pad(x, (0, 0, padding, padding, padding, padding))
    return _PatchConvolution.apply(x, weight, bias)


def half_patch_convolution(x: Tensor, weight: Tensor, bias: Tensor, padding: int) -> Tensor:
    """The same in bfloat16, with sums in float32."""
    half = torch.bfloat16
    return patch_convolution(x.to(half), weight.to(half), bias.to(half), padding).float()


CONVOLUTIONS: dict[str, Convolution] = {
    "loop": loop_convolution,
    "grouped": grouped_convolution,
    "patches": patch_convolution,
    "bf16 patches": half_patch_convolution,
}


class _PatchConvolution(torch.autograd.Function):
    SPLITS = 16  # pieces of the long sum over positions, which would otherwise keep too few processors busy

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        e, b, height, width, c = x.shape
        o, k = weight.shape[1], weight.shape[-1]
        h, w = height - k + 1, width - k + 1
        used = k * k * c
        # Rows and columns of 8 numbers or a multiple of it suit the tensor cores.
        patches = x.new_empty(e, b, h, w, -(-used // 8) * 8)
        patches[..., :used].unflatten(-1, (k, k, c)).copy_(
            x.unfold(2, k, 1).unfold(3, k, 1).permute(0, 1, 2, 3, 5, 6, 4)
        )
        patches[..., used:] = 0
        patches = patches.flatten(1, 3)  # (E, B·h·w, K)
        kernel = weight.permute(0, 3, 4, 2, 1).flatten(1, 3)  # (E, k·k·C, O)
        kernel = F.pad(kernel, (0, -o % 8, 0, patches.shape[-1] - used))
        y = torch.bmm(patches, kernel)[..., :o] + bias.unsqueeze(1)
        ctx.save_for_backward(patches, kernel)
        ctx.sizes = (e, b, h, w, c, o, k, used)
        return y.view(e, b, h, w, o)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        patches, kernel = ctx.saved_tensors
        e, b, h, w, c, o, k, used = ctx.sizes
        g = F.pad(gradients[0].reshape(e, b * h * w, o), (0, -o % 8))
        pieces = _PatchConvolution.SPLITS if (b * h * w) % _PatchConvolution.SPLITS == 0 else 1
        parts = torch.bmm(patches.view(e * pieces, -1, patches.shape[-1]).mT, g.view(e * pieces, -1, g.shape[-1]))
        to_kernel = parts.view(e, pieces, *parts.shape[1:]).sum(1)[:, :used, :o]
        to_weight = to_kernel.unflatten(1, (k, k, c)).permute(0, 4, 3, 1, 2)
        to_bias = g.sum(1)[:, :o]
        to_x = None
        if ctx.needs_input_grad[0]:
            spread = torch.bmm(g, kernel.mT)[..., :used].view(e, b, h, w, k, k, c)
            to_x = g.new_zeros(e, b, h + k - 1, w + k - 1, c)
            for i in range(k):
                for j in range(k):
                    to_x[:, :, i : i + h, j : j + w] += spread[:, :, :, :, i, j]
        return to_x, to_weight, to_bias


class Stack(nn.Module):
    """E networks with parameters (E, …).

    Args:
        networks: Of one class and of the same shapes.
        models: Their names, for the dropout rates; either all `vi` or none.
    """

    rates: Tensor

    def __init__(self, networks: Sequence[nn.Module], models: Sequence[str]) -> None:
        super().__init__()
        self.pictures = isinstance(networks[0], LeNet)
        self.bayesian = models[0] == "vi"
        self.names = [name for name, _ in networks[0].named_parameters()]
        states = [dict(network.named_parameters()) for network in networks]
        for name in self.names:
            stacked = torch.stack([state[name].detach() for state in states])
            self.register_parameter(name.replace(".", "/"), nn.Parameter(stacked))
        self.register_buffer("rates", torch.tensor([rate(model) for model in models]).view(-1, 1, 1))
        self.priors = {
            name: module.prior_std
            for name, module in networks[0].named_modules()
            if isinstance(getattr(module, "prior_std", None), float)
        }
        self.padding = int(networks[0].conv1.padding[0]) if isinstance(networks[0], LeNet) else 0
        self.convolution: Convolution = loop_convolution
        # VI on tables needs the scale of the observations' noise in its objective.
        self.log_noise = nn.Parameter(torch.zeros(len(networks))) if self.bayesian and not self.pictures else None
        self.kl_weight: float | Tensor = 1.0 if self.pictures else TABLE_KL_WEIGHT  # one for all, or (E,)

    def get(self, name: str) -> Tensor:
        return getattr(self, name.replace(".", "/"))

    def state(self) -> dict[str, Tensor]:
        """Stacked parameters by the names of one network."""
        extra = {} if self.log_noise is None else {"log_noise": self.log_noise.detach()}
        return {name: self.get(name).detach() for name in self.names} | extra

    def load(self, state: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self.state().items():
                tensor.copy_(state[name])

    def forward(self, x: Tensor) -> Tensor:
        """(E, B, side, side, channels) or (E, B, inputs) → (E, B, outputs); random in training mode."""
        if self.pictures:
            x = self._features(x)
            x = self._linear("fc1", x).relu()
            x = self._linear("fc2", self._drop(x)).relu()
            return self._linear("fc3", self._drop(x))
        x = self._drop(self._linear("fc1", x).relu())
        x = self._drop(self._linear("fc2", x).relu())
        return self._linear("fc3", x)

    def _features(self, x: Tensor) -> Tensor:
        for name, padding in (("conv1", self.padding), ("conv2", 0)):
            x = self.convolution(x, self.get(f"{name}.weight"), self.get(f"{name}.bias"), padding)
            e, b, h, w, c = x.shape
            x = x.reshape(e, b, h // 2, 2, w // 2, 2, c).amax((3, 5)).relu()
        return x.permute(0, 1, 4, 2, 3).flatten(2)

    def _linear(self, name: str, x: Tensor) -> Tensor:
        y = torch.baddbmm(self.get(f"{name}.bias").unsqueeze(1), x, self.get(f"{name}.weight").mT)
        if name not in self.priors or not self.training:
            return y
        spread = torch.exp(2 * self.get(f"{name}.weight_log_std"))
        bias_spread = torch.exp(2 * self.get(f"{name}.bias_log_std"))
        variance = torch.baddbmm(bias_spread.unsqueeze(1), x.square(), spread.mT)
        return y + variance.clamp_min(1e-30).sqrt() * torch.randn_like(y)

    def _drop(self, x: Tensor) -> Tensor:
        if self.bayesian or not self.training:
            return x
        keep = 1 - self.rates
        return x * ((torch.rand_like(x) < keep) / keep)

    def kl(self) -> Tensor:
        """KL of the weights from N(0, s²), (E,): Σ log s − ρ + (e^{2ρ} + μ²)/(2s²) − ½."""
        total = torch.zeros(len(self.rates), device=self.rates.device)
        for name, s in self.priors.items():
            for part in ("weight", "bias"):
                mean, log_std = self.get(f"{name}.{part}"), self.get(f"{name}.{part}_log_std")
                terms = (torch.exp(2 * log_std) + mean.square()) / (2 * s**2) - log_std
                constant = torch.log(torch.tensor(s)).item() - 0.5
                total = total + terms.flatten(1).sum(1) + constant * terms[0].numel()
        return total

    def losses(self, output: Tensor, target: Tensor, inputs: int) -> Tensor:
        """What each member minimises, (E,): the mean negative log-likelihood, for VI plus the weighted KL per input.

        Without VI the likelihood of a table has no scale: the mean squared error.
        """
        if self.pictures:
            fit = F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view(target.shape).mean(1)
        else:
            fit = (output.squeeze(-1) - target).square().mean(1)
            if self.log_noise is not None:
                fit = 0.5 * fit * torch.exp(-2 * self.log_noise) + self.log_noise
        return fit + self.kl_weight * self.kl() / inputs if self.bayesian else fit


def build(model: str, seed: int, *, channels: int = 1, classes: int = 10, inputs: int | None = None) -> nn.Module:
    """A fresh network, a LeNet unless the number of `inputs` is given; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LeNet(model, channels, classes) if inputs is None else Perceptron(model, inputs)
