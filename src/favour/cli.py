"""The command line: `favour COMMAND`.

One function per command, listed in `COMMANDS`; its docstring is the help text, its arguments are the options.
A command imports what it needs when it runs, so that `favour --help` answers without loading an experiment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
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
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
) -> None:
    """Train a small dropout network on handwritten digits; compare plain inference, sampling and Favour."""
    from favour.experiments import digits

    digits.main(epochs=epochs, seed=seed, threads=threads, out=out)


class Experiment(StrEnum):
    """What `favour reproduce` can run."""

    all = "all"
    classification = "classification"
    regression = "regression"
    ood = "ood"
    jsd = "jsd"
    figures = "figures"


class ProfileName(StrEnum):
    """Sizes of a run."""

    quick = "quick"
    paper = "paper"
    tiny = "tiny"


def reproduce(
    experiment: Annotated[Experiment, typer.Argument(help="Which experiment of the paper.")],
    profile: Annotated[
        ProfileName,
        typer.Option(help="quick: under 40 minutes on 2 cores; paper: for a GPU; tiny: a trial in seconds."),
    ] = ProfileName.quick,
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder with mnist/, fashion_mnist/, cifar10/, svhn/ and uci/; or `hub`. Without it: digits."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results; an interrupted run there is continued.")] = Path(
        "results/reproduce"
    ),
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of networks that are already trained; by default in the results' folder."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 1,
) -> None:
    """Reproduce the paper's experiments: train, measure, write JSON, figures and one HTML report."""
    import torch

    from favour.experiments.reproduce import reproduce as run

    if threads > 0:
        torch.set_num_threads(threads)
    run(experiment.value, profile.value, data, device, out, checkpoints, seed)


def report(
    directory: Annotated[Path, typer.Argument(help="Folder that `favour reproduce` or `favour demo` wrote.")],
) -> None:
    """Build the HTML report of a folder of results anew."""
    from favour.report import build as build_report

    print(build_report(directory))


COMMANDS: tuple[Callable[..., None], ...] = (demo, reproduce, report)


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
