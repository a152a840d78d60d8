"""`favour demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training set.")] = 60,
    seed: Annotated[int, typer.Option(help="Fixes the weights, the batches and the samples.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 1,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
) -> None:
    """Train a small dropout network on handwritten digits; compare plain inference, sampling and Favour."""
    from favour.experiments import digits

    digits.main(epochs=epochs, seed=seed, threads=threads, out=out)
