"""Shared by tests and doctests: fixed seeds, and no check of every predictor."""

import pytest
import torch

import favour


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _self_check(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """`favour.compile` compares every predictor with samples, which thousands of tests do not need: those that do say
    `@pytest.mark.self_check`, and a `check=` that a test gives always counts."""
    if not request.node.get_closest_marker("self_check"):
        monkeypatch.setitem(favour.compile.__kwdefaults__, "check", False)
