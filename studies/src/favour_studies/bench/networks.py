"""The networks of the benchmark, each as a deterministic trunk and a head that begins with the first dropout.

    name              network                                                   dropout
    regression        10-100-100-1                                              0.2 behind both hidden layers
    mlp               784-400-400-10                                            0.2 behind both hidden layers
    wide              784-1024-1024-1024-1024-10                                0.2 behind every hidden layer
    lenet-top         LeNet on 28 × 28                                          0.2 before the two top layers
    lenet-all         the same                                                  0.1 at all layers
    resnet18          ResNet-18 on 3 × 32 × 32, no pooling in the stem          0.1 behind the stem and in every block
    transformer       4 pre-norm layers of width 256 over the 28 rows           0.1 everywhere, attention included
    classes1000       256-1024-1024-1000                                        0.2 behind both hidden layers

Weights are trained briefly: on MNIST where a data folder is given, else on what scikit-learn brings (digits, diabetes),
and for the thousand classes on planted ones (random vectors with noise around them). `Trained.origin` says which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from favour.errors import UnknownName
from favour_studies.experiments.data import images, scaled, uci

POOL = 1024  # inputs kept beside the weights, to measure with


class Split(nn.Module):
    """head(trunk(x)); no draw touches the trunk."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.trunk(x))


def mlp(*sizes: int, p: float = 0.2) -> Split:
    """Linear, ReLU and dropout between each two sizes; the last layer is linear only."""
    layers: list[nn.Module] = []
    for n, m in itertools.pairwise(sizes[:-1]):
        layers += [nn.Linear(n, m), nn.ReLU(), nn.Dropout(p)]
    layers.append(nn.Linear(sizes[-2], sizes[-1]))
    return Split(nn.Sequential(*layers[:2]), nn.Sequential(*layers[2:]))


def lenet(top: float, below: float = 0.0) -> Split:
    """LeNet with ReLU and max-pooling; dropout before the two top layers and, if `below` > 0, behind each pooling."""
    layers = [
        nn.Conv2d(1, 6, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(below),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(below),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Dropout(top),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Dropout(top),
        nn.Linear(84, 10),
    ]
    layers = [m for m in layers if not (isinstance(m, nn.Dropout) and m.p == 0)]
    first = next(i for i, m in enumerate(layers) if isinstance(m, nn.Dropout))
    return Split(nn.Sequential(*layers[:first]), nn.Sequential(*layers[first:]))


class Block(nn.Module):
    """relu(norm(conv(dropout(relu(norm(conv x))))) + shortcut x)."""

    def __init__(self, inputs: int, outputs: int, stride: int, p: float) -> None:
        super().__init__()
        self.a = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_a, self.norm_b, self.drop = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), nn.Dropout(p)
        same = stride == 1 and inputs == outputs
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm_a(self.a(x))))
        return torch.relu(self.norm_b(self.b(h)) + self.shortcut(x))


def resnet18(widths: tuple[int, ...] = (64, 128, 256, 512), blocks: int = 2, p: float = 0.1) -> Split:
    """ResNet-18 as it is used at 32 × 32: a 3 × 3 stem without pooling."""
    stem = nn.Sequential(nn.Conv2d(3, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU())
    layers: list[nn.Module] = [nn.Dropout(p)]
    before = widths[0]
    for i, width in enumerate(widths):
        for j in range(blocks):
            layers.append(Block(before, width, 2 if i and not j else 1, p))
            before = width
    return Split(stem, nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 10)))


class _Rows(nn.Module):
    """The rows of a picture as a sequence, embedded, with their places."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Linear(28, width), nn.Parameter(0.1 * torch.randn(28, width))

    def forward(self, x: Tensor) -> Tensor:
        return self.embed(x.squeeze(1)) + self.place


class _Encoder(nn.Module):
    def __init__(self, width: int, layers: int, p: float) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=p, batch_first=True, norm_first=True)
        self.drop = nn.Dropout(p)
        self.encoder = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        self.out = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.encoder(self.drop(x)).mean(1))


def transformer(width: int = 256, layers: int = 4, p: float = 0.1) -> Split:
    """A pre-norm encoder over the rows of a picture, averaged at the end."""
    return Split(_Rows(width), _Encoder(width, layers, p))


@dataclass(frozen=True)
class Network:
    """One network of the benchmark.

    Args:
        name: As the command line has it.
        title: As tables have it.
        make: Builds it, untrained.
        data: `"pictures"`, `"colour"` (the same as 3 × 32 × 32), `"table"` or `"vectors"`.
        steps: Of training, batch 128 (32 for `"colour"`).
        inputs: On how many inputs the covariance is judged.
        samples: Of the reference, on a CPU and on a GPU.
    """

    name: str
    title: str
    make: Callable[[], Split]
    data: str
    steps: int
    inputs: int
    samples: tuple[int, int]
    rate: float = 1e-3

    @property
    def task(self) -> str:
        """What `favour.compile` is told of the outputs."""
        return "regression" if self.data == "table" else "classification"


NETWORKS: dict[str, Network] = {
    n.name: n
    for n in (
        Network("regression", "MLP 2×100, regression", lambda: mlp(10, 100, 100, 1), "table", 600, 64, (100_000,) * 2),
        Network("mlp", "784-400-400-10", lambda: mlp(784, 400, 400, 10), "pictures", 600, 32, (100_000, 400_000)),
        Network("wide", "MLP 4×1024", lambda: mlp(784, *[1024] * 4, 10), "pictures", 300, 16, (20_000, 200_000)),
        Network("lenet-top", "LeNet, top two layers", lambda: lenet(0.2), "pictures", 600, 32, (100_000, 400_000)),
        Network("lenet-all", "LeNet, all layers", lambda: lenet(0.1, 0.1), "pictures", 600, 32, (20_000, 200_000)),
        Network("resnet18", "ResNet-18, 32×32", resnet18, "colour", 40, 8, (1_000, 50_000)),
        Network("transformer", "encoder 4×256", transformer, "pictures", 100, 8, (4_000, 100_000), 3e-4),
        Network(
            "classes1000",
            "256-1024-1024-1000",
            lambda: mlp(256, 1024, 1024, 1000),
            "vectors",
            400,
            4,
            (20_000, 100_000),
        ),
    )
}


@dataclass(frozen=True)
class Trained:
    """A network in eval mode, inputs it was not trained on, and where its weights come from."""

    network: Network
    model: Split
    inputs: Tensor
    origin: str

    def batch(self, size: int, device: str | torch.device = "cpu") -> Tensor:
        """Inputs (size, …), the same again where there are too few."""
        rows = torch.arange(size) % len(self.inputs)
        return self.inputs[rows].to(device)


def chosen(names: str | None) -> list[Network]:
    """Networks by their names, separated by commas; all without any.

    >>> [network.title for network in chosen("mlp,wide")]
    ['784-400-400-10', 'MLP 4×1024']
    """
    wanted = list(NETWORKS) if names in (None, "", "all") else [n.strip() for n in str(names).split(",")]
    unknown = [n for n in wanted if n not in NETWORKS]
    if unknown:
        raise UnknownName(f"no network {', '.join(map(repr, unknown))}; there are {', '.join(NETWORKS)}.")
    return [NETWORKS[n] for n in wanted]


# ---------------------------------------------------------------------------------------------------------- data


def planted(shape: tuple[int, ...], classes: int, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Classes made up: a random centre each, and inputs around them. Pictures are smooth and lie in 0 … 1."""
    plan, draw = torch.Generator().manual_seed(7), torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, *shape, generator=plan)
    labels = torch.randint(0, classes, (n,), generator=draw)
    if len(shape) == 1:
        return centres[labels] + 1.5 * torch.randn(n, *shape, generator=draw), labels

    def smooth(x: Tensor) -> Tensor:
        return F.avg_pool2d(x, 7, 1, 3) * 7

    x = smooth(centres)[labels] + 0.7 * smooth(torch.randn(n, *shape, generator=draw))
    return (0.25 + 0.25 * x).clamp(0, 1), labels


def _pictures(data: str | None) -> tuple[Tensor, Tensor, Tensor, str]:
    name = "mnist" if data else "digits"
    train, test = images(name, "train", data), images(name, "test", data)
    return scaled(train.x[:30_000]), train.y[:30_000], scaled(test.x[:POOL]), name


def _table() -> tuple[Tensor, Tensor, Tensor, str]:
    train, test = uci("diabetes", 0, "")
    mean, std = train.x.mean(0), train.x.std(0)
    target = ((train.y - train.y.mean()) / train.y.std()).unsqueeze(1)
    return (train.x - mean) / std, target, (test.x - mean) / std, "diabetes"


def load(network: Network, data: str | None) -> tuple[Tensor, Tensor, Tensor, str]:
    """Training inputs and targets, inputs to measure with, and what they are."""
    if network.data == "table":
        return _table()
    if network.data == "vectors":
        x, y = planted((256,), 1000, 20_000)
        return x, y, planted((256,), 1000, POOL, 1)[0], "planted classes"
    x, y, test, origin = _pictures(data)
    if network.name in ("mlp", "wide"):
        return x.flatten(1), y, test.flatten(1), origin
    if network.data == "colour":

        def colour(x: Tensor) -> Tensor:
            return F.pad(x, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous()

        return colour(x[:4096]), y[:4096], colour(test), origin
    return x, y, test, origin


def prepare(
    network: Network,
    data: str | None = None,
    checkpoints: Path | None = None,
    device: str = "cpu",
    tell: Callable[[str], Any] = lambda text: None,
) -> Trained:
    """The network with weights, from `checkpoints` if it was trained before, which is where it goes otherwise.

    Args:
        network: One of `NETWORKS`.
        data: Folder with MNIST, see `favour_studies.experiments.data`; None for what scikit-learn brings.
        checkpoints: Folder of weights and inputs; None to train and forget.
        device: Where to train and where the model goes.
        tell: Called with a line about what goes on.
    """
    torch.manual_seed(0)
    model = network.make()
    path = None if checkpoints is None else Path(checkpoints) / f"bench-{network.name}{'-mnist' if data else ''}.pt"
    if path is not None and path.is_file():
        kept = torch.load(path, weights_only=True)
        model.load_state_dict(kept["weights"])
        return Trained(network, _frozen(model, device), kept["inputs"], kept["origin"])
    x, y, test, name = load(network, data)
    tell(f"training {network.title} on {name}")
    model.to(device).train()
    _train(model, x.to(device), y.to(device), network)
    origin = f"{network.steps} steps of Adam on {name}"
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        weights = {k: v.cpu() for k, v in model.state_dict().items()}
        torch.save({"weights": weights, "inputs": test[:POOL].clone(), "origin": origin}, path)
    return Trained(network, _frozen(model, device), test[:POOL], origin)


def _train(model: nn.Module, x: Tensor, y: Tensor, network: Network) -> None:
    optimiser = torch.optim.Adam(model.parameters(), network.rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, network.steps)
    loss: nn.Module = nn.MSELoss() if y.is_floating_point() else nn.CrossEntropyLoss()
    draw = torch.Generator().manual_seed(0)
    for _ in range(network.steps):
        rows = torch.randint(0, len(x), (32 if network.data == "colour" else 128,), generator=draw).to(x.device)
        optimiser.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimiser.step()
        schedule.step()


def _frozen(model: Split, device: str) -> Split:
    return model.to(device).eval().requires_grad_(False)
