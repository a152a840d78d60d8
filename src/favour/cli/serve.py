"""`favour serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    model: Annotated[Path, typer.Argument(help="An .onnx or .pt2 file of `favour export`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most rows in one call of the model, and in one request.")
    ] = 256,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, help="How long a request waits for others to share a call with.")
    ] = 2.0,
    max_queue: Annotated[int, typer.Option(min=1, help="Most requests waiting; more are answered 503.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request in bytes.")] = 16 * 2**20,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model.")] = 1,
) -> None:
    """Answer predictions over HTTP: POST /predict, /health, /metrics, and a page to try it at /."""
    from favour.serving import run

    run(
        str(model),
        host=host,
        port=port,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_queue=max_queue,
        max_body=max_body,
        threads=threads,
    )
