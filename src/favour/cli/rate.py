"""`favour rate`."""

from __future__ import annotations

import csv
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer


class Engine(StrEnum):
    """Who carries out a rating."""

    local = "local"
    ray = "ray"


def rate(
    model: Annotated[
        str,
        typer.Argument(help="A .pt2 or .onnx file of `favour export`, a saved predictor, or package.module:factory."),
    ],
    data: Annotated[list[str], typer.Argument(help="Parquet, CSV, TSV or NPY files, folders of images, or globs.")],
    out: Annotated[str, typer.Option(help="A .parquet, .csv or .tsv file; a name without suffix is a folder.")],
    weights: Annotated[Path | None, typer.Option(help="Safetensors file for the factory's module.")] = None,
    columns: Annotated[str | None, typer.Option(help="Features, with commas. Default: all columns of numbers.")] = None,
    id: Annotated[str | None, typer.Option(help="Column to copy to the result, and not to feed to the model.")] = None,
    kind: Annotated[
        str | None, typer.Option(help="softmax, binary, multilabel, ordinal or regression. Default: the model's.")
    ] = None,
    level: Annotated[float | None, typer.Option(help="Of a regression's intervals. Default: 0.95.")] = None,
    size: Annotated[str | None, typer.Option(help="Of images: 224 or 224,320 (height, width).")] = None,
    channels: Annotated[int | None, typer.Option(help="Of images: 1 or 3. Default: the model's.")] = None,
    mean: Annotated[str | None, typer.Option(help="Subtracted from images with values 0 to 1: 0.5 or r,g,b.")] = None,
    std: Annotated[str | None, typer.Option(help="That images are divided by: 0.5 or r,g,b.")] = None,
    dtype: Annotated[str | None, typer.Option(help="Of a factory's input, such as int64. Default: float32.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows rated at once. Default: by memory.")] = None,
    part_rows: Annotated[int | None, typer.Option(min=1, help="Rows between two safe points.")] = None,
    every_class: Annotated[bool, typer.Option("--every-class", help="A column for each class's probability.")] = False,
    header: Annotated[
        bool | None,
        typer.Option(
            "--header/--no-header", help="Whether the first line of CSV files holds names, where it is unclear."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda. Default: cuda if there is one.")] = None,
    engine: Annotated[Engine, typer.Option(help="local, or ray: a pool of processes on one or more machines.")] = (
        Engine.local
    ),
    workers: Annotated[int | None, typer.Option(min=1, help="Processes of --engine ray. Default: all.")] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier result, once the new is whole.")
    ] = False,
) -> None:
    """Rate every row of a data set: prediction, probability, interval and scores, in a Parquet or CSV file.

    An interrupted run continues when the same command is given again. Rows that cannot be read are listed with the
    reason in OUT.bad.parquet (or .csv).

    Example: favour rate model.onnx patients.csv --id patient --out rated.parquet
    """
    options: dict[str, Any] = {
        "columns": _names(columns),
        "id": id,
        "kind": kind,
        "level": level,
        "size": _size(size),
        "channels": channels,
        "mean": _numbers("mean", mean),
        "std": _numbers("std", std),
        "dtype": dtype,
        "batch_size": batch_size,
        "part_rows": part_rows,
        "every_class": every_class,
        "header": header,
        "weights": weights,
        "device": device,
        "overwrite": overwrite,
    }
    if engine is Engine.ray:
        from favour.scale import rate as run

        options["workers"] = workers
    elif workers is not None:
        raise typer.BadParameter("belongs to --engine ray", param_hint="--workers")
    else:
        from favour.rating import rate as run
    try:
        with _bar() as bar:
            done = run(data, model, out, progress=bar, **options)
    except KeyboardInterrupt:
        typer.echo("favour: interrupted; the same command continues from here.", err=True)
        raise typer.Exit(130) from None
    typer.echo(str(done))


def _names(text: str | None) -> tuple[str, ...] | None:
    """Names between commas; one that has a comma in it stands in quotes."""
    return tuple(name.strip() for name in next(csv.reader([text]))) if text else None


def _numbers(name: str, text: str | None) -> tuple[float, ...] | None:
    try:
        return None if text is None else tuple(float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no list of numbers", param_hint=f"--{name}") from None


def _size(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    sizes = [int(part) for part in text.split(",") if part.strip().isdigit()]
    if len(sizes) not in (1, 2) or len(sizes) != len(text.split(",")):
        raise typer.BadParameter(f"{text!r} is neither 224 nor 224,320", param_hint="--size")
    return sizes[0], sizes[-1]


class _bar:
    """A progress bar on the error stream, once the number of rows is known."""

    def __enter__(self) -> _bar:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        parts = (TextColumn("rating"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[bad]}"))
        self.progress = Progress(*parts, TimeRemainingColumn(), console=Console(stderr=True))
        self.task = self.progress.add_task("", total=None, bad="")
        return self

    def __call__(self, rows: int, bad: int, total: int) -> None:
        self.progress.start()  # what is wrong with the arguments has been said by now
        note = f"{bad:,} bad" if bad else ""
        self.progress.update(self.task, completed=rows + bad, total=total, bad=note)

    def __exit__(self, *error: object) -> None:
        if self.progress.live.is_started:
            self.progress.stop()
