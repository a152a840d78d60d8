"""The closed form of the Jensen–Shannon divergence against sampled ones (the paper's figure 2).

Beliefs over ten logits: means N(0, 1), covariances ε² AAᵀ/10 with A a 10 × 10 matrix of standard normals and ε spread
evenly over (0, ε_max), ε_max = .3 for small covariances and 1 for larger ones. Each is sampled n = 10, 100, 1000 and
10,000 times; the lemma is taken with its factor 1 − 1/n. A further 200,000 draws say what the divergence really is.

    python benchmarks/concordance.py
"""

from __future__ import annotations

import matplotlib
import torch
from common import RESULTS, write
from torch import Tensor

from favour import Belief
from favour_studies.experiments.closed_form import closed_form

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COUNTS = (10, 100, 1000, 10_000)
LARGEST = {"small": 0.3, "larger": 1.0}
BELIEFS, CLASSES, TRUTH, CHUNK = 200, 10, 200_000, 500


def beliefs(largest: float, generator: torch.Generator) -> Belief:
    mean = torch.randn(BELIEFS, CLASSES, generator=generator, dtype=torch.float64)
    root = torch.randn(BELIEFS, CLASSES, CLASSES, generator=generator, dtype=torch.float64) / CLASSES**0.5
    scale = largest * (torch.arange(BELIEFS, dtype=torch.float64) + 1) / BELIEFS
    return Belief(mean, covariance=(root @ root.mT) * scale.square().reshape(-1, 1, 1))


def divergence(belief: Belief, n: int, generator: torch.Generator) -> Tensor:
    """H(p̄) − mean H(p) over n draws, in chunks."""
    total: Tensor | float = 0.0
    own: Tensor | float = 0.0
    for first in range(0, n, CHUNK):
        log_p = belief.sample((min(CHUNK, n - first),), generator).log_softmax(-1)
        p = log_p.exp()
        total, own = total + p.sum(0), own - (p * log_p).sum((0, 2))
    mean = torch.as_tensor(total) / n
    return -(mean * mean.log()).sum(-1) - own / n


def agreement(sampled: Tensor, lemma: Tensor) -> dict[str, float]:
    """Lin's concordance coefficient, the correlation, and the root mean square difference over the mean."""
    pair = torch.stack([sampled, lemma])
    covariance = torch.cov(pair)
    gap = (sampled.mean() - lemma.mean()).square()
    return {
        "concordance": (2 * covariance[0, 1] / (covariance[0, 0] + covariance[1, 1] + gap)).item(),
        "correlation": torch.corrcoef(pair)[0, 1].item(),
        "relative difference": ((sampled - lemma).square().mean().sqrt() / sampled.mean()).item(),
    }


def main() -> None:
    torch.set_num_threads(1)
    result: dict[str, object] = {}
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.8), layout="constrained")
    for panel, (name, largest) in zip(panels, LARGEST.items(), strict=True):
        generator = torch.Generator().manual_seed(0)
        belief = beliefs(largest, generator)
        truth = divergence(belief, TRUTH, generator)
        rows: dict[str, object] = {}
        for n, colour in zip(COUNTS, ("#c6cbd3", "#8fb3d9", "#3b6ea5", "#b5462f"), strict=True):
            sampled, lemma = divergence(belief, n, generator), closed_form(belief) * (1 - 1 / n)
            rows[str(n)] = {
                **agreement(sampled, lemma),
                "sampled against the truth": agreement(sampled, truth),
            }
            panel.scatter(lemma, sampled, s=9, color=colour, label=f"n = {n:,}", linewidths=0)
        rows["lemma against the truth"] = agreement(closed_form(belief), truth)
        top = 1.05 * max(truth.max().item(), closed_form(belief).max().item())
        panel.plot([0, top], [0, top], color="black", linewidth=0.8)
        panel.set(
            title=f"{name} covariance, ε ≤ {largest:g}",
            xlabel="lemma, with 1 − 1/n (nats)",
            ylabel="sampled Jensen–Shannon divergence (nats)",
            xlim=(0, top),
            ylim=(0, top),
        )
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False, loc="upper left")
        result[name] = {"largest scale": largest, "rows": rows}
        print(f"{name} covariance")
        for key, row in rows.items():
            print(f"  {key:24s}", {k: round(v, 4) for k, v in row.items() if isinstance(v, float)})
    path = RESULTS / "concordance.png"
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
    write("concordance", {"beliefs": BELIEFS, "classes": CLASSES, "draws of the truth": TRUTH, "covariances": result})


if __name__ == "__main__":
    main()
