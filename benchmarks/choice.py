"""What `method="auto"` predicts a pass to cost, beside what it takes, on networks of different shapes.

python benchmarks/choice.py
"""

from __future__ import annotations

import torch
from common import time_all, write
from networks import mlp

import favour

NETWORKS = {
    "784-400-400-10": (784, 400, 400, 10),
    "784-400-400-100": (784, 400, 400, 100),
    "784-400-400-1000": (784, 400, 400, 1000),
    "784-400-400-4000": (784, 400, 400, 4000),
    "64-1024-1024-1024-10": (64, 1024, 1024, 1024, 10),
    "13-100-100-1": (13, 100, 100, 1),
}
SETTINGS = {"auto": {}, "dplr r=2": {"method": "dplr", "rank": 2}, "adjoint, 3 directions": {"directions": 3}}


def main() -> None:
    torch.set_num_threads(2)
    torch.manual_seed(0)
    rows = []
    with torch.no_grad():
        for name, sizes in NETWORKS.items():
            model, x = mlp(*sizes).eval().requires_grad_(False), torch.rand(512, sizes[0])
            for label, settings in SETTINGS.items():
                torch.compiler.reset()  # every predictor counts against one limit on recompilations
                predict = favour.compile(model, x[:2], **settings)
                compiled = torch.compile(predict, fullgraph=True)
                times = time_all({"forward": lambda m=model, x=x: m(x), "pass": lambda c=compiled, x=x: c(x)}, 15)
                method, predicted = predict.method, predict.method.cost(predict.plain_plan)
                row = {
                    "network": name,
                    "settings": label,
                    "method": method.name,
                    "covectors": getattr(method, "directions", None),
                    "predicted forwards": predicted,
                    "measured forwards": times["pass"] / times["forward"],
                }
                rows.append(row)
                print(
                    f"{name:24s} {label:22s} {method.name:8s} predicted {predicted:6.2f} "
                    f"measured {row['measured forwards']:6.2f}"
                )
    write("choice", {"rows": rows})


if __name__ == "__main__":
    main()
