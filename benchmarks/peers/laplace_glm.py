"""laplace-torch's GLM predictive: the network linearised in its weights, J diag(σ²) Jᵀ with J of every input."""

from __future__ import annotations

import torch
from problem import Problem, main, time_in_turns

ROWS = 16  # inputs at a time: the Jacobians of more would not fit in memory


def solve(problem: Problem) -> list[dict]:
    from laplace.baselaplace import DiagLaplace
    from laplace.curvature import CurvlinopsGGN

    network = problem.network()
    laplace = DiagLaplace(network, "classification", prior_precision=1e-12, backend=CurvlinopsGGN)
    laplace.mean = torch.nn.utils.parameters_to_vector(network.parameters()).detach()
    laplace.n_outputs = 10
    network.output_size = 10
    laplace.H = 1 / problem.flat_variance() - 1e-12

    def predict(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [laplace._glm_predictive_distribution(piece) for piece in x.split(ROWS)]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    mean, covariance = predict(problem.judged)
    few = problem.timed[: 4 * ROWS]

    def forward() -> None:
        with torch.no_grad():
            network(problem.timed)

    seconds, forwards = time_in_turns(lambda: predict(few), forward, 10.0)
    return [
        {
            "name": "laplace-torch, GLM",
            "mean": mean.detach().numpy(),
            "covariance": covariance.detach().numpy(),
            "seconds": seconds * len(problem.timed) / len(few),
            "forward seconds": forwards,
            "note": f"timed on {len(few)} inputs, {ROWS} at a time, and scaled to {len(problem.timed)}",
        }
    ]


main(solve)
