"""The short check of every new predictor against samples of its network.

`favour.compile` draws up to `DRAWS` samples of a few inputs with a generator of its own and compares them with the
beliefs, as `favour.check` does. It takes about as long as compiling did at most: with a network that is dear to sample
there are fewer inputs, then fewer draws, and below `FEWEST` nothing is said. Where the draws that there was time for
would not have shown an error of `BAD` (an error, two of its standard errors added), they are too few to tell, and the
belief counts as not checked. A belief is called untrusted where an error is larger than `LARGE` and, two of its
standard errors taken off, larger than `SMALL`: means in standard deviations, covariances in the Frobenius norm
relative to the larger of the two; or where the logarithm of predicted over sampled variance is, 2.5 standard errors
taken off, beyond ±`SMALL` (with heavy tails this is seen first, since a logarithm has a standard error that is worth
something). `benchmarks/selfcheck.py` measures how many bad beliefs are found so, and how many good ones are suspected.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.errors import FavourError, NothingUncertain, UntrustedBelief
from favour.graph.example import split_example
from favour.inspect.agreement import Tally
from favour.inspect.cost import Cost, measured
from favour.inspect.live import live_difference
from favour.program.propagator import Propagator

DRAWS, FEWEST, CHUNK = 200, 60, 20
INPUTS = 8
LEAST_SECONDS = 1.0
LARGE, SMALL = 0.2, 0.1  # of an error, and of its lower confidence bound
BAD = 0.3  # of an error's upper confidence bound

_SEED = 20_231


@dataclass(frozen=True)
class SelfCheck:
    """What the check at compile time found.

    Attributes:
        n: Draws; 0 if there was no check.
        inputs: How many inputs were drawn for.
        mean_error, covariance_error: The largest over the model's outputs, sampling error subtracted.
        variance_ratio: Predicted over sampled variance, of the output where they differ most.
        wrong: Whether one of these is too large, and by more than chance.
        undecided: Whether none is, but the draws are too few to tell.
        problem: What is wrong besides, in a sentence.
        reason: Why there was no check.
        compared: `"covariances"`, or `"variances"` alone where the method keeps few correlations.
        still: Whether neither beliefs nor samples vary, at these inputs and at random ones.
        cost: Of a prediction at these inputs, measured; None where there was no check.
    """

    n: int = 0
    inputs: int = 0
    mean_error: float = 0.0
    covariance_error: float = 0.0
    variance_ratio: float = 1.0
    wrong: bool = False
    undecided: bool = False
    problem: str = ""
    reason: str = ""
    compared: str = "covariances"
    still: bool = False
    cost: Cost | None = field(default=None, compare=False)

    @property
    def trusted(self) -> bool:
        """Whether nothing was found; without a check, or with too few draws, nothing is."""
        return not (self.problem or self.wrong)

    def figures(self) -> str:
        """The errors in words."""
        return (
            f"means off by {self.mean_error:.2f} standard deviations, {self.compared} by {self.covariance_error:.0%}, "
            f"variances {self.variance_ratio:.2f} times the samples'"
        )

    def __str__(self) -> str:
        if not self.n:
            return f"not checked ({self.reason})" if self.reason else "not checked"
        if self.still:
            return f"nothing varies in {self.n} samples of {self.inputs} inputs"
        if self.trusted and self.undecided:
            return f"not checked ({self.n} samples of {self.inputs} inputs are too few to tell: {self.figures()})"
        how = "checked" if self.trusted else "UNTRUSTED"
        return f"{how} against {self.n} samples of {self.inputs} inputs: {self.figures()}"


def self_check(predict: Propagator, inputs: Any, seconds: float, draws: int = DRAWS) -> SelfCheck:
    """Compare a predictor with samples of its network for about `seconds` at most; torch's own generator is untouched.

    Args:
        predict: The predictor.
        inputs: As for `favour.compile`; the first `INPUTS` rows are used, or fewer.
        seconds: The budget, at least `LEAST_SECONDS`.
        draws: At most so many.
    """
    limit = time.perf_counter() + max(seconds, LEAST_SECONDS)
    args, kwargs = split_example(inputs)
    rows = next((t.shape[0] for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim), 0)
    if not rows:
        return SelfCheck(reason="the example is empty")
    if not predict.graph.batched:
        rows = 1
    generator = torch.Generator(device=predict.device).manual_seed(_SEED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap, about speed
        try:
            difference = live_difference(predict, *_first(args, kwargs, rows, min(rows, 2)))
            if difference is not None:
                return SelfCheck(1, min(rows, 2), problem=difference)
            if predict.method.unchecked():
                first = _first(args, kwargs, rows, min(rows, INPUTS))
                still = _certain(predict, *first) and _certain(predict, *_random(*first))
                return SelfCheck(reason=predict.method.unchecked(), still=still)
            each = _seconds_per_draw(predict, *_first(args, kwargs, rows, 1), generator)
            affordable = int((limit - time.perf_counter()) / each)
            if affordable < FEWEST:
                return SelfCheck(reason=f"{FEWEST} samples of one input would take {FEWEST * each:.1f} s")
            count = max(1, min(rows, INPUTS, affordable // draws))
            trial = _Trial(predict, *_first(args, kwargs, rows, count), generator)
            while trial.n < draws and (trial.n < FEWEST or time.perf_counter() < limit):
                trial.draw(min(CHUNK, draws - trial.n))
            outcome = replace(trial.verdict(count), cost=measured(predict, *_first(args, kwargs, rows, count), count))
            if outcome.trusted and trial.still:  # an example of zeros, or noise that is nowhere
                other = _Trial(predict, *_random(*_first(args, kwargs, rows, count)), generator)
                other.draw(CHUNK)
                outcome = replace(outcome, still=other.still)
        except (FavourError, RuntimeError, NotImplementedError) as error:
            return SelfCheck(reason=f"no samples could be drawn: {str(error).splitlines()[0][:200]}")
    return outcome


def _first(args: tuple, kwargs: dict[str, Any], rows: int, count: int) -> tuple[tuple, dict[str, Any]]:
    """The first inputs, finite: the values of an example mean nothing, it may be an uninitialised tensor."""

    def some(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.ndim:
            return t
        t = t[:count] if t.shape[0] == rows and rows > 1 else t
        return t.nan_to_num(0, 0, 0) if t.is_floating_point() else t

    return pytree.tree_map(some, (args, kwargs))


def _random(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Numbers from a normal in the place of floating-point inputs."""
    generator = torch.Generator().manual_seed(_SEED)

    def some(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        return torch.randn(t.shape, generator=generator).to(t)

    return pytree.tree_map(some, (args, kwargs))


def _certain(predict: Propagator, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether no belief varies."""
    return not any(bool(t.variance.any()) for t in _leaves(predict(*args, **kwargs)) if isinstance(t, Belief))


def _seconds_per_draw(predict: Propagator, args: tuple, kwargs: dict[str, Any], generator: torch.Generator) -> float:
    """Of one input, in chunks; a network whose chunk is dear is measured by a single draw."""
    trial = _Trial(predict, args, kwargs, generator)
    for n in (1, 1, CHUNK):
        begin = time.perf_counter()
        trial.draw(n)
        seconds = (time.perf_counter() - begin) / n
        if n == 1 and seconds > LEAST_SECONDS / 2:
            break
    return max(seconds, 1e-9)


class _Trial:
    """Beliefs and draws of some inputs, every output apart."""

    def __init__(self, predict: Propagator, args: tuple, kwargs: dict[str, Any], generator: torch.Generator) -> None:
        self.sample: Callable[[int], Any] = lambda n: predict.sample(*args, n=n, generator=generator, **kwargs)
        leaves = _leaves(predict(*args, **kwargs))
        # Compression keeps few correlations, and says so: there variances are what has to hold.
        self.compressed = predict.method.partial
        self.tallies = {i: Tally(t, True, self.compressed) for i, t in enumerate(leaves) if isinstance(t, Belief)}
        self.n = 0

    def draw(self, n: int) -> None:
        drawn = _leaves(self.sample(n))
        for i, tally in self.tallies.items():
            tally.add(drawn[i])
        self.n += n

    @property
    def still(self) -> bool:
        """Whether no output varies, in beliefs and draws alike."""
        statistics = [tally.statistics() for tally in self.tallies.values()]
        return all(not bool(f[name].any()) for f in statistics for name in ("stddev", "sampled_stddev"))

    def verdict(self, inputs: int) -> SelfCheck:
        pairs = [tally.errors() for tally in self.tallies.values()]
        errors, bounds = torch.stack([e for e, _ in pairs]), torch.stack([b for _, b in pairs])  # (outputs, 3)
        undecided = bool((2 * errors - bounds)[:, :2].amax() > BAD**2)
        # The output that is worst beyond doubt, for each measure apart.
        worst = bounds.argmax(0, keepdim=True)
        errors, bounds = errors.gather(0, worst)[0], bounds.gather(0, worst)[0]
        squares = (errors[:2] > LARGE**2) & (bounds[:2] > SMALL**2)
        wrong = bool(squares.any() or bounds[2] > SMALL)
        mean, covariance = errors[:2].clamp(min=0).sqrt().tolist()
        problem, compared = "", "variances" if self.compressed else "covariances"
        for tally in self.tallies.values():
            statistics = tally.statistics()
            still = (statistics["sampled_stddev"] == 0).all(0)
            loud = (statistics["stddev"] > 0.05 * (1 + statistics["mean"].abs())).any(0)
            if bool((still & loud).any()):
                problem = "outputs that never vary in the samples have a standard deviation above 0 in the belief"
        ratio = errors[2].exp().item()
        return SelfCheck(self.n, inputs, mean, covariance, ratio, wrong, undecided, problem, compared=compared)


def _leaves(result: Any) -> list[Any]:
    return pytree.tree_leaves(result, is_leaf=lambda t: isinstance(t, Belief))


def warn_of(predict: Propagator, checked: SelfCheck, stacklevel: int) -> None:
    """Say what was found, where it should not be trusted."""
    if checked.still:
        looked = f"neither beliefs nor {checked.n} samples vary" if checked.n else "beliefs do not vary"
        warnings.warn(
            f"nothing in this model is uncertain, so every standard deviation is 0: its noise reaches an output, but "
            f"{looked}, at the example and at random inputs. Variances of a "
            "posterior that are 0 make no noise, nor does what is multiplied by 0.",
            NothingUncertain,
            stacklevel=stacklevel,
        )
    if checked.trusted:
        return
    evidence = checked.problem or f"against {checked.n} samples of {checked.inputs} inputs {checked.figures()}"
    warnings.warn(
        f"beliefs of this model are not to be trusted: {evidence}. {_remedy(predict, checked)} Look closer with "
        "`print(favour.check(predict, x))` on inputs of your own; `favour.compile(..., check=False)` skips this test.",
        UntrustedBelief,
        stacklevel=stacklevel,
    )


def _remedy(predict: Propagator, checked: SelfCheck) -> str:
    if checked.problem:
        return "`favour.sample` draws from the captured graph."
    untried = predict.method.untried()
    measured = " `favour.tune(model, x)` measures which."
    return f"Try {untried}.{measured}" if untried else "Take samples: `favour.sample(model, x, n)`."


def warn_of_silence(predict: Propagator, stacklevel: int) -> None:
    """Say that nothing is uncertain, where no noise reaches an output."""
    known = predict.graph.dropout_modules
    has = (
        f"dropout in {', '.join(f'`{name}`' for name in known[:5])}, which does not reach it" if known else "no dropout"
    )
    warnings.warn(
        f"nothing in this model is uncertain, so every standard deviation will be 0: it has {has}, and no posterior is "
        "given (dropout with p = 0 counts as none). `favour.fit` learns a posterior in one more epoch; or give one, "
        "`favour.compile(..., posterior={'parameter': variance})`; "
        "`favour.adapters` make posteriors from Laplace, VI, SWAG … Or set a rate with `dropout={'module name': p}` "
        "where the model has dropout, or call the predictor with inputs that are Beliefs, for which this can be "
        "ignored.",
        NothingUncertain,
        stacklevel=stacklevel,
    )
