"""The closed form of the Jensen–Shannon divergence against samples (paper, figure 2).

Logits z ~ N(μ, Σ) of ten classes, with random μ and Σ = s² AAᵀ/10, A standard normal: a small s and a large one. The
lemma's ½ tr((diag p − ppᵀ)Σ), p = softmax(μ), times 1 − 1/n, is compared with the divergence of n draws; and both with
that of a great many draws. Concordance is Lin's coefficient, which is 1 only on the diagonal:

    2 Cov(x, y) / (Var x + Var y + (x̄ − ȳ)²)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import favour
from favour import scores
from favour.errors import FavourError
from favour_studies.experiments.closed_form import closed_form
from favour_studies.experiments.data import scaled
from favour_studies.experiments.methods import generator
from favour_studies.experiments.record import write_json
from favour_studies.experiments.run import Run
from favour_studies.experiments.tasks import TITLES, pictures

NUMBERS = (10, 100, 1000)
PANELS = (("small", "small covariance", 0.3), ("large", "larger covariance", 2.0))
NOTES = [
    "The lemma is the first term of an expansion in the covariance: it agrees with samples while the covariance is "
    "small, and overstates the divergence, which is bounded, where it is large. Fixed nodes do not.",
]
_HELD = 20_000_000  # numbers at once


def concordance(x: Tensor, y: Tensor) -> dict[str, float]:
    """Of two vectors; the ratio is that of their means."""
    a, b = x - x.mean(), y - y.mean()
    covariance = (a * b).mean()
    spread = a.square().mean() + b.square().mean() + (x.mean() - y.mean()).square()
    return {
        "lin": (2 * covariance / spread).item(),
        "pearson": (covariance / (a.square().mean() * b.square().mean()).sqrt()).item(),
        "ratio": (x.mean() / y.mean()).item(),
    }


def divergence(draw: Callable[[int], Tensor], n: int, batch: int, classes: int) -> Tensor:
    """The divergence of n draws (n, B, C), in pieces: H(p̄) − mean H(p), in float64."""
    total = torch.zeros(batch, classes, dtype=torch.float64)
    entropy = torch.zeros(batch, dtype=torch.float64)
    chunk = max(1, _HELD // (batch * classes))
    for first in range(0, n, chunk):
        log_p = draw(min(chunk, n - first)).double().log_softmax(-1).cpu()
        total += log_p.exp().sum(0)
        entropy -= (log_p.exp() * log_p).sum((0, 2))
    p = total / n
    return -(p * p.clamp_min(1e-300).log()).sum(-1) - entropy / n


def panel(belief: favour.Belief, draw: Callable[[int], Tensor], reference: int) -> dict[str, Any]:
    """Lemma, nodes and draws of one belief; `draw(n)` gives fresh logits (n, B, C)."""
    batch, classes = belief.mean.shape
    lemma, nodes = closed_form(belief).double().cpu(), scores.jsd(belief, estimator="nodes").double().cpu()
    sampled = {n: scores.jsd(draw(n)).double().cpu() for n in NUMBERS}
    truth = divergence(draw, reference, batch, classes)

    def error(x: Tensor) -> float:
        return ((x - truth).abs().sum() / truth.sum()).item()

    return {
        "lemma": lemma,
        "nodes": nodes,
        "sampled": {n: s for n, s in sampled.items()},
        "reference": truth,
        "concordance": {n: concordance(lemma * (1 - 1 / n), s) for n, s in sampled.items()},
        "concordance_nodes": {n: concordance(nodes * (1 - 1 / n), s) for n, s in sampled.items()},
        "reference_n": reference,
        "error": {"lemma": error(lemma), "nodes": error(nodes)} | {str(n): error(s) for n, s in sampled.items()},
    }


@torch.no_grad()
def jsd(run: Run) -> dict[str, Any]:
    """Run the experiment; writes jsd.json."""
    units, profile = run.units("jsd"), run.profile
    panels = []
    for name, title, scale in PANELS:

        def compute(scale: float = scale) -> dict[str, Any]:
            random = torch.Generator().manual_seed(run.seed)
            b, c = profile.jsd_inputs, 10
            root = scale * torch.randn(b, c, c, generator=random, dtype=torch.float64) / c**0.5
            mean = torch.randn(b, c, generator=random, dtype=torch.float64)
            belief = favour.Belief(mean, covariance=root @ root.mT)
            return panel(belief, lambda n: belief.sample((n,), random), profile.jsd_reference)

        panels.append({"id": name, "title": title, "scale": scale} | units.get((name,), {}, compute))
    networks = []
    tasks = ("digits",) if run.source == "embedded" else ("mnist", "cifar10")
    for task in tasks:
        networks.append(_network(run, task))
    used = [(task, "dropout10") for task in tasks]
    content = run.envelope("jsd", used, None, NOTES)
    content |= {"panels": panels, "networks": [n for n in networks if n is not None]}
    write_json(run.out / "jsd.json", content)
    return content


def _network(run: Run, task: str) -> dict[str, Any] | None:
    """The same for a trained network's own logits on test pictures."""
    profile = run.profile

    def compute() -> dict[str, Any]:
        subject = run.subject(task, "dropout10")
        net = subject.load(0)
        x = scaled(pictures(task, "test", run.source)[: profile.jsd_inputs].x).to(subject.device)
        belief = subject.predictor({"method": "adjoint"}, x)(x)
        random = generator(subject.device, run.seed)
        return panel(belief, lambda n: favour.sample(net, x, n, generator=random), min(20_000, profile.jsd_reference))

    try:
        found = run.units("jsd").get((task,), {"epochs": run.epochs(task, "dropout10")}, compute)
    except (FavourError, StopIteration):  # not trained in this run
        return None
    return {"task": task, "title": TITLES[task], "model": "dropout10"} | found
