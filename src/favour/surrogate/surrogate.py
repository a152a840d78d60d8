"""The surrogate of one operation: what a rule makes and methods read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from favour.surrogate.carried import Carried
from favour.surrogate.gram import flat
from favour.surrogate.linear_map import LinearMap, scaled
from favour.surrogate.noise import Noise
from favour.surrogate.siblings import Origin


class Second(ABC):
    """Second derivatives of an operation in one of its arguments, E[∂²y_i/∂x_j∂x_k].

    They are pulled back by covectors g at y: H = Σ_i g_i ∂²y_i/∂x∂x, a matrix for each covector and input.

    Attributes:
        ends_cumulants: Mean and noise of the operation have taken in what cumulants of x were known.
    """

    ends_cumulants = False

    @abstractmethod
    def diagonal(self, g: Tensor) -> Tensor:
        """H_jj, (F, *result shape) to (F, *input shape)."""

    @abstractmethod
    def forms(self, g: Tensor, u: Tensor) -> Tensor:
        """uᵀHw for all pairs of deviations u, w: (F, *result) and (P, *input) to (batch, F, P, P)."""


class Pointwise(Second):
    """Of y_i = f(x_i): H = diag(g∘E[f″]).

    Args:
        curvature: E[f″], (batch, *event), when called.
        ends_cumulants: See `Second`.
    """

    def __init__(self, curvature: Callable[[], Tensor], ends_cumulants: bool = True) -> None:
        self.curvature, self.ends_cumulants = curvature, ends_cumulants

    def diagonal(self, g: Tensor) -> Tensor:
        return scaled(g, self.curvature())

    def forms(self, g: Tensor, u: Tensor) -> Tensor:
        images, b = flat(u).transpose(0, 1).unsqueeze(1), flat(self.diagonal(g)).transpose(0, 1).unsqueeze(2)
        return (images * b) @ images.mT


@dataclass
class Surrogate:
    """What a rule returns: y ≈ mean + Σ G(x − E[x]) + noises.

    Attributes:
        mean: E[y], the shape of y.
        maps: Pairs of an uncertain argument (as the rule received it) and its `LinearMap`.
        noises: The draws this operation makes.
        second: Second derivatives in the first argument of `maps`, where the operation is curved and they are known.
        carried: What the operation tells of y to sweeps of variances, in the place of what its maps would move.
        variance: Var y in such a sweep, where what an argument carries tells more than maps and noises do.
        crossed: Second derivatives in two arguments of one origin: the origin, and the products P∘Q of the entries of
            their paths from it (`favour.surrogate.siblings`).
        readings: By parameter, what the operations that read it later have to know of this one (`Weight.earlier`).
    """

    mean: Tensor
    maps: list[tuple[Any, LinearMap]] = field(default_factory=list)
    noises: list[Noise] = field(default_factory=list)
    second: Second | None = None
    carried: list[Carried] = field(default_factory=list)
    variance: Tensor | None = None
    crossed: list[tuple[Origin, LinearMap]] = field(default_factory=list)
    readings: dict[str, Any] = field(default_factory=dict)
