"""Scores of pictures for the experiment on unfamiliar inputs, by beliefs and by samples, and the areas they reach."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

import favour
from favour import metrics, scores
from favour_studies.experiments.classification import chunks
from favour_studies.experiments.closed_form import closed_form
from favour_studies.experiments.data import Split
from favour_studies.experiments.methods import HEAD, HEAD_MANY, Method, Subject, generator

HEADS = (HEAD, HEAD_MANY)
CHUNK = 500  # pictures at a time


def belief_scores(belief: favour.Belief, rate: scores.Mahalanobis, certain: bool) -> dict[str, Tensor]:
    """All scores of a belief; without JSD and KL if it is `certain`."""
    found = {
        "max_probability": scores.least_confidence(belief),
        "entropy": scores.entropy(belief),
        "mahalanobis": rate.score(belief.mean if certain else belief),
    }
    if not certain:
        found |= {
            "jsd": closed_form(belief),
            "jsd_nodes": scores.jsd(belief, estimator="nodes"),
            "kl": scores.kl(belief),
        }
    return found


def draw_scores(z: Tensor, rate: scores.Mahalanobis) -> dict[str, Tensor]:
    """All scores of draws (n, B, C)."""
    return {
        "max_probability": scores.least_confidence(z),
        "entropy": scores.entropy(z),
        "mahalanobis": rate.score(z),
        "jsd": scores.jsd(z),
        "kl": scores.kl(z),
    }


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, np.ndarray]:
    return {k: torch.cat([p[k] for p in parts]).double().cpu().numpy() for k in parts[0]}


@torch.no_grad()
def belief_based(subject: Subject, method: Method, x: Tensor, rate: scores.Mahalanobis) -> dict[str, np.ndarray]:
    """Scores of pictures by plain inference or a predictor."""
    assert subject.net is not None
    parts = []
    for chunk in chunks(x, subject.device, CHUNK):
        if method.family == "plain":
            parts.append(belief_scores(favour.Belief.point(subject.net(chunk)), rate, True))
        elif method in HEADS:
            predict = subject.predictor(method.settings, chunk)
            parts.append(draw_scores(predict.draws(chunk, n=method.settings.get("draws")), rate))
        else:
            parts.append(belief_scores(subject.predictor(method.settings, chunk)(chunk), rate, False))
    return joined(parts)


@torch.no_grad()
def draw_based(
    subject: Subject, x: Tensor, rate: scores.Mahalanobis, whole: Sequence[int], numbers: Sequence[int], seed: int
) -> tuple[dict[int, dict[str, np.ndarray]], dict[int, np.ndarray]]:
    """All scores of pictures by some numbers of samples, and the JSD by others; the smaller number is part of the
    larger."""
    random = generator(subject.device, seed)
    found: dict[int, list[dict[str, Tensor]]] = {n: [] for n in whole}
    nested: dict[int, list[Tensor]] = {n: [] for n in numbers if n > 1}
    for chunk in chunks(x, subject.device, CHUNK):
        z = subject.draws(chunk, max(*whole, *numbers), random)
        for n, parts in found.items():
            parts.append(draw_scores(z[:n], rate))
        for n, part in nested.items():
            part.append(found[n][-1]["jsd"] if n in found else scores.jsd(z[:n]))
    jsd = {n: torch.cat(part).double().cpu().numpy() for n, part in nested.items()}
    return {n: joined(parts) for n, parts in found.items()}, jsd


def areas(usual: dict[str, np.ndarray], unusual: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Areas under both curves for every score."""
    found: dict[str, dict[str, float]] = {"auroc": {}, "aupr": {}}
    for score in usual:
        s = np.nan_to_num(np.concatenate([usual[score], unusual[score]]), posinf=np.finfo(np.float64).max)
        t = np.repeat([0, 1], [len(usual[score]), len(unusual[score])])
        found["auroc"][score] = metrics.auroc(s, t)
        found["aupr"][score] = metrics.aupr(s, t)
    return found


@torch.no_grad()
def fitted(subject: Subject, part: Split) -> scores.Mahalanobis:
    """Class means and covariance of the plain logits of training pictures."""
    assert subject.net is not None
    logits = torch.cat([subject.net(chunk) for chunk in chunks(part.x, subject.device)])
    return scores.Mahalanobis().fit(logits, part.y.to(logits.device))
