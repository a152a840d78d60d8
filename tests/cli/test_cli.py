"""The command line, run in the same process where possible."""

import builtins
import importlib
import re
import sys
from importlib.metadata import EntryPoint

import pytest
import typer.main
from typer.testing import CliRunner

import favour.cli
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


def test_errors_name_flags(monkeypatch, capsys, tmp_path):
    (tmp_path / "rows.npy").write_bytes(b"")
    (tmp_path / "model.onnx").write_bytes(b"")
    words = ["rate", "model.onnx", "rows.npy", "--out", "x.parquet", "--std", "0"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["favour", *words])
    with pytest.raises(SystemExit):
        favour.cli.main()
    printed = capsys.readouterr()
    assert "`--std` is (0.0,)" in printed.err
    assert printed.out == "" and printed.err.count("\n") == 1  # no progress bar before a usage error


@pytest.mark.parametrize("command", [*(c.__name__ for c in favour.cli.COMMANDS), *favour.cli.STUDIES])
def test_help_has_an_example_that_parses(command):
    text = " ".join(run(command, "--help").output.replace("│", " ").split())
    example = re.search(rf"Example: favour {command} ((?:(?!(?:Arguments|Options|╭)).)+)", text)
    assert example, text
    words = [word for word in example[1].split() if not set(word) <= set("─╭╮╰╯│")]
    group = typer.main.get_command(favour.cli.build())
    group.commands[command].make_context(command, words)


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
