"""What a step of learning through beliefs costs, in ordinary training steps of the same network.

python benchmarks/learning.py [--compiled] [--rounds 100] [--only PART]

A step is loss, gradients and Adam. The ordinary one is of the same network with plain loss, dropout drawn if it has
any; with --compiled it is compiled as well, and the faster of the two counts (compiled dropout is slower than eager).
"regression" learns weights, variances, rates and noise of 8-50-50-1, batch 1,000, or of 8-50-1, batch 128;
"classification" of 784-400-400-10, batch 512, with k directions or all ten outputs.
Seconds are the processor's, in one thread: the
candidates take turns, and the ratio of their least over the rounds is reported. Rows that results/learning_cost.json
has of the other mode stay.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
import warnings
from collections.abc import Callable

import torch
from common import RESULTS, write
from torch import Tensor, nn

import favour

Step = Callable[[], None]


def mlp(*sizes: int, p: float) -> nn.Sequential:
    layers: list[nn.Module] = []
    for i, o in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(i, o), nn.ReLU(), *([nn.Dropout(p)] if p else [])]
    return nn.Sequential(*layers, nn.Linear(*sizes[-2:]))


def stepping(module: nn.Module, loss: Callable[[], Tensor]) -> Step:
    optimiser = torch.optim.Adam([p for p in module.parameters() if p.requires_grad], 1e-4)

    def step() -> None:
        optimiser.zero_grad()
        loss().backward()
        optimiser.step()

    return step


def candidates(compiled: bool, only: str) -> dict[str, list[Step]]:
    """Ours and the ordinary steps, by name."""
    torch.manual_seed(0)
    steps = {}
    x, y = torch.randn(1000, 8), torch.randn(1000, 1)
    picture, label = torch.randn(512, 784), torch.randint(10, (512,))
    kinds = ("mean field", 0.0), ("rates too", 0.1), ("one hidden layer", 0.0)
    tasks = [(f"regression, {kind}", p, "gaussian", {}) for kind, p in kinds]
    tasks += [(f"classification, {k} directions", 0.0, "categorical", {"directions": k}) for k in (1, 3)]
    tasks += [("classification, 10 outputs", 0.0, "categorical", {})]
    for name, p, likelihood, options in tasks:
        if only not in name:
            continue
        regression = likelihood == "gaussian"
        inputs, targets = (x, y) if regression else (picture, label)
        network = mlp(8, 50, 50, 1, p=p) if regression else mlp(784, 400, 400, 10, p=p)
        if "one hidden" in name:
            network, inputs, targets = mlp(8, 50, 1, p=p), x[:128], y[:128]
        plain = nn.functional.mse_loss if regression else nn.functional.cross_entropy
        how = {"noise": 1.0} if regression else {}
        learner = favour.Learner(network, inputs[:2], likelihood=likelihood, compiled=compiled, **how, **options)
        calls = [network, torch.compile(network)] if compiled else [network]
        steps[name] = [stepping(learner, lambda f=learner, a=inputs, b=targets: f.loss(a, b, rows=10_000).total)]
        steps[name] += [stepping(network, lambda f=f, a=inputs, b=targets, loss=plain: loss(f(a), b)) for f in calls]
    return steps


def least(steps: list[Step], rounds: int) -> list[float]:
    best = [float("inf")] * len(steps)
    for step in steps:
        for _ in range(3):
            step()
    for _ in range(rounds):
        for i, step in enumerate(steps):
            begin = time.process_time()
            step()
            best[i] = min(best[i], time.process_time() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compiled", action="store_true")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--only", default="", help="Part of a row's name.")
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    path = RESULTS / "learning_cost.json"
    rows = json.loads(path.read_text())["rows"] if path.is_file() else {}
    for name, steps in candidates(given.compiled, given.only).items():
        ours, *ordinary = least(steps, given.rounds)
        plain = min(ordinary)
        row = f"{name} | {'compiled' if given.compiled else 'eager'}"
        rows[row] = {"milliseconds": 1e3 * ours, "plain milliseconds": 1e3 * plain, "plain steps": ours / plain}
        print(row, rows[row], flush=True)
        write("learning_cost", {"rows": rows})


if __name__ == "__main__":
    main()
