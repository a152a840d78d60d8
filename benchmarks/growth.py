"""How cost grows: exponents in width, depth, batch and pixels of a prediction beside those of inference.

A network is scaled along one axis at a time. At every size the forward pass and a prediction (`auto`, ten outputs) are
timed in turns, both eager and compiled; the exponent is the least-squares slope of log time against log size. A
prediction that grows as inference does has the same exponent; where its exponent is off inference's by more than
0.15, the line says so. Everything is compiled first and timed then. Sizes begin where
inference itself is bound by its products: below, its fixed costs flatten its own exponent.

    width     n-n-n-n-10, ReLU, dropout 0.2 behind every hidden layer, batch 64
    depth     400-wide layers of the same kind, batch 64, with dropout on the inputs too: every layer lies behind noise,
              so that the uncertain share of the network is the same at every depth
    batch     784-400-400-10
    pixels    three 3 × 3 convolutions of 16 channels with dropout 0.1, averaged at the end, batch 32

    python benchmarks/growth.py [--quick] [--eager] [--device cpu|cuda] [--axes width,depth]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from common import write
from torch import Tensor, nn

import favour
from favour_studies.bench.measure import keep_freed_memory, time_all
from favour_studies.bench.networks import mlp
from favour_studies.bench.samplers import compiled as compiled_alone

CLOSE = 0.15


def convolutions(channels: int = 16, layers: int = 3) -> nn.Module:
    """Convolutions of one width at full resolution."""
    stack: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU(), nn.Dropout(0.1)]
    for _ in range(layers - 1):
        stack += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*stack, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def width(n: int) -> tuple[nn.Module, Tensor]:
    return mlp(n, n, n, n, 10), torch.rand(64, n)


def depth(n: int) -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Dropout(0.2), mlp(400, *[400] * n, 10)), torch.rand(64, 400)


def batch(n: int) -> tuple[nn.Module, Tensor]:
    return mlp(784, 400, 400, 10), torch.rand(n, 784)


def pixels(n: int) -> tuple[nn.Module, Tensor]:
    side = math.isqrt(n)
    return convolutions(), torch.rand(32, 3, side, side)


AXES: dict[str, tuple[Callable[[int], tuple[nn.Module, Tensor]], list[int]]] = {
    "width": (width, [512, 1024, 2048, 4096]),
    "depth": (depth, [4, 8, 16, 32]),
    "batch": (batch, [512, 1024, 2048, 4096]),
    "pixels": (pixels, [32**2, 64**2, 128**2]),
}


def slope(sizes: Sequence[float], seconds: Sequence[float]) -> float:
    """Least squares in logarithms."""
    a, b = [math.log(s) for s in sizes], [math.log(s) for s in seconds]
    ma, mb = sum(a) / len(a), sum(b) / len(b)
    return sum((p - ma) * (q - mb) for p, q in zip(a, b, strict=True)) / sum((p - ma) ** 2 for p in a)


Calls = dict[str, Callable[[], object]]


def prepared(axis: str, sizes: Sequence[int], device: str, compiled: bool) -> dict[int, Calls]:
    """What is to be timed at every size, compiled where it is."""
    made: dict[int, Calls] = {}
    for n in sizes:
        torch.manual_seed(0)
        model, x = AXES[axis][0](n)
        model, x = model.eval().requires_grad_(False).to(device), x.to(device)
        predict = favour.compile(model, x[:2])
        calls: Calls = {"inference": lambda m=model, x=x: m(x), "prediction": lambda p=predict, x=x: p(x)}
        if compiled:
            fast, plain = compiled_alone(predict, fullgraph=True, dynamic=False), compiled_alone(model, dynamic=False)
            calls["inference, compiled"] = lambda m=plain, x=x: m(x)
            calls["prediction, compiled"] = lambda p=fast, x=x: p(x)
        for call in calls.values():
            call()
        made[n] = calls
        print(f"{axis} {n}: prepared", flush=True)
    return made


def measure(axis: str, made: Mapping[int, Calls], device: str, budget: float) -> dict[str, object]:
    """Times along one axis, and the exponents."""
    seconds: dict[str, list[float]] = {}
    spreads: dict[str, list[float]] = {}
    sizes = list(made)
    for n, calls in made.items():
        for name, time in time_all(calls, device, budget, (5, 60)).items():
            seconds.setdefault(name, []).append(time.median)
            spreads.setdefault(name, []).append(time.spread)
        print(f"  timing {axis} {n}: " + ", ".join(f"{k} {v[-1] * 1e3:.2f} ms" for k, v in seconds.items()), flush=True)
    exponents = {name: slope(sizes, values) for name, values in seconds.items()}
    differences = {
        name: exponents[name] - exponents[name.replace("prediction", "inference")]
        for name in exponents
        if name.startswith("prediction")
    }
    return {
        "sizes": sizes,
        "seconds": seconds,
        "spread": spreads,
        "exponent": exponents,
        "prediction's less inference's": differences,
        "within": {name: abs(difference) <= CLOSE for name, difference in differences.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest size")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--axes", default=",".join(AXES), help="some of width, depth, batch, pixels")
    parser.add_argument("--budget", type=float, default=5.0, help="seconds of timing per size")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default="growth", help="name of the file under results/")
    options = parser.parse_args()
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    results = {}
    with torch.no_grad():
        axes = options.axes.split(",")
        cut = -1 if options.quick else None
        made = {a: prepared(a, AXES[a][1][:cut], options.device, not options.eager) for a in axes}
        print("timing", flush=True)
        for axis in axes:
            found = results[axis] = measure(axis, made[axis], options.device, options.budget)
            for name, difference in found["prediction's less inference's"].items():
                own = found["exponent"][name]
                verdict = "" if difference <= CLOSE else f"   MORE THAN {CLOSE} OVER"
                if difference < -CLOSE:
                    verdict = f"   more than {CLOSE} under: it grows slower than inference"
                text = f"timing {axis}, {name}: exponent {own:.2f}, inference {own - difference:.2f}{verdict}"
                print(text, flush=True)
    write(options.out, {"device": options.device, "axes": results})


if __name__ == "__main__":
    main()
