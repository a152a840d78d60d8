"""How many samples is one Favour pass worth?

Trains ReLU MLPs with dropout on MNIST (10 epochs of Adam at 2e-4) and a regression MLP on UCI data, and compares the
output covariance of every method with that of 20,000 samples: mean relative Frobenius error over test inputs. A
method is worth the n at which n samples have the same error; since the reference is itself a sample, that n is a
lower bound.

    python benchmarks/worth.py --data DIR [--fresh]

Checkpoints are kept in checkpoints/ (git-ignored); --fresh trains anew.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from common import write
from networks import mlp
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import favour
from favour_studies.experiments.data import images, uci

SAMPLES, INPUTS, REPEATS = 20_000, 64, 8
CHECKPOINTS = Path(__file__).resolve().parent.parent / "checkpoints"


class Residual(nn.Module):
    """784-400, four blocks x + dropout(relu(linear(x))), and a linear head."""

    def __init__(self, width: int = 400, blocks: int = 4, p: float = 0.2) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(784, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.drops = nn.ModuleList(nn.Dropout(p) for _ in range(blocks + 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drops[0](torch.relu(self.stem(x)))
        for block, drop in zip(self.blocks, self.drops[1:], strict=True):
            x = x + drop(torch.relu(block(x)))
        return self.head(x)


def train(model: nn.Module, x: Tensor, y: Tensor, epochs: int, loss: nn.Module, name: str, rate: float = 2e-4) -> None:
    optimiser = torch.optim.Adam(model.parameters(), rate)
    model.train()
    for _ in track(range(epochs), f"training {name}"):
        for rows in torch.randperm(len(x)).split(128):
            optimiser.zero_grad()
            loss(model(x[rows]), y[rows]).backward()
            optimiser.step()


def prepared(name: str, model: nn.Module, x: Tensor, y: Tensor, epochs: int, loss: nn.Module, fresh: bool) -> nn.Module:
    path = CHECKPOINTS / f"worth-{name.replace(' ', '-')}.safetensors"
    if path.exists() and not fresh:
        model.load_state_dict(load_file(path))
    else:
        train(model, x, y, epochs, loss, name)
        CHECKPOINTS.mkdir(exist_ok=True)
        save_file(model.state_dict(), path)
    return model.eval().requires_grad_(False)


METHODS = {
    "adjoint": {"method": "adjoint"},
    "adjoint, bf16 sweeps": {"method": "adjoint", "precision": "bf16"},
    "adjoint, 3 directions": {"method": "adjoint", "directions": 3},
    "adjoint, 3 directions, bf16 sweeps": {"method": "adjoint", "directions": 3, "precision": "bf16"},
    "adjoint, rank-8 marginals": {"method": "adjoint", "rank": 8, "iterations": 3},
    "adjoint, secants": {"method": "adjoint", "secant": True},
    "adjoint, secants, bf16 sweeps": {"method": "adjoint", "secant": True, "precision": "bf16"},
    "adjoint, 16 groups of pairs": {"method": "adjoint", "pairs": 16},
    "adjoint, rank-8 marginals, 16 groups of pairs": {"method": "adjoint", "rank": 8, "iterations": 3, "pairs": 16},
    "adjoint, taylor": {"method": "adjoint", "activation": "taylor"},
    "adjoint, matched": {"method": "adjoint", "activation": "matched"},
    "dplr r=2 K=2": {"method": "dplr", "rank": 2},
    "dplr r=2 K=2 q=40": {"method": "dplr", "rank": 2, "weight_rank": 40},
    "dplr r=4 K=2": {"method": "dplr", "rank": 4},
    "dplr r=16 K=2": {"method": "dplr", "rank": 16},
    "diag": {"method": "diag"},
}


def moments(draws: Tensor) -> tuple[Tensor, Tensor]:
    mean = draws.mean(0)
    centred = draws - mean
    return mean, torch.einsum("nbi,nbj->bij", centred, centred) / (len(draws) - 1)


def error(matrix: Tensor, reference: Tensor) -> float:
    return ((matrix - reference).norm(dim=(1, 2)) / reference.norm(dim=(1, 2))).mean().item()


def measure(model: nn.Module, x: Tensor) -> dict[str, object]:
    """Errors of every method and of n samples on one network."""
    draws = favour.sample(model, x, SAMPLES, generator=torch.Generator().manual_seed(0)).double()
    mean, covariance = moments(draws)
    spread = draws.std(0)
    sampled = {}
    for n in (10, 100, 1000):
        fresh = favour.sample(model, x, n * REPEATS, generator=torch.Generator().manual_seed(n)).double()
        sampled[n] = sum(error(moments(part)[1], covariance) for part in fresh.split(n)) / REPEATS
    rows: dict[str, object] = {}
    for name, settings in METHODS.items():
        if settings.get("directions", 0) > mean.shape[1]:
            continue
        belief = favour.compile(model, x[:2], **settings)(x)
        if "directions" in settings:  # in the directions it covers
            Q = belief.covariance.basis.double()  # (k, batch, n)
            e = error(belief.covariance.core.double(), torch.einsum("kbi,bij,lbj->bkl", Q, covariance, Q))
        else:
            e = error(belief.covariance_matrix.double(), covariance)
        rows[name] = {
            "covariance error": e,
            "mean error in standard deviations": ((belief.mean - mean) / spread).abs().mean().item(),
            "worth samples": 1000 * (sampled[1000] / e) ** 2,
        }
    for n, e in sampled.items():
        rows[f"{n} samples"] = {"covariance error": e}
    return rows


def jsd_kept(model: nn.Module, x: Tensor, k: int) -> float:
    """The lemma's JSD summed over inputs: the share that k directions keep."""

    def jsd(belief: favour.Belief) -> Tensor:
        p = belief.mean.softmax(-1)
        Q, core = belief.covariance.basis, belief.covariance.core
        JQ = p * Q - p * (Q * p).sum(-1, keepdim=True)
        return 0.5 * torch.einsum("kbi,lbi,bkl->b", Q, JQ, core)

    full = favour.compile(model, x[:2], method="adjoint")(x)
    p = full.mean.softmax(-1)
    S = full.covariance_matrix
    whole = 0.5 * ((p * S.diagonal(dim1=1, dim2=2)).sum(-1) - torch.einsum("bi,bij,bj->b", p, S, p))
    part = jsd(favour.compile(model, x[:2], method="adjoint", directions=k)(x))
    return (part.sum() / whole.sum()).item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with mnist/ and uci/")
    parser.add_argument("--fresh", action="store_true", help="train anew")
    options = parser.parse_args()
    torch.set_num_threads(2)
    train_set, test_set = images("mnist", "train", options.data), images("mnist", "test", options.data)
    x, y = train_set.x.flatten(1).float() / 255, train_set.y
    x_test = test_set.x.flatten(1).float() / 255
    results: dict[str, object] = {}
    kept: dict[str, float] = {}
    networks = {
        "MNIST, depth 2": lambda: mlp(784, 400, 400, 10, p=0.2),
        "MNIST, depth 8": lambda: mlp(784, *[400] * 8, 10, p=0.2),
        "MNIST, 4 residual blocks": Residual,
    }
    for name, make in networks.items():
        torch.manual_seed(0)
        model = prepared(name, make(), x, y, 10, nn.CrossEntropyLoss(), options.fresh)
        accuracy = (model(x_test).argmax(1) == test_set.y).float().mean().item()
        results[name] = {"accuracy": accuracy, "rows": measure(model, x_test[:INPUTS])}
        if name != "MNIST, 4 residual blocks":
            kept[name] = {k: jsd_kept(model, x_test[:2000], k) for k in (1, 2, 3, 5)}
        show(name, results[name], kept.get(name))
    fit, held = uci("concrete", 0, options.data)
    mean, std = fit.x.mean(0), fit.x.std(0)
    target = ((fit.y - fit.y.mean()) / fit.y.std()).unsqueeze(1)
    torch.manual_seed(0)
    name = "UCI concrete, 2 x 100, dropout 0.5"
    model = mlp(fit.x.shape[1], 100, 100, 1, p=0.5)
    model = prepared(name, model, (fit.x - mean) / std, target, 400, nn.MSELoss(), options.fresh)
    results[name] = {"rows": measure(model, ((held.x - mean) / std)[:INPUTS])}
    show(name, results[name], None)
    write("worth", {"samples": SAMPLES, "inputs": INPUTS, "networks": results, "jsd kept by k directions": kept})


def show(name: str, result: dict, kept: dict | None) -> None:
    print(f"\n{name}" + (f", accuracy {result['accuracy']:.4f}" if "accuracy" in result else ""))
    for method, row in result["rows"].items():
        worth = f"   worth {row['worth samples']:8.0f} samples" if "worth samples" in row else ""
        mean = f"   mean {row['mean error in standard deviations']:.3f}" if worth else ""
        print(f"  {method:28s} {row['covariance error']:.4f}{mean}{worth}")
    if kept:
        print("  JSD kept:", {k: round(v, 4) for k, v in kept.items()})


if __name__ == "__main__":
    main()
