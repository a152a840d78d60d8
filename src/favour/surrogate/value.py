"""What a rule sees of its arguments.

`Value` is an uncertain tensor: its mean and what the running method knows of its covariance,

    Σ = diag(λ) + Σ_blocks U_k U_kᵀ,      U_k of shape (rank_k, batch, *event).

Blocks are named: two values that hold a block of the same name share those latent variables, so that the
covariance between them is Σ_k U_k(x) U_k(y)ᵀ over the shared names.

`Weight` is a parameter with a posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from favour.surrogate.carried import Carried, find
from favour.surrogate.gaussian import Gaussian
from favour.surrogate.linear_map import LinearMap

K = TypeVar("K", bound=Carried)


@dataclass(eq=False)
class Value:
    """An uncertain tensor.

    Attributes:
        mean: (batch, *event).
        diag: λ, independent variances, (batch, *event), or None for zero.
        blocks: Factor columns by the name of their latent variables.
        name: The graph node this is the value of.
        carried: What else a sweep of variances knows, one of each kind that its method wants.
    """

    mean: Tensor
    diag: Tensor | None = None
    blocks: dict[Hashable, Tensor] = field(default_factory=dict)
    name: str = ""
    carried: tuple[Carried, ...] = ()

    # Kept by hand: functools.cached_property takes a lock, which torch.compile cannot trace.
    _variance: Tensor | None = field(default=None, repr=False)
    _factor: Tensor | None = field(default=None, repr=False)

    @property
    def variance(self) -> Tensor:
        """Marginal variances, (batch, *event)."""
        if self._variance is None:
            total = self.diag
            for block in self.blocks.values():
                part = block.square().sum(0)
                total = part if total is None else total + part
            self._variance = torch.zeros_like(self.mean) if total is None else total
        return self._variance

    @property
    def factor(self) -> Tensor | None:
        """All columns in one tensor, (rank, batch, *event), or None where there are none."""
        if self._factor is None and self.blocks:
            self._factor = torch.cat(list(self.blocks.values()))
        return self._factor

    def known(self, kind: type[K]) -> K | None:
        """What is carried of one kind."""
        return find(self.carried, kind)

    def through(self, G: LinearMap) -> Tensor:
        """Marginal variances of Gx, from the marginal variances and what is carried beside them."""
        for one in self.carried:
            variance = one.through(self.variance, G)
            if variance is not None:
                return variance
        return G.square(self.variance)

    def replace(self, diag: Tensor | None, blocks: dict[Hashable, Tensor]) -> None:
        """Hold the same covariance differently: what is derived from it is made anew."""
        self.diag, self.blocks = diag, blocks
        self._variance = self._factor = None

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape


def mean_of(argument: Any) -> Any:
    """The mean of an uncertain argument, or the argument itself."""
    return argument.mean if isinstance(argument, (Value, Weight)) else argument


@dataclass(frozen=True, eq=False)
class Weight:
    """A parameter that has a posterior.

    Attributes:
        name: The parameter's qualified name.
        mean: Its mean, of the parameter's shape.
        gaussian: Its own covariance, or None.
        partner: For a matrix and a bias that share one Gaussian over [W | b], the other's name.
        latents: Columns (K, *shape) of the draws shared by all layers, or None.
        uses: How many operations of the model read this parameter.
        mixed: They are of several kinds, or read it at many places: its draws are held in weight space.
        earlier: What the operations that read it before noted for those behind them (`Surrogate.readings`).
        parts: Of a weight that is computed from parameters, the independent parts of its covariance, by their draws;
            `gaussian` is None then.
    """

    name: str
    mean: Tensor
    gaussian: Gaussian | None = None
    partner: str | None = None
    latents: Tensor | None = None
    uses: int = 1
    mixed: bool = False
    earlier: tuple[Any, ...] = ()
    parts: tuple[Weight, ...] = ()

    @property
    def shape(self) -> torch.Size:
        return self.mean.shape

    @property
    def draws(self) -> tuple[Weight, ...]:
        """Weights with a covariance each, that add up to this one: itself, or its parts."""
        return self.parts if self.gaussian is None else (self,)

    def variance(self) -> Tensor:
        """Marginal variances, of the parameter's shape."""
        total = torch.zeros_like(self.mean)
        for part in self.draws:
            assert part.gaussian is not None
            total = total + part.gaussian.variance()
        return total if self.latents is None else total + self.latents.square().sum(0)

    def transposed(self) -> Weight:
        """The matrix with rows and columns exchanged; its draws are the same."""
        gaussian = None if self.gaussian is None else self.gaussian.transposed()
        latents = None if self.latents is None else self.latents.mT
        parts = tuple(part.transposed() for part in self.parts)
        return replace(self, mean=self.mean.mT, gaussian=gaussian, latents=latents, parts=parts)

    def read(self, readings: Mapping[str, Any]) -> Weight:
        """For the next operation that reads it, with what this one noted (`Surrogate.readings`)."""
        earlier = (*self.earlier, readings[self.name]) if self.name in readings else self.earlier
        return replace(self, earlier=earlier, parts=tuple(part.read(readings) for part in self.parts))


@dataclass(frozen=True, eq=False)
class Context:
    """What a rule may know besides its arguments: settings and its place, nothing that another rule wrote.

    Attributes:
        activation: `"price"`, `"matched"` or `"taylor"`.
        module: Path of the module that made the call.
        place: Module path and source line, for messages.
        step: Name of the node that is being computed.
        short: Dtype of large products with deviations, covectors and variances; None leaves the model's own.
        tf32: Large products with deviations, covectors and variances may use TF32 (eager code on a GPU).
        cache: `cache(step, name, tensor, function, costly)`, see `cached`.
    """

    activation: str = "price"
    module: str = ""
    place: str = ""
    step: str = ""
    short: torch.dtype | None = None
    tf32: bool = False
    cache: Callable[[str, str, Tensor, Callable[[Tensor], Any], bool], Any] | None = None

    def at(self, step: str, module: str, place: str) -> Context:
        """The same for another step."""
        if torch.compiler.is_compiling():
            return replace(self, step=step, module=module, place=place)
        made = object.__new__(Context)  # once a step and call: a tenth of what `replace` takes
        made.__dict__.update(self.__dict__, step=step, module=module, place=place)
        return made

    def cached(self, name: str, tensor: Tensor, function: Callable[[Tensor], Any], *, costly: bool = False) -> Any:
        """`function(tensor)`, kept until the tensor changes.

        Args:
            name: Tells several such values of one step apart.
            tensor: What it is made of.
            function: Makes it.
            costly: Compiled code takes it from the last eager call, and does not compute it anew.
        """
        return function(tensor) if self.cache is None else self.cache(self.step, name, tensor, function, costly)

    def shortened(self, tensor: Tensor) -> Tensor:
        """A weight in the dtype that products with deviations, covectors and variances use."""
        return tensor if self.short is None else tensor.to(self.short)
