"""The table of rules: one aten overload, one rule.

A rule is a plain function `rule(ctx, *args, **kwargs) -> Surrogate` with the signature of the operation.
Uncertain tensors arrive as `Value`, parameters with a posterior as `Weight`, everything else as it is.
An operation with several results returns a list of surrogates.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from favour.errors import InvalidValue, UnsupportedOperation
from favour.graph.traits import NONE, Argument, Operation, Traits, set_traits
from favour.scalar import ScalarFunction, composed, remainder_between, surrogate_slope
from favour.scalar.effective import effective_cumulants, effective_moments
from favour.surrogate import (
    Cumulants,
    DiagonalNoise,
    LinearMap,
    Noise,
    Pointwise,
    Residual,
    Surrogate,
    compose,
    scaling,
    stored,
)
from favour.surrogate.channels import ChannelCovariance, Scaled
from favour.surrogate.tails import Tails
from favour.surrogate.value import Context, Value

Exactness = Literal["exact", "moment-matched", "linearised", "refused"]


@dataclass(frozen=True)
class Rule:
    """A registered rule.

    Attributes:
        function: Makes the surrogate.
        exactness: `"exact"` (mean and covariance are exact for any input distribution with these second
            moments), `"moment-matched"` (exact marginals for Gaussian inputs), `"linearised"`, or
            `"refused"` (takes no uncertain argument).
        family: What the table of supported operations files it under.
        pointwise: For element-wise operations on one tensor, the scalar function they apply.
        weights: The operation may be given parameters with a posterior.
        traits: What passes may know of it, see `favour.Traits`.
    """

    function: Callable[..., Any]
    exactness: Exactness
    family: str
    pointwise: Callable[..., ScalarFunction] | None = None
    weights: bool = False
    traits: Traits = NONE


RULES: dict[Operation, Rule] = {}


def _register(overloads: tuple[Any, ...], entry: Rule, override: bool) -> None:
    for overload in overloads:
        if overload in RULES and not override:
            raise InvalidValue(
                f"`{overload}` already has a rule ({RULES[overload].family}); pass `override=True` to replace it."
            )
        RULES[overload] = entry
        set_traits(overload, entry.traits)


def rule(
    *overloads: Operation,
    exactness: Exactness = "linearised",
    family: str = "user",
    weights: bool = False,
    traits: Traits = NONE,
    override: bool = False,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a rule for one or more aten overloads.

    Args:
        overloads: For example `torch.ops.aten.linear.default`.
        exactness: See `Rule`.
        family: Heading in the table of supported operations.
        weights: Set when the rule knows what to do with `Weight` arguments.
        traits: What the operation does, by which the passes that rewrite a model know it: `favour.Traits`.
        override: Replace an existing rule instead of raising.

    Example:
        >>> import torch, favour
        >>> @favour.rule(torch.ops.aten.narrow_copy.default, exactness="exact")
        ... def narrow_copy(ctx, x, dim, start, length):
        ...     d = dim % x.mean.ndim + 1  # deviations have one more axis in front
        ...
        ...     def put(g):
        ...         zeros = g.new_zeros(g.shape[0], *x.mean.shape)
        ...         return zeros.slice_scatter(g, d, start, start + length)
        ...
        ...     G = favour.structural(lambda v: v.narrow(d, start, length), put)
        ...     return favour.Surrogate(x.mean.narrow(dim, start, length), [(x, G)])
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _register(overloads, Rule(function, exactness, family, None, weights, traits), override)
        return function

    return register


def elementwise(
    *overloads: Operation,
    function: Callable[..., ScalarFunction],
    exactness: Exactness = "moment-matched",
    traits: Traits = NONE,
    override: bool = False,
) -> None:
    """Register y = f(x) element by element; `function(*further arguments)` gives the scalar f.

    `traits`: what else is known of it (homogeneous, monotone, power, bounds).
    """

    def apply(ctx: Context, x: Value, *args: Argument, **kwargs: Argument) -> Surrogate:
        return pointwise_surrogate(ctx, x, function(*args, **kwargs))

    traits = Traits(scalar=composed.function(function)).merged(traits).merged(Traits(elementwise=True))
    _register(overloads, Rule(apply, exactness, "element-wise", function, traits=traits), override)


def pointwise_surrogate(ctx: Context, x: Value, f: ScalarFunction) -> Surrogate:
    """The surrogate of a scalar function in the context's activation mode."""
    price = ctx.activation == "price"

    def second_derivative() -> Tensor:
        return curvature(f, x.mean, x.variance)

    draw, cumulants = None, x.known(Cumulants)
    if cumulants is None or not price or f.exactness == "linearised":  # two values may lie outside f's domain
        mean, slope, residual = surrogate_slope(f, x.mean, x.variance, ctx.activation)
    else:
        third, fourth = cumulants.third, cumulants.fourth
        (mean, slope, residual), draw = effective_moments(f, x.mean, x.variance, third, fourth, second_derivative)

    slope = stored(slope)
    result = Surrogate(mean, [(x, scaling(slope))], second=Pointwise(second_derivative) if price else None)
    if not price:
        return result
    tails = x.known(Tails)
    if tails is not None and f.exactness != "linearised":
        result.carried.append(Tails(lambda: _bent(f, x, tails.cumulants())))
    within = x.known(ChannelCovariance)
    response = None if within is None else within.response()
    if within is not None and response is not None:
        z, spread = response
        answer = compose(scaling(0.5 * second_derivative()), spread)  # see `favour.surrogate.channels`
        result.maps.append((z, answer))
        result.carried.append(Scaled(within, slope, x.mean.ndim - 2))
        result.variance = slope.square() * x.variance + residual
        residual = (residual - answer.square(z.variance)).clamp_min(0)

    def between(c: Tensor | None, q: int) -> Noise:
        assert c is not None
        return DiagonalNoise(remainder_between(f, x.mean, x.variance, residual, c).flatten(0, 1))

    result.noises.append(Residual(residual, f"{ctx.module or 'model'} ({f.name})", between=between, draw=draw))
    return result


def _bent(f: ScalarFunction, x: Value, cumulants: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor] | None:
    return None if cumulants is None else effective_cumulants(f, x.mean, x.variance, *cumulants)


def curvature(f: ScalarFunction, mean: Tensor, variance: Tensor) -> Tensor:
    """E[f″], by the slopes E[f′] a twentieth of a standard deviation to either side; 0 where the variance is."""
    positive = variance > 0
    if f.curvature is not None:
        return torch.where(positive, f.curvature(mean, torch.where(positive, variance, 1.0)), 0.0)
    step = 0.05 * torch.where(positive, variance, 1.0).sqrt()
    above, below = (surrogate_slope(f, mean + d, variance, "price").slope for d in (step, -step))
    return torch.where(positive, (above - below) / (2 * step), 0.0)


def linear_map(
    *overloads: Operation,
    make: Callable[..., tuple[Tensor, LinearMap]],
    family: str,
    traits: Traits = NONE,
    override: bool = False,
) -> None:
    """Register an operation that is linear in its one tensor argument.

    `make(mean, *args)` returns the operation's result on the mean and its `LinearMap`.
    """

    def apply(ctx: Context, x: Value, *args: Argument, **kwargs: Argument) -> Surrogate:
        mean, G = make(x.mean, *args, **kwargs)
        return Surrogate(mean, [(x, G)])

    _register(overloads, Rule(apply, "exact", family, traits=traits), override)


def deterministic(*overloads: Argument, traits: Traits = NONE, override: bool = False) -> None:
    """Register operations whose result is discrete: they refuse uncertain input, and say so."""

    def refuse(ctx: Context, *args: Argument, **kwargs: Argument) -> Surrogate:
        raise UnsupportedOperation(
            f"an operation with a discrete result at {ctx.place} has an uncertain argument, so its result "
            "has no mean and covariance. Return the values before it (logits instead of argmax, say)."
        )

    _register(overloads, Rule(refuse, "refused", "discrete", traits=traits), override)


def supported_operations() -> list[tuple[str, str, str]]:
    """(operation, family, exactness) of every registered rule, sorted."""
    return sorted((str(overload), entry.family, entry.exactness) for overload, entry in RULES.items())


def operations_table() -> str:
    """The table of supported operations in Markdown, as docs/operations.md holds it."""
    families: dict[tuple[str, str], list[str]] = {}
    for name, family, exactness in supported_operations():
        families.setdefault((family, exactness), []).append(f"`{name}`")
    lines = ["| family | how exact | operations |", "|---|---|---|"]
    lines += [f"| {family} | {how} | {', '.join(names)} |" for (family, how), names in sorted(families.items())]
    return "\n".join(lines) + "\n"
