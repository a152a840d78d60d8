"""What a model's beliefs are worth on some inputs, and what they cost here.

    error       of the belief's covariance, ‖Σ − S‖_F / ‖S‖_F over inputs, the samples' own error subtracted
    samples     how many have that error: that of m falls as 1/√m (`Check.samples_matched`)
    cost        of a pass, eager and through `torch.compile`, and of a sample, drawn many at a time with what comes
                before the first noise run once; all in forward passes of the same graph without noise, eager, by turns

So `samples · cost of a sample / cost of a pass` is how much faster a pass is than samples of its error.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from favour.graph.example import split_example
from favour.graph.interpreter import interpret, noiseless
from favour.inspect.check import Check, check
from favour.inspect.cost import medians
from favour.inspect.describe import noise
from favour.predictor.predictor import Predictor

DRAWS = 50  # at a time, where a sample is timed
ROUNDS, PATIENCE = 7, 4.0  # of timing, and its seconds


@dataclass(frozen=True)
class Costs:
    """In forward passes of `forward` seconds; `compiled` is None where it was not asked for or failed, see `why`."""

    forward: float
    eager: float
    sample: float
    compiled: float | None = None
    why: str = ""

    @property
    def best(self) -> float:
        """The cheaper pass."""
        return self.eager if self.compiled is None else min(self.eager, self.compiled)


@dataclass(frozen=True)
class Trial:
    """What was found.

    Attributes:
        model: Its name.
        inputs: How many.
        outputs: Numbers per input.
        method, noise: In words.
        check: Beliefs against samples.
        costs: See `Costs`.
        warnings: What Favour warned of.
        explanation: Operation by operation, as text.
    """

    model: str
    inputs: int
    outputs: int
    method: str
    noise: str
    check: Check
    costs: Costs
    warnings: tuple[str, ...] = ()
    explanation: str = field(default="", repr=False)

    @property
    def passes(self) -> bool:
        """Whether the belief can be trusted as it is."""
        return self.check.verdict == "trust it"

    @property
    def comparable(self) -> bool:
        """Whether anything varies in the samples, so that there is an error and a number of samples that has it."""
        return self.check.sampling_error > 0

    @property
    def faster(self) -> float:
        """The time of samples of the same error over that of a pass."""
        return self.check.samples_matched()[0] * self.costs.sample / self.costs.best


def trial(
    predict: Predictor,
    x: Any,
    name: str,
    n: int = 1000,
    seed: int = 0,
    compiled: bool = True,
    output: int | None = None,
    warned: tuple[str, ...] = (),
) -> Trial:
    """Check a predictor on inputs of its user's, and time it.

    Args:
        predict: The predictor.
        x: Inputs as for `favour.compile`.
        name: Of the model, for the report.
        n: Samples to compare with.
        seed: Of the samples.
        compiled: Whether to time `torch.compile` too, which takes up to a minute.
        output: Which, of several.
        warned: What was warned of before.
    """
    generator = torch.Generator(device=predict.device).manual_seed(seed)
    checked = check(predict, x, n, generator, output)
    args, kwargs = split_example(x)
    explanation = str(predict.explain(*args, **kwargs))
    return Trial(
        name,
        len(checked.mean),
        max(1, checked.mean[:1].numel()),
        predict.method.name,
        noise(predict),
        checked,
        costs(predict, args, kwargs, generator, compiled),
        warned,
        explanation,
    )


def costs(predict: Predictor, args: tuple, kwargs: dict[str, Any], generator: Any, compiled: bool) -> Costs:
    """Time a forward pass, a belief (with its covariance) and a sample."""
    graph = predict.graph
    known = predict.program.points(predict.program.leaves(args, kwargs))

    def wait() -> None:
        if predict.device.type == "cuda":
            torch.cuda.synchronize(predict.device)

    calls: list[Callable[[], object]] = [
        lambda: interpret(graph.calls, dict(known), noiseless),
        lambda: predict(*args, **kwargs),
        lambda: predict.sample(*args, n=DRAWS, generator=generator, **kwargs),
    ]
    why = ""
    with torch.no_grad():
        if compiled:
            fast, why = _compiled(predict, args, kwargs)
            if fast is not None:
                calls.append(fast)
        forward, eager, drawn, *rest = medians(calls, ROUNDS, PATIENCE, wait)
    quick = rest[0] / forward if rest else None
    return Costs(forward, eager / forward, drawn / DRAWS / forward, quick, why)


def _compiled(predict: Predictor, args: tuple, kwargs: dict[str, Any]) -> tuple[Callable[[], object] | None, str]:
    """The predictor through `torch.compile`, warm, or the reason why not."""
    fast = torch.compile(predict, dynamic=False)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fast(*args, **kwargs)
    except Exception as error:  # no compiler on this machine, or none that takes this model
        return None, f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return lambda: fast(*args, **kwargs), ""
