"""A posterior for a trained, deterministic LeNet: `favour.fit` after the fact beside what else one may do.

    python -m favour_studies.learning.posthoc --data DIR --out results/learning_posthoc.json [--device cuda]

Every repeat is kept in `--keep` (build/learning) as it ends, and not run again by the next call; so a longer run may
be interrupted, and more repeats or sets may be added later.

A LeNet without dropout is trained on all but 5,000 rows, and then, on the same rows and the 5,000 held out:

    plain         the network as it is
    temperature   its logits over a temperature, fitted to the held-out rows
    fit           `favour.fit(learn=("variances",))`, mean-field over the two top layers, one epoch; the weight of the
                  divergence chosen by `fit` on the held-out rows
    fit_last      the same with a Kronecker posterior over the last layer
    laplace       last layer, full generalised Gauss–Newton matrix, prior precision by the held-out likelihood
    mc_dropout    a LeNet with dropout of 10%, 50 draws
    ensemble      the networks of all repeats together

Negative log-likelihood and calibration error on the test rows, differences to `fit` with a paired bootstrap over test
rows; the area under the ROC curve for pictures of another set. Which score to use is settled beforehand: the one that
best tells held-out rows from themselves with their quadrants shuffled.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import favour
from favour_studies.experiments import bootstrap
from favour_studies.experiments.data import Split, images, scaled
from favour_studies.experiments.models import LeNet
from favour_studies.learning import record

EPOCHS = {"mnist": 6, "fashion_mnist": 10, "cifar10": 15}
UNFAMILIAR = {"mnist": "fashion_mnist", "fashion_mnist": "mnist", "cifar10": "svhn"}
HELD, BATCH, RESAMPLES = 5000, 128, 2000
Outputs = dict[str, Tensor]  # probabilities (N, C) and scores (N,) by name


def plain_lenet(channels: int) -> LeNet:
    """LeNet without dropout."""
    model = LeNet("dropout10", channels)
    model.drop1.p = model.drop2.p = 0.0
    return model


def train(model: nn.Module, rows: Split, epochs: int, seed: int) -> nn.Module:
    """Adam at 1e-3 on the cross-entropy."""
    torch.manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(epochs):
        for part in torch.randperm(len(rows), device=rows.x.device).split(BATCH):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(scaled(rows.x[part])), rows.y[part]).backward()
            optimiser.step()
    return model.eval()


# ---- answers


def in_parts(function: Any, x: Tensor) -> Outputs:
    """A function of scaled pictures over all pictures."""
    with torch.no_grad():
        parts = [function(scaled(part)) for part in x.split(1000)]
    return {name: torch.cat([part[name] for part in parts]).cpu() for name in parts[0]}


def scores_of(p: Tensor) -> Outputs:
    """Of class probabilities: themselves, one less the greatest, and the entropy."""
    return {"p": p, "max": 1 - p.max(1).values, "entropy": -torch.special.xlogy(p, p).sum(1)}


def by_logits(model: nn.Module, temperature: float = 1.0) -> Any:
    """A plain network's."""
    return lambda x: scores_of((model(x) / temperature).softmax(1))


def by_belief(predict: favour.Predictor) -> Any:
    """A predictor's, with the divergence of its draws."""

    def function(x: Tensor) -> Outputs:
        belief = predict(x)
        found = scores_of(favour.probabilities(belief))
        return found | {"jsd": favour.scores.jsd(belief), "variance": belief.variance.sum(1)}

    return function


def by_draws(draw: Any) -> Any:
    """Of logits (n, B, C)."""

    def function(x: Tensor) -> Outputs:
        z = draw(x).log_softmax(-1)
        p = z.exp().mean(0)
        each = -(z.exp() * z).sum(-1).mean(0)
        found = scores_of(p)
        return found | {"jsd": found["entropy"] - each}

    return function


def temperature_of(model: nn.Module, held: Split) -> float:
    """The one of a grid with the least −log p on held-out rows."""
    with torch.no_grad():
        z = model(scaled(held.x))
    grid = torch.logspace(-1, 1, 401).tolist()
    return min(grid, key=lambda t: float(nn.functional.cross_entropy(z / t, held.y)))


class LastLayerLaplace:
    """z ~ N(Wφ, ·) with the posterior precision Σ_n (diag p_n − p_n p_nᵀ) ⊗ φ_n φ_nᵀ + δI of the last layer."""

    def __init__(self, model: LeNet, rows: Split, held: Split) -> None:
        self.model, n = model, model.fc3.in_features + 1
        classes = model.fc3.out_features
        total = torch.zeros(classes * n, classes * n, dtype=torch.float64, device=rows.x.device)
        with torch.no_grad():
            for part in torch.arange(len(rows), device=rows.x.device).split(1000):
                phi = self.features(scaled(rows.x[part]))
                p = (phi[:, :-1].float() @ model.fc3.weight.mT + model.fc3.bias).softmax(1).double()
                curvature = p.diag_embed() - p.unsqueeze(-1) * p.unsqueeze(-2)
                total += torch.einsum("bij,bk,bl->ikjl", curvature, phi, phi).reshape(total.shape)
            self.values, self.vectors = torch.linalg.eigh(total)
            best = (math.inf, 1.0)
            for delta in torch.logspace(-1, 3, 9).tolist():
                self.delta = delta
                p = in_parts(by_belief(self), held.x)["p"]  # type: ignore[arg-type]
                best = min(best, (float(nn.functional.nll_loss(p.clamp(min=1e-12).log(), held.y.cpu())), delta))
            self.delta = best[1]

    def features(self, x: Tensor) -> Tensor:
        """The last hidden layer and a constant."""
        model = self.model
        h = torch.max_pool2d(model.conv1(x), 2).relu()
        h = torch.max_pool2d(model.conv2(h), 2).relu()
        h = model.fc2(model.fc1(h.flatten(1)).relu()).relu()
        return torch.cat([h, h.new_ones(len(h), 1)], 1).double()

    def __call__(self, x: Tensor) -> favour.Belief:
        phi = self.features(x)
        classes = self.model.fc3.out_features
        roots = self.vectors * (self.values.clamp(min=0) + self.delta).rsqrt()
        turned = torch.einsum("bk,ckr->bcr", phi, roots.reshape(classes, phi.shape[1], -1))
        return favour.Belief(self.model(x), covariance=(turned @ turned.mT).float(), validate=False)


# ---- the study


def shuffled(x: Tensor) -> Tensor:
    """Pictures with their quadrants turned round: lower right, lower left, upper right, upper left."""
    h, w = x.shape[-2] // 2, x.shape[-1] // 2
    return torch.roll(x, (h, w), (-2, -1))


def auroc(usual: Tensor, unusual: Tensor) -> float:
    """The chance that an unusual input scores higher."""
    ones = torch.ones(1, len(usual), dtype=torch.float64), torch.ones(1, len(unusual), dtype=torch.float64)
    return float(bootstrap.weighted_auroc(usual, unusual)(*ones))


def repeat(name: str, seed: int, data: str, device: str, share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """One trained network and everything after it: answers by method, and what was settled on the way."""
    rows, test = images(name, "train", data), images(name, "test", data)
    other = images(UNFAMILIAR[name], "test", data)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    if share < 1:
        order = order[: round(share * len(order))]
    held, rows = rows[order[:HELD]], rows[order[HELD:]]
    if other.x.shape[1:] != test.x.shape[1:]:
        raise ValueError(f"{name} and {UNFAMILIAR[name]} have pictures of different shapes")
    held, rows = (Split(s.x.to(device), s.y.to(device)) for s in (held, rows))
    sets = {"test": test.x.to(device), "other": other.x.to(device), "held": held.x, "shuffled": shuffled(held.x)}
    epochs = EPOCHS[name]
    torch.manual_seed(seed)
    notes: dict[str, Any] = {}
    begin = time.perf_counter()
    model = train(plain_lenet(rows.x.shape[1]).to(device), rows, epochs, seed)
    notes["train_seconds"] = time.perf_counter() - begin
    answers: dict[str, Any] = {"plain": by_logits(model)}
    notes["temperature"] = temperature_of(model, held)
    answers["temperature"] = by_logits(model, notes["temperature"])
    pair, held_pair = (scaled(rows.x), rows.y), (scaled(held.x), held.y)
    kinds: dict[str, dict[str, Any]] = {
        "fit": {"layers": ["fc2", "fc3"]},
        "fit_last": {"posterior": "last_layer"},
    }
    for method, how in kinds.items():
        begin = time.perf_counter()
        fitted = favour.fit(
            model,
            pair,
            likelihood="categorical",
            learn=("variances",),
            validation=held_pair,
            epochs=1,
            batch_size=BATCH,
            seed=seed,
            check=False,
            **how,
        )
        notes[method] = {
            "seconds": time.perf_counter() - begin,
            "kl_weight": fitted.kl_weight,
            "held": {f"{r.kl_weight:g}": r.held_nll for r in fitted.history},
        }
        answers[method] = by_belief(fitted.predict)
    begin = time.perf_counter()
    laplace = LastLayerLaplace(model, rows, held)  # type: ignore[arg-type]
    answers["laplace"] = by_belief(laplace)  # type: ignore[arg-type]
    notes["laplace"] = {"seconds": time.perf_counter() - begin, "delta": laplace.delta}
    dropped = train(LeNet("dropout10", rows.x.shape[1]).to(device), rows, epochs, seed)
    answers["mc_dropout"] = by_draws(lambda x: favour.sample(dropped, x, 50))
    found = {m: {s: in_parts(a, x) for s, x in sets.items()} for m, a in answers.items()}
    notes["score"] = {m: _settle(f) for m, f in found.items()}
    return {"answers": found, "labels": test.y}, notes


def _settle(found: dict[str, Outputs]) -> dict[str, Any]:
    areas = {s: auroc(found["held"][s], found["shuffled"][s]) for s in found["held"] if s != "p"}
    return {"chosen": max(areas, key=lambda s: areas[s]), "held_areas": areas}


def measures(name: str, repeats: list[dict[str, Any]], notes: list[dict[str, Any]]) -> dict[str, Any]:
    """The table of one set, and paired comparisons of `fit` with the others."""
    y = repeats[0]["labels"]
    methods = list(repeats[0]["answers"])
    found: dict[str, Any] = {}
    nll: dict[str, Tensor] = {}
    p: dict[str, list[Tensor]] = {}
    for method in methods:
        outputs = [r["answers"][method] for r in repeats]
        p[method] = [o["test"]["p"] for o in outputs]
        each = [-q.gather(1, y[:, None])[:, 0].clamp(min=1e-12).log() for q in p[method]]
        nll[method] = torch.stack(each).mean(0)
        entry: dict[str, Any] = {
            "nll": record.summary([float(e.mean()) for e in each]),
            "ece": record.summary([favour.metrics.ece(q, y) for q in p[method]]),
            "accuracy": record.summary([float((q.argmax(1) == y).float().mean()) for q in p[method]]),
        }
        for score in outputs[0]["test"]:
            if score != "p":
                areas = [auroc(o["test"][score], o["other"][score]) for o in outputs]
                entry[f"auroc_{score}"] = record.summary(areas)
        chosen = [n["score"][method]["chosen"] for n in notes]
        entry["chosen_scores"] = chosen
        entry["auroc_chosen"] = record.summary(
            [auroc(o["test"][s], o["other"][s]) for o, s in zip(outputs, chosen, strict=True)]
        )
        found[method] = entry
    if len(repeats) > 1:
        together = torch.stack(p["plain"]).mean(0)
        rows = -together.gather(1, y[:, None])[:, 0].clamp(min=1e-12).log()
        found["ensemble"] = {
            "nll": float(rows.mean()),
            "ece": favour.metrics.ece(together, y),
            "accuracy": float((together.argmax(1) == y).float().mean()),
        }
    paired = []
    for ours in ("fit", "fit_last"):
        for theirs in ("plain", "temperature", "laplace", "mc_dropout"):
            drawn = bootstrap.means(nll[ours], nll[theirs], RESAMPLES, 0)
            a, b = float(nll[ours].mean()), float(nll[theirs].mean())
            paired.append(bootstrap.verdict("nll", "lower", a, b, drawn, ours=ours, theirs=theirs))
            drawn = bootstrap.ece(p[ours], p[theirs], y, RESAMPLES, 0)
            a, b = found[ours]["ece"]["mean"], found[theirs]["ece"]["mean"]
            paired.append(bootstrap.verdict("ece", "lower", a, b, drawn, ours=ours, theirs=theirs))
        mine = _pairs(repeats, ours, found[ours]["chosen_scores"])
        drawn = bootstrap.auroc(mine, _pairs(repeats, "plain", ["max"] * len(repeats)), 200, 0)
        a, b = found[ours]["auroc_chosen"]["mean"], found["plain"]["auroc_max"]["mean"]
        paired.append(bootstrap.verdict("auroc", "higher", a, b, drawn, ours=ours, theirs="plain, max"))
    return {"methods": found, "paired": paired, "notes": notes, "unfamiliar": UNFAMILIAR[name]}


def _pairs(repeats: list[dict[str, Any]], method: str, scores: list[str]) -> list[tuple[Tensor, Tensor]]:
    """A method's scores of usual and of unfamiliar pictures, by repeat."""
    outputs = [r["answers"][method] for r in repeats]
    return [(o["test"][s], o["other"][s]) for o, s in zip(outputs, scores, strict=True)]


def kept(name: str, seed: int, options: argparse.Namespace) -> tuple[dict[str, Any], dict[str, Any]]:
    """A repeat, from its file if it has been run."""
    file = options.keep / f"{name}-{seed}-{options.share:g}.pt"
    if file.is_file():
        found = torch.load(file, weights_only=True)
        return found["outputs"], json.loads(found["notes"])
    outputs, notes = repeat(name, seed, options.data, options.device, options.share)
    notes["environment"] = record.environment(options.device)
    options.keep.mkdir(parents=True, exist_ok=True)
    part = file.with_name(file.name + ".part")
    torch.save({"outputs": outputs, "notes": json.dumps(notes)}, part)
    part.replace(file)
    return outputs, notes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, default=Path("results/learning_posthoc.json"))
    parser.add_argument("--sets", default="mnist,fashion_mnist,cifar10")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--share", type=float, default=1.0, help="Of the rows.")
    parser.add_argument("--keep", type=Path, default=Path("build/learning"))
    options = parser.parse_args()
    result: dict[str, Any] = {"environment": record.environment(options.device)}
    if options.out.is_file():
        result = {**json.loads(options.out.read_text()), **result}
    for name in options.sets.split(","):
        runs = []
        for seed in range(options.repeats):
            runs.append(kept(name, seed, options))
            print(name, seed, runs[-1][1], flush=True)
            found = measures(name, [r for r, _ in runs], [n for _, n in runs])
            result[name] = found | {"repeats": len(runs), "share": options.share}
            record.write(options.out, result)
        for method, entry in result[name]["methods"].items():
            print(name, method, {k: v["mean"] if isinstance(v, dict) else v for k, v in entry.items()}, flush=True)


if __name__ == "__main__":
    main()
