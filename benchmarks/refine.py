"""Error against the number of draws: plain samples, beliefs corrected by them (`predict.refine`), and both combined.

Five networks, trained briefly on MNIST: two MLPs, a LeNet, a residual CNN and an encoder. Over test inputs, root mean
squares of the error of means (in standard deviations) and of covariances (relative, Frobenius) against a reference:
the network corrected by many more draws, whose own squared standard error is taken off. For each n the same draws serve
all three estimates. Beside them the belief alone; the share of variance that was left; how many plain samples each draw
is worth; and how often intervals of 95% hold the reference.

    python benchmarks/refine.py --data DIR [--quick] [--fresh]

Writes results/refine.json and a figure. Checkpoints are kept in checkpoints/ (git-ignored); --fresh trains anew,
--quick takes a tenth of the draws.
"""

from __future__ import annotations

import argparse

import torch
from architectures import Task, prepared, tasks
from common import RESULTS, write
from networks import mlp
from rich.progress import Progress
from torch import Tensor, nn

import favour
from favour.belief.refined import Refined, refined
from favour.program.refine import controlled

INPUTS, REPEATS, REFERENCE = 8, 6, 10_000
COUNTS = (3, 10, 30, 100, 300, 1000)


def networks(data: str) -> dict[str, Task]:
    known = tasks(data)
    some = known["LeNet, dropout at all layers"]
    x = (some.inputs[0].flatten(1),)
    test = (some.test[0].flatten(1),)
    return {
        "MLP, depth 2": Task(lambda: mlp(784, 400, 400, 10, p=0.2), x, some.targets, test),
        "MLP, depth 8": Task(lambda: mlp(784, *[400] * 8, 10, p=0.2), x, some.targets, test),
        "LeNet": known["LeNet, dropout at all layers"],
        "residual CNN": known["residual CNN, dropout everywhere"],
        "encoder, pre-norm": known["transformer, pre-norm"],
    }


def errors(mean: Tensor, covariance: Tensor, reference: Refined) -> tuple[float, float]:
    """Root mean squares over inputs, the reference's own share taken off."""
    variance, matrix = reference.variance.double(), reference.covariance_matrix.double()
    gap = (mean - reference.mean).double().square() - reference.mean_error.double().square()
    off = (covariance - matrix).square().sum((-2, -1)) - reference.covariance_error.double().square().sum((-2, -1))
    return root((gap / variance).mean()), root((off / matrix.square().sum((-2, -1))).mean())


def root(x: Tensor) -> float:
    return x.clamp(min=0).sqrt().item()


def plain(draws: Tensor) -> tuple[Tensor, Tensor]:
    d = draws - draws.mean(0)
    return draws.mean(0), torch.einsum("nbi,nbj->bij", d, d) / (len(draws) - 1)


def measure(model: nn.Module, x: Tensor, quick: bool) -> dict[str, object]:
    predict = favour.compile(model, x[:2], check=False)
    generator = torch.Generator().manual_seed(0)
    reference = predict.refine(x, REFERENCE // (10 if quick else 1), generator=generator)
    belief = predict(x)
    counts = [n for n in COUNTS if not quick or n <= 100]
    program = predict.program
    found = controlled(program, program.inputs((x,), {}), REPEATS * counts[-1], generator, 0)
    draws = found.draws.double()
    rows: dict[int, dict[str, dict[str, float]]] = {}
    for n in counts:
        sums: dict[str, list[tuple[float, float]]] = {"samples": [], "refined": [], "combined": []}
        covered: list[Tensor] = []
        for i in range(REPEATS):
            part = slice(i * n, (i + 1) * n)
            f, line = draws[part], found.line[part]
            sums["samples"].append(errors(*plain(f), reference))
            for combine in (False, True):
                one = refined(f, line, found.known, belief, combine)
                sums["combined" if combine else "refined"].append(
                    errors(one.mean, one.covariance_matrix.double(), reference)
                )
                if not combine:
                    width = torch.hypot(one.mean_error, reference.mean_error)
                    covered.append(((one.mean - reference.mean).abs() < 1.96 * width).double().mean())
        rows[n] = {
            name: {
                "mean error in standard deviations": (sum(m * m for m, _ in all_) / REPEATS) ** 0.5,
                "covariance error": (sum(c * c for _, c in all_) / REPEATS) ** 0.5,
            }
            for name, all_ in sums.items()
        }
        rows[n]["refined"]["95% intervals of means that hold"] = torch.stack(covered).mean().item()
    mean, covariance = errors(belief.mean, belief.covariance_matrix.double(), reference)
    return {
        "method": repr(predict.method),
        "share of variance left": reference.share,
        "plain samples each draw is worth": 1 / reference.share,
        "not followed": list(reference.missing),
        "belief": {"mean error in standard deviations": mean, "covariance error": covariance},
        "draws": rows,
    }


def figure(results: dict) -> None:
    from matplotlib import pyplot as plt

    fig, axes = plt.subplots(2, len(results), figsize=(3 * len(results), 5.4), sharex=True, sharey="row")
    for column, (name, found) in zip(axes.T, results.items(), strict=True):
        for ax, kind in zip(column, ("mean error in standard deviations", "covariance error"), strict=True):
            for label, style in (("samples", "k:o"), ("refined", "C0-o"), ("combined", "C1-s")):
                ax.loglog(
                    list(found["draws"]), [r[label][kind] for r in found["draws"].values()], style, ms=4, label=label
                )
            ax.axhline(found["belief"][kind], color="C2", label="belief alone")
        column[0].set_title(f"{name} ({found['share of variance left']:.1%} left)", fontsize=10)
        column[1].set_xlabel("draws")
    axes[0, 0].set_ylabel("mean, in standard deviations")
    axes[1, 0].set_ylabel("covariance, relative")
    axes[0, 0].legend(fontsize=8)
    fig.tight_layout()
    fig.savefig(RESULTS / "refine.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist/")
    parser.add_argument("--fresh", action="store_true", help="train anew")
    parser.add_argument("--quick", action="store_true", help="a tenth of the draws")
    options = parser.parse_args()
    results: dict[str, dict] = {}
    with Progress() as progress:
        for name, task in networks(options.data).items():
            model = prepared(name, task, options.fresh, progress)
            results[name] = found = measure(model, task.test[0][:INPUTS], options.quick)
            last = list(found["draws"].items())[-1]
            print(f"{name}: {found['share of variance left']:.1%} left; belief {found['belief']}; {last}", flush=True)
    write("refine", {"inputs": INPUTS, "reference draws": REFERENCE, "repeats": REPEATS, "networks": results})
    figure(results)


if __name__ == "__main__":
    main()
