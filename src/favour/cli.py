"""The command line: `favour COMMAND`.

One function per command, listed in `COMMANDS`; its docstring is the help text, its arguments are the options.
A command imports what it needs when it runs, so that `favour --help` answers without loading an experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated

import favour
from favour.errors import FavourError

try:
    import rich  # noqa: F401  (the commands print with it)
    import typer
except ImportError:  # `main` says so; the annotations below stay strings and are never evaluated
    COMPLETE = False
else:
    COMPLETE = True


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training set.")] = 60,
    seed: Annotated[int, typer.Option(help="Fixes the weights, the batches and the samples.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 1,
) -> None:
    """Train a small dropout network on handwritten digits; compare plain inference, sampling and Favour."""
    from favour.experiments import digits

    digits.main(epochs=epochs, seed=seed, threads=threads)


COMMANDS: tuple[Callable[..., None], ...] = (demo,)


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


if __name__ == "__main__":
    main()
