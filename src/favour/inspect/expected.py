"""What a prediction is expected to take in eager code, by counting what a pass over a few inputs does.

A pass over two inputs and one over four are run and every operation of torch is noted: its name, how many numbers it
touches and, of products, its multiplications. What lies between the two passes is proportional to the inputs, the rest
is paid once, so that a pass over any number of inputs follows without running it. Each operation takes

    launch + numbers × cost of its kind + multiplications / rate,      rate = RATE · d/(d + HALF) · n/(n + INNER),

d rows or columns of the result, the fewer, and n the length of the sums, since small products do not keep a processor
busy. The forward pass without noise is counted in the same way, which gives the prediction in forward passes. Nothing
is timed: the constants are those of one core of a server CPU, and ratios depend little on them. What is measured is in
`benchmarks/expected.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from favour.graph.interpreter import interpret, noiseless
from favour.program.propagator import Propagator

# Seconds for an operation, for a convolution, for a view, and what our own code adds to each in a pass; for each number
# of four bytes while it stays in the caches and beyond; multiplications a second, and the sizes at which half of them
# are reached.
LAUNCH, WINDOW, VIEW, PYTHON = 1.5e-6, 1e-5, 0.6e-6, 1.0e-6
NUMBER, FAR, CACHED = 1.6e-10, 4e-10, 2**20
RATE, HALF, INNER = 5.6e10, 20.0, 6.0

LANES = 8  # channels of a convolution that are taken together where there are fewer

# Costs of a number, in those of a multiplication.
KINDS = {
    **dict.fromkeys(("where", "masked_fill", "heaviside"), 26.0),
    **dict.fromkeys(("erfc", "special_erfc", "special_log_ndtr", "erfinv", "tanh", "_safe_softmax"), 15.0),
    **dict.fromkeys(("erf", "cos", "sin", "isfinite", "gelu", "log", "log1p", "index_select"), 10.0),
    **dict.fromkeys(("max_pool2d_with_indices", "adaptive_max_pool2d"), 10.0),
    **dict.fromkeys(("exp", "_softmax", "_log_softmax", "sigmoid", "silu", "gather", "index"), 6.0),
    "native_layer_norm": 6.0,
    **dict.fromkeys(("sqrt", "gt", "lt", "ge", "le", "ne", "eq", "bitwise_and", "_to_copy", "clone", "cumsum"), 3.5),
}  # fmt: skip
PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "matmul", "linear", "dot", "mv"}
VIEWS = {
    *("view", "expand", "transpose", "permute", "slice", "select", "squeeze", "unsqueeze", "t", "detach", "alias"),
    *("as_strided", "_unsafe_view", "split", "split_with_sizes", "unbind", "diagonal", "unfold", "lift_fresh"),
}


@dataclass(frozen=True)
class Work:
    """Of one operation: its kind, the numbers it touches, its multiplications and the sizes of its matrices."""

    kind: str
    numbers: float
    multiplications: float = 0.0
    rows: tuple[float, ...] = (1.0,)

    def seconds(self) -> float:
        if self.kind in VIEWS:
            return VIEW
        each = NUMBER if self.numbers <= CACHED else FAR
        launch = WINDOW if self.kind.endswith("convolution") else LAUNCH
        taken = launch + self.numbers * each * KINDS.get(self.kind, 1.0)
        least, inner = min(self.rows[:-1], default=1.0), self.rows[-1]
        return taken + self.multiplications / (RATE * least / (least + HALF) * inner / (inner + INNER))

    def between(self, other: Work, t: float) -> Work:
        """On the line through two counts."""
        sizes = tuple(max(1.0, a + t * (b - a)) for a, b in zip(self.rows, other.rows, strict=True))
        numbers = max(0.0, self.numbers + t * (other.numbers - self.numbers))
        products = self.multiplications + t * (other.multiplications - self.multiplications)
        return Work(self.kind, numbers, max(0.0, products), sizes)


class Count(TorchDispatchMode):
    """Notes the work of every operation in `works`."""

    def __init__(self) -> None:
        super().__init__()
        self.works: list[Work] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        kind = function._opname.rstrip("_") if hasattr(function, "_opname") else str(function)
        inputs = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = [t for t in pytree.tree_leaves(result) if isinstance(t, Tensor)]
        numbers = max((_numbers(t) for t in (*inputs, *made)), default=0.0)
        products = 0.0
        sizes: tuple[float, ...] = (1.0,)
        if kind in PRODUCTS and made:
            factor = inputs[1] if kind in ("addmm", "baddbmm") else inputs[0]
            inner = factor.shape[-1] if factor.ndim else 1
            products = float(made[0].numel() * inner)
            sizes = tuple(map(float, (*made[0].shape[-2:], inner)))
        elif kind.endswith("convolution") and made:
            products, sizes = _convolution(args, made[0])
        elif "attention" in kind and len(inputs) > 2:
            q, k = inputs[:2]
            products, sizes = 2.0 * q.numel() * k.shape[-2], (float(k.shape[-2]), float(q.shape[-1]))
        elif kind in ("gru", "lstm", "rnn_tanh", "rnn_relu"):
            steps = made[0].shape[0] * made[0].shape[1]
            products = float(steps * sum(t.numel() for t in inputs[2:] if t.ndim == 2))
            sizes = (float(made[0].shape[1]), float(made[0].shape[2]))
        self.works.append(Work(kind, numbers, products, sizes))
        return result


def _numbers(t: Tensor) -> float:
    """Numbers held, in those of four bytes; of an expanded tensor those that are there."""
    if t.layout is not torch.strided:
        return float(t.numel())
    return math.prod(n for n, stride in zip(t.shape, t.stride(), strict=True) if stride) * t.element_size() / 4


def _convolution(args: Any, result: Tensor) -> tuple[float, tuple[float, ...]]:
    kernel, transposed, groups = args[1], bool(args[6]) if len(args) > 6 else False, args[8] if len(args) > 8 else 1
    positions = (args[0] if transposed else result).numel()
    each = math.prod(kernel.shape[1:])
    rows = kernel.shape[0] // groups if not transposed else kernel.shape[1]
    return float(positions * each), (float(max(rows, LANES)), float(each))


@dataclass(frozen=True)
class Expected:
    """The work of a prediction and of a forward pass, for any number of inputs.

    Attributes:
        prediction, forward: The works of a pass over `few` inputs and over twice as many.
        few: How many.
    """

    prediction: tuple[list[Work], list[Work]]
    forward: tuple[list[Work], list[Work]]
    few: int

    def seconds(self, inputs: int) -> float:
        """Of a prediction."""
        return _seconds(*self.prediction, (inputs - self.few) / self.few, PYTHON)

    def forwards(self, inputs: int) -> float:
        """Its time in forward passes."""
        return self.seconds(inputs) / _seconds(*self.forward, (inputs - self.few) / self.few, PYTHON)


def _seconds(once: list[Work], twice: list[Work], t: float, more: float) -> float:
    if [w.kind for w in once] == [w.kind for w in twice]:
        works = [a.between(b, t) for a, b in zip(once, twice, strict=True)]
        return sum(w.seconds() + more for w in works)
    a, b = (sum(w.seconds() + more for w in works) for works in (once, twice))  # other steps for other sizes
    return max(a + t * (b - a), 0.0)


def expected(
    predict: Propagator,
    args: tuple,
    kwargs: Mapping[str, Any],
    few: int = 2,
    forward: Callable[..., object] | None = None,
) -> Expected:
    """Count a prediction for a few inputs and for twice as many.

    Args:
        predict: The predictor.
        args: Arguments of a call, of at least one input; rows are repeated as needed.
        kwargs: Keyword arguments of it.
        few: How many inputs.
        forward: What a forward pass is; None for the predictor's graph without its noise.
    """
    graph = predict.graph
    few = few if graph.batched else 1

    def rows(n: int) -> tuple[tuple, dict[str, Any]]:
        if not graph.batched:
            return args, dict(kwargs)

        def taken(t: Any) -> Any:
            many = isinstance(t, Tensor) and t.ndim and t.shape[0]
            return t[torch.arange(n, device=t.device) % t.shape[0]] if many else t

        return pytree.tree_map(taken, (args, dict(kwargs)))

    predictions, forwards = [], []
    with torch.no_grad():
        for n in (few, 2 * few):
            some, named = rows(n)
            predictions.append(_counted(partial(predict, *some, **named)))
            known = predict.program.points(predict.program.leaves(some, named))
            plain = partial(forward, *some, **named) if forward else partial(_noiseless, predict, known)
            forwards.append(_counted(plain))
    return Expected((predictions[0], predictions[1]), (forwards[0], forwards[1]), few)


def _noiseless(predict: Propagator, known: Mapping[Any, Any]) -> None:
    interpret(predict.graph.calls, dict(known), noiseless)


def _counted(run: Callable[[], object]) -> list[Work]:
    with Count() as count:
        run()
    return count.works
