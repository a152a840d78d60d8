"""A fit that is under way: stretches of steps, what is kept of them, checkpoints and the result."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from favour.errors import CorruptFile, DivergedFit, FavourError, InvalidValue
from favour.learn import rates
from favour.learn.fitted import Fitted, read, write
from favour.learn.history import Callback, Record, judge
from favour.learn.learner import Learner
from favour.learn.rows import Rows, moved
from favour.posterior import Posterior
from favour.predictor.compilation import compile

BLOWN = 1e3  # times the first stretch's objective: diverged


@dataclass(frozen=True)
class Schedule:
    """What to train.

    Attributes:
        weights: Of the divergence, one for each stretch.
        steps: Of each stretch.
        step_sizes: By the names of `learn`.
        steady: Step sizes stay as they are; else they fall along a cosine.
        patience: Stretches without a better held-out likelihood before training ends; None for no end. Without `steady`
            only stretches with the last weight count.
    """

    weights: Sequence[float]
    steps: Sequence[int]
    step_sizes: dict[str, float]
    steady: bool
    patience: int | None


class Task:
    """A fit that is under way."""

    def __init__(
        self,
        learner: Learner,
        rows: Rows,
        device: torch.device,
        seed: int,
        callbacks: tuple[Callback, ...],
        options: dict[str, Any],
        check: bool,
    ) -> None:
        self.learner, self.rows, self.device, self.seed = learner, rows, device, seed
        self.callbacks, self.options, self.check = callbacks, options, check
        self.refit = "means" not in learner.learn and "noise" in learner.learn
        self.history: list[Record] = []
        self.best: Record | None = None
        self.kept = self._state()
        self.noise = learner.noise()
        self.checkpoint: Path | None = None
        self.spent, self.first = 0.0, 0.0  # seconds before a resumption; the first stretch's objective

    def _state(self) -> dict[str, Tensor]:
        return {name: t.detach().clone() for name, t in self.learner.state_dict().items()}

    def start_noise(self) -> None:
        """Begin at the residuals of the model as it is; of held-out rows where its means stay as they are."""
        learner = self.learner
        assert learner.log_noise is not None
        squares, count = torch.zeros_like(learner.log_noise), 0
        batches = self.rows.held if self.refit and self.rows.held else self.rows.batches()
        with torch.no_grad():
            for batch in batches:
                x, y = moved(batch, self.device)
                belief = learner(x)
                residuals = learner.targets(y, belief) - belief.mean
                squares, count = squares + residuals.square().sum(0), count + len(residuals)
                if count >= 4096:
                    break
            learner.log_noise.copy_((squares / count).clamp(min=1e-8).log())

    # ---- training

    def run(self, plan: Schedule, show: Callable[[str], None]) -> None:
        """Stretches of steps, each with its weight of the divergence; a record and maybe a checkpoint after each."""
        groups = [{"params": p, "lr": plan.step_sizes[name], "name": name} for name, p in self.learner.groups().items()]
        optimiser = torch.optim.Adam(groups, fused=self.device.type in ("cpu", "cuda"))  # one call for all parameters
        done = self._resume(optimiser, plan)
        since = 0
        begin = time.perf_counter() - self.spent
        for index in range(done, len(plan.weights)):
            torch.manual_seed(hash((self.seed, index)) % 2**31)
            before = self._state()
            try:
                nll, objective = self._stretch(optimiser, plan, index, show)
            except FavourError as error:
                if isinstance(error, DivergedFit) or not self.history:
                    raise
                self._diverged(before, str(error))
            if not math.isfinite(objective) or (self.history and objective > BLOWN * (1 + abs(self.first))):
                self._diverged(before, f"the objective became {objective:.4g}")
            if not self.history:
                self.first = objective
            judgement = judge(self.learner, self.rows.held, self.device, refit_noise=self.refit)
            with torch.no_grad():
                divergence = float(self.learner.divergence())
            record = Record(
                index + 1,
                plan.weights[index],
                -(self.rows.count * nll + divergence),
                nll,
                divergence,
                None if judgement is None else judgement.nll,
                None if judgement is None else judgement.calibration,
                time.perf_counter() - begin,
            )
            if judgement is not None and not math.isfinite(judgement.nll):
                self._diverged(before, f"held-out rows have a log-likelihood of {-judgement.nll:.4g}")
            self.history.append(record)
            if self._better(record, plan):
                self.best, self.kept, since = record, self._state(), 0
                self.noise = self.learner.noise() if judgement is None else judgement.noise
            else:
                since += 1
            self._write(optimiser, plan, record.seconds)
            if any([callback(self.learner, record) is True for callback in self.callbacks]):
                break
            if plan.patience is not None and since >= plan.patience:
                break

    def _better(self, record: Record, plan: Schedule) -> bool:
        """Whether a record takes the place of the best; what was trained on a part of the divergence gives way."""
        best = self.best
        if best is None or best.held_nll is None or record.held_nll is None:
            return True
        last = plan.weights[-1]
        if not plan.steady and (record.kl_weight < last or best.kl_weight < last):
            return True
        return record.held_nll < best.held_nll

    def _stretch(
        self, optimiser: torch.optim.Optimizer, plan: Schedule, index: int, show: Callable[[str], None]
    ) -> tuple[float, float]:
        """Mean likelihood term and objective over a stretch."""
        weight, steps = plan.weights[index], plan.steps[index]
        total, before = sum(plan.steps), sum(plan.steps[:index])
        nll, objective, left = 0.0, 0.0, steps
        text = f"weight {weight:g}" if plan.steady else f"epoch {index + 1}"
        if self.history:
            text += f", {self.history[-1]}"
        while left > 0:
            for batch in self.rows.batches():
                if left == 0:
                    break
                x, y = moved(batch, self.device)
                at = (before + steps - left) / total
                for group in optimiser.param_groups:
                    falls = 1.0 if plan.steady else 0.5 * (1 + math.cos(math.pi * at))
                    group["lr"] = plan.step_sizes[group["name"]] * falls
                loss = self.learner.loss(x, y, self.rows.count, weight)
                value = float(loss.total.detach())
                if not math.isfinite(value):
                    return float(loss.nll.detach()), value
                optimiser.zero_grad(set_to_none=True)
                loss.total.backward()
                optimiser.step()
                rates.clamp(self.learner.rates)
                nll, objective, left = nll + float(loss.nll.detach()), objective + value, left - 1
                show(text)
        n = max(1, steps)
        return nll / n, objective / n

    def _diverged(self, before: dict[str, Tensor], why: str) -> None:
        self.kept = before if self.best is None else self.kept
        place = f"in epoch {len(self.history) + 1}"
        fitted = self.result() if self.history else None
        raise DivergedFit(
            f"the fit diverged {place}: {why}. Lower `lr`, or give targets and inputs of unit scale. The last good "
            f"state is this error's `fitted`{'' if fitted else ', of which there is none yet'}.",
            fitted,
        )

    # ---- checkpoints

    def _identity(self, plan: Schedule) -> str:
        learner = self.learner
        shapes = {name: list(t.shape) for name, t in learner.state_dict().items()}
        what = [self.seed, self.rows.count, list(learner.learn), learner.likelihood.name, plan.step_sizes]
        return json.dumps([list(plan.weights), list(plan.steps), *what, shapes])

    def _write(self, optimiser: torch.optim.Optimizer, plan: Schedule, seconds: float) -> None:
        if self.checkpoint is None:
            return
        description = {
            "plan": self._identity(plan),
            "history": [record.as_dict() for record in self.history],
            "best": None if self.best is None else self.history.index(self.best),
            "seconds": seconds,
        }
        content = {
            "description": json.dumps(description),
            "state": self._state(),
            "kept": self.kept,
            "noise": None if self.noise is None else self.noise.detach().clone(),
            "optimiser": optimiser.state_dict(),
        }
        write(self.checkpoint, content)

    def _resume(self, optimiser: torch.optim.Optimizer, plan: Schedule) -> int:
        """Take over what a checkpoint holds; how many stretches it has behind it."""
        if self.checkpoint is None or not self.checkpoint.is_file():
            return 0
        content = read(self.checkpoint)
        description = json.loads(content["description"])
        if description.get("plan") != self._identity(plan):
            raise InvalidValue(
                f"`{self.checkpoint}` is of another fit: its epochs, seed, rows, `learn`, likelihood, `lr` or sizes "
                "differ. Name another file, or delete it."
            )
        missing = [k for k in ("state", "kept", "noise", "optimiser") if k not in content]
        if missing:
            raise CorruptFile(f"`{self.checkpoint}` lacks {', '.join(missing)}; delete it to begin anew.")
        self.learner.load_state_dict(content["state"])
        optimiser.load_state_dict(content["optimiser"])
        self.kept, self.noise, self.spent = content["kept"], content["noise"], description["seconds"]
        self.history = [Record(**record) for record in description["history"]]
        self.best = None if description["best"] is None else self.history[description["best"]]
        self.first = -self.history[0].bound / self.rows.count
        return len(self.history)

    # ---- the result

    def result(self) -> Fitted:
        """At the state that is kept."""
        learner = self.learner
        learner.load_state_dict(self.kept)
        fitted = learner.fitted_model()
        posterior = learner.posterior()
        bayesian = set(Posterior.from_module(fitted).names)
        outside = Posterior(
            {k: g for k, g in posterior.gaussians.items() if not {*([k] if isinstance(k, str) else k)} & bayesian},
            latents=posterior.latents,
        )
        options = {k: v for k, v in self.options.items() if v is not None}
        if learner.likelihood.classes and learner.likelihood.covariance:
            options.setdefault("task", "classification")
        options.setdefault("check", self.check)
        predict = compile(fitted, learner.example, posterior=outside, **options)
        return Fitted(
            predict,
            fitted,
            posterior,
            None if self.noise is None else self.noise.detach().clone(),
            learner.rate_values(),
            learner.prior_stds(),
            (self.best or Record(0, 1.0, 0, 0, 0, None, None, 0)).kl_weight,
            list(self.history),
            self.best,
        )
