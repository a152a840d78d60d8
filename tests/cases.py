"""Named cases for every operation that has a rule. Independent of favour.

A case names an aten overload and builds its arguments: float64, small, the batch in front. Uncertain tensors
are `Uncertain`, known tensors with a batch axis are `Batched`, everything else is passed on as it is. The
kind says what the operation is, and with that which reference it is held against:

    linear    affine in its uncertain arguments: the dense matrix, from basis vectors
    scalar    y = f(x) element by element: Gaussian integrals of f
    delta     the same, where a Gaussian leaves the domain of f: second-order Taylor terms
    dropout   total variance
    draw      noise of a model's own around its argument: total variance
    curved    nonlinear in several entries at once: see `cases_sequence`
    refused   raises, whatever the covariance
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

BATCH = 3
F64 = torch.float64
randn = partial(torch.randn, dtype=F64)
rand = partial(torch.rand, dtype=F64)


@dataclass(eq=False)
class Uncertain:
    """N(mean, diag(diag) + Σ_k factor_k factor_kᵀ), the factor's rank in front."""

    mean: Tensor
    diag: Tensor
    factor: Tensor

    @property
    def variance(self) -> Tensor:
        return self.diag + self.factor.square().sum(0)


@dataclass(eq=False)
class Batched:
    """A known tensor with a batch axis."""

    tensor: Tensor


@dataclass(frozen=True, eq=False)
class Case:
    """One way to call one operation.

    Attributes:
        overload: As torch prints it, `aten.relu.default`.
        kind: See the module docstring.
        build: Makes the arguments; call it after seeding.
        kwargs: Keyword arguments of the call.
        label: Tells several cases of one overload apart.
        kinks: Where a scalar function is not smooth.
        per_row: Each row of the batch is an independent call.
    """

    overload: str
    kind: str
    build: Callable[[], Sequence[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    label: str = ""
    kinks: tuple[float, ...] = ()
    per_row: bool = True

    @property
    def name(self) -> str:
        return self.overload + (f" [{self.label}]" if self.label else "")

    @property
    def op(self) -> Callable[..., Any]:
        """The overload itself."""
        target: Any = torch.ops
        for part in self.overload.split("."):
            target = getattr(target, part)
        return target

    def on_means(self, *args: Any) -> Any:
        """The operation on plain tensors; dropout and other draws, which are random, keep their mean."""
        return args[0] if self.kind in ("dropout", "draw") else self.op(*args, **self.kwargs)


CASES: list[Case] = []


def case(overload: str, kind: str, build: Callable[[], Sequence[Any]], label: str = "", **more: Any) -> None:
    kwargs = {k: v for k, v in more.items() if k not in ("kinks", "per_row")}
    known = {k: v for k, v in more.items() if k in ("kinks", "per_row")}
    CASES.append(Case(overload, kind, build, kwargs, label, **known))


def linear(overload: str, build: Callable[[], Sequence[Any]], label: str = "", **more: Any) -> None:
    case(overload, "linear", build, label, **more)


def refused(overload: str, build: Callable[[], Sequence[Any]], label: str = "", **more: Any) -> None:
    case(overload, "refused", build, label, **more)


def x(*event: int, batch: int = BATCH, dtype: torch.dtype = F64) -> Uncertain:
    """An uncertain tensor. Entries are multiples of 1/16, so that conversions to float32 lose nothing."""

    def grid(t: Tensor) -> Tensor:
        return ((t * 16).round() / 16).to(dtype)

    shape = (batch, *event)
    return Uncertain(grid(randn(shape)), grid(rand(shape) + 0.1), grid(0.5 * randn(2, *shape)))


def c(*event: int, batch: int = BATCH) -> Batched:
    """A known tensor with a batch axis."""
    return Batched(randn(batch, *event))


def mask(*event: int) -> Tensor:
    return rand(event) > 0.4


# Reshaping

linear("aten.view.default", lambda: (x(4, 2), [-1, 8]))
linear("aten.view.default", lambda: (x(8), [-1, 2, 1, 4]), "split")
linear("aten.reshape.default", lambda: (x(4, 2), [-1, 2, 4]))
linear("aten._unsafe_view.default", lambda: (x(6), [-1, 3, 2]))
linear("aten.flatten.using_ints", lambda: (x(2, 3, 2), 1, -1))
linear("aten.flatten.using_ints", lambda: (x(2, 3, 2), 1, 2), "inner")
linear("aten.unflatten.int", lambda: (x(6), 1, [2, 3]))
linear("aten.squeeze.default", lambda: (x(1, 4, 1),), per_row=False)
linear("aten.squeeze.dim", lambda: (x(1, 4), 1))
linear("aten.squeeze.dim", lambda: (x(2, 4), 1), "nothing to squeeze")
linear("aten.squeeze.dims", lambda: (x(1, 4, 1), [1, -1]))
linear("aten.unsqueeze.default", lambda: (x(4), -1))
linear("aten.unsqueeze.default", lambda: (x(4), 1), "middle")
for _name in ("contiguous", "clone", "alias", "detach", "lift_fresh_copy"):
    linear(f"aten.{_name}.default", lambda: (x(2, 3),))
for _name in ("reshape_as", "view_as"):
    linear(f"aten.{_name}.default", lambda: (x(4, 2), c(8)))
    linear(f"aten.{_name}.default", lambda: (x(4, 2), x(2, 4)), "shape of an uncertain tensor")
    linear(f"aten.{_name}.default", lambda: (c(4, 2), x(2, 4)), "only the shape is uncertain's")

# Permuting and selecting

linear("aten.permute.default", lambda: (x(2, 3, 2), [0, 3, 1, 2]))
linear("aten.permute.default", lambda: (x(2, 3, 2), [0, -1, -3, -2]), "negative")
linear("aten.transpose.int", lambda: (x(2, 3), 1, 2))
linear("aten.transpose.int", lambda: (x(2, 3, 2), -1, 1), "negative")
linear("aten.swapaxes.default", lambda: (x(2, 3), 1, -1))
linear("aten.t.default", lambda: (x(4),), per_row=False)
linear("aten.t.default", lambda: (x(),), "one axis")
linear("aten.movedim.int", lambda: (x(2, 3, 2), 1, 3))
linear("aten.movedim.int", lambda: (x(2, 3, 2), -1, 1), "back")
linear("aten.slice.Tensor", lambda: (x(6), 1, 1, 5, 2))
linear("aten.slice.Tensor", lambda: (x(6), 1, -3, 9223372036854775807), "to the end")
linear("aten.slice.Tensor", lambda: (x(6, 2), -2, 0, -1), "negative")
linear("aten.slice.Tensor", lambda: (x(6), 1, 4, 2), "empty")
linear("aten.select.int", lambda: (x(4, 2), 1, 2))
linear("aten.select.int", lambda: (x(4, 2), -1, -1), "negative")
linear("aten.narrow.default", lambda: (x(6), 1, 2, 3))
linear("aten.narrow.default", lambda: (x(6), 1, -1, 1), "last entry")
linear("aten.index_select.default", lambda: (x(4), 1, torch.tensor([2, 0, 2])))
linear("aten.index_select.default", lambda: (x(4, 3), -2, torch.tensor([3, 1])), "no repetition")
linear("aten.flip.default", lambda: (x(4, 2), [1]))
linear("aten.flip.default", lambda: (x(4, 2), [-1, -2]), "negative")

# Copying and joining

linear("aten.expand.default", lambda: (x(1, 2), [-1, 3, 2]))
linear("aten.expand.default", lambda: (x(3, 2), [-1, 3, 2]), "to its own shape")
linear("aten.expand_as.default", lambda: (x(1, 2), c(3, 2)))
linear("aten.expand_as.default", lambda: (c(1, 2), x(3, 2)), "only the shape is uncertain's")
linear("aten.repeat.default", lambda: (x(3), [1, 2]))
linear("aten.repeat.default", lambda: (x(2, 2), [1, 3, 2]), "two axes")
linear("aten.repeat.default", lambda: (x(3), [1, 1]), "once")
for _name in ("cat", "concat"):
    linear(f"aten.{_name}.default", lambda: ([x(2), c(1), x(3)], 1))
    linear(f"aten.{_name}.default", lambda: ([x(2, 1), x(2, 2)], -1), "negative")


def _twice() -> tuple[list[Uncertain], int]:
    one = x(2)
    return [one, one], 1


linear("aten.cat.default", _twice, "one tensor twice")
linear("aten.stack.default", lambda: ([x(2), c(2), x(2)], 1))
linear("aten.stack.default", lambda: ([x(2), x(2)], -1), "negative")
linear("aten.stack.default", _twice, "one tensor twice")
linear("aten.split.Tensor", lambda: (x(5), 2, 1))
linear("aten.split.Tensor", lambda: (x(2, 4), 2, -1), "negative")
linear("aten.split.sizes", lambda: (x(5), [1, 4], 1))
linear("aten.split_with_sizes.default", lambda: (x(5, 2), [2, 3], -2))
linear("aten.chunk.default", lambda: (x(5), 2, 1))
linear("aten.chunk.default", lambda: (x(2, 6), 3, -1), "negative")
linear("aten.unbind.int", lambda: (x(3, 2), 1))
linear("aten.unbind.int", lambda: (x(3, 2), -1), "negative")
linear("aten.slice_scatter.default", lambda: (x(5), x(2), 1, 1, 3))
linear("aten.slice_scatter.default", lambda: (c(5), x(2), -1, 0, 4, 2), "into a known tensor")
linear("aten.slice_scatter.default", lambda: (x(5, 2), c(5, 1), 2, 1, 2), "a known slice")
linear("aten.select_scatter.default", lambda: (x(4, 2), x(2), 1, 2))
linear("aten.select_scatter.default", lambda: (c(4, 2), x(4), -1, -1), "into a known tensor")
linear("aten.select_scatter.default", lambda: (x(4), c(), 1, 0), "a known entry")

# Reducing and converting

linear("aten.sum.dim_IntList", lambda: (x(2, 3), [1]))
linear("aten.sum.dim_IntList", lambda: (x(2, 3), [-1], True), "kept")
linear("aten.sum.dim_IntList", lambda: (x(2, 3, 2), [1, -1]), "two axes")
linear("aten.sum.dim_IntList", lambda: (x(2, dtype=torch.float32), [1]), "wider", dtype=F64)
linear("aten.mean.dim", lambda: (x(2, 3), [-1]))
linear("aten.mean.dim", lambda: (x(2, 3, 2), [2, 1], True), "two axes, kept")
refused("aten.sum.dim_IntList", lambda: (x(2), [0]), "over the batch")
refused("aten.mean.dim", lambda: (x(2), [-2]), "over the batch")
refused("aten.sum.default", lambda: (x(2),))
refused("aten.mean.default", lambda: (x(2),))
linear("aten._to_copy.default", lambda: (x(3),), dtype=F64)
linear("aten._to_copy.default", lambda: (x(3),), "no dtype")
linear("aten.to.dtype", lambda: (x(3), torch.float32))
linear("aten.to.dtype", lambda: (x(3, dtype=torch.float32), F64), "wider")
linear("aten.to.dtype_layout", lambda: (x(3),), dtype=torch.float32, layout=torch.strided)
linear("aten.type_as.default", lambda: (x(3), torch.zeros(2)))
linear("aten.type_as.default", lambda: (x(3, dtype=torch.float32), x(2)), "type of an uncertain tensor")
linear("aten.type_as.default", lambda: (c(3), x(2)), "only the type is uncertain's")
refused("aten.to.dtype", lambda: (x(3), torch.int64), "to integers")

# Arithmetic

for _name, _more in (("add", {}), ("sub", {}), ("add", {"alpha": 2.5}), ("sub", {"alpha": -0.5})):
    _tag = ", alpha" if _more else ""
    linear(f"aten.{_name}.Tensor", lambda: (x(3), x(3)), "two" + _tag, **_more)
    linear(f"aten.{_name}.Tensor", lambda: (x(1, 3), x(2, 1)), "broadcast" + _tag, **_more)
    linear(f"aten.{_name}.Tensor", lambda: (c(3), x(3)), "known first" + _tag, **_more)
    linear(f"aten.{_name}.Tensor", lambda: (x(3), randn(2, 1, 3)), "known leads" + _tag, per_row=False, **_more)
    linear(f"aten.{_name}.Tensor", lambda: (x(3), 0.7), "number" + _tag, **_more)
    linear(f"aten.{_name}.Tensor", lambda: [*_twice()[0]], "with itself" + _tag, **_more)
    linear(f"aten.{_name}.Scalar", lambda: (x(3), 2), "number" + _tag, **_more)
linear("aten.rsub.Scalar", lambda: (x(3), 2.0))
linear("aten.rsub.Scalar", lambda: (x(3), 2.0, 3.0), "alpha")
linear("aten.rsub.Tensor", lambda: (x(1, 3), x(2, 3)), alpha=0.5)
linear("aten.rsub.Tensor", lambda: (x(3), c(3)), "known")
linear("aten.neg.default", lambda: (x(3),))
linear("aten.mul.Tensor", lambda: (x(3), c(3)))
linear("aten.mul.Tensor", lambda: (c(3), x(3)), "known first")
linear("aten.mul.Tensor", lambda: (x(3), -1.5), "number")
linear("aten.mul.Tensor", lambda: (x(1, 3), c(2, 1)), "broadcast")
linear("aten.mul.Tensor", lambda: (x(2, 3), randn(3)), "per entry")
linear("aten.mul.Tensor", lambda: (x(3), mask(3)), "mask")
linear("aten.mul.Scalar", lambda: (x(3), 4))
linear("aten.div.Tensor", lambda: (x(3), c(3)))
linear("aten.div.Tensor", lambda: (x(3), torch.tensor([3, 7, 11])), "integers")
linear("aten.div.Tensor", lambda: (x(3), torch.tensor(3)), "one integer")
linear("aten.div.Tensor", lambda: (x(3, 1), randn(2)), "broadcast")
linear("aten.div.Tensor", lambda: (x(3), 3), "number")
linear("aten.div.Scalar", lambda: (x(3), 7))
linear("aten.where.self", lambda: (mask(3), x(3), x(3)))
linear("aten.where.self", lambda: (mask(2, 1), x(1, 3), c(2, 3)), "broadcast")
linear("aten.where.self", lambda: (Batched(mask(BATCH, 3)), torch.zeros((), dtype=F64), x(3)), "known first")
refused("aten.where.self", lambda: (x(3), x(3), x(3)), "on an uncertain condition")
linear("aten.masked_fill.Scalar", lambda: (x(3), mask(3), -2.0))
linear("aten.masked_fill.Scalar", lambda: (x(1, 3), mask(2, 1), 0.5), "broadcast")
linear("aten.masked_fill.Tensor", lambda: (x(3), Batched(mask(BATCH, 3)), torch.tensor(1.5, dtype=F64)))
refused("aten.masked_fill.Tensor", lambda: (c(3), mask(3), x()), "with an uncertain value")

# Layers

linear("aten.linear.default", lambda: (x(4), randn(3, 4), randn(3)))
linear("aten.linear.default", lambda: (x(2, 4), randn(3, 4)), "positions, no bias")
refused("aten.linear.default", lambda: (x(4), x(4)), "an uncertain weight")
linear("aten.addmm.default", lambda: (randn(3), x(4), randn(4, 3)))
linear("aten.addmm.default", lambda: (randn(3), x(4), randn(4, 3)), "scaled", alpha=0.5, beta=2)
refused("aten.addmm.default", lambda: (randn(3), c(4), x(3, batch=4)), "an uncertain right matrix")


def _norm(channels: int, affine: bool = True) -> tuple[Any, ...]:
    weight, bias = (randn(channels), randn(channels)) if affine else (None, None)
    return weight, bias, randn(channels), rand(channels) + 0.2, False, 0.1, 1e-3, False


linear("aten.batch_norm.default", lambda: (x(4), *_norm(4)))
linear("aten.batch_norm.default", lambda: (x(2, 3, 2), *_norm(2)), "images")
linear("aten.batch_norm.default", lambda: (x(4), *_norm(4, False)), "no weight")
refused("aten.batch_norm.default", lambda: (x(4), *_norm(4)[:4], True, 0.1, 1e-3, False), "batch statistics")
refused(
    "aten.batch_norm.default",
    lambda: (x(4), None, None, None, None, True, 0.1, 1e-3, False),
    "no running statistics",
)

for _name in ("aten", "favour"):
    _rates = partial(torch.tensor, [0.0, 0.3, 0.5, 0.9], dtype=F64)
    case(f"{_name}.dropout.default", "dropout", lambda r=_rates: (x(4), r(), True), "rates")
    case(f"{_name}.dropout.default", "dropout", lambda: (x(2, 3), 0.3, True), "one rate")
    case(f"{_name}.dropout.default", "dropout", lambda r=_rates: (c(4), r(), True), "known input")
    case(f"{_name}.dropout.default", "dropout", lambda: (x(4), 0.0, True), "never drops")
    case(f"{_name}.dropout.default", "dropout", lambda: (x(4), 0.3, False), "not live")


def chances() -> Uncertain:
    """Probabilities that are themselves uncertain."""
    return Uncertain(0.2 + 0.6 * rand(BATCH, 4), 0.02 * rand(BATCH, 4), 0.05 * randn(2, BATCH, 4))


case("favour.bernoulli.default", "draw", lambda: (chances(),))
case("favour.bernoulli.default", "draw", lambda: (Batched(rand(BATCH, 4)),), "known input")
case("favour.bernoulli.default", "draw", lambda: (chances(), 1.0, False), "not live")
for _name in ("normal", "uniform"):
    case(f"favour.{_name}.default", "draw", lambda: (x(4),))
    case(f"favour.{_name}.default", "draw", lambda: (c(2, 3),), "known input")

# Element-wise functions


def bends() -> Uncertain:
    """Means on both sides of every kink, standard deviations from .15 to 1.2."""
    mean = torch.tensor([[-3.1, -1.0, 0.0, 0.4], [0.5, 1.1, 2.9, 6.2], [-0.6, 0.05, 1.0, -6.0]], dtype=F64)
    variance = torch.tensor([0.0225, 0.16, 0.64, 1.44], dtype=F64).expand(BATCH, 4)
    return Uncertain(mean, 0.75 * variance, (0.125 * variance).sqrt().expand(2, BATCH, 4))


def scalar(name: str, *args: Any, kinks: tuple[float, ...] = (), label: str = "", **kwargs: Any) -> None:
    overload = name if "." in name else f"{name}.default"
    case(f"aten.{overload}", "scalar", lambda: (bends(), *args), label, kinks=kinks, **kwargs)


scalar("relu", kinks=(0.0,))
scalar("relu6", kinks=(0.0, 6.0))
scalar("leaky_relu", kinks=(0.0,))
scalar("leaky_relu", 0.3, kinks=(0.0,), label="slope")
scalar("rrelu", 0.1, 0.4, False, kinks=(0.0,))
scalar("prelu", torch.tensor([0.25], dtype=F64), kinks=(0.0,))
scalar("prelu", torch.tensor([0.25, -0.5, 1.0, 0.0], dtype=F64), kinks=(0.0,), label="per channel")
scalar("elu", kinks=(0.0,))
scalar("elu", 0.5, kinks=(0.0,), label="alpha")
scalar("selu", kinks=(0.0,))
scalar("celu", kinks=(0.0,))
scalar("celu", 0.5, kinks=(0.0,), label="alpha")
scalar("gelu")
scalar("gelu", label="tanh", approximate="tanh")
scalar("silu")
scalar("mish")
scalar("sigmoid")
scalar("log_sigmoid")
scalar("tanh")
scalar("softplus")
scalar("softplus", 2.0, 20.0, label="beta")
scalar("hardtanh", kinks=(-1.0, 1.0))
scalar("hardtanh", -0.5, 2.0, kinks=(-0.5, 2.0), label="bounds")
scalar("hardsigmoid", kinks=(-3.0, 3.0))
scalar("hardswish", kinks=(-3.0, 3.0))
scalar("hardshrink", kinks=(-0.5, 0.5))
scalar("softshrink", kinks=(-0.5, 0.5))
scalar("threshold", 0.2, -1.0, kinks=(0.2,))
scalar("abs", kinks=(0.0,))
scalar("exp")
scalar("expm1")
scalar("sin")
scalar("cos")
scalar("atan")
scalar("erf")
scalar("erfc")
scalar("square")
scalar("sign", kinks=(0.0,))
scalar("clamp", -0.5, 0.8, kinks=(-0.5, 0.8))
scalar("clamp", None, 0.8, kinks=(0.8,), label="above")
scalar("clamp_min", -0.3, kinks=(-0.3,))
scalar("clamp_max", 0.3, kinks=(0.3,))
scalar("pow.Tensor_Scalar", 3)
scalar("pow.Tensor_Scalar", 2.0, label="square")
scalar("pow.Tensor_Scalar", 1, label="identity")
scalar("pow.Tensor_Scalar", 0, label="constant")
refused("aten.elu.default", lambda: (bends(), 1.0, 2.0), "scaled")


def positive() -> Uncertain:
    shape = (BATCH, 4)
    return Uncertain(1 + 2 * rand(shape), 0.01 + 0.02 * rand(shape), 0.1 * randn(2, *shape))


for _name in ("log", "log1p", "sqrt", "rsqrt", "reciprocal"):
    case(f"aten.{_name}.default", "delta", lambda: (positive(),))
case("aten.pow.Tensor_Scalar", "delta", lambda: (positive(), 1.5), "fractional")
case("aten.pow.Tensor_Scalar", "delta", lambda: (positive(), -2), "negative")

# Discrete results

for _name in ("argmax", "argmin", "argsort", "sort", "round", "floor", "ceil", "bernoulli"):
    refused(f"aten.{_name}.default", lambda: (x(3),))
refused("aten.topk.default", lambda: (x(3), 2))


import cases_sequence  # noqa: E402, F401  (products, norms, attention, embeddings)
import cases_vision  # noqa: E402, F401  (convolution, pooling, resampling)


def of_kind(*kinds: str) -> list[Case]:
    return [each for each in CASES if each.kind in kinds]
