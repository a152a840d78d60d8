"""Two pictures of what a belief is: a noisy sine, and three predictions in the simplex (paper, figures 1 and "sine").

Sine: a perceptron with 50% dropout on y = sin(x) + noise, x in −3 … 3, looked at beyond the data.
Simplex: a perceptron with three classes of points in the plane. An input amid one class, one where two classes overlap,
and one far from all of them: a confident prediction, ambiguous data, an unfamiliar input. Far away a network with
dropout is sure of itself in most directions; the input shown is the one on a wide circle where its draws disagree most.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import favour
from favour import scores
from favour_studies.experiments.closed_form import closed_form
from favour_studies.experiments.models import Perceptron
from favour_studies.experiments.record import write_json
from favour_studies.experiments.run import Run

STEPS = 3000
DRAWS = 1000
FAR = 8.0


def fit(net: nn.Module, x: Tensor, y: Tensor, loss: nn.Module, steps: int, rate: float = 1e-3) -> nn.Module:
    """Adam on all the data at each step."""
    adam = torch.optim.Adam(net.parameters(), rate)
    net.train()
    for _ in range(steps):
        adam.zero_grad()
        loss(net(x), y).backward()
        adam.step()
    return net.eval().requires_grad_(False)


def sine(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """The arrays of the sine figure."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        x = torch.rand(120, 1) * 6 - 3
        y = x.sin() + 0.2 * torch.randn_like(x)
        net = fit(Perceptron("dropout50", 1), x, y, nn.MSELoss(), steps)
        grid = torch.linspace(-5, 5, 201).unsqueeze(1)
        predict = favour.compile(net, grid[:2], check=False)
        belief = predict(grid)
        draws = favour.sample(net, grid, DRAWS, generator=torch.Generator().manual_seed(seed)).squeeze(-1)
        noise = favour.fit_noise(predict(x), y).item()
    error = ((belief.variance.squeeze(-1) - draws.var(0)).abs().sum() / draws.var(0).sum()).item()
    return {
        "train_x": x.squeeze(1),
        "train_y": y.squeeze(1),
        "x": grid.squeeze(1),
        "truth": grid.sin().squeeze(1),
        "favour": {"mean": belief.mean.squeeze(-1), "stddev": belief.stddev.squeeze(-1)},
        "samples": {"n": DRAWS, "mean": draws.mean(0), "stddev": draws.std(0)},
        "curves": draws[:10],
        "noise": noise,
        "model": "1-100-100-1, dropout 50%",
        "covariance_error": error,
    }


def simplex(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """The arrays of the simplex figure."""
    centres = torch.tensor([[0.0, 1.6], [-1.1, -0.6], [0.6, -0.6]])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        y = torch.arange(3).repeat(60)
        x = centres[y] + 0.45 * torch.randn(len(y), 2)
        net = fit(Perceptron("dropout25", 2, outputs=3), x, y, nn.CrossEntropyLoss(), min(steps, 600))
        predict = favour.compile(net, x[:2], check=False)
        angle = torch.linspace(0, 2 * torch.pi, 361)
        circle = FAR * torch.stack([angle.cos(), angle.sin()], 1)
        points = {
            "a": ("A confident prediction", centres[0]),
            "b": ("Ambiguous data", centres[1:].mean(0)),
            "c": ("An unfamiliar input", circle[scores.jsd(predict(circle), estimator="nodes").argmax()]),
        }
        panels = []
        for name, (title, point) in points.items():
            at = point.unsqueeze(0)
            belief = predict(at)
            draws = favour.sample(net, at, DRAWS, generator=torch.Generator().manual_seed(seed))
            panels.append(
                {
                    "id": name,
                    "title": title,
                    "favour_mean": predict.probabilities(at)[0],
                    "favour_points": belief.sample((200,), torch.Generator().manual_seed(seed)).softmax(-1)[:, 0],
                    "sample_points": draws[:200, 0].softmax(-1),
                    "jsd": closed_form(belief).item(),
                    "jsd_nodes": scores.jsd(belief, estimator="nodes").item(),
                    "jsd_samples": scores.jsd(draws).item(),
                    "entropy": scores.entropy(belief).item(),
                    "point": point,
                }
            )
    return {"classes": ["A", "B", "C"], "panels": panels, "train_x": x, "train_y": y}


def figures(run: Run) -> dict[str, Any]:
    """Train both small networks; writes figures.json."""
    units, steps = run.units("figures"), run.profile.figure_steps
    content = run.envelope("figures", [], None, [])
    content["sine"] = units.get(("sine",), {}, lambda: sine(run.seed, steps))
    content["simplex"] = units.get(("simplex",), {}, lambda: simplex(run.seed, steps))
    write_json(run.out / "figures.json", content)
    return content
