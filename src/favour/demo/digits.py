"""The data, pictures that are no digits, the network and its training.

64-100-100-10 with ReLU and dropout 0.2, on scikit-learn's 8 × 8 digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from favour.extras import require


@dataclass(frozen=True)
class Data:
    """Standardised pixels, (N, 64), and labels, (N,); pixels are centre + scale · x, each (64,)."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor
    centre: Tensor
    scale: Tensor

    def pixels(self, x: Tensor) -> Tensor:
        """Pictures (8, 8) with values 0 to 1 (white to black)."""
        return ((self.centre + self.scale * x) / 16).clamp(0, 1).reshape(8, 8)


def load(seed: int = 0) -> Data:
    """The digits, 70% for training; pixels standardised by the training set's mean and deviation.

    Pixels that are constant there, the corners of the image, are only centred.
    """
    x, y = require("sklearn.datasets", "demo").load_digits(return_X_y=True)
    split = require("sklearn.model_selection", "demo").train_test_split
    train_x, test_x, train_y, test_y = split(x, y, test_size=0.3, stratify=y, random_state=seed)
    scaler = require("sklearn.preprocessing", "demo").StandardScaler().fit(train_x)
    return Data(
        torch.from_numpy(scaler.transform(train_x)).float(),
        torch.from_numpy(train_y),
        torch.from_numpy(scaler.transform(test_x)).float(),
        torch.from_numpy(test_y),
        torch.from_numpy(scaler.mean_).float(),
        torch.from_numpy(scaler.scale_).float(),
    )


def network(seed: int = 0) -> nn.Sequential:
    """64-100-100-10, ReLU, dropout 0.2 after each hidden layer; the caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(64, 100),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(100, 100),
            nn.ReLU(),
            nn.Dropout(0.2),
            nn.Linear(100, 10),
        )


def train(model: nn.Module, data: Data, epochs: int = 60, seed: int = 0, batch: int = 64) -> Iterator[float]:
    """Adam on the cross-entropy; yields the mean loss of each epoch and leaves the model in eval mode."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        random_state = torch.get_rng_state()
    for _ in range(epochs):
        losses = []
        # A generator function is suspended at `yield`, so the caller's random state is swapped out per epoch.
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(random_state)
            model.train()
            for index in torch.randperm(len(data.train_x)).split(batch):
                loss = nn.functional.cross_entropy(model(data.train_x[index]), data.train_y[index])
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                losses.append(loss.item())
            model.eval()
            random_state = torch.get_rng_state()
        yield statistics.fmean(losses)


# Drawn like the digits, eight by eight, 0 to 16; no class is theirs.
LETTERS = {
    "A": "00044000 000gg000 00g00g00 00g00g00 0gggggg0 0g0000g0 gg0000gg 00000000",
    "X": "g000000g 0g0000g0 00g00g00 000gg000 000gg000 00g00g00 0g0000g0 g000000g",
}


def unfamiliar(data: Data, seed: int = 0) -> dict[str, Tensor]:
    """Pictures that are no digits, by name, (64,) each and standardised like the data: two letters, and noise."""
    pixels = {name: [[int(c, 17) for c in row] for row in text.split()] for name, text in LETTERS.items()}
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(0, 17, (64,), generator=generator).float()
    pictures = {f"the letter {name}": torch.tensor(rows).float().flatten() for name, rows in pixels.items()}
    return {name: (picture - data.centre) / data.scale for name, picture in {**pictures, "noise": noise}.items()}
