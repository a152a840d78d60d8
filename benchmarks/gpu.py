"""The reverse sweep on a GPU at width 4096, batch 4096, 4 hidden layers, against the float32 forward pass.

python benchmarks/gpu.py
"""

from __future__ import annotations

import torch
from common import time_all, write
from networks import mlp

import favour

SETTINGS = {
    "adjoint, 10 outputs": {"method": "adjoint"},
    "adjoint, 10 outputs, bf16 sweeps": {"method": "adjoint", "precision": "bf16"},
    "adjoint, 3 directions, bf16 sweeps": {"method": "adjoint", "directions": 3, "precision": "bf16"},
    "dplr r=2 K=2, bf16 sweeps": {"method": "dplr", "rank": 2, "precision": "bf16"},
    "diag": {"method": "diag"},
}


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(0)
    model = mlp(4096, 4096, 4096, 4096, 4096, 10).eval().requires_grad_(False).cuda()
    x = torch.rand(4096, 4096, device="cuda")
    rows = {}
    with torch.no_grad():
        exact = favour.compile(model, x[:2], method="adjoint")(x).covariance_matrix
        for name, settings in SETTINGS.items():
            torch.compiler.reset()
            predict = favour.compile(model, x[:2], **settings)
            compiled = torch.compile(predict, fullgraph=True)
            times = time_all({"forward": lambda: model(x), "pass": lambda c=compiled: c(x)}, 15)
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
            print(name, {k: round(v, 4) for k, v in rows[name].items()}, flush=True)
    write("gpu_cost", {"network": "4096 wide, 4 hidden layers, 10 outputs, batch 4096", "rows": rows})


if __name__ == "__main__":
    main()
