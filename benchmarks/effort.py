"""What `effort` buys: errors of the default and of its neighbours on trained networks, with what they cost.

MLPs with ReLU (two and eight layers) and GELU (three), LeNets and a residual CNN, trained briefly on MNIST, and a
regression on UCI tables (Boston) at dropout .1. Over test inputs, root mean squares of the error of covariances
(relative, Frobenius) and of means (in standard deviations) against the network itself, corrected by 20,000 draws
(`predict.refine`), whose own squared standard error is taken off; forward passes as predicted. Beside each goal of the
default.

    python benchmarks/effort.py --data DIR [--quick] [--fresh]

Writes results/effort.json. Checkpoints are kept in checkpoints/ (git-ignored); --fresh trains anew, --quick takes a
tenth of the draws.
"""

from __future__ import annotations

import argparse

import torch
from architectures import Task, prepared, tasks
from common import write
from refine import errors, networks
from rich.progress import Progress
from torch import Tensor, nn

import favour
from favour_studies.experiments.data import uci

INPUTS, DRAWS = 12, 20_000
GOALS = {  # of the covariance error, by default
    "regression, dropout .1": 0.04,
    "MLP, depth 2": 0.015,
    "MLP, three GELU layers": 0.015,
    "MLP, depth 8": 0.04,
    "LeNet, top two layers": 0.03,
    "LeNet": 0.03,
    "residual CNN": 0.06,
}
SETTINGS = {
    "default": {},
    "effort='fast'": {"effort": "fast"},
    "effort='best'": {"effort": "best"},
    "secants": {"secant": True},
    "rank 8": {"rank": 8},
    "secants and rank 8": {"secant": True, "rank": 8},
}


def gelu() -> nn.Module:
    layers: list[nn.Module] = []
    for width in (784, 400, 400):
        layers += [nn.Linear(width, 400), nn.GELU(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, nn.Linear(400, 10))


def regression(data: str) -> tuple[nn.Module, Tensor]:
    """One hidden layer of 50 units, dropout .1 before and behind it, as regression studies have it."""
    fit, held = uci("boston", 0, data)
    mean, std = fit.x.mean(0), fit.x.std(0)
    x, y = (fit.x - mean) / std, ((fit.y - fit.y.mean()) / fit.y.std()).unsqueeze(1)
    torch.manual_seed(0)
    width = x.shape[1]
    model = nn.Sequential(nn.Dropout(0.1), nn.Linear(width, 50), nn.ReLU(), nn.Dropout(0.1), nn.Linear(50, 1))
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(100):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval().requires_grad_(False), (held.x - mean) / std


def measure(model: nn.Module, x: Tensor, draws: int) -> dict[str, object]:
    generator = torch.Generator().manual_seed(0)
    reference = favour.compile(model, x[:2], secant=True, check=False).refine(x, draws, generator=generator)
    rows: dict[str, object] = {"share of variance left": reference.share}
    for name, settings in SETTINGS.items():
        predict = favour.compile(model, x[:2], check=False, **settings)
        belief = predict(x)
        mean, covariance = errors(belief.mean, belief.covariance_matrix.double(), reference)
        gap = (belief.covariance_matrix - reference.covariance_matrix).norm(dim=(1, 2))
        rows[name] = {
            "method": repr(predict.method),
            "forward passes": predict.method.cost(predict.plain_plan),
            "covariance error": covariance,
            "median covariance error": (gap / reference.covariance_matrix.norm(dim=(1, 2))).median().item(),
            "mean error in standard deviations": mean,
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist/ and uci/")
    parser.add_argument("--fresh", action="store_true", help="train anew")
    parser.add_argument("--quick", action="store_true", help="a tenth of the draws")
    options = parser.parse_args()
    known = networks(options.data)
    flat = known["MLP, depth 2"]
    known["MLP, three GELU layers"] = Task(gelu, flat.inputs, flat.targets, flat.test)
    known["LeNet, top two layers"] = tasks(options.data)["LeNet, dropout in the top two layers"]
    draws = DRAWS // (10 if options.quick else 1)
    results: dict[str, dict] = {}
    with Progress() as progress:
        for name, goal in GOALS.items():
            if name in known:
                model, x = prepared(name, known[name], options.fresh, progress), known[name].test[0]
            else:
                model, x = regression(options.data)
            results[name] = {"goal": goal, **measure(model, x[:INPUTS], draws)}
            shown = {k: round(v["covariance error"], 4) for k, v in results[name].items() if isinstance(v, dict)}
            print(f"{name}: goal {goal}, {shown}", flush=True)
    write("effort", {"inputs": INPUTS, "draws": draws, "networks": results})


if __name__ == "__main__":
    main()
