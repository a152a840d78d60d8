"""ivon-opt: an optimiser whose state is a mean-field posterior.

IVON keeps a running Hessian h beside the mean m (the parameters themselves), and draws

    θ ~ N(m, diag(1 / (λ(h + δ)))),      λ the effective sample size `ess`, δ the weight decay.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from favour.adapters.adapted import Adapted, names_of, split
from favour.adapters.silence import without_dropout
from favour.errors import InvalidType, InvalidValue
from favour.posterior import Posterior

_NEEDS = ("params", "hess", "ess", "weight_decay")


def is_ivon(obj: Any) -> bool:
    """Whether `obj` is an optimiser whose parameter groups hold a Hessian and an effective sample size."""
    groups = getattr(obj, "param_groups", None)
    return isinstance(groups, list) and bool(groups) and all(k in group for group in groups for k in _NEEDS)


def from_ivon(optimizer: Any, model: nn.Module, *, keep_dropout: bool = False) -> Adapted:
    """An IVON optimiser that has trained `model` as the model and its posterior.

    Args:
        optimizer: An `ivon.IVON`. Not modified.
        model: The network whose parameters it optimises. Call this outside `optimizer.sampled_params()`, inside which
            the parameters are a draw.
        keep_dropout: Count dropout on top of the posterior; by default it is silent, as it is when draws of
            IVON are evaluated in eval mode (ivon-opt leaves the mode to you).

    Returns:
        `model` itself (or a copy that shares its tensors, where dropout is silenced), and the posterior as it is now;
        training on changes neither means nor variances of the latter.

    Warns:
        SilencedDropout: The model has dropout, which is left out.

    Raises:
        InvalidType: Not an IVON optimiser.
        InvalidValue: It has not made a step.
        UnknownName: It optimises another model.
    """
    if not is_ivon(optimizer):
        raise InvalidType(f"`optimizer` is a {type(optimizer).__name__}; pass the `ivon.IVON` that trained the model.")
    if getattr(optimizer, "current_step", 1) == 0:
        raise InvalidValue("this IVON optimiser has made no step, so its Hessian is the initial guess; train first.")
    variances: dict[str, Tensor] = {}
    means: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        parameters = [p for p in group["params"] if p is not None]
        names = names_of(model, parameters, "this optimiser")
        means |= {name: p.detach().clone() for name, p in zip(names, parameters, strict=True)}
        precision = group["ess"] * (group["hess"] + group["weight_decay"])
        if not bool((precision > 0).all()):
            raise InvalidValue(
                f"the Hessian plus weight decay has entries that are not positive, the least "
                f"{float(precision.min()):.3g}; train with a positive `weight_decay` or a larger `hess_init`."
            )
        variances |= split(precision.reciprocal(), {n: p.shape for n, p in zip(names, parameters, strict=True)})
    return Adapted(without_dropout(model, keep_dropout, "ivon-opt"), Posterior(variances, means=means))
