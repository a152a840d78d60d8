"""`favour serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def serve(
    model: Annotated[Path, typer.Argument(help="An .onnx or .pt2 file of `favour export`.")],
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(help="A name by which clients address the server, besides localhost; * for any. Repeatable."),
    ] = None,
    max_batch: Annotated[
        int, typer.Option(min=1, help="Most rows in one call of the model, and in one request.")
    ] = 256,
    max_wait_ms: Annotated[
        float, typer.Option(min=0, help="How long a request waits for others to share a call with.")
    ] = 2.0,
    max_call_ms: Annotated[
        float, typer.Option(min=0, help="How long a call should take while others wait; large requests go in pieces.")
    ] = 3.0,
    max_queue: Annotated[int, typer.Option(min=1, help="Most requests waiting; more are answered 503.")] = 1024,
    max_body: Annotated[int, typer.Option(min=1, help="Largest request in bytes.")] = 16 * 2**20,
    max_values: Annotated[int, typer.Option(min=1, help="Most numbers in one request.")] = 2**20,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Most connections; a new one replaces the one that waits longest.")
    ] = 1000,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Seconds for a request to arrive, to be answered, and to be read.")
    ] = 30.0,
    header_timeout: Annotated[float, typer.Option(min=0.001, help="Seconds for the head of a request.")] = 10.0,
    threads: Annotated[int, typer.Option(min=1, help="CPU threads of the model.")] = 1,
    model_version: Annotated[
        str | None, typer.Option(help="Shown at /model; the beginning of the file's SHA-256 by default.")
    ] = None,
) -> None:
    """Answer predictions over HTTP: POST /predict, /health, /metrics, /docs, and a page to try it at /.

    Example: favour serve model.onnx --port 8000
    """
    from favour.serving import run

    run(
        str(model),
        host=host,
        port=port,
        hosts=allow_host or (),
        version=model_version,
        max_batch=max_batch,
        max_wait_ms=max_wait_ms,
        max_call_ms=max_call_ms,
        max_queue=max_queue,
        max_body=max_body,
        max_held_bytes=max(4 * max_body, 2**26),
        max_values=max_values,
        max_held_values=max(8 * max_values, 2**23),
        max_connections=max_connections,
        timeout=timeout,
        header_timeout=header_timeout,
        threads=threads,
    )
