"""The command line: `favour COMMAND`.

One function per command, in a file of its own, listed in `COMMANDS`; its docstring is the help text, its arguments are
the options. A command imports what it needs when it runs, so that `favour --help` answers at once.

Other packages add commands by entry points of the group `favour.commands`: a name, and a function like those here. The
package `favour-studies` adds `STUDIES`; without it, these say how to get it.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import entry_points
from inspect import signature
from typing import Annotated, get_args

import favour
from favour.errors import FavourError, InvalidValue, MissingExtra

__all__ = ["COMMANDS", "GROUP", "STUDIES", "build", "main", "with_flags"]

GROUP = "favour.commands"
STUDIES = ("reproduce", "report", "bench")

COMMANDS: tuple[Callable[..., None], ...] = ()
try:
    import rich
    import typer
except ImportError:  # `main` says so; the annotations below stay strings and are never evaluated
    COMPLETE = False
else:
    from favour.cli.check import check
    from favour.cli.demo import demo
    from favour.cli.export import export
    from favour.cli.rate import rate
    from favour.cli.serve import serve

    COMPLETE = True
    COMMANDS = (demo, check, rate, export, serve)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"favour {favour.__version__}")
        raise typer.Exit()


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """How far a trained network's predictions scatter: computed, not sampled."""


def build() -> typer.Typer:
    """The application: every command of `COMMANDS` under its function's name, and those of other packages."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
    app.callback()(_root)
    builtin = {command.__name__ for command in COMMANDS}
    for command in COMMANDS:
        app.command()(command)
    added = {entry.name: entry for entry in entry_points(group=GROUP)}
    for name, entry in added.items():
        if name in builtin:
            raise InvalidValue(f"`{entry.value}` wants to be `favour {name}`, which is a command of Favour's own.")
        app.command(name)(entry.load())
    for name in STUDIES:
        if name not in added:
            anything = {"allow_extra_args": True, "ignore_unknown_options": True}
            app.command(name, context_settings=anything, add_help_option=False)(_missing(name))
    return app


def _missing(name: str) -> Callable[[], None]:
    """A command that says where the real one is."""

    def command() -> None:
        raise MissingExtra(
            f"`favour {name}` comes with the studies, a package of its own: `pip install ./studies` in a clone of "
            "Favour's repository."
        )

    command.__doc__ = "Not installed: comes with the package favour-studies (`pip install ./studies` in a clone)."
    return command


def main() -> None:
    """The console script. Errors of Favour's own are one line on stderr and exit status 1."""
    if not COMPLETE:
        print('The command line needs two more packages: pip install "favour[cli]"', file=sys.stderr)
        raise SystemExit(2)
    try:
        build()()
    except FavourError as error:
        print(f"favour: {with_flags(str(error), sys.argv[1:2])}", file=sys.stderr)
        raise SystemExit(1) from None


def with_flags(message: str, command: Sequence[str]) -> str:
    """A message of the library in the words of a command: a parameter that it names is the command's flag.

    >>> with_flags("leave out `columns`; column `id` is there.", ["rate"])
    'leave out `--columns`; column `id` is there.'
    """
    functions = {function.__name__: function for function in COMMANDS}
    if not command or command[0] not in functions:
        return message
    parameters = signature(functions[command[0]], eval_str=True).parameters.values()
    options = [
        p.name for p in parameters if any(isinstance(m, typer.models.OptionInfo) for m in get_args(p.annotation)[1:])
    ]
    for name in options:
        flag = f"`--{name.replace('_', '-')}`"
        message = re.sub(rf"(?<!column )`{name}`", flag, message)
    return message
