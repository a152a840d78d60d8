"""Does the Jensen–Shannon divergence rank inputs as 10,000 samples do, near the data and far from it?

Networks with dropout on scikit-learn's digits, and with --data LeNets on MNIST: 200 test pictures (60 where the whole
network has to be sampled), noise of one, three and ten times the scale of a normal, and for LeNet letters drawn from
matplotlib's fonts. For each estimator: Spearman's rank correlation with 10,000 samples, of all inputs but the noise ×1
together and within each group; the area under the ROC curve of test pictures against each other group, beside that of
100 samples (mean of five repeats); the largest value; and the cost in forward passes and in dropout samples of one
batch. "Held back" marks architectures that were not looked at while the estimators were made. --only keeps the results
of other networks.

    python benchmarks/scores.py [--data DIR] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write
from scipy.stats import spearmanr
from sklearn.datasets import load_digits
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

import favour
from favour import scores
from favour.classify.head import find_head
from favour.errors import OutOfRange

EACH, DEAR, MANY, FEW, REPEATS, BATCH = 200, 60, 10_000, 100, 5, 100
LETTERS = "ABCDEFGHJKLMNPQRTUVWXYZabdefghkmnpqrtuvwxyz"
FONTS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSerif", "DejaVuSansMono", "DejaVuSans-Oblique", "STIXGeneral")


def perceptron(sizes: list[int], p: float, act: type[nn.Module] = nn.ReLU, first: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Dropout(p)] if first else []
    for a, b in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(a, b), act(), nn.Dropout(p)]
    return nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]))


def lenet(p: float, everywhere: bool = False) -> nn.Sequential:
    more = [nn.Dropout(p)] if everywhere else []
    first = [nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), *more, nn.MaxPool2d(2)]
    second = [nn.Conv2d(6, 16, 5), nn.ReLU(), *more, nn.MaxPool2d(2), nn.Flatten()]
    top = [nn.Linear(400, 120), nn.ReLU(), nn.Dropout(p), nn.Linear(120, 84), nn.ReLU(), nn.Dropout(p)]
    return nn.Sequential(*first, *second, *top, nn.Linear(84, 10))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {
    "64-64-10, .1": lambda: perceptron([64, 64, 10], 0.1),
    "64-64-10, .3": lambda: perceptron([64, 64, 10], 0.3),
    "64-64-10, .5": lambda: perceptron([64, 64, 10], 0.5),
    "64-128-128-10, .3": lambda: perceptron([64, 128, 128, 10], 0.3),
    "LeNet, .1": lambda: lenet(0.1),
    "LeNet, .5": lambda: lenet(0.5),
    "LeNet, .2 everywhere": lambda: lenet(0.2, True),
    "held back: 64-100-50-10 GELU, .4": lambda: perceptron([64, 100, 50, 10], 0.4, nn.GELU),
    "held back: 64-64-10, .25 on inputs too": lambda: perceptron([64, 64, 10], 0.25, first=True),
}


def letters(n: int) -> Tensor:
    """White letters on black, 28 × 28, a little moved and turned."""
    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    g, found = np.random.default_rng(0), []
    for i in range(n):
        picture = Image.new("L", (28, 28), 0)
        draw = ImageDraw.Draw(picture)
        font = ImageFont.truetype(str(folder / f"{FONTS[g.integers(len(FONTS))]}.ttf"), int(g.integers(18, 25)))
        left, top, right, bottom = draw.textbbox((0, 0), LETTERS[i % len(LETTERS)], font=font)
        at = (14 - (left + right) / 2 + g.normal(), 14 - (top + bottom) / 2 + g.normal())
        draw.text(at, LETTERS[i % len(LETTERS)], fill=255, font=font)
        found.append(np.array(picture.rotate(float(8 * g.normal()))))
    return torch.from_numpy(np.stack(found)).float().unsqueeze(1) / 255


def mnist(data: str, split: str, n: int) -> tuple[Tensor, Tensor]:
    import pyarrow.parquet as pq
    from PIL import Image

    (file,) = Path(data, "mnist").glob(f"{split}*.parquet")
    table = pq.read_table(file).slice(0, n)
    x = [np.array(Image.open(io.BytesIO(row["bytes"])).convert("L")) for row in table["image"].to_pylist()]
    return torch.from_numpy(np.stack(x)).float().unsqueeze(1) / 255, torch.tensor(table["label"].to_pylist())


def prepared(name: str, data: str | None) -> tuple[nn.Sequential, dict[str, Tensor]]:
    """A trained network and groups of inputs, test pictures first."""
    torch.manual_seed(0)
    model = NETWORKS[name]()
    each = DEAR if "everywhere" in name else EACH
    if "LeNet" in name:
        assert data is not None
        (x, y), epochs = mnist(data, "train", 12_000), 4
        groups = {"test": mnist(data, "test", each)[0], "letters": letters(each)}
    else:
        whole = load_digits()
        order = torch.randperm(len(whole.data), generator=torch.Generator().manual_seed(0))
        x, y = torch.tensor(whole.data / 16, dtype=torch.float32)[order], torch.tensor(whole.target)[order]
        groups, x, y, epochs = {"test": x[:each]}, x[each:], y[each:], 60
    for scale in (1, 3, 10):
        noise = torch.randn(each, *x.shape[1:], generator=torch.Generator().manual_seed(scale))
        groups[f"noise ×{scale}"] = scale * noise
    optimiser = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimiser.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
    return model.eval().requires_grad_(False), groups


def sampled(model: nn.Sequential, x: Tensor, n: int, seed: int) -> Tensor:
    """The divergence of n samples, by a loop of its own; what comes before the first dropout is run once.

    H(p̄) − mean H(p) in float64, but for the likeliest class, where 1 − p is kept instead of p.
    """
    start = next(i for i, layer in enumerate(model) if isinstance(layer, nn.Dropout))
    torch.manual_seed(seed)
    live, parts = model[start:], []
    for x_part in x.split(BATCH):
        hidden, b = model[:start](x_part), len(x_part)
        top = nn.functional.one_hot(model(x_part).argmax(-1), 10).bool()
        live.train()
        total, other, own = torch.zeros(b, 10, dtype=torch.float64), 0.0, 0.0
        for _ in range(0, n, 50):
            z = live(hidden.repeat(50, *[1] * (hidden.dim() - 1))).double().reshape(50, b, 10)
            log_p = z.log_softmax(-1)
            p = log_p.exp()
            rest = p.masked_fill(top, 0).sum(-1)
            total, other = total + p.sum(0), other + rest.sum(0)
            own = own + ((p * log_p).masked_fill(top, 0).sum(-1) + one_less(rest, log_p[:, top])).sum(0)
        model.eval()
        p, rest = total / n, other / n
        whole = torch.special.xlogy(p, p).masked_fill(top, 0).sum(-1) + one_less(rest, p[top].clamp(min=1e-300).log())
        parts.append((own / n - whole).clamp(min=0))
    return torch.cat(parts)


def one_less(rest: Tensor, log_p: Tensor) -> Tensor:
    """p log p for p = 1 − rest."""
    return torch.where(rest < 0.5, (1 - rest) * torch.log1p(-rest.clamp(max=0.5)), log_p.exp() * log_p)


def judged(found: Tensor, truth: Tensor, groups: dict[str, Tensor]) -> dict[str, Any]:
    value, many = found.double().numpy(), truth.numpy()
    each = len(value) // len(groups)
    strange = np.arange(2 * each) >= each
    of = {name: slice(i * each, (i + 1) * each) for i, name in enumerate(groups)}
    named = [name for name in groups if name != "noise ×1"]  # inputs, and noise of three and ten times the scale
    rows = np.concatenate([np.arange(len(value))[of[name]] for name in named])
    return {
        "together": float(spearmanr(value[rows], many[rows])[0]),
        "within": {name: float(spearmanr(value[s], many[s])[0]) for name, s in of.items()},
        "auroc": {
            name: float(roc_auc_score(strange, np.r_[value[:each], value[s]])) for name, s in of.items() if s.start
        },
        "largest": float(value.max()),
    }


def met(row: dict[str, Any], few: dict[str, float]) -> dict[str, bool]:
    """What is asked of a default."""
    return {
        "at most ln C": row["largest"] <= math.log(10) + 1e-6,
        "together at least .98": row["together"] >= 0.98,
        "within at least .95": min(row["within"].values()) >= 0.95,
        "auroc at most .005 below 100 samples": all(v >= few[k] - 0.005 for k, v in row["auroc"].items()),
    }


def network(name: str, data: str | None) -> dict[str, Any]:
    model, groups = prepared(name, data)
    x = torch.cat(list(groups.values()))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", OutOfRange)
        truth = sampled(model, x, MANY, 1)
        predict = favour.compile(model, x[:2])
        head = find_head(predict)
        estimators: dict[str, Callable[[Tensor], Tensor]] = {
            "lemma": lambda t: scores.jsd(predict(t), estimator="lemma"),
            "nodes": lambda t: scores.jsd(predict(t), estimator="nodes"),
            "scores.jsd": lambda t: scores.jsd(predict(t)),
            "predict.jsd": predict.jsd,
        }
        rows: dict[str, Any] = {f"{MANY} samples again": judged(sampled(model, x, MANY, 2), truth, groups)}
        repeats = [judged(sampled(model, x, FEW, 10 + i), truth, groups) for i in range(REPEATS)]
        few = {k: sum(r["auroc"][k] for r in repeats) / REPEATS for k in repeats[0]["auroc"]}
        rows[f"{FEW} samples"] = repeats[0] | {"auroc": few, "together": sum(r["together"] for r in repeats) / REPEATS}
        for key, estimator in estimators.items():
            rows[key] = judged(torch.cat([estimator(part) for part in x.split(BATCH)]), truth, groups)
            rows[key]["met"] = met(rows[key], few)
        part, live = x[:BATCH], NETWORKS[name]().train().requires_grad_(False)
        calls = {"forward": lambda: model(part), "sample": lambda: live(part), "belief": lambda: predict(part)}
        seconds = fastest(calls | {k: (lambda e=e: e(part)) for k, e in estimators.items()})
        for key in ("belief", *estimators):
            cost = {f"{unit}s": seconds[key] / seconds[unit] for unit in ("forward", "sample")}
            cost["milliseconds per input"] = 1e3 * seconds[key] / BATCH
            rows.setdefault(key, {})["cost"] = cost
    draws = 0 if head is None else head.for_scores
    for key, row in rows.items():
        if "together" in row:
            print(f"{name:40s} {key:20s} {row['together']:.4f}", {k: round(v, 3) for k, v in row["within"].items()})
            print(f"{'':61s}", {k: round(v, 4) for k, v in row["auroc"].items()}, row.get("met"), row.get("cost"))
    return {"draws of the head": draws, "rows": rows}


def fastest(calls: dict[str, Callable[[], Any]], rounds: int = 20) -> dict[str, float]:
    """Seconds of one core per call, the least over interleaved rounds: what other programs do does not count."""
    seconds = dict.fromkeys(calls, math.inf)
    for _ in range(rounds):
        for name, call in calls.items():
            call()
            start = time.process_time()
            call()
            seconds[name] = min(seconds[name], time.process_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="folder with mnist/, for the LeNets; without it their results stay as they are")
    parser.add_argument("--only", nargs="+", choices=list(NETWORKS), default=list(NETWORKS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    path = RESULTS / "scores.json"
    found: dict[str, Any] = json.loads(path.read_text())["networks"] if path.exists() else {}
    for name in options.only:
        if options.data or "LeNet" not in name:
            found[name] = network(name, options.data)
            write("scores", {"samples": MANY, "networks": found})


if __name__ == "__main__":
    main()
