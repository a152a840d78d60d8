"""torchbnn: layers with means `weight_mu`, `bias_mu` and log-deviations `weight_log_sigma`, `bias_log_sigma`.

`BayesLinear` and `BayesConv2d` become a linear layer and a convolution, `BayesBatchNorm2d` a `BatchNorm2d`; σ = e^s.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from favour.adapters.adapted import Adapted
from favour.adapters.layers import Affine, Plain, replaced
from favour.errors import InvalidValue, UnsupportedOperation


def is_torchbnn(obj: Any) -> bool:
    """Whether `obj` is a model with layers of this kind."""
    return isinstance(obj, nn.Module) and any(_variational(module) for module in obj.modules())


def from_torchbnn(model: nn.Module, *, keep_dropout: bool = False) -> Adapted:
    """A model with torchbnn layers as a plain model and its posterior.

    Args:
        model: With `BayesLinear`, `BayesConv2d` or `BayesBatchNorm2d`. Not modified.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as it is in eval
            mode, where the layers of torchbnn still draw.

    Returns:
        A copy of the model with plain layers, and the mean-field posterior.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidValue: No such layers, or frozen ones, which repeat one draw.
        UnsupportedOperation: A layer that is none of these, or circular padding; all of them in one message.
    """
    return replaced(model, _plain, "torchbnn", keep_dropout)


def _variational(module: nn.Module) -> bool:
    return hasattr(module, "weight_mu") and hasattr(module, "weight_log_sigma")


def _plain(path: str, module: nn.Module) -> Plain | None:
    if not _variational(module) or not isinstance(module.weight_mu, Tensor):  # a norm without weights is plain
        return None
    if getattr(module, "weight_eps", None) is not None:
        raise InvalidValue(
            f"`{path}` is frozen and repeats one draw of its weights; call `torchbnn.utils.unfreeze(model)` first."
        )
    deviations = {
        name: getattr(module, f"{name}_log_sigma").exp()
        for name in ("weight", "bias")
        if isinstance(getattr(module, f"{name}_mu", None), Tensor)
    }
    weight, bias = module.weight_mu, module.bias_mu if "bias" in deviations else None
    assert bias is None or isinstance(bias, Tensor)
    if hasattr(module, "running_mean"):
        return Plain(_norm(module), deviations)
    if weight.ndim == 2:
        return Plain(Affine(F.linear, weight, bias, {}), deviations)
    if weight.ndim == 4 and module.padding_mode == "zeros" and not module.transposed:
        arguments = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}
        return Plain(Affine(F.conv2d, weight, bias, arguments), deviations)
    raise UnsupportedOperation(
        f"`{path}` is a {type(module).__name__} with weights of shape {tuple(weight.shape)}; linear layers, "
        "two-dimensional convolutions with zero padding and batch norms are supported"
    )


def _norm(module: Any) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(
        module.num_features, module.eps, module.momentum, True, module.track_running_stats, dtype=module.weight_mu.dtype
    ).to(module.weight_mu.device)
    names = ("running_mean", "running_var", "num_batches_tracked") if module.track_running_stats else ()
    state = {name: getattr(module, name) for name in names}
    norm.load_state_dict({"weight": module.weight_mu, "bias": module.bias_mu, **state})
    return norm
