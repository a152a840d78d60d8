"""The commands that this package adds: `favour reproduce` and `favour report`; `favour bench` is in test_bench."""

import sys
import types
from pathlib import Path

import torch
from typer.testing import CliRunner

import favour.cli
from favour_studies.experiments import reproduce as experiments_reproduce


def run(*arguments: str):
    return CliRunner().invoke(favour.cli.build(), list(arguments))


def test_every_command_is_there(installed):
    assert {entry.name for entry in installed} == set(favour.cli.STUDIES)
    shown = " ".join(run("--help").stdout.split())
    assert "Not installed" not in shown and all(name in shown for name in favour.cli.STUDIES)


def test_reproduce_interrupted_says_how_to_go_on(monkeypatch, tmp_path):
    def stopped(*options, **named):
        raise KeyboardInterrupt

    monkeypatch.setattr(experiments_reproduce, "reproduce", stopped)
    result = run("reproduce", "jsd", "--profile", "tiny", "--out", str(tmp_path))
    assert result.exit_code == 130 and "the same command continues" in result.output


def test_reproduce_passes_its_options_on(monkeypatch, tmp_path):
    given = []
    monkeypatch.setattr(experiments_reproduce, "reproduce", lambda *options, **named: given.append((options, named)))
    before = torch.get_num_threads()
    try:
        chosen = ("--profile", "paper", "--data", "d", "--out", str(tmp_path), "--seed", "3", "--checkpoints", "c")
        assert run("reproduce", "ood", *chosen, "--time-device", "cuda", "--workers", "3").exit_code == 0
    finally:
        torch.set_num_threads(before)
    assert given == [(("ood", "paper", "d", "cpu", tmp_path, Path("c"), 3), {"time_device": "cuda", "workers": 3})]
    assert run("reproduce", "everything").exit_code == 2 == run("reproduce", "ood", "--workers", "0").exit_code
    assert run("reproduce", "ood", "--profile", "slow").exit_code == 2


def test_report_is_rebuilt(monkeypatch, tmp_path):
    module = types.ModuleType("favour_studies.report")
    module.build = lambda folder: folder / "report.html"
    monkeypatch.setitem(sys.modules, "favour_studies.report", module)
    result = run("report", str(tmp_path))
    assert result.exit_code == 0 and "report.html" in result.stdout.replace("\n", "")
