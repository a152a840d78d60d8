"""Sub-inference for convolutions, the paper's open question: covectors through rank-q kernels, measured.

`weight_rank=q` replaces a kernel (m, n·window) by q kernels and a change of channels on the way back, which costs q/m
of a convolution and 1/window more of q/n. Means and variances keep the whole kernel. Here cost and error of that, on

    lenet-all    LeNet with dropout at all layers
    resnet18     ResNet-18 on 3 × 32 × 32 with dropout in every block

both with the weights of `favour bench`. Errors are relative Frobenius errors of the output covariance, against the same
pass with whole kernels and, with --samples, against draws. `energy` is the share of the squared kernels that rank q
keeps, averaged over layers: what bounds the error.

The other way, to subsample the noise in space, can save no more than what is not covectors' convolutions: the share of
an eager pass that goes into Gram matrices of the noise and into the variance sweep is measured beside.

    python benchmarks/subinference.py [--data DIR] [--networks lenet-all,resnet18] [--batch 32] [--eager]
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import write
from torch import Tensor, nn

import favour
from favour_studies.bench.measure import Reference, keep_freed_memory, time_all
from favour_studies.bench.networks import NETWORKS, prepare
from favour_studies.bench.samplers import compiled

RANKS = {"lenet-all": (2, 4, 8, 12), "resnet18": (8, 16, 32, 48)}


def energy(model: nn.Module, q: int) -> float:
    """The share of a kernel's squared singular values that the q largest have, averaged over what q shortens."""
    kept = []
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            squares = torch.linalg.svdvals(layer.weight.flatten(1)).square()
            if q < len(squares):
                kept.append((squares[:q].sum() / squares.sum()).item())
    return sum(kept) / len(kept) if kept else 1.0


def shares(predict: favour.Predictor, model: nn.Module, x: Tensor) -> dict[str, float]:
    """Where an eager pass spends its time: convolutions, Gram matrices (bmm), all else."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        predict(x)
    times: dict[str, float] = {}
    for event in seen.key_averages():
        kind = "convolutions" if "conv" in event.key else "Gram matrices" if "bmm" in event.key else "all else"
        times[kind] = times.get(kind, 0.0) + event.self_cpu_time_total
    total = sum(times.values())
    return {kind: value / total for kind, value in times.items()}


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Rows for one network."""
    with torch.enable_grad():
        trained = prepare(NETWORKS[name], options.data, options.checkpoints, "cpu", print)
    model, x = trained.model, trained.batch(options.batch)
    few = x[: NETWORKS[name].inputs]
    settings: dict[str, dict[str, Any]] = {"whole kernels": {}} | {f"rank {q}": {"weight_rank": q} for q in RANKS[name]}
    predictors = {label: favour.compile(model, x[:2], method="adjoint", **kw) for label, kw in settings.items()}
    beliefs = {label: predict(few) for label, predict in predictors.items()}
    whole = beliefs["whole kernels"].covariance_matrix
    reference = None
    if options.samples[name]:
        sampler = predictors["whole kernels"]
        generator = torch.Generator().manual_seed(0)
        reference = Reference.draw(lambda n: sampler.sample(few, n=n, generator=generator), options.samples[name], 50)
    part = shares(predictors["whole kernels"], model, x)
    calls: dict[str, Any] = {"forward": lambda: model(x)}
    for label, predict in predictors.items():
        run = predict if options.eager else compiled(predict, fullgraph=True, dynamic=False)
        calls[label] = lambda run=run: run(x)
        calls[label]()
    print(f"{name}: timing", flush=True)
    times = time_all(calls, "cpu", options.budget, (3, 40))
    rows = {}
    for label, belief in beliefs.items():
        matrix = belief.covariance_matrix
        q = settings[label].get("weight_rank")
        rows[label] = {
            "forwards": times[label].median / times["forward"].median,
            "seconds": times[label].median,
            "spread": times[label].spread,
            "of whole kernels' time": times[label].median / times["whole kernels"].median,
            "energy": 1.0 if q is None else energy(model, q),
            "off whole kernels": ((matrix - whole).norm(dim=(-2, -1)) / whole.norm(dim=(-2, -1))).mean().item(),
            "error": None if reference is None else reference.judge(belief.mean, matrix).error,
        }
        found = rows[label]
        print(f"{name}, {label}: " + ", ".join(f"{k} {v:.3f}" for k, v in found.items() if v is not None), flush=True)
    return {
        "weights": trained.origin,
        "batch": options.batch,
        "mode": "eager" if options.eager else "compiled",
        "forward seconds": times["forward"].median,
        "samples": options.samples[name],
        "rows": rows,
        "shares of an eager pass": part,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with mnist/; without it what scikit-learn brings")
    parser.add_argument("--checkpoints", type=Path, default=Path("checkpoints"))
    parser.add_argument("--networks", default=",".join(RANKS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--samples", default="20000,0", help="of the reference for each network; 0 for none")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds of timing per network")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="subinference", help="name of the file under results/")
    options = parser.parse_args()
    names = options.networks.split(",")
    options.samples = dict(zip(names, map(int, options.samples.split(",")), strict=True))
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    with torch.no_grad():
        results = {name: measure(name, options) for name in names}
    write(options.out, {"networks": results})


if __name__ == "__main__":
    main()
