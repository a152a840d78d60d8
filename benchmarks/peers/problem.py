"""What a peer is given and what it gives back; runs in the peer's own environment, so it needs torch and numpy only.

A problem is an .npz file: weights and variances of 784-400-400-10 (`weight_i`, `bias_i`, `weight_variance_i`,
`bias_variance_i`; variances are zero where the noise is elsewhere), inputs to be judged on (`judged`) and to be timed
on (`timed`), and variances of the inputs (`judged_variance`, `timed_variance`).
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

LAYERS = 3


class Problem:
    """The file as tensors, and a plain network with the mean weights."""

    def __init__(self, path: str | Path) -> None:
        with np.load(path) as content:
            self.tensors = {k: torch.from_numpy(content[k]) for k in content.files}
        self.judged, self.timed = self.tensors["judged"], self.tensors["timed"]
        self.weights = [self.tensors[f"weight_{i}"] for i in range(LAYERS)]
        self.biases = [self.tensors[f"bias_{i}"] for i in range(LAYERS)]
        self.weight_variances = [self.tensors[f"weight_variance_{i}"] for i in range(LAYERS)]
        self.bias_variances = [self.tensors[f"bias_variance_{i}"] for i in range(LAYERS)]

    def network(self) -> nn.Sequential:
        layers: list[nn.Module] = []
        for weight, bias in zip(self.weights, self.biases, strict=True):
            linear = nn.Linear(weight.shape[1], weight.shape[0])
            linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
            layers += [linear, nn.ReLU()]
        return nn.Sequential(*layers[:-1]).eval()

    def flat_variance(self) -> Tensor:
        """All variances in the order of the network's parameters."""
        pairs = zip(self.weight_variances, self.bias_variances, strict=True)
        return torch.cat([t.flatten() for pair in pairs for t in pair])


def time_in_turns(first: Callable[[], Any], second: Callable[[], Any], budget: float = 5.0) -> tuple[float, float]:
    """Median seconds of two calls that take turns."""
    seen: tuple[list[float], list[float]] = ([], [])
    begin = time.perf_counter()
    while len(seen[0]) < 5 or (time.perf_counter() - begin < budget and len(seen[0]) < 60):
        for kept, call in zip(seen, (first, second), strict=True):
            start = time.perf_counter()
            call()
            kept.append(time.perf_counter() - start)
    return statistics.median(seen[0][2:]), statistics.median(seen[1][2:])


def answer(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Write rows with keys name, mean (B, C), covariance (B, C, C), seconds, forward seconds, draws, note."""
    arrays = {f"{k}_{i}": np.asarray(r[k]) for i, r in enumerate(rows) for k in ("mean", "covariance")}
    kept = [{k: v for k, v in r.items() if k not in ("mean", "covariance")} for r in rows]
    np.savez(path, about=json.dumps(kept), **arrays)


def main(solve: Callable[[Problem], list[dict[str, Any]]]) -> None:
    """`python PEER.py PROBLEM ANSWER THREADS`."""
    torch.set_num_threads(int(sys.argv[3]))
    torch.manual_seed(0)
    answer(sys.argv[2], solve(Problem(sys.argv[1])))
