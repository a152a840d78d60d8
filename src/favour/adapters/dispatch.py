"""`adapt`: which adapter an object belongs to, told by its attributes. No other library is imported to find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from favour.adapters.adapted import Adapted
from favour.adapters.bayesian_torch import from_bayesian_torch, is_bayesian_torch
from favour.adapters.ivon import from_ivon, is_ivon
from favour.adapters.laplace import from_laplace, is_laplace
from favour.adapters.pyro import from_pyro, is_auto_normal
from favour.adapters.swag import from_swag, is_swag
from favour.adapters.torchbnn import from_torchbnn, is_torchbnn
from favour.errors import InvalidType


class _Known(NamedTuple):
    recognises: Callable[[Any], bool]
    adapter: Callable[..., Adapted]
    holds_model: bool
    what: str


_ADAPTERS = (
    _Known(is_swag, from_swag, False, "SWAG moments"),
    _Known(is_ivon, from_ivon, False, "an ivon-opt optimiser"),
    _Known(is_auto_normal, from_pyro, False, "a Pyro AutoNormal guide"),
    _Known(is_laplace, from_laplace, True, "a laplace-torch object"),
    _Known(is_bayesian_torch, from_bayesian_torch, True, "a model with bayesian-torch layers"),
    _Known(is_torchbnn, from_torchbnn, True, "a model with torchbnn layers"),
)


def adapt(obj: Any, model: nn.Module | None = None, **options: Any) -> Adapted:
    """Turn another library's trained object into a model and a posterior for `favour.compile`.

    Args:
        obj: A fitted `laplace.Laplace`; an `ivon.IVON`; a model with bayesian-torch or torchbnn layers; a `SWAG` or a
            mapping of its moments; a Pyro `AutoNormal` guide. Never modified.
        model: The network, where `obj` does not hold it: for IVON, SWAG and Pyro.
        options: Of that adapter, see `from_laplace`, `from_swag` and so on. All take `keep_dropout=True`, for
            dropout to count on top of the posterior; by default it is silent, as these libraries predict in eval mode.

    Returns:
        A named tuple (model, posterior).

    Warns:
        SilencedDropout: The network has dropout, which is left out of its beliefs.

    Raises:
        InvalidType: No adapter knows this object, or `model` is missing.

    Example:
        >>> import torch, favour
        >>> network, swag = nn.Linear(2, 1), favour.adapters.SWAG()
        >>> for _ in range(5):
        ...     _ = nn.init.normal_(network.weight)
        ...     swag.collect(network)
        >>> model, posterior = adapt(swag, network)
        >>> favour.compile(model, torch.ones(3, 2), posterior=posterior)(torch.ones(3, 2)).variance.shape
        torch.Size([3, 1])
    """
    for known in _ADAPTERS:
        if not known.recognises(obj):
            continue
        if known.holds_model:
            return known.adapter(obj, **options)
        if model is None:
            raise InvalidType(f"{known.what} does not hold its network; call `adapt(obj, model)`.")
        return known.adapter(obj, model, **options)
    if isinstance(obj, list | tuple):
        raise InvalidType(
            f"a {type(obj).__name__} of {len(obj)} is no posterior. If these are members of a deep ensemble, make "
            "`favour.adapters.Ensemble(members)`, which is used like a predictor."
        )
    names = ", ".join(known.what for known in _ADAPTERS)
    raise InvalidType(
        f"no adapter knows a {type(obj).__module__}.{type(obj).__name__}. Known are {names}. For anything else build a "
        "favour.Posterior from means and variances by parameter name."
    )
