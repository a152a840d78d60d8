"""The entry points of this package, whether it is installed or not."""

import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import favour.cli

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """The entry points of pyproject.toml, as `favour` finds them where this package is installed."""
    found = [EntryPoint(*item, favour.cli.GROUP) for item in PROJECT["entry-points"][favour.cli.GROUP].items()]
    monkeypatch.setattr(favour.cli, "entry_points", lambda group: found)
    return found
