"""The network's own Jacobian at the mean, and nothing of second order: the GLM predictive of Laplace approximations.

With ξ all that is random, weights w, the masks of dropout and uncertain inputs, the network is replaced by its line at
the mean of ξ,

    f(ξ) ≈ f(ξ̄) + J(ξ − ξ̄),      mean f(ξ̄),      Σ_out = J Σ_ξ Jᵀ,      J = ∂f/∂ξ at ξ̄.

Every surrogate is asked for at an input that does not vary: then its mean is the operation itself, G its derivative,
and only noise of its own is left, a mean-field layer's Σ_j V_ij μ_j² or a mask's μ² p/q. The reverse sweep over these
(`favour.methods.reverse`) is J Σ_ξ Jᵀ, without forming J.

This is another model than the law of the network under draws of ξ, which the other methods describe. A posterior that
was fitted to a linearisation, as Laplace's is, may be far wider than the region where the network is its own
line; draws of its weights are then nonsense while the linearised network predicts well (docs/adapters.md has figures).
Where the network is linear in what is random, in its last layer, both are the same.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from favour.errors import InvalidValue
from favour.methods.adjoint import ReverseSweep
from favour.methods.forward import Representation, Sweep
from favour.methods.method import Bound, Numerics, register
from favour.methods.reverse import Inputs
from favour.passes.plan.steps import Step
from favour.surrogate import Surrogate
from favour.surrogate.value import Value


@register
@dataclass(frozen=True, eq=False, repr=False)
class Linearised(ReverseSweep):
    """The network linearised at the mean of weights, masks and inputs.

    Args:
        directions: Of the outputs: how many leading directions of a softmax, or covectors (k, *event) or
            (k, batch, *event); None for all.
    """

    name = "linearised"

    directions: int | Tensor | None = None

    def representation(self, bound: Bound) -> Representation:
        return Points()

    def swept(self, bound: Bound) -> tuple[Sweep, Inputs]:
        bound.ctx = replace(bound.ctx, activation="taylor")  # f′(μ), as no mode but this says where nothing varies
        return super().swept(bound)

    def unchecked(self) -> str:
        return "samples are of the network, not of its linearisation"

    def held(self) -> str:
        return "A forward sweep holds the network's values at the mean, a reverse sweep applies its Jacobian there."

    def untried(self) -> str:
        return "method='adjoint', which is of the network and not of its linearisation"

    def validate(self, numerics: Numerics) -> None:
        super().validate(numerics)
        if numerics.activation not in ("price", "taylor"):
            raise InvalidValue(
                f"`activation` is {numerics.activation!r}, and method='linearised' takes f′(μ) of every activation."
            )


class Points(Representation):
    """Values alone: no result varies."""

    def absorb(self, surrogate: Surrogate, step: Step, sweep: Sweep) -> Value:
        return Value(surrogate.mean)

    def source(self, value: Value) -> Value:
        return Value(value.mean)
