"""What a pass may know of an operation: its traits, declared where its rule is registered.

Passes never ask which operation a node calls, but what it does: "element-wise and homogeneous", "draws a mask per
channel", "a view with this inverse". An operation of a user's own that declares the same traits is rewritten like
favour's. The table is by overload; operations without a rule (comparisons, what reads only shapes) have traits too.

    f homogeneous      f(a·x) = a·f(x) for a ≥ 0
    f monotone         nondecreasing in its first argument
    f row-wise         acts on every row of the last axis alone
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from favour.errors import InvalidValue, ShapeMismatch

Operation = Any  # what a node calls: an overload of aten, or a Python function on sizes
# What an operation is given: a node in a graph, and where it is run what is known of that; a number, a flag, a dtype,
# None, or a list of such. Whoever takes one asks which; a union would only have everybody assert what they know.
Argument = Any
Range = tuple[float, float]
Claim = bool | Callable[..., bool]  # always, or as the further arguments have it


def check_rate(p: Argument, where: str) -> None:
    """Raise unless 0 ≤ p < 1 everywhere."""
    if isinstance(p, Tensor):
        if not torch.compiler.is_compiling() and not bool(((p >= 0) & (p < 1)).all()):
            raise InvalidValue(
                f"dropout probabilities at {where} must lie in [0, 1); got values from {p.min()} to {p.max()}."
            )
    elif not 0 <= p < 1:
        raise InvalidValue(f"the dropout probability at {where} must lie in [0, 1); got {p}.")


def _scaled_mask(random: Argument, shape: tuple[int, ...], p: Argument, dtype: torch.dtype) -> Tensor:
    return random.scaled_mask(shape, p, dtype)


def _multiplied(x: Tensor, draw: Tensor, p: Argument) -> Tensor:
    return x * draw


@dataclass(frozen=True, eq=False)
class Draw:
    """What an operation on x draws, anew at each call and for each input: a kind of dropout.

    With rate 0, or switched off, the operation is x. Nothing else about a kind is said elsewhere: the sampler, rate
    overrides (`dropout={…: p}`), the adapters' silence and the checks of files read this.

    Attributes:
        channels: One draw for each channel (dimension 1) and input, instead of one for each entry.
        falls: y = D ∘ x with D ∈ {0, 1/(1 − p)} and P(D = 0) = p; what commutes with such a factor then does.
        sample: (random, shape, p, dtype) to draws of that shape; `random` has `scaled_mask`, `normal` and `uniform`.
        apply: (x, draws, p) to y. By default x ∘ draws.
        outcomes: A number p to (gain, shift, rest): an entry that is kept is gain·x + shift, one that falls is `rest`,
            with probability p. None where a draw has more than two values.
        rate, live: Positions of the rate and of the flag that switches it on; None: always on.
        check: (p, where) raises unless p is a rate.

    Example:
        Multiplicative Gaussian noise, y = x∘(1 + √p·z), z ~ N(0, 1):

        >>> from favour import Draw
        >>> gaussian = Draw(sample=lambda random, shape, p, dtype: 1 + p**0.5 * random.normal(shape, dtype))
    """

    channels: bool = False
    falls: bool = False
    sample: Callable[[Any, tuple[int, ...], Any, torch.dtype], Tensor] = _scaled_mask
    apply: Callable[[Tensor, Tensor, Any], Tensor] = _multiplied
    outcomes: Callable[[float], tuple[float, float, float]] | None = None
    rate: int = 1
    live: int | None = 2
    check: Callable[[Any, str], None] = check_rate

    def shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Of the draws for a tensor (batch, *event)."""
        return (*shape[:2], *[1] * (len(shape) - 2)) if self.channels else tuple(shape)

    def check_shape(self, p: Argument, shape: tuple[int, ...], where: str) -> None:
        """Raise unless p has one entry for each draw."""
        space = len(shape) - 2
        sizes = p.shape[max(p.ndim - space, 0) :] if self.channels and isinstance(p, Tensor) and p.ndim else ()
        if any(size != 1 for size in sizes):
            raise ShapeMismatch(
                f"the dropout at {where} drops whole channels of a {tuple(shape)} tensor, so its rates need the shape "
                f"{(shape[1], *[1] * space)}, not {tuple(p.shape)}: one for each channel."
            )


@dataclass(frozen=True, eq=False)
class Link:
    """The operation makes probabilities of logits: over one axis together (`joint`), or each alone.

    `log`: their logarithms.
    """

    joint: bool
    log: bool = False


@dataclass(frozen=True, eq=False)
class Affine:
    """A norm whose result is multiplied by the argument `weight` and moved by `bias`, which lie along the channels
    (dimension 1) or along the last axes."""

    weight: str
    bias: str | None
    channels: bool


@dataclass(frozen=True, eq=False)
class Traits:
    """What an operation does, as far as passes ask.

    Element by element:
        elementwise: An entry of the result depends on that entry of the tensor arguments, which broadcast.
        affine: Positions of arguments in which it is affine, the others given; element-wise.
        homogeneous, monotone: In the first argument; a function of the further arguments where they decide.
        power: The result is x to this power, a number or a function of the further arguments.
        scalar: How it acts on functions of one variable, see `favour.scalar.composed`.

    Where entries come from:
        keeps: The result has the entries of its first argument at their places: copies, dtypes, devices.
        ordered: The same entries in the same order, in another shape.
        permutes: Every entry of the argument once, somewhere else.
        within: Its entries are entries of the argument, or averages of some.
        sums: Sums of entries with weights ≥ 0, or of their squares.
        row_wise: Acts on each row of the last axis alone; or as the further arguments have it.
        mixes: (the first argument's shape, *further arguments) to the dimensions along which an entry of the result
            reads several entries of it. All other dimensions keep their places.
        reduces: Takes (x, dims, keepdim) and reduces over dims.
        pool: Reduces windows of each channel, `"regular"` ones or `"adaptive"` ones.
        maximum: To their largest entry.
        indices: Its results are values and where they were.
        inverse: Of a view: (base, value, *further arguments) to the operation and arguments that write `value` back
            into `base`; None where it is not known.
        pieces: (index, the argument's shape, *further arguments) to the view that piece `index` of the result is, an
            operation and its further arguments; None where it is not known.

    What its numbers are:
        bounds: Bounds of the result (low, high), or of those of the arguments a function that gives them: numbers and
            tensors arrive as bounds, lists as lists of them.
        link: Makes probabilities.

    What it reads and makes:
        draws: What it draws.
        random: It draws something else, and has a rule that knows of it.
        shape_only: Reads the shape of its arguments, never their values.
        lookup: Its arguments to what they look up: (index, table, axis, whether negative ones count from the end).
        weights: Positions of the arguments that its rule reads as weights, in which the result is linear.
        norm: A norm with a weight and a bias.
    """

    elementwise: bool = False
    affine: tuple[int, ...] = ()
    homogeneous: Claim = False
    monotone: Claim = False
    power: float | Callable[..., Any] | None = None
    scalar: Callable[..., Any] | None = None
    keeps: bool = False
    ordered: bool = False
    permutes: bool = False
    within: bool = False
    sums: bool = False
    row_wise: Claim = False
    mixes: Callable[..., Collection[int]] | None = None
    reduces: bool = False
    pool: Literal["regular", "adaptive"] | None = None
    maximum: bool = False
    indices: bool = False
    inverse: Callable[..., tuple[Any, tuple] | None] | None = None
    pieces: Callable[..., tuple[Any, tuple] | None] | None = None
    bounds: Range | Callable[..., Range] | None = None
    link: Link | None = None
    draws: Draw | None = None
    random: bool = False
    shape_only: bool = False
    lookup: Callable[..., list[tuple[Any, Any, int, bool]]] | None = None
    weights: tuple[int, ...] = ()
    norm: Affine | None = None

    def merged(self, other: Traits) -> Traits:
        """These and the other's."""
        changes = {f.name: getattr(other, f.name) for f in fields(other) if getattr(other, f.name) != f.default}
        return replace(self, **changes)


NONE = Traits()
_TABLE: dict[Operation, Traits] = {}
_RULED: set[Operation] = set()  # operations that have a rule


def declare(*targets: Operation, traits: Traits) -> None:
    """Say what operations do, beside what has been said of them."""
    for target in targets:
        _TABLE[target] = _TABLE.get(target, NONE).merged(traits)


def set_traits(target: Operation, traits: Traits) -> None:
    """Say all that is known of an operation that is given a rule; what was said before is forgotten."""
    _TABLE[target] = traits
    _RULED.add(target)


def has_rule(target: Operation) -> bool:
    """Whether an operation has a rule."""
    return target in _RULED


def traits_of(target: Operation) -> Traits:
    """What is known of an operation; all traits are false of one that nobody declared."""
    try:
        return _TABLE.get(target, NONE)
    except TypeError:  # no target of a call
        return NONE


def holds(claim: Any, *args: Any, **kwargs: Any) -> Any:
    """What a claim is for these further arguments."""
    return claim(*args, **kwargs) if callable(claim) else claim
