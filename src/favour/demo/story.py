"""What the demo shows, computed.

    trial           the belief about test images beside samples of the network, and what both cost (`favour.trial`)
    cases           three digits the network is sure of, three it is torn about, three pictures that are no digits
    reliability     how often it is right, by how sure it says it is: plain inference and Favour

The digits are chosen by Favour's class probabilities p alone: of different classes with the largest p; with the least
difference between the two largest. How unfamiliar a picture is says the divergence between draws of the network
(`Predictor.jsd`), as the share of test images that have less.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

import favour
from favour import metrics
from favour.demo.digits import Data, unfamiliar
from favour.predictor.predictor import Predictor
from favour.trial.measure import Trial, trial

SAMPLES = (10, 100, 1000)
INPUTS = 128  # test images of the comparison with samples
EDGES = (0.0, 0.5, 0.7, 0.9, 0.99)  # of confidence, from where its bins begin
DRAWS = 1000  # of a belief, for the spread of a probability
GROUPS = ("sure", "torn", "not a digit")


@dataclass(frozen=True)
class Case:
    """A picture and what the network makes of it.

    Attributes:
        group: One of `GROUPS`.
        name: What it is.
        picture: (8, 8), 0 to 1.
        probabilities: Of the ten classes.
        spread: Standard deviation of each over draws of the network.
        unfamiliar: Share of test images about which draws disagree less.
    """

    group: str
    name: str
    picture: Tensor
    probabilities: Tensor
    spread: Tensor
    unfamiliar: float

    def said(self) -> str:
        """In words."""
        (p, q), (a, b) = self.probabilities.topk(2)
        first = f"{a} ({p:.0%} ± {self.spread[a]:.0%})"
        guess = first if self.group == "sure" else f"{first} or {b} ({q:.0%} ± {self.spread[b]:.0%})"
        if self.unfamiliar < 0.005:
            return f"{guess}; draws agree"
        share = "any test image" if self.unfamiliar > 0.995 else f"{self.unfamiliar:.0%} of the test images"
        return f"{guess}; draws disagree more than for {share}"


@dataclass(frozen=True)
class Bin:
    """Test images of like confidence: how many, the mean confidence, and the share that was right."""

    count: int
    confidence: float
    right: float


@dataclass(frozen=True)
class Story:
    """Everything that is shown; `scores` has (accuracy, negative log-likelihood, ECE) by method."""

    trial: Trial
    cases: tuple[Case, ...]
    reliability: dict[str, tuple[Bin, ...]]
    scores: dict[str, tuple[float, float, float]]
    tested: int
    threads: int


@torch.no_grad()
def tell(model: nn.Module, data: Data, samples: int = 4000, compiled: bool = True, seed: int = 0) -> Story:
    """Predict the test images, choose the cases, compare with samples, take times."""
    x, y = data.test_x, data.test_y
    predict = favour.compile(model, x[:8])
    result = trial(predict, x[:INPUTS], "the demo's network", samples, seed, compiled)
    p = predict.probabilities(x)
    probabilities = {"plain inference": model(x).softmax(-1), "Favour": p}
    scores = {n: (metrics.accuracy(q, y), metrics.nll(q, y), metrics.ece(q, y)) for n, q in probabilities.items()}
    reliability = {name: bins(q, y) for name, q in probabilities.items()}
    return Story(result, cases(predict, data, p, seed), reliability, scores, len(x), torch.get_num_threads())


def cases(predict: Predictor, data: Data, p: Tensor, seed: int) -> tuple[Case, ...]:
    """Three of each group."""
    x, y = data.test_x, data.test_y
    known = predict.jsd(x).sort().values
    sure: list[int] = []
    for i in p.amax(1).argsort(descending=True).tolist():
        if all(y[i] != y[j] for j in sure):
            sure.append(i)
        if len(sure) == 3:
            break
    torn = (p.topk(2).values @ torch.tensor([1.0, -1.0])).argsort()[:3].tolist()
    chosen = [(GROUPS[k], f"a {y[i]}", x[i]) for k, rows in enumerate((sure, torn)) for i in rows]
    chosen += [(GROUPS[2], name, picture) for name, picture in unfamiliar(data, seed).items()]
    inputs = torch.stack([picture for _, _, picture in chosen])
    q, disagreement = predict.probabilities(inputs), predict.jsd(inputs)
    spread = predict(inputs).sample((DRAWS,), torch.Generator().manual_seed(seed)).softmax(-1).std(0)
    less = torch.searchsorted(known, disagreement) / len(known)
    return tuple(
        Case(group, name, data.pixels(picture), q[i], spread[i], float(less[i]))
        for i, (group, name, picture) in enumerate(chosen)
    )


def bins(p: Tensor, y: Tensor) -> tuple[Bin, ...]:
    """By confidence, from the least; bins without an image are left out."""
    confidence, guess = p.max(1)
    which = torch.bucketize(confidence, torch.tensor(EDGES[1:], dtype=p.dtype), right=True)
    parts = [(which == k).nonzero()[:, 0] for k in range(len(EDGES))]
    return tuple(
        Bin(len(i), float(confidence[i].mean()), float((guess[i] == y[i]).double().mean())) for i in parts if len(i)
    )
