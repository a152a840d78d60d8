"""`favour demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    epochs: Annotated[int, typer.Option(min=1, help="Passes over the training set.")] = 60,
    seed: Annotated[int, typer.Option(help="Fixes the weights, the batches and the samples.")] = 0,
    threads: Annotated[int, typer.Option(min=0, help="CPU threads; 0 for PyTorch's default.")] = 1,
    compiled: Annotated[
        bool, typer.Option("--compiled/--eager", help="Time torch.compile too: some twenty seconds.")
    ] = True,
    out: Annotated[Path, typer.Option(help="Folder of the report.")] = Path("demo-report"),
) -> None:
    """Train a small dropout network on handwritten digits; show what its beliefs are worth and what they say.

    Example: favour demo --out demo-report
    """
    import torch
    from rich.console import Console
    from rich.progress import track

    from favour.demo import digits, report, story
    from favour.extras import require

    require("sklearn", "demo")
    console = Console()
    data, model = digits.load(seed), digits.network(seed)
    console.print(f"Training {report.NETWORK} on {len(data.train_x)} digits for {epochs} epochs.")
    if threads > 0:
        torch.set_num_threads(threads)
    for _ in track(digits.train(model, data, epochs, seed), "training", total=epochs, console=console):
        pass
    with console.status("predicting, sampling, timing"):
        tale = story.tell(model, data, compiled=compiled, seed=seed)
    report.show(tale, console)
    training = {"epochs": epochs, "inputs": len(data.train_x), "seed": seed}
    console.print(f"The report is {report.write(tale, training, out)}", soft_wrap=True)
    console.print(f"Now your own model: [bold]{report.TRY}[/bold]", highlight=False, soft_wrap=True)
