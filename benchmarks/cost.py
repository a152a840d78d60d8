"""What a prediction costs, in eager forward passes and in dropout samples (a forward pass with dropout on).

784-400-400-10, batch 512, two threads: every method eager and compiled. Then how cost grows with width.

    python benchmarks/cost.py [--quick]
    python benchmarks/cost.py --against PATH [--rounds 60]        beside another checkout, see `against`
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import torch
from against import compare
from common import keep_freed_memory, time_all, write
from networks import mlp, with_dropout

import favour

SETTINGS = {
    "adjoint, 10 outputs": {"method": "adjoint"},
    "adjoint, 10 outputs, bf16 sweeps": {"method": "adjoint", "precision": "bf16"},
    "adjoint, 10 outputs, secants": {"method": "adjoint", "secant": True},
    "adjoint, 10 outputs, secants, bf16 sweeps": {"method": "adjoint", "secant": True, "precision": "bf16"},
    "adjoint, 3 directions": {"method": "adjoint", "directions": 3},
    "adjoint, 3 directions, bf16 sweeps": {"method": "adjoint", "directions": 3, "precision": "bf16"},
    "dplr r=2 K=2": {"method": "dplr", "rank": 2, "iterations": 2},
    "dplr r=2 K=2, random start": {"method": "dplr", "rank": 2, "iterations": 2, "start": "random"},
    "dplr r=2 K=2 q=40": {"method": "dplr", "rank": 2, "iterations": 2, "weight_rank": 40},
    "dplr r=4 K=2": {"method": "dplr", "rank": 4, "iterations": 2},
    "diag": {"method": "diag"},
}


def costs(rounds: int) -> dict[str, dict[str, float]]:
    model, x = mlp(784, 400, 400, 10).eval().requires_grad_(False), torch.rand(512, 784)
    noisy = with_dropout(model)
    candidates = {"forward": lambda: model(x), "sample": lambda: noisy(x)}
    for name, settings in SETTINGS.items():
        predict = favour.compile(model, x[:2], **settings)
        compiled = torch.compile(predict, fullgraph=True)
        candidates[f"{name} | eager"] = lambda p=predict: p(x)
        candidates[f"{name} | compiled"] = lambda p=compiled: p(x)
    regression, features = mlp(13, 100, 100, 1).eval().requires_grad_(False), torch.rand(512, 13)
    small = torch.compile(favour.compile(regression, features[:2]), fullgraph=True)
    noisy_regression = with_dropout(regression)
    candidates["forward, 13-100-100-1"] = lambda: regression(features)
    candidates["sample, 13-100-100-1"] = lambda: noisy_regression(features)
    candidates["adjoint, 13-100-100-1 | compiled"] = lambda: small(features)
    sampler = favour.compile(model, x[:2])
    candidates["32 samples of favour.sample"] = lambda: sampler.sample(x, n=32)
    times = time_all(candidates, rounds)
    rows = {}
    for name, seconds in times.items():
        own = ", 13-100-100-1" if "13-100" in name else ""
        rows[name] = {
            "milliseconds": seconds * 1e3,
            "forwards": seconds / times[f"forward{own}"],
            "samples": seconds / times[f"sample{own}"],
        }
    return rows


def exponent(settings: dict, widths: list[int], batch: int, rounds: int) -> dict[str, object]:
    """Least-squares slope of log time against log width, beside the forward pass's own."""
    seconds: dict[str, list[float]] = {"forward": [], "method": []}
    for n in widths:
        model, x = mlp(n, n, n, n, 10).eval().requires_grad_(False), torch.rand(batch, n)
        predict = favour.compile(model, x[:2], **settings)
        times = time_all({"forward": lambda m=model, x=x: m(x), "method": lambda p=predict, x=x: p(x)}, rounds, 1)
        for name, value in times.items():
            seconds[name].append(value)

    def slope(values: list[float]) -> float:
        a = [math.log(w) for w in widths]
        b = [math.log(v) for v in values]
        ma, mb = sum(a) / len(a), sum(b) / len(b)
        return sum((p - ma) * (q - mb) for p, q in zip(a, b, strict=True)) / sum((p - ma) ** 2 for p in a)

    steps = range(len(widths) - 1)
    return {
        "widths": widths,
        "batch": batch,
        "seconds": seconds,
        "exponent": {k: slope(v) for k, v in seconds.items()},
        "between widths": {
            k: [math.log(v[i + 1] / v[i]) / math.log(widths[i + 1] / widths[i]) for i in steps]
            for k, v in seconds.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--against", type=Path, metavar="PATH")
    parser.add_argument("--rounds", type=int, default=60)
    asked = parser.parse_args()
    if asked.against is not None:
        write("cost_against", compare(asked.against, asked.rounds))
        return
    keep_freed_memory()
    torch.set_num_threads(2)
    torch.manual_seed(0)
    torch._dynamo.config.recompile_limit = 64  # every predictor compiled here counts
    quick = asked.quick
    with torch.no_grad():
        rows = costs(10 if quick else 25)
        for name, row in rows.items():
            cost = f"{row['forwards']:7.2f} forwards {row['samples']:7.2f} samples"
            print(f"{name:44s} {row['milliseconds']:8.2f} ms {cost}")
        widths = [256, 512, 1024, 2048] if quick else [256, 512, 1024, 2048, 4096]
        growth = {
            "dplr r=2 K=2": exponent(SETTINGS["dplr r=2 K=2"], widths, 64, 5),
            "adjoint": exponent(SETTINGS["adjoint, 10 outputs"], widths, 64, 5),
            "full": exponent({"method": "full"}, [512, 1024, 2048] if quick else [512, 1024, 2048, 3072], 1, 2),
        }
        for name, result in growth.items():
            print(f"growth with width, {name}: {result['exponent']}")
            print(f"    between widths: {result['between widths']['method']}")
    write("cost", {"network": "784-400-400-10, dropout 0.2, batch 512", "rows": rows, "growth": growth})


if __name__ == "__main__":
    main()
