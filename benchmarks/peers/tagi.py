"""pytagi: Gaussian means and variances layer by layer in C++, with ReLU linearised or as a truncated Gaussian."""

from __future__ import annotations

import sys

import numpy as np
import torch
from problem import Problem, main, time_in_turns


def solve(problem: Problem) -> list[dict]:
    from pytagi.nn import Linear, MixtureReLU, ReLU, Sequential

    plain = problem.network()
    rows = []
    for name, activation in (("ReLU", ReLU), ("MixtureReLU", MixtureReLU)):
        layers = []
        for weight in problem.weights:
            layers += [Linear(weight.shape[1], weight.shape[0]), activation()]
        network = Sequential(*layers[:-1])
        network.set_threads(int(sys.argv[3]))
        network.eval()
        judged, timed = (t.numpy().astype(np.float32) for t in (problem.judged, problem.timed))
        network(timed.flatten())  # makes its buffers, which a larger batch would overrun later, and its parameters
        groups = zip(problem.weights, problem.weight_variances, problem.biases, problem.bias_variances, strict=True)
        own = [tuple(t.flatten().tolist() for t in group) for group in groups]
        keys = [k for k in sorted(network.state_dict(), key=_place) if len(network.state_dict()[k][0])]
        network.load_state_dict(dict(zip(keys, own, strict=True)))
        mean, variance = network(judged.flatten())
        outputs = len(mean) // len(judged)
        flat = timed.flatten()

        def forward() -> None:
            with torch.no_grad():
                plain(problem.timed)

        seconds, forwards = time_in_turns(lambda network=network, flat=flat: network(flat), forward)
        rows.append(
            {
                "name": f"pytagi, {name}",
                "mean": np.array(mean).reshape(len(judged), outputs),
                "covariance": np.stack([np.diag(v) for v in np.array(variance).reshape(len(judged), outputs)]),
                "seconds": seconds,
                "forward seconds": forwards,
                "note": "its own C++ code; the forward pass it is compared with is torch's",
            }
        )
    return rows


def _place(key: str) -> int:
    """The number of a layer in its name."""
    return int("".join(c for c in key if c.isdigit()) or 0)


main(solve)
