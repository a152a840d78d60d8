"""The command line, run in the same process where possible."""

import builtins
import dataclasses
import importlib
import io
import json
import re
import sys
from importlib.metadata import EntryPoint

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import favour.cli
from favour.demo import comparison, digits, report
from favour.errors import InvalidValue, MissingExtra
from favour.extras import require


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


def test_missing_package_names_the_extra():
    with pytest.raises(MissingExtra, match=r'`no_such_package_at_all`.*pip install "favour\[demo\]"'):
        require("no_such_package_at_all", "demo")


def test_commands_of_another_package_say_how_to_get_it(monkeypatch, capsys):
    monkeypatch.setattr(favour.cli, "entry_points", lambda group: ())
    shown = " ".join(run("--help").stdout.split())
    for name in favour.cli.STUDIES:
        assert name in shown
        monkeypatch.setattr(sys, "argv", ["favour", name, "somewhere", "--unknown", "3", "--help"])
        with pytest.raises(SystemExit) as stop:
            favour.cli.main()
        assert stop.value.code == 1
        assert f"`favour {name}` comes with the studies" in capsys.readouterr().err


def test_commands_are_added_by_entry_points(monkeypatch):
    """`json.tool:main` stands for any function of any package."""

    def points(group):
        assert group == "favour.commands"
        return [EntryPoint(name, "os:getcwd", group) for name in names]

    monkeypatch.setattr(favour.cli, "entry_points", points)
    names = ["where", "report"]
    assert run("where").exit_code == 0 and run("report").exit_code == 0
    assert isinstance(run("bench").exception, MissingExtra)
    names.append("demo")
    with pytest.raises(InvalidValue, match="`favour demo`"):
        favour.cli.build()


@pytest.fixture
def small() -> tuple[digits.Data, torch.nn.Sequential]:
    """Fifty test images, and a network that was trained for three epochs."""
    data, model = digits.load(), digits.network()
    losses = list(digits.train(model, data, epochs=3))
    assert losses[2] < losses[0] and not model.training
    return dataclasses.replace(data, test_x=data.test_x[:50], test_y=data.test_y[:50]), model


def test_demo_passes_its_options_on(monkeypatch, tmp_path, small):
    given = {}
    monkeypatch.setattr(digits, "load", lambda seed: given.update(seed=seed) or small[0])
    monkeypatch.setattr(digits, "train", lambda model, data, epochs, seed: given.update(epochs=epochs) or ())
    monkeypatch.setattr(comparison, "compare", lambda *rest: made_up())
    before = torch.get_num_threads()
    try:
        result = run("demo", "--epochs", "7", "--seed", "3", "--threads", "2", "--out", str(tmp_path / "x"))
        assert result.exit_code == 0 and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
    assert given == {"epochs": 7, "seed": 3}
    assert "report.html" in result.stdout.replace("\n", "")
    content = json.loads((tmp_path / "x" / "demo.json").read_text())
    assert content["training"] == {"epochs": 7, "inputs": len(small[0].train_x), "seed": 3}
    assert [row["covariance_error"] for row in content["rows"]] == [None, 0.2, 0.02]
    text = (tmp_path / "x" / "report.html").read_text()
    assert "100 samples have a lower NLL (0.0900) and the same ECE, in 10 times the time" in text
    assert "cannot be told from" in text and 'id="table-demo"' in text and text.count("<svg") == 1
    assert "default-src 'none'" in text and not re.search(r"<script|@import|url\(['\"]?http|src=", text)


def made_up() -> comparison.Comparison:
    told = (("plain", 0.2, None, 1.0), ("100 samples", 0.09, 0.2, 50.0), ("Favour", 0.1, 0.02, 5.0))
    rows = tuple(comparison.Row(method, 0.97, nll, 0.01, error, t, t) for method, nll, error, t in told)
    return comparison.Comparison(rows, 2000, 0.03, 540, 1)


def test_demo_compares_every_method(small):
    data, model = small
    found = comparison.compare(model, data, repeats=1, draws=500)
    assert [row.method for row in found.rows] == [
        "plain",
        "10 samples",
        "100 samples",
        "Favour",
    ]
    plain, few, many, ours = found.rows
    assert plain.covariance_error is None
    # The error of n samples falls as 1/√n, and Favour is nearer to the reference than 100 of them.
    assert few.covariance_error > many.covariance_error > ours.covariance_error > 0
    assert min(row.accuracy for row in found.rows) > 0.8

    console = Console(width=100, record=True, file=io.StringIO())
    report.show(found, console)
    printed = " ".join(console.export_text().split())
    for row in found.rows:
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
    _, error = comparison._reference(torch.nn.Identity(), torch.zeros(8, 3), n, torch.Generator().manual_seed(0))
    expected = ((sigma.norm() ** 2 + sigma.trace() ** 2) / (n - 1)).sqrt() / sigma.norm()
    assert error == pytest.approx(expected.item(), rel=0.03)
