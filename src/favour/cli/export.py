"""`favour export`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

EXAMPLES = 10_000  # rows of a file of them, at most


class Kind(StrEnum):
    """What the outputs are."""

    regression = "regression"
    softmax = "softmax"
    binary = "binary"
    multilabel = "multilabel"
    ordinal = "ordinal"


def export(
    model: Annotated[
        str,
        typer.Argument(
            help="A file of `Predictor.save`, or `package.module:factory` for a function that returns a model."
        ),
    ],
    out: Annotated[Path, typer.Option(help="File to write; .onnx or .pt2 chooses the format.")],
    weights: Annotated[
        Path | None, typer.Option(help="With a factory: a safetensors file with the model's state dict.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="With a factory: shape of one example without the batch, such as 3,32,32.")
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="With a factory: dtype of the example, such as float32 or int64.")
    ] = "float32",
    kind: Annotated[
        Kind | None, typer.Option(help="By default two or more outputs are classes (softmax), else regression.")
    ] = None,
    labels: Annotated[str | None, typer.Option(help="Names of the classes, separated by commas.")] = None,
    level: Annotated[float, typer.Option(help="Of a regression's interval.")] = 0.95,
    noise: Annotated[float, typer.Option(help="Variance of a regression's observation noise.")] = 0.0,
    examples: Annotated[
        Path | None,
        typer.Option(help="A file of training inputs: their means, ranges and scores go along, for the try-it page."),
    ] = None,
    check: Annotated[bool, typer.Option(help="Run the file and compare it with the predictor.")] = True,
) -> None:
    """Write a predictor as an ONNX or torch.export graph: no Python, no sampling and no random numbers to run it.

    Example: favour export predictor.favour --out model.onnx --labels cat,dog
    """
    import favour
    from favour.exporting.source import load_source
    from favour.trial import reading

    predict = load_source(model, weights, shape, dtype)
    names = None if labels is None else [name.strip() for name in labels.split(",")]
    chosen = None if kind is None else kind.value
    seen = None if examples is None else reading.read(examples, EXAMPLES)
    path = favour.export(predict, out, kind=chosen, labels=names, level=level, noise=noise, examples=seen, check=check)
    size = Path(path).stat().st_size
    model_file = favour.load_exported(path)
    print(f"{path}: {size / 1e6:.1f} MB, {model_file.kind}")
    for title, ports in (("input", model_file.inputs), ("output", model_file.outputs)):
        for port in ports:
            print(f"  {title:6} {port.name:14} {port.dtype:8} {port.written_shape}  {port.meaning}".rstrip())
