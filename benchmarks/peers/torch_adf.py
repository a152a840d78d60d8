"""torch-adf: assumed density filtering. Its layers have no uncertain weights, so it is given uncertain inputs."""

from __future__ import annotations

import torch
from problem import Problem, main, time_in_turns


def network(problem: Problem, mode: str) -> torch.nn.Module:
    from torchadf.nn import Linear, ReLU, Sequential

    layers: list[torch.nn.Module] = []
    for weight, bias in zip(problem.weights, problem.biases, strict=True):
        linear = Linear(weight.shape[1], weight.shape[0], mode=mode)
        linear.weight.data, linear.bias.data = weight.clone(), bias.clone()
        layers += [linear, ReLU(mode=mode)]
    return Sequential(*layers[:-1])


def solve(problem: Problem) -> list[dict]:
    plain = problem.network()
    rows = []
    with torch.no_grad():
        for mode in ("diag", "full"):
            adf = network(problem, mode)

            def predict(x: torch.Tensor, v: torch.Tensor, adf=adf, mode=mode) -> tuple[torch.Tensor, torch.Tensor]:
                return adf(x, v if mode == "diag" else torch.diag_embed(v))

            mean, spread = predict(problem.judged, problem.tensors["judged_variance"])
            count = len(problem.timed) if mode == "diag" else 64  # 784 × 784 covariances of more take too much memory
            x, v = problem.timed[:count], problem.tensors["timed_variance"][:count]
            seconds, forwards = time_in_turns(
                lambda predict=predict, x=x, v=v: predict(x, v), lambda: plain(problem.timed)
            )
            rows.append(
                {
                    "name": f"torch-adf, {mode}",
                    "mean": mean.numpy(),
                    "covariance": (torch.diag_embed(spread) if mode == "diag" else spread).numpy(),
                    "seconds": seconds * len(problem.timed) / count,
                    "forward seconds": forwards,
                    "note": "" if mode == "diag" else f"timed on {count} inputs and scaled to {len(problem.timed)}",
                }
            )
    return rows


main(solve)
