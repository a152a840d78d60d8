"""On a GPU: the reverse sweep of a wide perceptron beside its roofline, and LeNet with noise in its two top layers.

Perceptron: 4096 wide, 4 hidden layers, 10 outputs, batch 4096, dropout behind every hidden layer; against the float32
forward pass (no TF32). Operations are counted, 2 for each multiplication of a matrix product:

    mean        2B(4n² + nC)                in float32
    variance    2B(3n² + nC)                in the sweeps' precision; the first layer reads no noise
    reverse     2BC·3n²                     likewise, C covectors through three layers

and divided by the rates that one large product reaches on the same card in the same run: that is the time the products
would take at the peak. The products' own time is what the profiler finds in matrix kernels. Bytes: every product reads
its operands and writes its result once, against the measured rate of a copy.

LeNet: batch 4096, compiled with CUDA graphs (mode="reduce-overhead"), against the eager and the compiled plain forward.

    python benchmarks/gpu.py
"""

from __future__ import annotations

from typing import Any

import torch
from common import time_all, write
from networks import mlp
from torch import Tensor

import favour
from favour_studies.bench.networks import lenet

WIDTH, BATCH, HIDDEN, OUTPUTS = 4096, 4096, 4, 10
SETTINGS: dict[str, dict[str, Any]] = {
    "adjoint, 10 outputs": {"method": "adjoint"},
    "adjoint, 10 outputs, tf32 sweeps": {"method": "adjoint", "precision": "tf32"},
    "adjoint, 10 outputs, bf16 sweeps": {"method": "adjoint", "precision": "bf16"},
    "adjoint, 3 directions, bf16 sweeps": {"method": "adjoint", "directions": 3, "precision": "bf16"},
    "dplr r=2 K=2, bf16 sweeps": {"method": "dplr", "rank": 2, "precision": "bf16"},
    "diag": {"method": "diag"},
}
MATRIX_KERNELS = ("gemm", "cutlass", "nvjet", "cublas", "sm90_xmma", "matmul", "triton_mm", "bmm")


def rates() -> dict[str, float]:
    """Operations per second of one large product, in float32 and in bf16, and bytes per second of a copy."""
    found = {}
    for name, dtype in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=dtype) for _ in range(2))
        found[name] = 2 * 8192**3 / time_all({"product": lambda a=a, b=b: a @ b}, 10)["product"]
    source = torch.empty(2**30, device="cuda")
    target = torch.empty_like(source)
    found["bytes"] = 2 * 4 * 2**30 / time_all({"copy": lambda: target.copy_(source)}, 10)["copy"]
    return found


def roofline(peaks: dict[str, float], sweeps: str) -> dict[str, float]:
    """Seconds that the products of a pass over all outputs take at the peak rates, and their bytes at the copy's."""
    B, n, C = BATCH, WIDTH, OUTPUTS
    mean = 2 * B * (HIDDEN * n**2 + n * C) / peaks["float32"]
    inner = HIDDEN - 1
    variance = 2 * B * (inner * n**2 + n * C) / peaks[sweeps]
    reverse = 2 * B * C * inner * n**2 / peaks[sweeps]
    size = 4 if sweeps == "float32" else 2
    moved = HIDDEN * (2 * B * n + n**2) * 4 + inner * (2 * B * n + n**2) * size + inner * (2 * B * C * n + n**2) * size
    return {"operations": mean + variance + reverse, "bytes": moved / peaks["bytes"], "mean": mean}


def products(call: Any) -> float:
    """Seconds that matrix kernels take in one call, by the profiler."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    events = profile.key_averages()
    return sum(e.self_device_time_total for e in events if any(k in e.key.lower() for k in MATRIX_KERNELS)) * 1e-6


def perceptron() -> dict[str, Any]:
    torch.manual_seed(0)
    model = mlp(*[WIDTH] * (HIDDEN + 1), OUTPUTS).eval().requires_grad_(False).cuda()
    x = torch.rand(BATCH, WIDTH, device="cuda")
    peaks = rates()
    print({k: f"{v:.3g}" for k, v in peaks.items()}, flush=True)
    exact = favour.compile(model, x[:2], method="adjoint")(x).covariance_matrix
    rows: dict[str, Any] = {}
    for name, settings in SETTINGS.items():
        torch.compiler.reset()
        predict = favour.compile(model, x[:2], **settings)
        compiled = torch.compile(predict, fullgraph=True)
        times = time_all({"forward": lambda: model(x), "pass": lambda c=compiled: c(x)}, 10)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        belief = compiled(x)
        peak = (torch.cuda.max_memory_allocated() - before) / 2**30
        error = ((belief.covariance_matrix - exact).norm(dim=(1, 2)) / exact.norm(dim=(1, 2))).mean().item()
        rows[name] = {
            "milliseconds": times["pass"] * 1e3,
            "forward milliseconds": times["forward"] * 1e3,
            "forwards": times["pass"] / times["forward"],
            "peak GiB over weights and input": peak,
            "covariance distance from float32 adjoint": error,
        }
        if name.startswith("adjoint, 10 outputs") and settings.get("precision") != "tf32":
            limit = roofline(peaks, settings.get("precision", "float32"))
            spent = products(lambda c=compiled: c(x))
            rows[name] |= {
                "roofline milliseconds": max(limit["operations"], limit["bytes"]) * 1e3,
                "bytes at the copy's rate, milliseconds": limit["bytes"] * 1e3,
                "products, milliseconds": spent * 1e3,
                "products, share of the peak": limit["operations"] / spent if spent else None,
                "pass, share of the peak": limit["operations"] / times["pass"],
            }
        print(name, {k: round(v, 4) if v is not None else v for k, v in rows[name].items()}, flush=True)
    return {"network": f"{WIDTH} wide, {HIDDEN} hidden layers, {OUTPUTS} outputs, batch {BATCH}", "rows": rows} | {
        "measured peaks": peaks
    }


def small() -> dict[str, Any]:
    torch.manual_seed(0)
    model = lenet(0.2).eval().requires_grad_(False).cuda()
    rows = {}
    for batch in (1, 512, 4096):
        x = torch.rand(batch, 1, 28, 28, device="cuda")
        torch.compiler.reset()
        predict = favour.compile(model, x[:1].expand(2, -1, -1, -1), method="adjoint")
        fast = torch.compile(predict, fullgraph=True, mode="reduce-overhead")
        plain = torch.compile(model, fullgraph=True, mode="reduce-overhead")

        def whole(f: Any = fast, x: Tensor = x) -> Any:
            torch.compiler.cudagraph_mark_step_begin()
            return f(x)

        calls = {
            "eager forward": lambda x=x: model(x),
            "compiled forward": lambda x=x, f=plain: whole(f, x),
            "eager pass": lambda x=x, p=predict: p(x),
            "compiled pass": whole,
        }
        times = time_all(calls, 50, 5)
        rows[str(batch)] = {f"{k}, microseconds": v * 1e6 for k, v in times.items()} | {
            "in eager forwards": times["compiled pass"] / times["eager forward"],
            "in compiled forwards": times["compiled pass"] / times["compiled forward"],
        }
        print("LeNet", batch, {k: round(v, 3) for k, v in rows[str(batch)].items()}, flush=True)
    return rows


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.no_grad():
        write("gpu_cost", {"LeNet, noise in the two top layers, by batch": small(), **perceptron()})


if __name__ == "__main__":
    main()
