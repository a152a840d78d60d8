"""How fast Algorithm 1 converges from the random and from the warm start, on layers of a trained network.

For each hidden layer's covariance M, the error norm √ρ after K iterations over the one that alternating exact
eigendecompositions converge to, averaged over inputs; for the random start also over seeds.

    python benchmarks/algorithm1.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from common import write
from torch import nn

import favour

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from networks import digits
from test_algorithm1 import alternating


def network(depth: int) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(64, 100), nn.ReLU(), nn.Dropout(0.2)]
    for _ in range(depth - 1):
        layers += [nn.Linear(100, 100), nn.ReLU(), nn.Dropout(0.2)]
    model = nn.Sequential(*layers, nn.Linear(100, 10))
    images, labels, _, _ = digits()
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(40):
        for rows in torch.randperm(len(images)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(images[rows]), labels[rows]).backward()
            optimiser.step()
    return model.eval().double().requires_grad_(False)


def main() -> None:
    torch.set_num_threads(2)
    x = digits()[2][:12].double()
    rows = []
    for depth in (2, 4):
        model = network(depth)
        for name in ("3",):  # later layers start from compressed ones, so their M is not the exact one
            exact = favour.compile(model, x[:2], method="full", at=name)(x).covariance_matrix
            for rank in (1, 2, 4):
                best = alternating(exact, rank)
                for start in ("random", "warm"):
                    for K in (1, 2, 3, 4, 8):
                        ratios = []
                        for seed in range(5 if start == "random" else 1):
                            predict = favour.compile(
                                model,
                                x[:2],
                                method="dplr",
                                rank=rank,
                                iterations=K,
                                start=start,
                                at=name,
                                seed=seed,
                            )
                            error = (predict(x).covariance_matrix - exact).norm(dim=(1, 2)) / best
                            ratios.append(error.mean().item())
                        if ratios:
                            rows.append(
                                {
                                    "depth": depth,
                                    "layer": name,
                                    "rank": rank,
                                    "start": start,
                                    "K": K,
                                    "ratio": ratios,
                                }
                            )
                            mean = sum(ratios) / len(ratios)
                            print(f"depth {depth} layer {name} r={rank} {start:6s} K={K}: {mean:.3f}")
    write("algorithm1", {"rows": rows})


if __name__ == "__main__":
    main()
