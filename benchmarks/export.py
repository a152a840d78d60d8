"""Speed of exported predictors: onnxruntime and .pt2 against torch, and against MC dropout.

Each network gives mean, variance, covariance, class probabilities and JSD for a batch. Candidates take turns in one
thread; a time is the least over the rounds, and `forwards` divides it by a plain forward pass in torch. MC dropout
is the model with its masks drawn inside the graph, n copies of the batch in one call, which yields the mean and the
variance of the softmax; in onnxruntime the masks come from its RandomUniformLike.

    python benchmarks/export.py [--rounds 20] [--batches 1 64 512]
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from common import keep_freed_memory, time_all, write
from networks import mlp
from torch import Tensor, nn

import favour

SAMPLES = (10, 100)


def lenet() -> nn.Sequential:
    layers = [nn.Conv2d(1, 20, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.5), nn.Linear(800, 500), nn.ReLU(), nn.Dropout(0.5), nn.Linear(500, 10)]
    return nn.Sequential(*layers)


NETWORKS: dict[str, tuple[Callable[[], nn.Sequential], tuple[int, ...]]] = {
    "MLP 784-400-400-10, dropout 0.2": (lambda: mlp(784, 400, 400, 10), (784,)),
    "LeNet, dropout 0.5 in the top two layers": (lenet, (1, 28, 28)),
}


class Masked(nn.Module):
    """Dropout that draws in eval mode, in operations that every exporter has."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(torch.rand_like(x) >= self.p, x / (1 - self.p), torch.zeros_like(x))


class MonteCarlo(nn.Module):
    """Mean and variance of the softmax over n draws, the layers before the first dropout run once."""

    def __init__(self, model: nn.Sequential, n: int) -> None:
        super().__init__()
        first = next(i for i, layer in enumerate(model) if isinstance(layer, nn.Dropout))
        layers = [Masked(layer.p) if isinstance(layer, nn.Dropout) else layer for layer in model]
        self.early, self.late, self.n = nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:]), n

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.late(self.early(x).repeat(self.n, 1)).softmax(-1).unflatten(0, (self.n, -1))
        return p.mean(0), p.var(0)


class Favour(nn.Module):
    """What the exported graph computes."""

    def __init__(self, predict: favour.Predictor) -> None:
        super().__init__()
        self.predict = predict

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        belief = self.predict(x)
        p = self.predict.probabilities(x)
        return belief.mean, belief.variance, p, self.predict.jsd(x), belief.covariance_matrix


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options)


def onnx_of(module: nn.Module, x: Tensor, path: Path) -> onnxruntime.InferenceSession:
    batch = ({0: torch.export.Dim.DYNAMIC},)
    program = torch.onnx.export(module, (x,), dynamic_shapes=batch, dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))
    return session(path)


def measure(name: str, batches: list[int], rounds: int, folder: Path) -> dict[str, Any]:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().eval().requires_grad_(False)
    predict = favour.compile(model, torch.randn(3, *shape))
    reference = Favour(predict)
    written, seconds = {}, {}
    for form in ("onnx", "pt2"):
        start = time.perf_counter()
        written[form] = favour.export(predict, folder / f"model.{form}")
        seconds[form] = time.perf_counter() - start
    files = {form: favour.load_exported(path, threads=1) for form, path in written.items()}
    plain = onnx_of(model, torch.randn(3, *shape), folder / "plain.onnx")
    drawn = {n: onnx_of(MonteCarlo(model, n), torch.randn(3, *shape), folder / f"mc{n}.onnx") for n in SAMPLES}
    compiled = torch.compile(reference, dynamic=False)
    result: dict[str, Any] = {
        "export_seconds": {k: round(v, 1) for k, v in seconds.items()},
        "bytes": {form: Path(path).stat().st_size for form, path in written.items()},
        "batches": {},
    }
    for rows in batches:
        x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1))
        array = x.numpy()
        want = dict(zip(("mean", "variance", "probabilities", "jsd", "covariance"), reference(x), strict=True))
        error = {
            form: max(float((torch.from_numpy(file(x)[k]) - v).abs().max() / v.abs().max()) for k, v in want.items())
            for form, file in files.items()
        }
        candidates: dict[str, Callable[[], Any]] = {
            "torch, forward pass": lambda x=x: model(x),
            "onnxruntime, forward pass": lambda a=array: plain.run(None, {plain.get_inputs()[0].name: a}),
            "favour, torch eager": lambda x=x: reference(x),
            "favour, torch.compile": lambda x=x: compiled(x),
            "favour, .pt2": lambda a=array: files["pt2"](a),
            "favour, .onnx": lambda a=array: files["onnx"](a),
        }
        for n in SAMPLES:
            monte_carlo, ort = MonteCarlo(model, n), drawn[n]
            candidates[f"MC dropout, torch, n={n}"] = lambda x=x, m=monte_carlo: m(x)
            candidates[f"MC dropout, onnxruntime, n={n}"] = lambda a=array, s=ort: s.run(
                None, {s.get_inputs()[0].name: a}
            )
        times = time_all(candidates, rounds)
        one = times["torch, forward pass"]
        per_sample = (times[f"MC dropout, onnxruntime, n={SAMPLES[1]}"]) / SAMPLES[1]
        result["batches"][str(rows)] = {
            "relative_difference": error,
            "milliseconds": {k: round(1e3 * v, 4) for k, v in times.items()},
            "forwards": {k: round(v / one, 2) for k, v in times.items()},
            "onnx_costs_samples_in_onnxruntime": round(times["favour, .onnx"] / per_sample, 1),
        }
        print(f"{name}, batch {rows}")
        for candidate, value in times.items():
            print(f"  {candidate:32} {1e3 * value:9.3f} ms  {value / one:7.2f} forwards")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 512])
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(1)
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        results = {name: measure(name, options.batches, options.rounds, Path(folder)) for name in NETWORKS}
    write("export", {"threads": 1, "onnxruntime": onnxruntime.__version__, "networks": results})


if __name__ == "__main__":
    main()
