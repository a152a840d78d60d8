"""The command line, run in the same process where possible."""

import builtins
import dataclasses
import importlib
import io
import json
import sys
import types
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import favour.cli
from favour.errors import InvalidValue
from favour.experiments import MissingExtra, digits, require
from favour.experiments import reproduce as experiments_reproduce


def run(*arguments: str):
    return CliRunner().invoke(favour.cli.build(), list(arguments))


def test_version_is_printed():
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout == f"favour {favour.__version__}\n"


def test_help_lists_every_command():
    result = run("--help")
    assert result.exit_code == 0
    for command in favour.cli.COMMANDS:
        assert command.__name__ in result.stdout


def test_no_command_shows_help():
    assert "Usage" in run().output


def test_unknown_command_is_refused():
    result = run("dmeo")
    assert result.exit_code == 2
    assert "dmeo" in result.output


def test_demo_refuses_zero_epochs():
    assert run("demo", "--epochs", "0").exit_code == 2


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_is_one_line_and_status_2(monkeypatch, capsys, missing):
    original = builtins.__import__

    def without(name, *rest, **options):
        if name.split(".")[0] == missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return original(name, *rest, **options)

    with monkeypatch.context() as patch:
        patch.setattr(favour, "cli", favour.cli)  # put back what the import below replaces
        patch.delitem(sys.modules, "favour.cli")
        patch.setattr(builtins, "__import__", without)
        bare = importlib.import_module("favour.cli")
    with pytest.raises(SystemExit) as stop:
        bare.main()
    assert stop.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert 'pip install "favour[cli]"' in printed.err


def test_own_errors_are_one_line_and_status_1(monkeypatch, capsys):
    def fail() -> None:
        """Fail."""
        raise InvalidValue("p is 2; 0 ≤ p < 1 is required.")

    monkeypatch.setattr(favour.cli, "COMMANDS", (fail,))
    monkeypatch.setattr(sys, "argv", ["favour", "fail"])
    with pytest.raises(SystemExit) as stop:
        favour.cli.main()
    assert stop.value.code == 1
    assert capsys.readouterr().err == "favour: p is 2; 0 ≤ p < 1 is required.\n"


def test_missing_experiment_package_names_the_extra():
    with pytest.raises(MissingExtra, match=r'`no_such_package_at_all`.*pip install "favour\[experiments\]"'):
        require("no_such_package_at_all")


def test_demo_passes_its_options_on(monkeypatch):
    given = {}
    monkeypatch.setattr(digits, "main", lambda **options: given.update(options))
    assert run("demo", "--epochs", "7", "--seed", "3", "--threads", "2", "--out", "x").exit_code == 0
    assert given == {"epochs": 7, "seed": 3, "threads": 2, "out": Path("x")}


def test_demo_ends_with_a_report(monkeypatch, tmp_path):
    seen = []
    module = types.ModuleType("favour.report")
    module.build = lambda folder: seen.append(folder) or folder / "report.html"
    monkeypatch.setitem(sys.modules, "favour.report", module)
    monkeypatch.setattr(favour, "report", module, raising=False)
    data, model = digits.load(), digits.network()
    list(digits.train(model, data, epochs=1))
    rows = (digits.Row("plain", 0.9, 0.3, 0.02, None, 1.0, 1.0),)
    comparison = digits.Comparison(rows, 500, 0.04, len(data.test_x), 1)
    assert digits.write(comparison, model, data, 1, 0, tmp_path) == tmp_path / "report.html"
    assert seen == [tmp_path]
    content = json.loads((tmp_path / "demo.json").read_text())
    assert content["experiment"] == "demo" and content["rows"][0]["covariance_error"] is None
    for curve in content["reliability"].values():
        assert sum(curve["count"]) == len(data.test_x)
        assert len(curve["confidence"]) == len(curve["accuracy"]) == len(curve["count"])
    p = model(data.test_x).softmax(-1)
    overall = sum(
        a * c for a, c in zip(*(content["reliability"]["plain"][k] for k in ("accuracy", "count")), strict=True)
    )
    assert overall == pytest.approx((p.argmax(1) == data.test_y).sum().item())


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
    module = types.ModuleType("favour.report")
    module.build = lambda folder: folder / "report.html"
    monkeypatch.setitem(sys.modules, "favour.report", module)
    result = run("report", str(tmp_path))
    assert result.exit_code == 0 and "report.html" in result.stdout.replace("\n", "")


def test_demo_compares_every_method():
    data, model = digits.load(), digits.network()
    losses = list(digits.train(model, data, epochs=3))
    assert losses[2] < losses[0]
    assert not model.training
    some = dataclasses.replace(data, test_x=data.test_x[:50], test_y=data.test_y[:50])
    comparison = digits.compare(model, some, repeats=1, draws=500)
    assert [row.method for row in comparison.rows] == [
        "plain",
        "10 samples",
        "100 samples",
        "Favour",
    ]
    plain, few, many, ours = comparison.rows
    assert plain.covariance_error is None
    # The error of n samples falls as 1/√n, and Favour is nearer to the reference than 100 of them.
    assert few.covariance_error > many.covariance_error > ours.covariance_error > 0
    assert min(row.accuracy for row in comparison.rows) > 0.8

    console = Console(width=100, record=True, file=io.StringIO())
    digits.show(comparison, console)
    printed = " ".join(console.export_text().split())
    for row in comparison.rows:
        assert f"{row.method} │ {row.accuracy:.1%} │ {row.nll:.4f} │ {row.ece:.4f}" in printed
    assert "covariance of 500 samples" in printed


def test_demo_training_leaves_the_random_state_alone():
    data, model = digits.load(), digits.network()
    before = torch.get_rng_state()
    for _ in digits.train(model, data, epochs=2):
        assert torch.equal(torch.get_rng_state(), before)


def test_demo_reference_error_of_gaussian_draws(monkeypatch):
    # For Gaussian draws E‖S − Σ‖² = (‖Σ‖² + tr² Σ)/(n − 1), independently of the fourth moments used.
    scale = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    n, sigma = 20_000, scale.square().diag()

    def gaussian(model, x, n, generator):
        return scale * torch.randn(n, len(x), 3, dtype=torch.float64, generator=generator)

    monkeypatch.setattr(favour, "sample", gaussian)
    _, error = digits._reference(torch.nn.Identity(), torch.zeros(8, 3), n, torch.Generator().manual_seed(0))
    expected = ((sigma.norm() ** 2 + sigma.trace() ** 2) / (n - 1)).sqrt() / sigma.norm()
    assert error == pytest.approx(expected.item(), rel=0.03)
