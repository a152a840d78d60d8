"""bayesian-torch: n forward passes, each with all weights drawn anew."""

from __future__ import annotations

import torch
from problem import Problem, main, time_in_turns

NUMBERS = (10, 100, 1000)


def solve(problem: Problem) -> list[dict]:
    from bayesian_torch.layers import LinearReparameterization

    layers = []
    for weight, bias, wv, bv in zip(
        problem.weights, problem.biases, problem.weight_variances, problem.bias_variances, strict=True
    ):
        layer = LinearReparameterization(weight.shape[1], weight.shape[0])
        layer.mu_weight.data, layer.mu_bias.data = weight.clone(), bias.clone()
        layer.rho_weight.data, layer.rho_bias.data = (v.double().sqrt().expm1().log().float() for v in (wv, bv))
        layers.append(layer)
    plain = problem.network()

    def once(x: torch.Tensor) -> torch.Tensor:
        for layer in layers[:-1]:
            x = layer(x, return_kl=False).relu()
        return layers[-1](x, return_kl=False)

    with torch.no_grad():
        draws = torch.stack([once(problem.judged) for _ in range(max(NUMBERS))]).double()
        seconds, forwards = time_in_turns(lambda: once(problem.timed), lambda: plain(problem.timed))
    rows = []
    for n in NUMBERS:
        d = draws[:n] - draws[:n].mean(0)
        rows.append(
            {
                "name": f"bayesian-torch, {n} samples",
                "mean": draws[:n].mean(0).numpy(),
                "covariance": (torch.einsum("nbi,nbj->bij", d, d) / (n - 1)).numpy(),
                "seconds": n * seconds,
                "forward seconds": forwards,
                "draws": n,
                "note": "",
            }
        )
    return rows


main(solve)
