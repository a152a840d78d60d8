"""SUQ's diagonal MLP: mean and variance layer by layer, without correlations, activations linearised."""

from __future__ import annotations

import sys
import types

import torch
from problem import Problem, main, time_in_turns


def solve(problem: Problem) -> list[dict]:
    note = ""
    try:
        from suq.diag_suq_mlp import SUQ_MLP_Diag
    except ModuleNotFoundError as error:
        if error.name not in ("suq.utils", "suq.utils.utils"):
            raise
        # The published wheel leaves its sub-package `utils` out, of which only a data set class is imported.
        stub = types.ModuleType("suq.utils.utils")
        stub.torch_dataset = object
        sys.modules["suq.utils"], sys.modules["suq.utils.utils"] = types.ModuleType("suq.utils"), stub
        from suq.diag_suq_mlp import SUQ_MLP_Diag

        note = "the wheel lacks suq.utils; a stand-in was given for its one import, which prediction does not use"
    network = problem.network()
    suq = SUQ_MLP_Diag(network, problem.flat_variance(), "classification")
    mean, variance = suq.forward_latent(problem.judged)
    with torch.no_grad():  # it needs autograd inside and switches it on itself where it can
        plain = problem.network()

    def forward() -> None:
        with torch.no_grad():
            plain(problem.timed)

    seconds, forwards = time_in_turns(lambda: suq.forward_latent(problem.timed), forward)
    return [
        {
            "name": "SUQ, diagonal",
            "mean": mean.detach().numpy(),
            "covariance": torch.diag_embed(variance.detach()).numpy(),
            "seconds": seconds,
            "forward seconds": forwards,
            "note": note,
        }
    ]


main(solve)
