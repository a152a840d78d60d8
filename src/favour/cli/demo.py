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
    import torch
    from rich.console import Console
    from rich.progress import track

    from favour.demo import comparison, digits, report
    from favour.extras import require

    for module in ("sklearn", "matplotlib"):
        require(module, "demo")
    console = Console()
    data, model = digits.load(seed), digits.network(seed)
    console.print(f"Training 64-100-100-10 (ReLU, dropout 0.2) on {len(data.train_x)} digits for {epochs} epochs.")
    if threads > 0:
        torch.set_num_threads(threads)
    for _ in track(digits.train(model, data, epochs, seed), "training", total=epochs, console=console):
        pass
    with console.status("predicting three ways"):
        compared = comparison.compare(model, data, seed)
    report.show(compared, console)
    console.print(f"The report is {report.write(compared, model, data, epochs, seed, out)}")
