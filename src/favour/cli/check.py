"""`favour check`."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Annotated

import typer


def check(
    model: Annotated[
        str,
        typer.Argument(
            help="A file of `Predictor.save`, or `package.module:factory`: a function that returns a model."
        ),
    ],
    data: Annotated[Path, typer.Argument(help="Inputs: .npy .npz .pt .safetensors .csv .tsv or .parquet.")],
    weights: Annotated[
        Path | None, typer.Option(help="With a factory: a safetensors file with the model's state dict.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Of a table, with commas. Default: all columns of numbers.")
    ] = None,
    rows: Annotated[int, typer.Option(min=2, help="So many inputs at most, the first of the file.")] = 64,
    samples: Annotated[int, typer.Option(min=10, help="Samples of the network to compare with.")] = 1000,
    output: Annotated[int | None, typer.Option(help="Which output, where the model has several.")] = None,
    method: Annotated[str, typer.Option(help="auto, adjoint, dplr, diag or full.")] = "auto",
    compiled: Annotated[
        bool, typer.Option("--compiled/--eager", help="Time torch.compile too, which takes up to a minute.")
    ] = True,
    seed: Annotated[int, typer.Option(help="Of the samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("check-report"),
) -> None:
    """Is Favour right about your model, and what is it worth? Beliefs beside samples, cost, verdict, and a page.

    Exit status: 0 where the belief can be trusted, 3 for any other verdict.

    Example: favour check my_package.nets:trained inputs.npy --weights weights.safetensors
    """
    from rich.console import Console

    from favour.trial import measure, reading, report, source

    names = tuple(name.strip() for name in next(csv.reader([columns]))) if columns else None
    made, posterior = source.model(model, weights)
    x = reading.read(data, rows, names)
    console = Console()
    with console.status("compiling"):
        predict, x, warned = source.prepared(made, x, posterior, method)
    with console.status(f"comparing with {samples:,} samples, and timing"):
        name = type(made).__name__ if ":" in model else Path(model).name
        result = measure.trial(predict, x, name, samples, seed, compiled, output, tuple(warned))
    report.show(result, console)
    console.print(f"The report is {report.write(result, out)}", soft_wrap=True)
    if not result.passes:
        raise typer.Exit(3)
