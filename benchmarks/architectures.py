"""Convolutional, residual, attention, Bayesian and recommender networks against 10,000 samples of themselves.

Each network is trained briefly on real data (MNIST; the recommender on planted clicks). Then, over test inputs: the
mean relative Frobenius error of the output covariance and the mean absolute error of the mean in standard deviations,
of one `adjoint` pass, of the same with `activation="taylor"`, of plain linearisation (the network's own Jacobian in
every mask and weight, by autograd, and the plain forward pass as the mean) and of n samples, all against the same
10,000 samples; and what a pass costs in forward passes of the same eager network. The reference is itself a sample, so
small errors are over-stated: `10000 samples` gives the error of an equally large second sample.

`dplr` on LeNet with noise at all layers: error against the rank r and the iterations K of Algorithm 1, as a table and a
figure. Compile times of six models from `transformers`.

    python benchmarks/architectures.py --data DIR [--quick] [--fresh]

Checkpoints are kept in checkpoints/ (git-ignored); --fresh trains anew, --quick takes a tenth of the samples.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, time_all, write
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from worth import error, moments

import favour
from favour.methods.forward import evaluate
from favour_studies.experiments.data import images

CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"
INPUTS, REPEATS = 16, 4
# What the project set itself: largest error of the covariance, and of the mean in standard deviations.
BOUNDS = {
    "LeNet, dropout in the top two layers": (0.10, 0.15),
    "LeNet, dropout at all layers": (0.12, 0.15),
    "residual CNN, dropout everywhere": (0.12, 0.15),
    "transformer, post-norm": (0.20, 0.30),
    "transformer, pre-norm": (0.20, 0.30),
    "Bayesian convolutions": (0.15, 0.15),
    "Bayesian convolutions, twice the spread": (0.15, 0.15),
    "DLRM-like": (0.15, 0.15),
}
RANKS, ITERATIONS = (1, 2, 4, 8, 16, 32), (1, 2, 3, 4)


# ------------------------------------------------------------------------------------------------------ networks


def lenet(top: float, below: float = 0.0, before_pooling: float = 0.0) -> nn.Module:
    """LeNet with ReLU and max-pooling; dropout before the two top layers, behind each pooling, or in front of it."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.Dropout(before_pooling),
        nn.MaxPool2d(2),
        nn.Dropout(below),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.Dropout(before_pooling),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(below),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Dropout(top),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Dropout(top),
        nn.Linear(84, 10),
    )


class ResidualBlock(nn.Module):
    def __init__(self, width: int, p: float) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm_a, self.norm_b, self.drop_a, self.drop_b = (
            nn.BatchNorm2d(width),
            nn.BatchNorm2d(width),
            nn.Dropout(p),
            nn.Dropout(p),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop_a(torch.relu(self.norm_a(self.a(x))))
        return torch.relu(x + self.drop_b(self.norm_b(self.b(h))))


def residual(width: int = 16, p: float = 0.1) -> nn.Module:
    """Batch norm, dropout behind every convolution, averaged at the end."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, stride=2, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Dropout(p),
        ResidualBlock(width, p),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.Dropout(p),
        ResidualBlock(2 * width, p),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, 10),
    )


class RowEncoder(nn.Module):
    """Pictures as sequences of their rows: a transformer encoder with dropout 0.1 everywhere."""

    def __init__(self, norm_first: bool, width: int = 32, p: float = 0.1) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(28, width), nn.Parameter(0.1 * torch.randn(28, width))
        self.drop = nn.Dropout(p)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=p, batch_first=True, norm_first=norm_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.embed(x.squeeze(1)) + self.place)
        return self.head(self.encoder(h).mean(1))


def convolutional(conv: Callable[..., nn.Module], linear: Callable[..., nn.Module]) -> nn.Module:
    return nn.Sequential(
        conv(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.AvgPool2d(2),
        conv(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        linear(16 * 49, 10),
    )


def bayes(spread: float = 0.15) -> nn.Module:
    """A mean-field Gaussian over every kernel and matrix."""
    conv = partial(favour.nn.BayesConv2d, initial_std=spread)
    return convolutional(conv, partial(favour.nn.BayesLinear, initial_std=spread / 2))


def widened(model: nn.Module, x: Tensor, times: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """`bayes` as a plain network, and its posterior with `times` the standard deviations."""
    posterior = favour.compile(model, x[:2], method="diag").posterior()
    plain = convolutional(nn.Conv2d, nn.Linear).eval().requires_grad_(False)
    means = model.state_dict()
    plain.load_state_dict({name: means[name] for name in plain.state_dict()})
    return plain, {name: times**2 * posterior.gaussian(name).variance() for name in posterior.names}


class Recommender(nn.Module):
    """Dense features through an MLP, categories through tables, all pairs of them multiplied, an MLP on top.

    Two answers: the scores of a click and of a purchase.
    """

    def __init__(self, rows: int = 200, tables: int = 4, dense: int = 8, width: int = 16, p: float = 0.1) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(dense, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 64), nn.ReLU(), nn.Dropout(p), nn.Linear(64, 2))
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("first", first)
        self.register_buffer("second", second)

    def forward(self, dense: Tensor, categories: Tensor) -> Tensor:
        z = self.bottom(dense)
        vectors = torch.stack([z, *[table(categories[:, i]) for i, table in enumerate(self.tables)]], 1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([z, products[:, self.first, self.second]], 1))


def clicks(n: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Planted clicks and purchases: categories with Zipf frequencies, hidden tastes, scores by their products."""
    plan, draw = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    tastes, weights = torch.randn(4, 200, 4, generator=plan), torch.randn(8, 2, generator=plan)
    mixing = torch.randn(6, 2, generator=plan)
    frequency = 1 / torch.arange(1.0, 201)
    categories = torch.multinomial(frequency, 4 * n, True, generator=draw).reshape(n, 4)
    dense = torch.randn(n, 8, generator=draw)
    vectors = torch.stack([tastes[i, categories[:, i]] for i in range(4)], 1)
    a, b = torch.tril_indices(4, 4, -1)
    score = (vectors[:, a] * vectors[:, b]).sum(-1) @ mixing / 6 + dense @ weights / 3 - 0.5
    return (dense, categories), (torch.rand(n, 2, generator=draw) < score.sigmoid()).float()


# ------------------------------------------------------------------------------------------------------ training


@dataclass
class Task:
    """A network, what it is trained on, and the inputs it is judged on."""

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    targets: Tensor
    test: tuple[Tensor, ...]
    steps: int = 600
    rate: float = 2e-3
    trained_as: str | None = None  # another network's checkpoint
    times: float = 1.0  # its posterior's standard deviations


def train(model: nn.Module, task: Task, tick: Callable[[], None]) -> None:
    optimiser = torch.optim.Adam(model.parameters(), task.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, task.steps)
    bayesian = [m for m in model.modules() if hasattr(m, "favour_posterior")]
    loss = nn.BCEWithLogitsLoss() if task.targets.is_floating_point() else nn.CrossEntropyLoss()
    model.train()
    for _ in range(task.steps):
        rows = torch.randint(0, len(task.targets), (128,))
        optimiser.zero_grad()
        total = loss(model(*[t[rows] for t in task.inputs]), task.targets[rows])
        total = total + sum(m.kl() for m in bayesian) / len(task.targets)
        total.backward()
        optimiser.step()
        schedule.step()
        tick()


def prepared(name: str, task: Task, fresh: bool, progress: Progress) -> nn.Module:
    torch.manual_seed(0)
    model = task.make()
    label = (task.trained_as or name).replace(",", "").replace(" ", "-")
    path = CHECKPOINTS / f"architectures-{label}.safetensors"
    if path.exists() and not fresh:
        model.load_state_dict(load_file(path))
    else:
        bar = progress.add_task(f"training {name}", total=task.steps)
        train(model, task, lambda: progress.advance(bar))
        progress.remove_task(bar)
        CHECKPOINTS.mkdir(exist_ok=True)
        save_file(model.state_dict(), path)
    return model.eval().requires_grad_(False)


def rare_rows(model: Recommender, categories: Tensor) -> dict[str, Tensor]:
    """A mean-field posterior on the tables: a row seen n times has the variance s²/(1 + n/10), s² that of its table."""
    posterior = {}
    for i, table in enumerate(model.tables):
        seen = torch.bincount(categories[:, i], minlength=table.weight.shape[0])
        variance = table.weight.var() / (1 + seen / 10)
        posterior[f"tables.{i}.weight"] = variance.unsqueeze(1).expand(table.weight.shape).clone()
    return posterior


def tasks(data: str) -> dict[str, Task]:
    train_set, test_set = images("mnist", "train", data), images("mnist", "test", data)
    x, y = train_set.x[:30_000].float() / 255, train_set.y[:30_000]
    test = test_set.x[:INPUTS].float() / 255
    made: dict[str, Callable[[], nn.Module]] = {
        "LeNet, dropout in the top two layers": lambda: lenet(0.2),
        "LeNet, dropout at all layers": lambda: lenet(0.1, 0.1),
        "LeNet, dropout at all layers, before pooling": lambda: lenet(0.1, 0.0, 0.1),
        "residual CNN, dropout everywhere": residual,
        "transformer, post-norm": lambda: RowEncoder(False),
        "transformer, pre-norm": lambda: RowEncoder(True),
        "Bayesian convolutions": bayes,
    }
    result = {name: Task(make, (x,), y, (test,)) for name, make in made.items()}
    result["Bayesian convolutions"].steps = 1500
    for name in ("transformer, post-norm", "transformer, pre-norm"):  # errors of the mean differ widely between inputs
        result[name].test = (test_set.x[: 4 * INPUTS].float() / 255,)
    twice = replace(result["Bayesian convolutions"], trained_as="Bayesian convolutions", times=2.0)
    result["Bayesian convolutions, twice the spread"] = twice
    inputs, targets = clicks(50_000, 0)
    result["DLRM-like"] = Task(Recommender, inputs, targets, clicks(INPUTS, 1)[0], steps=1500)
    return result


# ----------------------------------------------------------------------------------------------------- measuring


def off(mean: Tensor, reference: Tensor, spread: Tensor) -> float:
    return ((mean - reference) / spread).abs().mean().item()


@dataclass
class Reference:
    """Moments of many samples of one network."""

    mean: Tensor
    covariance: Tensor
    spread: Tensor
    sample: Callable[[int, int], Tensor]

    @classmethod
    def draw(
        cls, model: nn.Module, x: tuple[Tensor, ...], posterior: Any, n: int, tick: Callable[[int], None]
    ) -> Reference:
        def sample(count: int, seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            pieces = []
            for first in range(0, count, 500):
                size = min(500, count - first)
                pieces.append(favour.sample(model, x, size, posterior=posterior, generator=generator).double())
                tick(size)
            return torch.cat(pieces)

        draws = sample(n, 0)
        mean, covariance = moments(draws)
        return cls(mean, covariance, draws.std(0), sample)

    def judge(self, mean: Tensor, covariance: Tensor) -> dict[str, float]:
        return {
            "covariance error": error(covariance.double(), self.covariance),
            "mean error in standard deviations": off(mean.double(), self.mean, self.spread),
        }


SETTINGS: dict[str, dict[str, Any]] = {
    "adjoint": {"method": "adjoint"},
    "adjoint, taylor": {"method": "adjoint", "activation": "taylor"},
}
SHARED: dict[str, dict[str, Any]] = {"adjoint, rank-16 marginals": {"method": "adjoint", "rank": 16, "iterations": 3}}


def linearised(model: nn.Module, x: tuple[Tensor, ...], posterior: Any) -> tuple[Tensor, Tensor]:
    """The network linearised in its draws: mean f(1, w̄) and covariance J diag(σ²) Jᵀ, input by input.

    J is the Jacobian in all dropout masks (mean 1, variance p/q) and all weights with a posterior.
    """
    predict = favour.compile(model, tuple(t[:2] for t in x), posterior=posterior, method="diag")
    graph, given = predict.graph, predict.posterior()
    means, matrices = [], []
    for i in range(len(x[0])):
        values: dict[Any, Any] = {n: t[i : i + 1] for n, t in zip(graph.inputs, x, strict=True)}
        draws: list[tuple[Tensor, Tensor]] = []
        with torch.enable_grad():
            for node in graph.nodes:
                if node.kind in ("parameter", "buffer"):
                    values[node] = predict.store.take(str(node.target)).detach()
                    if node.target in given.names:
                        values[node].requires_grad_()
                        draws.append((values[node], given.gaussian(node.target).variance()))
                elif node.kind == "constant":
                    values[node] = predict.store.take(f"constant.{node.target}")
                elif node.draw is not None:
                    source, p = values[node.args[0]], node.rate
                    mask = torch.ones_like(source, requires_grad=True)
                    draws.append((mask, torch.full_like(source, p / (1 - p))))
                    values[node] = source * mask
                elif node.kind == "call":
                    values[node] = evaluate(node, values)
            y = values[graph.outputs[0]][0]
            points = [point for point, _ in draws]
            rows = [torch.autograd.grad(entry, points, retain_graph=True, allow_unused=True) for entry in y]
        scaled = [
            torch.cat([(g * v.sqrt()).flatten() for g, (_, v) in zip(row, draws, strict=True) if g is not None])
            for row in rows
        ]
        J = torch.stack(scaled).double()
        means.append(y.detach())
        matrices.append(J @ J.T)
    return torch.stack(means), torch.stack(matrices)


def sizes(samples: int) -> dict[int, int]:
    """How many samples an estimate takes, and how many to draw for several of them."""
    return {n: n * (1 if n == samples else REPEATS) for n in (10, 100, 1000, samples)}


def measure(
    model: nn.Module, x: tuple[Tensor, ...], posterior: Any, reference: Reference, samples: int
) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    candidates: dict[str, Callable[[], Any]] = {"forward": lambda: model(*x)}
    # A kernel's noise is correlated over all positions, which variances alone do not show.
    bayesian = any(hasattr(m, "favour_posterior") for m in model.modules())
    everything = SETTINGS | (SHARED if bayesian else {})
    for name, settings in everything.items():
        begin = time.perf_counter()
        predict = favour.compile(model, tuple(t[:2] for t in x), posterior=posterior, **settings)
        seconds = time.perf_counter() - begin
        belief = predict(*x)
        rows[name] = {**reference.judge(belief.mean, belief.covariance_matrix), "compile seconds": seconds}
        if name in SETTINGS:
            candidates[name] = lambda p=predict: p(*x)
    rows["plain linearisation"] = reference.judge(*linearised(model, x, posterior))
    candidates["one sample"] = lambda: favour_sample(model, x, posterior)
    for n, total in sizes(samples).items():
        parts = reference.sample(total, n).split(n)
        judged = [reference.judge(*moments(part)) for part in parts]
        rows[f"{n} samples"] = {key: sum(j[key] for j in judged) / len(judged) for key in judged[0]}
    times = time_all(candidates, 5, 1)
    for name in SETTINGS:
        rows[name]["forwards"] = times[name] / times["forward"]
        rows[name]["milliseconds"] = times[name] * 1e3
    rows["forward milliseconds"] = times["forward"] * 1e3
    rows["one of 32 samples, forwards"] = times["one sample"] / 32 / times["forward"]
    return rows


def favour_sample(model: nn.Module, x: tuple[Tensor, ...], posterior: Any) -> Tensor:
    key = id(model)
    if key not in _SAMPLERS:
        _SAMPLERS[key] = favour.compile(model, tuple(t[:2] for t in x), posterior=posterior, method="diag")
    return _SAMPLERS[key].sample(*x, n=32)


_SAMPLERS: dict[int, favour.Predictor] = {}


def trade_off(model: nn.Module, x: Tensor, reference: Reference, tick: Callable[[], None]) -> list[dict[str, Any]]:
    """Errors of `dplr` over rank and iterations."""
    rows = []
    for rank in RANKS:
        for iterations in ITERATIONS:
            predict = favour.compile(model, x[:2], method="dplr", rank=rank, iterations=iterations)
            belief = predict(x)
            predicted = predict.method.cost(predict.plain_plan)
            judged = reference.judge(belief.mean, belief.covariance_matrix)
            rows.append({"r": rank, "K": iterations, "forward passes": predicted, **judged})
            tick()
    return rows


def figure(rows: list[dict[str, Any]], others: Mapping[str, Any]) -> Path:
    """Error of `dplr` against the rank, one line for each K, and against the cost."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = plt.get_cmap("viridis")([0.1, 0.35, 0.6, 0.85])
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for colour, K in zip(colours, ITERATIONS, strict=True):
        mine = [row for row in rows if row["K"] == K]
        errors = [row["covariance error"] for row in mine]
        left.plot([row["r"] for row in mine], errors, "o-", color=colour, label=f"K = {K}")
        right.plot([row["forward passes"] for row in mine], errors, "o-", color=colour, label=f"K = {K}")
    for axis in (left, right):
        for n, style in ((10, ":"), (100, "-."), (1000, "--")):
            axis.axhline(others[f"{n} samples"]["covariance error"], color="0.55", linestyle=style, lw=1)
        axis.axhline(others["adjoint"]["covariance error"], color="tab:red", lw=1.2)
        axis.set(xscale="log", yscale="log")
        axis.grid(alpha=0.25, which="both")
    edge = right.get_xlim()[1]
    for n in (10, 100, 1000):
        level = others[f"{n} samples"]["covariance error"]
        right.annotate(f" {n} samples", (edge, level), va="center", annotation_clip=False, fontsize=8, color="0.35")
    right.annotate(
        " adjoint",
        (edge, others["adjoint"]["covariance error"]),
        va="center",
        annotation_clip=False,
        fontsize=8,
        color="tab:red",
    )
    left.set_xticks(RANKS, [str(r) for r in RANKS])
    left.minorticks_off()
    left.set(xlabel="rank r", ylabel="relative error of the output covariance")
    right.set(xlabel="predicted cost in forward passes")
    left.legend(frameon=False)
    fig.suptitle(
        "dplr on LeNet with dropout at all layers (MNIST): rank r and iterations K of Algorithm 1", fontsize=11
    )
    path = RESULTS / "dplr_lenet.png"
    fig.savefig(path, dpi=130)
    return path


def compile_times() -> dict[str, float]:
    """Seconds that `favour.compile` takes for the models of tests/test_transformers.py."""
    sys.modules.pop("networks", None)  # the tests have one of their own
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
    import test_transformers as models

    result = {}
    for make in (models.resnet, models.vit, models.convnext, models.bert, models.distilbert, models.gpt2):
        torch.manual_seed(0)
        model, example = make()
        uncertain = next(v[1] for k, v in models.MODELS.items() if v[0] is make)
        posterior = {
            n: 1e-4 * torch.ones_like(p) for n, p in model.named_parameters() if uncertain and n.endswith(uncertain)
        }
        begin = time.perf_counter()
        favour.compile(model.eval(), example, posterior=posterior or None, method="adjoint")
        result[make.__name__] = time.perf_counter() - begin
    return result


def show(name: str, rows: Mapping[str, Any], console: Any) -> None:
    bound = BOUNDS.get(name)
    target = f" (to be at most {bound[0]} and {bound[1]})" if bound else ""
    console.print(f"\n[bold]{name}[/bold]{target}")
    for method, row in rows.items():
        if isinstance(row, dict):
            cost = f"   {row['forwards']:5.1f} forward passes" if "forwards" in row else ""
            mean = row["mean error in standard deviations"]
            console.print(f"  {method:22s} covariance {row['covariance error']:.3f}   mean {mean:.3f}{cost}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist/")
    parser.add_argument("--quick", action="store_true", help="a tenth of the samples, nothing is written")
    parser.add_argument("--fresh", action="store_true", help="train anew")
    parser.add_argument("--only", help="only networks whose name contains this; nothing is written")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    samples = 1_000 if options.quick else 10_000
    every = tasks(options.data)
    chosen = {k: v for k, v in every.items() if options.only is None or options.only in k}
    drawn = samples + sum(sizes(samples).values())
    results: dict[str, Any] = {}
    grid: list[dict[str, Any]] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress, torch.enable_grad():
        bar = progress.add_task("", total=len(chosen) * drawn)
        for name, task in chosen.items():
            progress.update(bar, description=name)
            model = prepared(name, task, options.fresh, progress)
            with torch.no_grad():
                posterior = rare_rows(model, task.inputs[1]) if isinstance(model, Recommender) else None
                if task.times != 1:
                    model, posterior = widened(model, task.test[0], task.times)

                def tick(n: int) -> None:
                    progress.advance(bar, n)

                reference = Reference.draw(model, task.test, posterior, samples, tick)
                results[name] = measure(model, task.test, posterior, reference, samples)
                results[name]["inputs judged"] = len(task.test[0])
                show(name, results[name], progress.console)
                if name == "LeNet, dropout at all layers":
                    inner = progress.add_task("dplr, r and K", total=len(RANKS) * len(ITERATIONS))
                    grid = trade_off(model, task.test[0], reference, lambda inner=inner: progress.advance(inner))
                    progress.remove_task(inner)
    if options.only is None:
        seconds = compile_times()
        print("\nfavour.compile, seconds:", {k: round(v, 1) for k, v in seconds.items()})
    if options.quick or options.only is not None:
        return
    write("architectures", {"samples": samples, "networks": results, "compile seconds": seconds})
    network = "LeNet, dropout at all layers"
    write("dplr_lenet", {"network": network, "samples": samples, "rows": grid, "beside": results[network]})
    print(f"wrote {figure(grid, results[network])}")


if __name__ == "__main__":
    main()
