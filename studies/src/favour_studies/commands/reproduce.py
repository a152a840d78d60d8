"""`favour reproduce` and `favour report`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer


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
    time_device: Annotated[
        str,
        typer.Option(
            help="Where methods are timed: cpu or cuda. Such small networks are not what a GPU is timed with."
        ),
    ] = "cpu",
    out: Annotated[Path, typer.Option(help="Folder of the results; an interrupted run there is continued.")] = Path(
        "results/reproduce"
    ),
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of networks that are already trained; by default in the results' folder."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of everything.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 1,
    workers: Annotated[
        int, typer.Option(min=1, help="Processes that compute results beside each other, once methods are timed.")
    ] = 1,
) -> None:
    """Reproduce the paper's experiments: train, measure, write JSON, figures and one HTML report.

    Example: favour reproduce regression --profile quick --out results
    """
    import torch

    from favour_studies.experiments.reproduce import reproduce as run

    if threads > 0:
        torch.set_num_threads(threads)
    try:
        run(
            experiment.value,
            profile.value,
            data,
            device,
            out,
            checkpoints,
            seed,
            time_device=time_device,
            workers=workers,
        )
    except KeyboardInterrupt:
        typer.echo("favour: interrupted; the same command continues from here.", err=True)
        raise typer.Exit(130) from None


def report(
    directory: Annotated[Path, typer.Argument(help="Folder that `favour reproduce` wrote.")],
) -> None:
    """Build the HTML report of a folder of results anew.

    Example: favour report results
    """
    from favour_studies.report import build as build_report

    print(build_report(directory))
