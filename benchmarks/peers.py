"""Favour beside its peers on the same posteriors: cost in forward passes, errors of variance and covariance.

Each peer is installed into an environment of its own (build/peers/NAME, on top of this environment's torch and numpy)
and run there by a script of benchmarks/peers; what could not be installed or run is listed with the reason. All answers
are judged against the same large sample. 784-400-400-10 with ReLU, batch 512, three posteriors:

    random      mean-field, weights N(0, 2/fan-in), every standard deviation 0.3 of the layer's weights'
    trained     mean-field, variational training on digits, or on MNIST with --data
    inputs      deterministic weights, dropout 0.2 on the inputs, for the peer that only takes uncertain inputs

The variance error is ‖diag Σ − diag S‖/‖diag S‖ and the covariance error ‖Σ − S‖/‖S‖, averaged over inputs. Every
process times the same eager forward pass in turns with its own; the unit of cost is the median of these.

    python benchmarks/peers.py [--data DIR] [--only suq_diagonal,tagi] [--posteriors random] [--samples 20000]
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import write
from torch import Tensor, nn

import favour
from favour_studies.bench.measure import Reference, keep_freed_memory, time_all
from favour_studies.bench.networks import NETWORKS, load
from favour_studies.bench.samplers import compiled

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent / "peers"
SIZES = (784, 400, 400, 10)
RATE = 0.2
SETTINGS: dict[str, dict[str, Any]] = {
    "favour": {},
    "favour, 3 directions": {"method": "adjoint", "directions": 3},
    "favour, diag": {"method": "diag"},
}


@dataclass(frozen=True)
class Peer:
    """A script of benchmarks/peers, what it needs installed, and the posteriors it can take."""

    script: str
    packages: tuple[str, ...]
    takes: tuple[str, ...] = ("random", "trained")


PEERS = (
    Peer("suq_diagonal", ("suq==0.1.0", "tqdm")),
    Peer("laplace_glm", ("laplace-torch==0.3", "curvlinops-for-pytorch", "backpack-for-pytorch", "einops", "einconv",
                         "unfoldnd", "opt_einsum", "torchmetrics", "lightning-utilities", "tqdm", "asdfghjkl==0.1a4")),
    Peer("torch_adf", ("torch-adf==22.1.0",), ("inputs",)),
    Peer("tagi", ("pytagi==0.1.12",)),
    Peer("bayesian_torch_samples", ("bayesian-torch==0.5.0",)),
)  # fmt: skip


# ------------------------------------------------------------------------------------------------------- posteriors


def plain(weights: Mapping[str, np.ndarray]) -> nn.Sequential:
    """The network with the mean weights."""
    layers: list[nn.Module] = []
    for i in range(len(SIZES) - 1):
        linear = nn.Linear(SIZES[i], SIZES[i + 1])
        linear.weight.data = torch.from_numpy(weights[f"weight_{i}"]).clone()
        linear.bias.data = torch.from_numpy(weights[f"bias_{i}"]).clone()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).eval().requires_grad_(False)


def random_weights() -> dict[str, np.ndarray]:
    draw, made = torch.Generator().manual_seed(0), {}
    for i in range(len(SIZES) - 1):
        n, m = SIZES[i], SIZES[i + 1]
        spread = (2 / n) ** 0.5
        made[f"weight_{i}"] = spread * torch.randn(m, n, generator=draw)
        made[f"bias_{i}"] = 0.1 * torch.randn(m, generator=draw)
        made[f"weight_variance_{i}"] = torch.full((m, n), (0.3 * spread) ** 2)
        made[f"bias_variance_{i}"] = torch.full((m,), (0.3 * spread) ** 2)
    return {k: v.numpy() for k, v in made.items()}


def trained_weights(x: Tensor, y: Tensor, steps: int = 800) -> dict[str, np.ndarray]:
    """Mean-field variational inference."""
    torch.manual_seed(0)
    sizes = list(itertools.pairwise(SIZES))
    layers = [favour.nn.BayesLinear(n, m, prior_std=n**-0.5, initial_std=0.2 * n**-0.5) for n, m in sizes]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2]).train()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (128,))
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(model(x[rows]), y[rows]) + sum(m.kl() for m in layers) / len(x)
        loss.backward()
        optimiser.step()
    made: dict[str, Tensor] = {}
    for i, layer in enumerate(layers):
        posterior = favour.Posterior.from_modules([("layer", layer)])
        for name in ("weight", "bias"):
            made[f"{name}_{i}"] = getattr(layer, name).detach()
            made[f"{name}_variance_{i}"] = posterior.gaussian(f"layer.{name}").variance().detach()
    return {k: v.numpy() for k, v in made.items()}


def problems(data: str | None, batch: int, judged: int) -> tuple[dict[str, dict[str, np.ndarray]], str]:
    """The three posteriors with inputs, and where the inputs come from."""
    x, y, test, origin = load(NETWORKS["mlp"], data)
    inputs = test[torch.arange(batch) % len(test)].numpy()
    trained = trained_weights(x, y)
    fixed = {k: np.zeros_like(v) if "variance" in k else v for k, v in trained.items()}
    made = {"random": random_weights(), "trained": trained, "inputs": fixed}
    for name, problem in made.items():
        problem["timed"], problem["judged"] = inputs, inputs[:judged]
        for part in ("timed", "judged"):
            noise = RATE / (1 - RATE) * problem[part] ** 2
            problem[f"{part}_variance"] = noise if name == "inputs" else np.zeros_like(noise)
    return made, origin


def ours(
    name: str, problem: Mapping[str, np.ndarray], x: Tensor, settings: Mapping[str, Any]
) -> tuple[nn.Module, favour.Predictor]:
    """Favour's predictor for a posterior, and the model it is of."""
    model: nn.Module = plain(problem)
    if name == "inputs":
        model = nn.Sequential(nn.Dropout(RATE), *model).eval().requires_grad_(False)
        return model, favour.compile(model, x[:2], **settings)
    variances = {
        f"{2 * i}.{part}": torch.from_numpy(problem[f"{part}_variance_{i}"])
        for i in range(len(SIZES) - 1)
        for part in ("weight", "bias")
    }
    return model, favour.compile(model, x[:2], posterior=variances, **settings)


# ----------------------------------------------------------------------------------------------------- environments


def environment(peer: Peer, folder: Path) -> Path:
    """Python of an environment with the peer's packages, and this one's torch and numpy behind them."""
    place = folder / peer.script
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=False)
    site = next((place / "lib").glob("python*/site-packages"))
    stamp = place / "installed.txt"
    if stamp.is_file() and stamp.read_text().split() == list(peer.packages):
        return python
    (site / "parent.pth").write_text("\n".join(p for p in sys.path if p.endswith("site-packages")) + "\n")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    run([*pip, "--target", str(site), "--upgrade", "-c", str(ROOT / "constraints.txt"), *peer.packages], 600)
    stamp.write_text("\n".join(peer.packages))
    return python


def run(command: list[str], seconds: float) -> None:
    """Run, or raise with the last line it printed."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=HERE)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"took over {seconds:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise RuntimeError(next((s for s in reversed(lines) if "rror" in s), lines[-1])[:300])


def judged(reference: Reference, row: Mapping[str, Any], mean: Any, covariance: Any) -> dict[str, Any]:
    verdict = reference.judge(torch.as_tensor(mean), torch.as_tensor(covariance))
    return {
        "milliseconds": 1e3 * row["seconds"],
        "forward milliseconds": 1e3 * row["forward seconds"],
        "variance error": verdict.variance_error,
        "covariance error": verdict.error,
        "mean error in standard deviations": verdict.mean_error,
        "worth samples": verdict.worth,
        "at least": verdict.capped,
        "note": row.get("note", ""),
    }


@dataclass
class Prepared:
    """The reference sample, and Favour's calls, compiled and ready to be timed, with their answers."""

    reference: Reference
    calls: dict[str, Any]
    beliefs: dict[str, favour.Belief]


def prepare_ours(name: str, problem: Mapping[str, np.ndarray], samples: int) -> Prepared:
    """Everything of a posterior but the times."""
    x, few = torch.from_numpy(problem["timed"]), torch.from_numpy(problem["judged"])
    model, predict = ours(name, problem, x, {})
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        reference = Reference.draw(lambda n: predict.sample(few, n=n, generator=generator), samples, 200)
        calls: dict[str, Any] = {"forward": lambda: model(x)}
        beliefs = {}
        for label, settings in SETTINGS.items():
            _, predict = ours(name, problem, x, settings)
            fast = compiled(predict, fullgraph=True, dynamic=False)
            calls[f"{label}, eager"], calls[f"{label}, compiled"] = lambda p=predict: p(x), lambda p=fast: p(x)
            beliefs[label] = predict(few)
            fast(x)
    return Prepared(reference, calls, beliefs)


def measure_ours(prepared: Prepared) -> dict[str, Any]:
    """Favour's own rows."""
    rows: dict[str, Any] = {}
    with torch.no_grad():
        times = time_all(prepared.calls, budget=10.0)
    for label, belief in prepared.beliefs.items():
        for mode in ("eager", "compiled"):
            row = {"seconds": times[f"{label}, {mode}"].median, "forward seconds": times["forward"].median}
            rows[f"{label}, {mode}"] = judged(prepared.reference, row, belief.mean, belief.covariance_matrix)
    return rows


def settle(rows: dict[str, Any]) -> None:
    """Costs in the common unit, and how every peer stands beside us."""
    unit = statistics.median({r["forward milliseconds"] for r in rows.values()})
    for row in rows.values():
        row["forwards"] = row["milliseconds"] / unit
    own = {name: r for name, r in rows.items() if name.startswith("favour")}
    for name, row in rows.items():
        if name in own:
            continue
        ahead = [
            (label, r)
            for label, r in own.items()
            if r["forwards"] < row["forwards"] and r["covariance error"] < row["covariance error"]
        ]
        if ahead:
            label, best = min(ahead, key=lambda pair: pair[1]["forwards"])
            times = row["forwards"] / best["forwards"]
            row["verdict"] = f"{label}: {times:.1f} times as fast, error {best['covariance error']:.3f}"
        elif any(r["covariance error"] < row["covariance error"] for r in own.values()):
            row["verdict"] = "faster than what we have at a lower error"
        else:
            row["verdict"] = "more accurate than what we have"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with mnist/; without it scikit-learn's digits")
    parser.add_argument("--only", help="scripts of benchmarks/peers, with commas between them")
    parser.add_argument("--posteriors", default="random,trained,inputs")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "peers")
    parser.add_argument("--samples", type=int, default=20_000, help="of the reference")
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--inputs", type=int, default=32, help="that errors are averaged over")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds a peer may take for one posterior")
    parser.add_argument("--out", default="peers", help="name of the file under results/")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    wanted = [p for p in PEERS if options.only is None or p.script in options.only.split(",")]
    failures: dict[str, str] = {}
    pythons: dict[str, Path] = {}
    for peer in wanted:
        print(f"installing {', '.join(peer.packages)}", flush=True)
        try:
            pythons[peer.script] = environment(peer, options.environments)
        except (RuntimeError, OSError) as error:
            failures[peer.script] = f"could not be installed: {error}"
    made, origin = problems(options.data, options.batch, options.inputs)
    tables: dict[str, dict[str, Any]] = {}
    able = {name: [p for p in wanted if name in p.takes and p.script in pythons] for name in made}
    able = {name: peers for name, peers in able.items() if peers and name in options.posteriors.split(",")}
    prepared: dict[str, Prepared] = {}
    for name in able:
        print(f"{name}: {options.samples} samples", flush=True)
        prepared[name] = prepare_ours(name, made[name], options.samples)
    with tempfile.TemporaryDirectory() as folder:
        for name, peers in able.items():
            print(f"{name}: timing favour", flush=True)
            tables[name] = measure_ours(prepared[name])
            given, answer = Path(folder) / "problem.npz", Path(folder) / "answer.npz"
            np.savez(given, **made[name])
            for peer in peers:
                print(f"{name}: timing {peer.script}", flush=True)
                command = [str(pythons[peer.script]), str(HERE / f"{peer.script}.py"), str(given), str(answer)]
                try:
                    run([*command, str(options.threads)], options.timeout)
                except RuntimeError as error:
                    failures[f"{peer.script}, {name}"] = f"could not run: {error}"
                    continue
                with np.load(answer) as content:
                    for i, row in enumerate(json.loads(str(content["about"]))):
                        found = judged(prepared[name].reference, row, content[f"mean_{i}"], content[f"covariance_{i}"])
                        tables[name][row["name"]] = found
            settle(tables[name])
    show(tables, failures)
    about = f"784-400-400-10, batch {options.batch}, inputs and training from {origin}"
    write(options.out, {"network": about, "samples": options.samples, "tables": tables, "could not": failures})


def show(tables: Mapping[str, Mapping[str, Any]], failures: Mapping[str, str]) -> None:
    for name, rows in tables.items():
        print(f"\n{name}\n{'':34s} forwards        ms  variance  covariance error   worth samples")
        for row, r in rows.items():
            print(
                f"{row:34s} {r['forwards']:8.2f} {r['milliseconds']:9.2f} {r['variance error']:9.3f} "
                f"{r['covariance error']:11.3f} {'≥' if r['at least'] else ' '}{r['worth samples']:14,.0f}   "
                f"{r.get('verdict', '')}"
            )
            if r["note"]:
                print(f"{'':36s}({r['note']})")
    for name, why in failures.items():
        print(f"{name}: {why}")


if __name__ == "__main__":
    main()
