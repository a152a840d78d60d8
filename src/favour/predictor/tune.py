"""`favour.tune`: the setting that measures best for its cost, on inputs of one's own.

A few hundred draws of the network, corrected by what is known of them (`favour.belief.refined`), stand for the truth;
they are made once. Every setting then answers for the same inputs. With μ̂, Σ̂ from the draws and ŝ², ê² their squared
standard errors, a belief N(μ, Σ) has the squared error

    e² = avg [(μ − μ̂)² − ŝ²]/Σ̂_ii  +  avg (‖Σ − Σ̂‖² − ‖ê‖²)/‖Σ̂‖²

averaged over inputs and outputs, or inputs: means in standard deviations, covariances relative. How well it is known,
and how well the *difference* of two settings is, say ten groups of draws that are left out in turn. Chosen is the
setting of least cost (forward passes, counted) among those whose error is not larger than the least by more than two
standard errors of the difference, or by more than `tolerance`. Methods of the kind that
`"auto"` takes are measured first.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from favour.belief import Belief
from favour.belief.refined import estimate
from favour.errors import FavourError, InvalidType, InvalidValue
from favour.graph.example import split_example
from favour.inspect.agreement import GROUPS, OUTPUTS
from favour.inspect.selfcheck import LARGE, SelfCheck, warn_of
from favour.methods import DPLR, Adjoint, Auto, Diag, Method, Sampling
from favour.methods.keywords import DEFAULTS
from favour.posterior import Posterior
from favour.predictor.compilation import compile
from favour.predictor.predictor import Predictor
from favour.program.program import Program
from favour.program.refine import MOST_OUTPUTS, controlled, output_of
from favour.progress import Bar

INPUTS = 32  # of those given, at most
FEWEST = 60  # draws, however short the time

# What is run where no `candidates` are given.
SETTINGS: tuple[Method, ...] = (
    Diag(),
    Adjoint(),
    Adjoint(secant=True),
    Adjoint(rank=8),
    Adjoint(rank=8, secant=True),
    Adjoint(pairs=16),
    Adjoint(rank=8, pairs=16),
    DPLR(),
    DPLR(rank=16),
    Sampling(100),
)

DEAREST = 250.0  # forward passes, beyond which a setting is not run


@dataclass(frozen=True)
class Row:
    """What was found of one setting.

    Attributes:
        method: The setting.
        forwards: What it costs in forward passes, by a count of operations.
        mean_error, covariance_error: Of the mean in standard deviations, of the covariance relative.
        variance_ratio: Predicted over sampled total variance, the geometric mean over inputs.
        error: e, both together.
        least, most: Two standard errors about it.
        verdict: `"chosen"`, `"as good"`, `"worse"`, or why it was not run.
    """

    method: Method
    forwards: float
    mean_error: float = float("nan")
    covariance_error: float = float("nan")
    variance_ratio: float = float("nan")
    error: float = float("nan")
    least: float = float("nan")
    most: float = float("nan")
    verdict: str = ""


@dataclass(frozen=True)
class Tuning:
    """What `favour.tune` measured; print it.

    Attributes:
        rows: One for each setting, by cost.
        n: Number of draws.
        inputs: Number of inputs.
        share: Of the variance of a draw what the control variate left.
    """

    rows: tuple[Row, ...]
    n: int
    inputs: int
    share: float

    def __str__(self) -> str:
        table = [("setting", "passes", "mean", "covariance", "error (95%)", "")]
        for row in self.rows:
            ran = row.error == row.error
            figures = (f"{row.mean_error:.3f}", f"{row.covariance_error:.3f}") if ran else ("–", "–")
            error = f"{row.error:.3f} ({row.least:.3f}–{row.most:.3f})" if ran else "–"
            table.append((repr(row.method), f"{row.forwards:.1f}", *figures, error, row.verdict))
        widths = [max(len(line[i]) for line in table) for i in range(5)]
        lines = [
            "  ".join([line[0].ljust(widths[0]), *(line[i].rjust(widths[i]) for i in range(1, 5)), line[5]]).rstrip()
            for line in table
        ]
        head = (
            f"Errors against {self.n} draws at {self.inputs} inputs, of whose variance {self.share:.1%} was left by "
            "the control variate:"
        )
        return "\n".join([head, *lines])


def tune(
    model: nn.Module,
    x: Any,
    budget: float | None = 60.0,
    *,
    n: int = 400,
    candidates: Sequence[Method] | None = None,
    tolerance: float = 0.01,
    output: int | None = None,
    seed: int = 0,
    **settings: Any,
) -> Predictor:
    """Compile with the setting that measures best for its cost on inputs of yours (see `favour.predictor.tune`).

    Args:
        model: As for `favour.compile`.
        x: Inputs to measure on, as for `favour.compile`; up to 32, evenly spaced, are used.
        budget: Seconds of measuring after the model is captured: half of it for draws, at least 60 of which are made;
            settings that it does not suffice for, the dearest, are not run. None: as long as it takes, which makes
            the choice reproducible.
        n: Draws of the network, at most.
        candidates: Methods (`favour.methods`) to choose among; by default sweeps with tangents, secants, pairs and
            rank-8 marginals, `dplr` of two ranks, `diag` and 100 samples.
        tolerance: Errors that differ by less count as alike.
        output: Which output to judge by, where the model has several.
        seed: Of the draws, and of what the predictor itself draws.
        settings: Further keywords of `favour.compile`: `posterior`, `dropout`, `at`, `memory`, ...

    Returns:
        A `Predictor` with the method that was chosen; `print(predict.tuned)` shows what was measured.

    Example:
        >>> model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 2))
        >>> predict = tune(model, torch.randn(16, 3), budget=None, n=100)
        >>> predict.method  # dropout reaches the output by a linear map: nothing is gained by more
        Adjoint()
    """
    wrong = [name for name in settings if name in DEFAULTS or name in ("method", "check")]
    if wrong:
        raise InvalidType(f"`{wrong[0]}` is what `favour.tune` chooses; give `candidates=[...]` to choose among.")
    if budget is not None and not budget > 0:
        raise InvalidValue(f"`budget` is {budget}; it is a number of seconds above 0, or None.")
    if isinstance(n, bool) or not isinstance(n, int) or n < FEWEST:
        raise InvalidValue(f"`n` is {n!r}; at least {FEWEST} draws tell settings apart.")
    if Posterior.wrap(settings.get("posterior")).linearised:
        raise InvalidValue("the posterior is of a linearised network, which draws of the network cannot judge.")
    first = compile(model, x, method=Adjoint(), seed=seed, check=False, **settings)
    if first.is_certain:
        return first
    begin = time.perf_counter()
    program = first.program
    leaves = _some(program, x)
    place = output_of(program, output)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of vmap, about speed
        truth = _Truth(program, leaves, place, n, budget, seed)
        plan, _ = program.plan()
        usual = type(Auto().choose(plan))
        asked = SETTINGS if candidates is None else candidates
        chosen = sorted(asked, key=lambda method: (type(method) is not usual, method.cost(plan)))
        rows: list[Row] = []
        scores: dict[int, Tensor] = {}
        with Bar("tuning", len(chosen)) as bar:
            for method in chosen:
                row = Row(method, method.cost(plan))
                late = budget is not None and time.perf_counter() - begin > budget and bool(scores)
                why = "not run: the budget is spent" if late else _unfit(method, program, row.forwards, candidates)
                if not why:
                    try:
                        belief = program.clone(method=method).run(leaves)[place]
                        row, scores[len(rows)] = truth.judged(row, belief)
                    except (FavourError, RuntimeError) as error:
                        why = f"not run: {str(error).splitlines()[0][:80]}"
                rows.append(replace(row, verdict=why))
                bar.advance(len(truth.mean))
    if not scores:
        raise InvalidValue("none of the candidates could be run:\n" + str(Tuning(tuple(rows), truth.n, 0, truth.share)))
    best = min(scores, key=lambda i: float(scores[i][0]))
    alike = [i for i in scores if _alike(scores[i], scores[best], tolerance)]
    taken = min(alike, key=lambda i: rows[i].forwards)
    for i in scores:
        rows[i] = replace(rows[i], verdict="chosen" if i == taken else "as good" if i in alike else "worse")
    winner = rows[taken]
    twin = program.clone(method=winner.method)
    twin.origin = program.origin
    predict = Predictor(twin)
    predict.prepare()
    rows.sort(key=lambda row: row.forwards)
    predict.tuned = Tuning(tuple(rows), truth.n, len(truth.mean), truth.share)
    predict.checked = truth.check(winner)
    warn_of(predict, predict.checked, stacklevel=3)
    return predict


def _some(program: Program, x: Any) -> list[Any]:
    args, kwargs = split_example(x)
    leaves = program.inputs(args, kwargs)
    rows = program.rows(leaves)
    if rows == 0:
        raise InvalidValue("`x` is an empty batch; there is nothing to measure on.")
    if rows is None or rows <= INPUTS:
        return leaves
    at = torch.linspace(0, rows - 1, INPUTS).round().long()
    return [leaf[at.to(leaf.device)] if b else leaf for leaf, b in zip(leaves, program.batched(), strict=True)]


def _unfit(method: Method, program: Program, forwards: float, candidates: Any) -> str:
    if candidates is None and forwards > DEAREST:
        return f"not run: more than {DEAREST:.0f} forward passes"
    try:
        method.validate(program.numerics)
    except FavourError as error:
        return f"not run: {error}"
    return ""


def _alike(score: Tensor, best: Tensor, tolerance: float) -> bool:
    d = score - best
    if float(score[0].clamp_min(0).sqrt() - best[0].clamp_min(0).sqrt()) <= tolerance:
        return True
    return float(d[0]) <= 2 * _jackknife(d)


def _jackknife(values: Tensor) -> float:
    """The standard error of the first entry, from what the others are with one group left out each."""
    others = values[1:]
    return float(((others - others.mean()).square().sum() * (len(others) - 1) / len(others)).sqrt())


class _Truth:
    """What draws say of one output, all of them and with one group left out each."""

    def __init__(
        self, program: Program, leaves: list[Any], place: int, n: int, budget: float | None, seed: int
    ) -> None:
        device = next((t.device for t in pytree.tree_leaves(leaves) if isinstance(t, Tensor)), None)
        generator = torch.Generator(device=device or "cpu").manual_seed(seed + 0xFA)
        plan, _ = program.plan()
        outputs = plan.entries(program.graph.outputs[place].shape)
        self.entries = torch.arange(0, outputs, -(-outputs // OUTPUTS))

        def drawn(count: int) -> tuple[Tensor, Tensor, Tensor]:
            if outputs > MOST_OUTPUTS:
                f = program.sample(leaves, count, generator)[place].flatten(2)[..., self.entries].double()
                return f, torch.zeros_like(f), f.new_zeros(*f.shape[1:], f.shape[-1])
            samples = controlled(program, leaves, count, generator, place)
            f = samples.draws.flatten(2) if samples.draws.ndim > 2 else samples.draws.unsqueeze(2)
            at = self.entries
            return f[..., at].double(), samples.line[..., at].double(), samples.known[:, at][:, :, at].double()

        begin = time.perf_counter()
        f, line, known = drawn(GROUPS)
        if budget is not None:
            each = (time.perf_counter() - begin) / GROUPS
            n = max(FEWEST, min(n, int(budget / 2 / max(each, 1e-9))))
        more = drawn(n // GROUPS * GROUPS - GROUPS)
        f, line = torch.cat([f, more[0]]), torch.cat([line, more[1]])
        self.n = len(f)
        groups = torch.arange(self.n, device=f.device) % GROUPS
        kept = [groups >= 0, *(groups != g for g in range(GROUPS))]
        self.estimates = [estimate(f[k], line[k], known) for k in kept]
        self.mean, self.covariance = self.estimates[0][:2]
        whole = f.var(0).sum()
        self.share = float((f - line).var(0).sum() / whole) if whole > 0 else 0.0

    def judged(self, row: Row, belief: Any) -> tuple[Row, Tensor]:
        """A row with its errors, and the squared error by all draws and with each group left out, (1 + GROUPS,)."""
        if not isinstance(belief, Belief):
            raise InvalidType("the output is no belief.")
        mean = belief.mean.double().reshape(len(self.mean), -1)[:, self.entries]
        covariance = belief.covariance.submatrix(self.entries.to(belief.device)).double()
        variance = self.covariance.diagonal(dim1=-2, dim2=-1)
        live, size = variance > 0, self.covariance.square().sum((-2, -1))
        rows = size > 0
        means, covariances = [], []
        for m, S, m_error, S_error in self.estimates:
            gap = ((mean - m).square() - m_error.square()) / torch.where(live, variance, 1)
            off = ((covariance - S).square() - S_error.square()).sum((-2, -1)) / torch.where(rows, size, 1)
            means.append(gap[live].mean() if bool(live.any()) else gap.new_zeros(()))
            covariances.append(off[rows].mean() if bool(rows.any()) else off.new_zeros(()))
        parts = torch.stack(means), torch.stack(covariances)
        score = parts[0] + parts[1]
        spread = 2 * _jackknife(score)
        low, e, high = (max(0.0, float(score[0]) + d) ** 0.5 for d in (-spread, 0.0, spread))
        one, two = (float(part[0].clamp_min(0).sqrt()) for part in parts)
        totals = covariance.diagonal(dim1=-2, dim2=-1).sum(-1), variance.sum(-1)
        both = (totals[0] > 0) & (totals[1] > 0)
        ratio = float((totals[0][both] / totals[1][both]).log().mean().exp()) if bool(both.any()) else 1.0
        return Row(row.method, row.forwards, one, two, ratio, e, low, high), score

    def check(self, row: Row) -> SelfCheck:
        wrong = row.error > LARGE and row.least > LARGE / 2
        return SelfCheck(self.n, len(self.mean), row.mean_error, row.covariance_error, row.variance_ratio, wrong)
