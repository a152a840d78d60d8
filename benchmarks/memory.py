"""Memory of a pass over a ResNet-18 at 224 × 224, batch 8: `adjoint` with 10 directions of 1000 outputs.

The unit is the sum of the layers' outputs: what a forward pass would hold if it kept the result of every layer (leaf
module), as training does. Two measurements, each in a process of its own: the bytes of all tensors alive at the worst
moment, counted operation by operation, and the growth of the process's peak resident set over a pass, which also sees
the work space inside convolutions and what the allocator keeps. Both are above the weights, the input and what
compiling left behind.

    python benchmarks/memory.py [--size 224] [--batch 8] [--memory BYTES]
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import write
from torch import Tensor, nn

import favour
from favour.methods.memory import Peak

SETTINGS: dict[str, dict[str, Any]] = {
    "adjoint, 10 directions": {"method": "adjoint", "directions": 10},
    "dplr r=4 K=2": {"method": "dplr"},
}


def resnet18(rate: float = 0.1) -> nn.Module:
    """ResNet-18 of `transformers`, with dropout behind every activation, the stem's included."""
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "basic"}
    model = transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=1000, **sizes))
    for module in model.modules():
        activation = getattr(module, "activation", None)
        if isinstance(activation, nn.ReLU):
            module.activation = nn.Sequential(activation, nn.Dropout(rate))
    return model.eval().requires_grad_(False)


def layer_outputs(model: nn.Module, x: Tensor) -> int:
    """Bytes of the results of all leaf modules."""
    total = 0

    def add(module: nn.Module, inputs: Any, output: Tensor) -> None:
        nonlocal total
        total += output.numel() * output.element_size()

    leaves = [m for m in model.modules() if not list(m.children()) and not isinstance(m, nn.Identity)]
    hooks = [m.register_forward_hook(add) for m in leaves]
    model(x)
    for hook in hooks:
        hook.remove()
    return total


def resident() -> int:
    """Bytes of the process's peak resident set."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one(settings: dict[str, Any], size: int, batch: int, counted: bool) -> dict[str, float]:
    """A pass in this process: the peak of tensor bytes, or the growth of the resident set."""
    torch.set_num_threads(2)
    model = resnet18()
    x = torch.randn(batch, 3, size, size)
    predict = favour.compile(model, x[:2, :, :64, :64], dynamic=(2, 3), **settings)
    with torch.no_grad():
        predict(x[:1, :, :64, :64])  # caches of squared weights
        gc.collect()
        if counted:
            unit = layer_outputs(model, x)
            with Peak() as peak:
                predict(x)
            return {"layer outputs": unit, "bytes": peak.most}
        before = resident()
        predict(x)
        return {"bytes": resident() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--memory", type=int, default=2**30, help="budget of the chunked passes, bytes")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        task = json.loads(options.one)
        print(json.dumps(one(task["settings"], options.size, options.batch, task["counted"])))
        return
    rows: dict[str, dict[str, float]] = {}
    first, settings = next(iter(SETTINGS.items()))
    budgeted = {f"{first}, memory={options.memory / 2**20:.0f} MiB": {**settings, "memory": options.memory}}
    for name, settings in {**SETTINGS, **budgeted}.items():
        measured = []
        for counted in (True, False):
            task = json.dumps({"settings": settings, "counted": counted})
            command = [sys.executable, Path(__file__), "--size", str(options.size), "--batch", str(options.batch)]
            done = subprocess.run([*command, "--one", task], check=True, capture_output=True, text=True)
            measured.append(json.loads(done.stdout.splitlines()[-1]))
        unit = measured[0]["layer outputs"]
        rows[name] = {
            "layer outputs, bytes": unit,
            "tensors, bytes": measured[0]["bytes"],
            "tensors over layer outputs": measured[0]["bytes"] / unit,
            "resident, bytes": measured[1]["bytes"],
            "resident over layer outputs": measured[1]["bytes"] / unit,
        }
        row = rows[name]
        print(
            f"{name:44s} tensors {row['tensors, bytes'] / 2**20:7.0f} MiB "
            f"= {row['tensors over layer outputs']:5.2f} x layer outputs   "
            f"resident {row['resident, bytes'] / 2**20:7.0f} MiB = {row['resident over layer outputs']:5.2f} x",
            flush=True,
        )
    network = f"ResNet-18, dropout behind every activation, {options.size} x {options.size}, batch {options.batch}"
    write("memory", {"network": network, "budget": options.memory, "rows": rows})


if __name__ == "__main__":
    main()
