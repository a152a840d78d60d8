"""One thread per process, and the entry points of this package whether it is installed or not. Seeds: `conftest.py`
above."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
import torch

import favour.cli

torch.set_num_threads(1)  # the tensors are small, and the workers share the cores

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points of pyproject.toml, as `favour` finds them where this package is installed."""
    found = [EntryPoint(*item, favour.cli.GROUP) for item in PROJECT["entry-points"][favour.cli.GROUP].items()]
    monkeypatch.setattr(favour.cli, "entry_points", lambda group: found)
    return found
