"""The networks of the paper's experiments.

LeNet for pictures, with ReLU and max-pooling; the two top linear layers are the random ones:

    conv 5×5 → 6, pool, conv 5×5 → 16, pool, 400 → 120, [120 → 84, 84 → classes]

and a perceptron with two hidden layers for tables, all of it random:

    [inputs → 100, 100 → 100, 100 → 1]

Random means, by model name:

    dropout10, dropout25, dropout50     dropout of that rate on the inputs of the layer (of the hidden layers' outputs)
    vi                                  a mean-field Gaussian over its weights, prior N(0, 1/fan-in)
"""

from __future__ import annotations

import math
import zlib

import torch
from torch import Tensor, nn

import favour.nn
from favour.errors import InvalidValue

MODELS = {"dropout10": 0.1, "dropout25": 0.25, "dropout50": 0.5, "vi": 0.0}
TITLES = {"dropout10": "dropout 10%", "dropout25": "dropout 25%", "dropout50": "dropout 50%", "vi": "mean-field VI"}
WIDTH = 100
INITIAL_SPREAD = 0.2  # of a Gaussian weight, in standard deviations of its prior


def rate(model: str) -> float:
    """The dropout rate of a model; 0 for `vi`."""
    if model not in MODELS:
        raise InvalidValue(f"no model {model!r}; there are {', '.join(MODELS)}.")
    return MODELS[model]


def _linear(inputs: int, outputs: int, bayesian: bool) -> nn.Linear:
    if not bayesian:
        return nn.Linear(inputs, outputs)
    prior = 1 / math.sqrt(inputs)
    return favour.nn.BayesLinear(inputs, outputs, prior_std=prior, initial_std=INITIAL_SPREAD * prior)


class LeNet(nn.Module):
    """LeNet on grey 28 × 28 or coloured 32 × 32 pictures.

    Args:
        model: One of `MODELS`.
        channels: 1 or 3; a grey picture is padded by two pixels, so that both give 5 × 5 maps at the end.
        classes: Number of outputs.

    Example:
        >>> LeNet("dropout10")(torch.zeros(2, 1, 28, 28)).shape
        torch.Size([2, 10])
    """

    def __init__(self, model: str = "dropout10", channels: int = 1, classes: int = 10) -> None:
        super().__init__()
        p = rate(model)
        self.conv1 = nn.Conv2d(channels, 6, 5, padding=2 if channels == 1 else 0)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.fc1 = nn.Linear(400, 120)
        self.drop1 = nn.Dropout(p)
        self.fc2 = _linear(120, 84, model == "vi")
        self.drop2 = nn.Dropout(p)
        self.fc3 = _linear(84, classes, model == "vi")

    def forward(self, x: Tensor) -> Tensor:
        """(B, channels, side, side) → (B, classes), the logits."""
        x = torch.max_pool2d(self.conv1(x), 2).relu()
        x = torch.max_pool2d(self.conv2(x), 2).relu()
        x = self.fc1(x.flatten(1)).relu()
        x = self.fc2(self.drop1(x)).relu()
        return self.fc3(self.drop2(x))


class Perceptron(nn.Module):
    """Two hidden layers of ReLUs and one output.

    Args:
        model: One of `MODELS`.
        inputs: Number of columns of the table.
        width: Of both hidden layers.

    Example:
        >>> Perceptron("vi", 13)(torch.zeros(2, 13)).shape
        torch.Size([2, 1])
    """

    def __init__(self, model: str = "dropout10", inputs: int = 1, width: int = WIDTH, outputs: int = 1) -> None:
        super().__init__()
        p, bayesian = rate(model), model == "vi"
        self.fc1 = _linear(inputs, width, bayesian)
        self.drop1 = nn.Dropout(p)
        self.fc2 = _linear(width, width, bayesian)
        self.drop2 = nn.Dropout(p)
        self.fc3 = _linear(width, outputs, bayesian)

    def forward(self, x: Tensor) -> Tensor:
        """(B, inputs) → (B, outputs)."""
        x = self.drop1(self.fc1(x).relu())
        x = self.drop2(self.fc2(x).relu())
        return self.fc3(x)


def seed_of(*parts: object) -> int:
    """A seed from a description, the same on every machine.

    >>> seed_of("mnist", "vi", 0) == seed_of("mnist", "vi", 0)
    True
    """
    return zlib.crc32("/".join(map(str, parts)).encode())
