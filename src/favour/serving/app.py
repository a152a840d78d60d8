"""The application: routes, and what a request goes through on its way to the model and back."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy.typing as npt

import favour
from favour.errors import CorruptFile, InvalidValue
from favour.exporting.exported import Exported, load_exported
from favour.extras import require
from favour.serving.batching import Arrays, Batcher, Stopped
from favour.serving.gate import LOCAL, Gate, Hosts
from favour.serving.limits import SMALL, Capacity, Limits, Overloaded
from favour.serving.logs import bounded
from favour.serving.metrics import Metrics
from favour.serving.openapi import docs, openapi
from favour.serving.page import page
from favour.serving.reading import check_kind, encode, in_turns, most_values, parse, read_body
from favour.serving.refusals import ID, Gone, Refused

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
RETRY = {"retry-after": "1"}
log = logging.getLogger("favour.serving")


def create_app(
    model: str | Exported,
    limits: Limits | None = None,
    *,
    threads: int = 1,
    hosts: Iterable[str] = (*LOCAL, "testserver"),
    version: str | None = None,
) -> Any:
    """The ASGI application for a model.

    Connections are the business of the server it runs under: `favour serve` limits their number and how long they may
    take, others may not.

    Args:
        model: A path for `favour.load_exported`, or what it returned.
        limits: See `Limits`.
        threads: CPU threads of onnxruntime.
        hosts: Names by which clients may address the server, `"*"` for any; others are answered 421. The default is
            this machine, and the name that test clients use.
        version: Of the model, shown at `/model`; by default the beginning of its file's digest.

    Returns:
        A `fastapi.FastAPI`.
    """
    fastapi, responses = require("fastapi", "serve"), require("fastapi.responses", "serve")
    missing = require("starlette.exceptions", "serve").HTTPException
    prometheus = require("prometheus_client", "serve")
    exported, digest = load(model, threads)
    limits = limits or Limits()
    metrics = Metrics(prometheus)
    batched = [bool(p.shape) and p.shape[0] is None for p in exported.inputs]
    most = most_values(exported, limits)
    answer_values = values_per_row(exported)
    values = Capacity(limits.max_held_values, "values", limits.max_held_values // SMALL)
    size = Capacity(limits.max_held_bytes, "bytes of requests")
    state: dict[str, Any] = {}

    def answer(arrays: Arrays) -> dict[str, npt.NDArray]:
        with metrics.model_seconds.time():
            return exported(*arrays)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        batcher = Batcher(
            answer,
            batched,
            limits.max_batch,
            limits.max_wait_ms / 1000,
            limits.max_queue,
            metrics.observe_call,
            limits.max_call_ms / 1000,
        )
        batcher.start()
        metrics.waiting.set_function(lambda: batcher.waiting)
        metrics.held.set_function(lambda: values.held)
        state["batcher"], state["turn"] = batcher, asyncio.Lock()
        with bounded():
            yield
            await batcher.stop()

    app = fastapi.FastAPI(title="Favour", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.metrics = metrics
    app.add_middleware(Gate, hosts=Hosts(hosts), observe=metrics.observe_request)
    description = describe(exported, limits, digest, version)
    described, pages = openapi(description), {"/": page(description), "/docs": docs(description)}

    async def predict(request: Any) -> Any:
        try:
            check_kind(request.headers)
            with values.hold() as share:
                with size.hold() as bytes_held:
                    body, count = await read_body(request, limits, most, bytes_held)
                    share.add(count)
                    arrays, rows = await in_turns(parse(body, exported, limits), state["turn"])
                    del body
                share.add(rows * answer_values)
                client = request.client.host if request.client else ""
                try:
                    outputs = await asyncio.wait_for(state["batcher"](arrays, rows, client), limits.timeout)
                except TimeoutError:
                    words = f"no answer within {limits.timeout:g} s; the server is busy, try again."
                    raise Refused(504, words) from None
                content = await in_turns(encode(outputs, rows), state["turn"])
                metrics.rows.inc(rows)
                return responses.Response(content, media_type="application/json")
        except (Overloaded, Stopped) as error:
            raise Refused(503, str(error), RETRY) from None
        except InvalidValue as error:  # found by the model itself: rows that ask for what no table has
            raise Refused(422, str(error)) from None
        except Gone:
            return _nothing
        except Refused:
            raise
        except Exception:
            log.exception("request %s: the model failed", request.scope[ID])
            raise Refused(500, "the model failed; the server's log says why, under the id of this request.") from None

    async def health(_: Any) -> Any:
        batcher = state.get("batcher")
        good = batcher is not None and batcher.running
        content = {"status": "ok" if good else "stopping", "waiting": batcher.waiting if batcher else 0}
        return responses.JSONResponse(content, 200 if good else 503)

    async def show_metrics(_: Any) -> Any:
        text = prometheus.generate_latest(metrics.registry)
        return responses.Response(text, media_type=prometheus.CONTENT_TYPE_LATEST)

    async def show_model(_: Any) -> Any:
        return responses.JSONResponse(description)

    async def show_openapi(_: Any) -> Any:
        return responses.JSONResponse(described)

    async def show_page(request: Any) -> Any:
        return responses.HTMLResponse(pages[request.url.path], headers={"Content-Security-Policy": POLICY})

    async def refuse(_: Any, error: Any) -> Any:
        """For paths and methods that do not exist."""
        raise Refused(error.status_code, f"{str(error.detail).lower()}; /docs lists what there is.", error.headers)

    app.add_exception_handler(missing, refuse)
    app.add_route("/predict", predict, methods=["POST"])
    for path, route in {
        "/health": health,
        "/metrics": show_metrics,
        "/model": show_model,
        "/openapi.json": show_openapi,
        "/docs": show_page,
        "/": show_page,
    }.items():
        app.add_route(path, route, methods=["GET"])
    return app


async def _nothing(scope: Any, receive: Any, send: Any) -> None:
    """The answer to a client that left."""


def load(model: str | Exported, threads: int) -> tuple[Exported, str | None]:
    """The model and the digest of the file it was loaded from.

    Raises:
        CorruptFile: The file was replaced while it was read.
    """
    path = Path(model if isinstance(model, str) else model.path)
    before = digest_of(path)
    if not isinstance(model, str):
        return model, before
    exported = load_exported(model, threads=threads)
    if digest_of(path) != before:
        raise CorruptFile(f"`{model}` changed while it was read; start again when it is complete.")
    return exported, before


def digest_of(path: Path) -> str | None:
    """SHA-256 of a file, None where there is none."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def values_per_row(model: Exported) -> int:
    """Numbers in the answer for a row; a size that may change counts as 1."""
    total = 0
    for port in model.outputs:
        values = 1
        for s in port.shape[1:]:
            values *= s or 1
        total += values
    return total


def describe(model: Exported, limits: Limits, digest: str | None = None, version: str | None = None) -> dict[str, Any]:
    """What `/model` answers."""
    ports = {
        title: [{"name": p.name, "dtype": p.dtype, "shape": list(p.shape), "meaning": p.meaning} for p in group]
        for title, group in (("inputs", model.inputs), ("outputs", model.outputs))
    }
    return {
        "kind": model.kind,
        "link": model.link,
        "classes": model.classes,
        "labels": model.labels,
        "level": model.level,
        "seen": model.seen,
        "format": model.format,
        "version": version or (digest and digest[:12]),
        "file": Path(model.path).name,
        "sha256": digest,
        "favour": favour.__version__,
        "exported_by_favour": model.favour_version,
        "max_batch": limits.max_batch,
        "max_body": limits.max_body,
        "max_values": most_values(model, limits),
        **ports,
    }
