"""`full` says what memory it would need before it takes any of it."""

import pytest
import torch
from torch import nn

import favour
from favour.errors import InsufficientMemory
from favour.methods import full
from favour.methods.memory import Peak


def network():
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Dropout(0.1), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(72, 5)), torch.randn(4, 3, 10, 10)


def test_columns_that_memory_has_no_room_for_are_refused_before_they_are_made(monkeypatch):
    model, x = network()
    predict = favour.compile(model, x, method="full")
    monkeypatch.setattr(full, "free_memory", lambda device: 2**21)
    with (
        Peak() as peak,
        pytest.raises(InsufficientMemory, match=r"columns of .* entries at `aten.*`.*method='adjoint'"),
    ):
        predict(x)
    assert peak.most < 2**21
    assert issubclass(InsufficientMemory, MemoryError)


def test_what_is_predicted_covers_what_is_taken(monkeypatch):
    """With as much as a pass really takes and a half more, it goes through; with a third of that it does not."""
    model, x = network()
    predict = favour.compile(model, x, method="full")
    with torch.no_grad(), Peak() as peak:
        predict(x)
    monkeypatch.setattr(full, "free_memory", lambda device: int(1.5 * peak.most))
    predict(x)
    monkeypatch.setattr(full, "free_memory", lambda device: int(0.33 * peak.most))
    with pytest.raises(InsufficientMemory):
        predict(x)
