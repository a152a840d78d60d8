"""Bayesian layers replaced by plain ones: the weights' means stay in the model, their variances become a posterior.

A mean-field layer draws W = μ + σ ∘ z, one draw for a whole batch, and applies a linear map or a convolution with it.
In a copy of the model it becomes an `Affine` with the parameters `weight` = μ_W and `bias` = μ_b, and the posterior is
σ_W², σ_b² under those names. How μ and σ are found in a layer is the library's affair.

Layers of these libraries draw at every call. A layer that is called twice in one forward pass draws twice there, while
a parameter with a posterior is one draw: such models do not agree with their samples.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from favour.adapters.adapted import Adapted
from favour.adapters.silence import without_dropout
from favour.errors import InvalidType, InvalidValue, UnsupportedOperation
from favour.posterior import Posterior


class Affine(nn.Module):
    """A linear layer or a convolution, y = function(x, weight, bias, **arguments).

    Args:
        function: Such as `torch.nn.functional.conv2d`.
        weight: Becomes the parameter `weight`; copied.
        bias: Becomes the parameter `bias`, or None.
        arguments: Stride, padding and so on.
        pair: Whether to return (y, kl) as the layer it stands for does, with kl = 0.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        weight: Tensor,
        bias: Tensor | None,
        arguments: Mapping[str, Any],
        pair: bool = False,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone())
        self.function, self.arguments, self.pair = function, dict(arguments), pair
        if pair:
            self.register_buffer("kl", weight.detach().new_zeros(()), persistent=False)

    def forward(self, x: Tensor, return_kl: bool = True) -> Any:
        y = self.function(x, self.weight, self.bias, **self.arguments)
        return (y, self.kl) if self.pair and return_kl else y

    def extra_repr(self) -> str:
        arguments = ", ".join(f"{k}={v}" for k, v in self.arguments.items())
        return f"{self.function.__name__}, {tuple(self.weight.shape)}" + (f", {arguments}" if arguments else "")


class Outputs(nn.Module):
    """A model without the Kullback–Leibler terms among its outputs: numbers and tensors without dimensions go."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = self.model(*args, **kwargs)
        if not isinstance(result, tuple):
            return result
        kept = tuple(
            y for y in result if not isinstance(y, (int, float)) and not (isinstance(y, Tensor) and y.ndim == 0)
        )
        return kept[0] if len(kept) == 1 else kept


class Plain(NamedTuple):
    """A plain layer for a Bayesian one.

    Attributes:
        layer: With parameters `weight` and `bias`.
        deviations: Standard deviations by parameter name.
    """

    layer: nn.Module
    deviations: Mapping[str, Tensor]


def replaced(
    model: nn.Module, plain: Callable[[str, nn.Module], Plain | None], library: str, keep_dropout: bool
) -> Adapted:
    """A copy of `model` with its Bayesian layers replaced, and their posterior.

    Args:
        model: Not modified.
        plain: From a layer's path and the layer to its replacement, or None for one that is not Bayesian. Raises
            `UnsupportedOperation` for one that has no replacement.
        library: Whose layers these are, for messages.
        keep_dropout: Whether the model's dropout counts, see `favour.adapters.silence`.
    """
    if not isinstance(model, nn.Module):
        raise InvalidType(f"`model` is a {type(model).__name__}; pass a torch.nn.Module with {library} layers.")
    done: dict[int, nn.Module] = {}
    variances: dict[str, Tensor] = {}
    refused: list[str] = []
    pairs = False
    for path, module in model.named_modules():  # each module once, under its first path
        try:
            substitute = plain(path, module)
        except UnsupportedOperation as error:
            refused.append(str(error))
            continue
        if substitute is None:
            continue
        substitute.layer.train(module.training)
        done[id(module)] = substitute.layer
        pairs = pairs or bool(getattr(substitute.layer, "pair", False))
        for name, deviation in substitute.deviations.items():
            variances[f"{path}.{name}" if path else name] = deviation.detach().square()
    if refused:
        raise UnsupportedOperation("; ".join(refused))
    if not done:
        raise InvalidValue(
            f"this {type(model).__name__} has no {library} layers, so nothing in it is uncertain; pass the Bayesian "
            "model itself."
        )
    twin = copy.deepcopy(model, done)  # the memo: a replaced layer is copied as its replacement
    twin = without_dropout(twin, keep_dropout, f"{library} in eval mode", stacklevel=5)
    if not pairs:
        return Adapted(twin, Posterior(variances))
    return Adapted(
        Outputs(twin).train(model.training), Posterior({f"model.{name}": v for name, v in variances.items()})
    )
