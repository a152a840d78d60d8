"""What a method is: one algorithm that takes the steps of a plan, and the values of a call, to beliefs.

A method is an object that holds its parameters and nothing else. It says what it does (`run`), what that costs in
forward passes (`cost`), how many numbers it holds for each input (`memory`) and which of its parameters make no sense
(`validate`). All else follows from its fields: how it is printed, written to a file and asked for by name.

    @register
    @dataclass(frozen=True, eq=False, repr=False)
    class Mine(Method):
        name = "mine"
        rank: int = 3

        def run(self, bound): ...

`favour.compile(model, x, method=Mine(rank=5))` takes it, and `method="mine", rank=5` once its file is imported.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor

from favour.belief import Belief
from favour.belief.covariance import Covariance, Dense, DiagonalPlusFactor
from favour.errors import InvalidType, InvalidValue
from favour.graph.node import Graph, Node
from favour.passes.plan.steps import Plan
from favour.posterior import Posterior
from favour.surrogate import flat
from favour.surrogate.value import Context, Value

ACTIVATIONS = ("price", "matched", "taylor")
PRECISIONS = (None, "tf32", "bf16")
Sources = list[tuple[str, Value]]


@dataclass(frozen=True)
class Numerics:
    """How any method computes; see `favour.compile`."""

    activation: str = "price"
    precision: str | None = None
    seed: int = 0
    memory: int | None = None

    def asked(self) -> list[str]:
        """What differs from the defaults, in words."""
        return differing(self)

    def validate(self) -> None:
        """Raise for values that make no sense."""
        if self.activation not in ACTIVATIONS:
            raise InvalidValue(f"`activation` is {self.activation!r}; choose one of {', '.join(ACTIVATIONS)}.")
        if self.precision not in PRECISIONS:
            raise InvalidValue(f"`precision` is {self.precision!r}; choose None, 'tf32' or 'bf16'.")
        check_whole("seed", self.seed, 0)
        check_whole("memory", self.memory, 1, optional=True)


@dataclass(eq=False)
class Bound:
    """One call, with all that a method needs for it.

    Attributes:
        plan: The steps.
        values: Inputs, parameters and constants by the nodes of the plan: uncertain inputs as `Value`, parameters with
            a posterior as `Weight`.
        sources: The uncertain inputs by name.
        ctx: For the rules.
        numerics: Asked of every method.
        starts: Random starts by the names of steps; filled in eager calls.
        graph: The captured network, as the model wrote it.
        leaves: Inputs, parameters and constants by the names of its nodes.
        posterior: Over parameters, by the graph's names.
        kept: Names of nodes, whose values `run` puts in.
        watched: Somebody wants to see `sweep`, the forward sweep with its tape and notes, once the method is done.
    """

    plan: Plan
    values: dict[Node, Any]
    sources: Sources
    ctx: Context
    numerics: Numerics
    starts: dict[str, Tensor]
    graph: Graph
    leaves: dict[str, Any]
    posterior: Posterior
    kept: dict[str, Any] = field(default_factory=dict)
    watched: bool = False
    sweep: Any = None


class Method(ABC):
    """A method; subclasses are frozen dataclasses of their parameters, all of which have defaults.

    Attributes:
        name: By which `favour.compile` knows it.
        partial: It keeps few of the correlations between outputs, and says so.
        fixed: It computes the same operations in every call, so that they can be compiled and exported.
    """

    name: ClassVar[str]
    partial: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    @abstractmethod
    def run(self, bound: Bound) -> list[Any]:
        """One belief per floating-point output of the plan, other outputs as they are."""

    def draws(self, bound: Bound, n: int | None) -> Tensor | None:
        """Draws of the first output, (n, batch, *event), where the method makes some; at least n if that is given."""
        return None

    def cost(self, plan: Plan) -> float:
        """Predicted time, in forward passes."""
        return 1.0

    def memory(self, plan: Plan) -> int:
        """Numbers held for each input at the worst moment."""
        return sum(plan.entries(step.node.shape) for step in plan.steps) or 1

    def validate(self, numerics: Numerics) -> None:  # noqa: B027 - most have nothing to refuse
        """Raise for parameters that make no sense, by themselves or with these numerics."""

    def choose(self, plan: Plan) -> Method:
        """The method that does the work: itself, for all but `auto`."""
        return self

    def written(self, plan: Plan) -> Method:
        """What a file takes that can draw no random numbers: itself where it draws none, and else refused there."""
        return self.choose(plan)

    def over(self, outputs: Literal["joint", "logits", "classes"]) -> Method:
        """The same for other outputs of the network.

        Args:
            outputs: `"joint"`, all of them in one vector; `"logits"`, what its softmax is taken of; `"classes"`, known
                to be class scores.
        """
        return self

    def unchecked(self) -> str:
        """Why draws of the network cannot tell whether it is right; nothing where they can."""
        return ""

    def held(self) -> str:
        """What it keeps of a covariance on its way, and what it forgets, in a sentence for `Predictor.explain`."""
        return ""

    def untried(self) -> str:
        """What may come closer to the truth, to follow "Try"; nothing where that is samples alone."""
        return ""

    def asked(self) -> list[str]:
        """As keywords of `favour.compile`, those that differ from the defaults."""
        return [*([f"method={self.name!r}"] if self.name != "auto" else []), *differing(self)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(differing(self))})"


M = TypeVar("M", bound=type[Method])

METHODS: dict[str, type[Method]] = {}


def register(cls: M) -> M:
    """Let `favour.compile` and files know a method by its name."""
    if METHODS.get(cls.name, cls).__qualname__ != cls.__qualname__:
        raise InvalidValue(f"there is a method {cls.name!r} already, {METHODS[cls.name].__qualname__}; take another.")
    METHODS[cls.name] = cls
    return cls


def parameters(cls: type[Method]) -> list[str]:
    """The names of a method's parameters."""
    return [f.name for f in fields(cls)]  # type: ignore[arg-type]


def differing(settings: Any) -> list[str]:
    """Fields of a dataclass that differ from their defaults, in words.

    >>> differing(Numerics(seed=3))
    ['seed=3']
    """
    differences = []
    for f in fields(settings):
        value = getattr(settings, f.name)
        if isinstance(value, Tensor):
            differences.append(f"{f.name}=(tensor of shape {tuple(value.shape)})")
        elif f.default is MISSING or value != f.default:
            differences.append(f"{f.name}={value!r}")
    return differences


def describe(settings: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """JSON-able fields of a dataclass, and the tensors among them."""
    plain: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    for f in fields(settings):
        value = getattr(settings, f.name)
        if isinstance(value, Tensor):
            tensors[f.name] = value
        elif isinstance(value, Mapping):
            plain[f.name] = {"keys": list(value)}
            tensors |= {f"{f.name}.{k}": v for k, v in value.items()}
        else:
            plain[f.name] = value
    return plain, tensors


def restored(plain: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The fields that `describe` wrote."""
    known: dict[str, Any] = dict(plain)
    for name, value in plain.items():
        if isinstance(value, dict):
            known[name] = {k: tensors[f"{name}.{k}"] for k in value["keys"]}
    return known | {k: v for k, v in tensors.items() if "." not in k}


def check_whole(name: str, value: Any, least: int, *, optional: bool = False) -> None:
    """Raise unless a parameter is a whole number of at least `least`."""
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidType(f"`{name}` is {value!r}; a whole number is needed.")
    if value < least:
        raise InvalidValue(f"`{name}` is {value}; it must be at least {least}.")


def belief_of(value: Any, covariance: Covariance | None = None) -> Any:
    """A belief for a tensor, uncertain or not; anything else as it is, a certain number without a batch too."""
    if isinstance(value, Tensor):
        if not value.is_floating_point() or not value.ndim:
            return value
        value = Value(value)
    if not isinstance(value, Value):
        return value
    mean = value.mean
    if covariance is None:
        columns = value.factor
        n = mean.flatten(1).shape[1] if mean.ndim > 1 else 1
        if columns is not None and value.diag is None and columns.shape[0] >= n:
            rows = flat(columns)  # (k, batch, n): fewer numbers as n × n
            covariance = Dense(torch.einsum("kbi,kbj->bij", rows, rows), mean.shape[1:])
        else:
            diag = torch.zeros_like(mean) if value.diag is None else value.diag.to(mean.dtype).expand(mean.shape)
            factor = mean.new_zeros(0, *mean.shape) if columns is None else columns.to(mean.dtype)
            covariance = DiagonalPlusFactor(diag, factor)
    return Belief(mean, covariance=covariance, validate=False)
