"""The command line: `favour COMMAND`.

One function per command, in a file of its own, listed in `COMMANDS`; its docstring is the help text, its arguments are
the options. A command imports what it needs when it runs, so that `favour --help` answers at once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import favour
from favour.errors import FavourError

COMMANDS: tuple[Callable[..., None], ...] = ()
try:
    import rich
    import typer
except ImportError:  # `main` says so; the annotations below stay strings and are never evaluated
    COMPLETE = False
else:
    from favour.cli.bench import bench
    from favour.cli.demo import demo
    from favour.cli.export import export
    from favour.cli.rate import rate
    from favour.cli.reproduce import report, reproduce
    from favour.cli.serve import serve

    COMPLETE = True
    COMMANDS = (demo, reproduce, report, rate, bench, export, serve)


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
    """Error bars for trained networks, without sampling."""


def build() -> typer.Typer:
    """The application, with every command of `COMMANDS` registered under its function's name."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
    app.callback()(_root)
    for command in COMMANDS:
        app.command()(command)
    return app


def main() -> None:
    """The console script. Errors of Favour's own are one line on stderr and exit status 1."""
    if not COMPLETE:
        print('The command line needs two more packages: pip install "favour[cli]"', file=sys.stderr)
        raise SystemExit(2)
    try:
        build()()
    except FavourError as error:
        print(f"favour: {error}", file=sys.stderr)
        raise SystemExit(1) from None
