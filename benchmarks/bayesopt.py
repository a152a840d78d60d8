"""Bayesian optimisation with a dropout network: the joint belief in BoTorch, against MC dropout and random search.

python benchmarks/bayesopt.py [--seeds 10] [--workers 2]        (about ten minutes on two cores)

Seeds that results/bayesopt.json holds already are not run again. Every method starts from the same points and proposes
q at a time by optimising qLogExpectedImprovement (EI) or qUpperConfidenceBound (UCB, β = 1) from the same number of
starts. Favour and MC dropout train the same network in the same way; they differ in what the acquisition function sees:
the joint belief, or S thinned networks, masks drawn once a round. "favour fitted" trains that network through beliefs
instead, posterior, rates and noise together. A Gaussian process (BoTorch's default) is there for orientation. Simple
regret is f(best) − f(best so far).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import torch
from botorch.acquisition import qLogExpectedImprovement, qUpperConfidenceBound
from botorch.fit import fit_gpytorch_mll
from botorch.models import SingleTaskGP
from botorch.models.ensemble import EnsembleModel
from botorch.models.model import Model
from botorch.optim import optimize_acqf
from botorch.sampling import SobolQMCNormalSampler
from botorch.sampling.index_sampler import IndexSampler
from botorch.test_functions import Branin, Hartmann, Levy
from common import RESULTS, write
from gpytorch.mlls import ExactMarginalLogLikelihood
from torch import Tensor

from favour.botorch import FavourModel
from favour.sklearn import FavourRegressor

F64 = torch.float64
# function, initial points, points at a time, rounds
PROBLEMS: dict[str, tuple[Callable[[], object], int, int, int]] = {
    "Branin": (lambda: Branin(negate=True), 6, 2, 10),
    "Hartmann6": (lambda: Hartmann(dim=6, negate=True), 12, 4, 10),
    "Levy4": (lambda: Levy(dim=4, negate=True), 10, 4, 10),
}
THINNED = 64  # networks of MC dropout
HIDDEN, DROPOUT = (64, 64), 0.1


class ThinnedNetworks(EnsembleModel):
    """MC dropout: S networks with masks drawn once."""

    def __init__(self, fitted: FavourRegressor, seed: int) -> None:
        super().__init__()
        self._num_outputs = 1
        self.fitted = fitted
        generator = torch.Generator().manual_seed(seed)
        keep = [torch.rand(THINNED, 1, h, generator=generator, dtype=F64) >= DROPOUT for h in HIDDEN]
        self.masks = [k / (1 - DROPOUT) for k in keep]
        state = {k: torch.as_tensor(v, dtype=F64) for k, v in fitted.state_.items()}
        self.layers = [(state[f"{3 * i}.weight"], state[f"{3 * i}.bias"]) for i in range(len(HIDDEN) + 1)]

    def forward(self, X: Tensor) -> Tensor:
        f = self.fitted
        h = ((X - torch.as_tensor(f.x_mean_)) / torch.as_tensor(f.x_scale_)).unsqueeze(-3)  # (…, 1, q, d)
        for (W, b), mask in zip(self.layers, self.masks, strict=False):
            h = torch.relu(h @ W.T + b) * mask
        W, b = self.layers[-1]
        return (h @ W.T + b) * torch.as_tensor(f.y_scale_) + torch.as_tensor(f.y_mean_)  # (…, S, q, 1)


def network(X: Tensor, y: Tensor, seed: int, training: str = "dropout") -> FavourRegressor:
    model = FavourRegressor(
        HIDDEN,
        dropout=DROPOUT,
        training=training,
        epochs=400,
        batch_size=64,
        learning_rate=1e-2,
        validation_fraction=0.0,
        patience=400,
        random_state=seed,
    )
    return model.fit(X.numpy(), y.numpy())


def gaussian_process(X: Tensor, y: Tensor) -> Model:
    model = SingleTaskGP(X, y.unsqueeze(-1))
    fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
    return model


def propose(method: str, X: Tensor, y: Tensor, q: int, seed: int) -> tuple[Tensor, float]:
    """The next q points in the unit cube, and the seconds spent on the acquisition function."""
    if method == "random":
        return torch.rand(q, X.shape[1], dtype=F64, generator=torch.Generator().manual_seed(seed)), 0.0
    torch.manual_seed(seed)
    if method.startswith("Gaussian process"):
        model, sampler = gaussian_process(X, y), SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    elif method.startswith("MC dropout"):
        model, sampler = ThinnedNetworks(network(X, y, seed), seed), IndexSampler(torch.Size([THINNED]), seed=seed)
    else:
        training = "propagation" if method.startswith("favour fitted") else "dropout"
        model = FavourModel.from_regressor(network(X, y, seed, training))
        sampler = SobolQMCNormalSampler(torch.Size([64]), seed=seed)
    acquisition = (
        qUpperConfidenceBound(model, 1.0, sampler=sampler)
        if method.endswith("UCB")
        else qLogExpectedImprovement(model, y.max(), sampler=sampler)
    )
    bounds = torch.stack([torch.zeros(X.shape[1]), torch.ones(X.shape[1])]).to(F64)
    start = time.perf_counter()
    options = {"maxiter": 40, "seed": seed}
    new, _ = optimize_acqf(acquisition, bounds, q, num_restarts=4, raw_samples=64, options=options)
    return new.detach(), time.perf_counter() - start


def run(problem: str, method: str, seed: int) -> tuple[list[float], float]:
    """Simple regret after the start and after each round; seconds per acquisition."""
    make, initial, q, rounds = PROBLEMS[problem]
    function = make()
    low, high = function.bounds.to(F64)
    best = float(function.optimal_value)

    def f(x: Tensor) -> Tensor:
        return function(low + (high - low) * x)

    X = torch.rand(initial, len(low), dtype=F64, generator=torch.Generator().manual_seed(seed))
    y = f(X)
    regrets, seconds = [best - float(y.max())], 0.0
    for i in range(rounds):
        new, spent = propose(method, X, y, q, 1000 * seed + i)
        X, y = torch.cat([X, new]), torch.cat([y, f(new)])
        regrets.append(best - float(y.max()))
        seconds += spent
    return regrets, seconds / rounds


COLOURS = {
    "random": "#888888",
    "MC dropout, EI": "#c77d2e",
    "MC dropout, UCB": "#e3b27f",
    "favour, EI": "#3b6ea5",
    "favour, UCB": "#7fa8d1",
    "favour fitted, EI": "#8a3ba5",
    "Gaussian process, EI": "#4f9a5b",
}
METHODS = tuple(COLOURS)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--problems", nargs="*", default=list(PROBLEMS))
    parser.add_argument("--methods", nargs="*", default=list(METHODS))
    parser.add_argument("--dry", action="store_true", help="print only")
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    path = RESULTS / "bayesopt.json"
    results = json.loads(path.read_text())["problems"] if path.is_file() else {}
    with ProcessPoolExecutor(given.workers, context, quiet) as pool:
        for problem in given.problems:
            for method in given.methods:
                compare(problem, method, given.seeds, pool, results)
                if not given.dry:
                    write("bayesopt", {"thinned networks": THINNED, "problems": results})
    if not given.dry:
        draw(results)


def quiet() -> None:
    """For each worker."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)


def compare(problem: str, method: str, seeds: int, pool: ProcessPoolExecutor, results: dict[str, dict]) -> None:
    """Run the seeds that are missing of a method on a problem."""
    _, initial, q, rounds = PROBLEMS[problem]
    entry = results.setdefault(problem, {"evaluations": [initial + q * i for i in range(rounds + 1)], "methods": {}})
    kept = entry["methods"].get(method, {"regret": []})
    missing = range(len(kept["regret"]), seeds)
    if missing:
        runs = list(pool.map(run, [problem] * len(missing), [method] * len(missing), missing))
        spent = float(np.median([s for _, s in runs]))
        kept = {"regret": kept["regret"] + [r for r, _ in runs], "seconds per acquisition": spent}
        entry["methods"][method] = kept
    final = np.array(kept["regret"])[:, -1]
    print(
        f"{problem:10s} {method:20s} regret {np.median(final):7.4f} "
        f"(quartiles {np.quantile(final, 0.25):.4f} to {np.quantile(final, 0.75):.4f}), {len(final)} seeds",
        flush=True,
    )


def draw(results: dict[str, dict]) -> None:
    """Median simple regret with quartiles, by function evaluations."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(5 * len(results), 3.6), layout="constrained", squeeze=False)
    for ax, (problem, result) in zip(axes[0], results.items(), strict=True):
        for method, values in result["methods"].items():
            regret = np.maximum(np.array(values["regret"]), 1e-4)
            ax.plot(result["evaluations"], np.median(regret, 0), color=COLOURS[method], label=method)
            low, high = np.quantile(regret, [0.25, 0.75], axis=0)
            ax.fill_between(result["evaluations"], low, high, color=COLOURS[method], alpha=0.12, lw=0)
        ax.set(title=problem, xlabel="evaluations of the function", yscale="log")
        ax.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("simple regret (median, quartiles)")
    axes[0][-1].legend(frameon=False, fontsize=8)
    figure.savefig(RESULTS / "bayesopt.png", dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    main()
