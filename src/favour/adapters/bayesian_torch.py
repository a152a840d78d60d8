"""bayesian-torch: layers with means `mu_*` and spreads σ = log(1 + e^ρ), ρ in `rho_*`.

| layer                                      | tensors             | here                                |
|--------------------------------------------|---------------------|-------------------------------------|
| `LinearReparameterization`, `LinearFlipout` | `mu_weight`, `rho_weight` | linear                        |
| `Conv{1,2,3}d…`, `ConvTranspose{1,2,3}d…`   | `mu_kernel`, `rho_kernel` | (transposed) convolution      |

Flipout multiplies a draw by random signs of inputs and outputs, for each input of a batch anew. For a linear layer on
vectors that is the same distribution. A Flipout *convolution* flips signs at every position, so what it outputs at
different positions is uncorrelated although its kernel is one draw; the posterior over the kernel is what counts here.
An LSTM of this library draws new weights at every time step, which is no distribution over weights: it is refused.

Unless made by `dnn_to_bnn`, layers return (output, kl). So do their replacements, with kl = 0, and the model's output
is freed of what was summed up of these.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from favour.adapters.adapted import Adapted, comes_from
from favour.adapters.layers import Affine, Plain, replaced
from favour.errors import UnsupportedOperation

_CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
_TRANSPOSED = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}


def is_bayesian_torch(obj: Any) -> bool:
    """Whether `obj` is a model with layers of this kind."""
    return isinstance(obj, nn.Module) and any(_variational(module) for module in obj.modules())


def from_bayesian_torch(model: nn.Module, *, keep_dropout: bool = False) -> Adapted:
    """A model with bayesian-torch layers as a plain model and its posterior.

    Args:
        model: With Reparameterization or Flipout layers, written by hand or by `dnn_to_bnn`. Not modified.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as it is in eval
            mode, where the layers of bayesian-torch still draw.

    Returns:
        A copy of the model with plain layers and without KL terms among its outputs, and the mean-field posterior.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidValue: No such layers.
        UnsupportedOperation: Recurrent or quantised layers, all of them in one message.
    """
    return replaced(model, _plain, "bayesian-torch", keep_dropout)


def _variational(module: nn.Module) -> bool:
    """A layer that draws: it has means and spreads, or is one of the library's that holds such layers."""
    spread = any(hasattr(module, f"mu_{name}") and hasattr(module, f"rho_{name}") for name in ("weight", "kernel"))
    return spread or (comes_from(module, "bayesian_torch") and hasattr(module, "kl_div"))


def _plain(path: str, module: nn.Module) -> Plain | None:
    if not _variational(module):
        return None
    kind = type(module).__name__
    name = next((n for n in ("weight", "kernel") if hasattr(module, f"mu_{n}")), None)
    if name is None or getattr(module, "quant_prepare", False) or "Quantized" in kind:
        raise UnsupportedOperation(
            f"`{path}` is a {kind}, which draws new weights at every step or is quantised; linear layers and "
            "convolutions with one draw of floating-point weights are supported"
        )
    mean: Tensor = getattr(module, f"mu_{name}")
    bias: Tensor | None = module.mu_bias if isinstance(module.mu_bias, Tensor) else None
    deviations = {"weight": F.softplus(getattr(module, f"rho_{name}"))}
    if bias is not None:
        assert isinstance(module.rho_bias, Tensor)
        deviations["bias"] = F.softplus(module.rho_bias)
    function: Any = F.linear
    arguments: dict[str, Any] = {}
    if name == "kernel":
        transposed = hasattr(module, "output_padding")
        function = (_TRANSPOSED if transposed else _CONVOLUTIONS)[mean.ndim]
        kept = ("stride", "padding", "dilation", "groups", *(("output_padding",) if transposed else ()))
        arguments = {argument: getattr(module, argument) for argument in kept}
    return Plain(Affine(function, mean, bias, arguments, pair=not module.dnn_to_bnn_flag), deviations)
