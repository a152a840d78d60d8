"""The application: reading requests within limits, and routes."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from favour.errors import FavourError, InvalidValue
from favour.exported import Exported, load_exported
from favour.extras import require
from favour.serving.batching import Arrays, Batcher, Overloaded, Stopped
from favour.serving.page import page


@dataclass(frozen=True)
class Limits:
    """What one request may ask for, and how requests are gathered.

    Attributes:
        max_batch: Most rows of one request, and of one call of the model.
        max_wait_ms: How long a request waits for others to share a call with.
        max_queue: Most requests that wait; more are answered 503.
        max_body: Bytes.
        timeout: Seconds in which a request must have arrived, and again in which it must be answered.
    """

    max_batch: int = 256
    max_wait_ms: float = 2.0
    max_queue: int = 1024
    max_body: int = 16 * 2**20
    timeout: float = 30.0

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_queue", "max_body"):
            if getattr(self, name) < 1:
                raise InvalidValue(f"`{name}` is {getattr(self, name)}; at least 1 is required.")
        if not self.max_wait_ms >= 0 or not self.timeout > 0:
            raise InvalidValue("`max_wait_ms` must be at least 0 and `timeout` more than 0.")


DISCARDED = 2**28
log = logging.getLogger("favour.serving")


class Refused(Exception):
    """A request that is answered with an HTTP status and a sentence."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status, self.words = status, words


def create_app(model: str | Exported, limits: Limits | None = None, *, threads: int = 1) -> Any:
    """The ASGI application for a model.

    Args:
        model: A path for `favour.load_exported`, or what it returned.
        limits: See `Limits`.
        threads: CPU threads of onnxruntime.

    Returns:
        A `fastapi.FastAPI`.
    """
    fastapi, responses = require("fastapi", "serve"), require("fastapi.responses", "serve")
    prometheus = require("prometheus_client", "serve")
    exported = load_exported(model, threads=threads) if isinstance(model, str) else model
    limits = limits or Limits()
    metrics = _Metrics(prometheus)
    batched = [bool(p.shape) and p.shape[0] is None for p in exported.inputs]
    state: dict[str, Batcher] = {}

    def answer(arrays: Arrays) -> dict[str, npt.NDArray]:
        with metrics.model_seconds.time():
            return exported(*arrays)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        batcher = Batcher(
            answer, batched, limits.max_batch, limits.max_wait_ms / 1000, limits.max_queue, metrics.observe_call
        )
        batcher.start()
        metrics.waiting.set_function(lambda: batcher.waiting)
        state["batcher"] = batcher
        yield
        await batcher.stop()

    app = fastapi.FastAPI(title="Favour", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    description = describe(exported, limits)
    html = page(description)

    async def predict(request: Any) -> Any:
        start = time.perf_counter()
        status = 500
        try:
            arrays, rows = await read_request(request, exported, limits)
            try:
                outputs = await asyncio.wait_for(state["batcher"](arrays, rows), limits.timeout)
            except TimeoutError:
                raise Refused(504, f"no answer within {limits.timeout:g} s; the server is busy, try again.") from None
            body = encode(outputs, rows)
            status = 200
            metrics.rows.inc(rows)
            return responses.Response(body, media_type="application/json")
        except Refused as refusal:
            status = refusal.status
            # What is left of a body that was not read cannot be told from the next request.
            headers = {"Connection": "close"} if status in (408, 413) else None
            return responses.JSONResponse({"error": refusal.words}, status, headers)
        except (Overloaded, Stopped) as error:
            status = 503
            return responses.JSONResponse({"error": str(error)}, status, {"Retry-After": "1"})
        except InvalidValue as error:  # found by the model itself: rows that ask for what no table has
            status = 422
            return responses.JSONResponse({"error": str(error)}, status)
        except Exception:
            log.exception("the model failed")
            return responses.JSONResponse({"error": "the model failed; the server's log says why."}, status)
        finally:
            metrics.requests.labels(str(status)).inc()
            metrics.request_seconds.observe(time.perf_counter() - start)

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

    async def show_page(_: Any) -> Any:
        return responses.HTMLResponse(html, headers={"Content-Security-Policy": POLICY})

    app.add_route("/predict", predict, methods=["POST"])
    for path, route in (("/health", health), ("/metrics", show_metrics), ("/model", show_model), ("/", show_page)):
        app.add_route(path, route, methods=["GET"])
    return app


POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"


class _Metrics:
    """Counters of one application, in a registry of its own."""

    def __init__(self, prometheus: Any) -> None:
        self.registry = registry = prometheus.CollectorRegistry()
        self.requests = prometheus.Counter("favour_requests", "Requests to /predict", ["status"], registry=registry)
        self.rows = prometheus.Counter("favour_rows", "Rows predicted", registry=registry)
        self.calls = prometheus.Counter("favour_model_calls", "Calls of the model", registry=registry)
        self.batch_rows = prometheus.Histogram(
            "favour_batch_rows", "Rows in a call of the model", buckets=[2**k for k in range(11)], registry=registry
        )
        steps = [0.001 * 2**k for k in range(14)]
        self.request_seconds = prometheus.Histogram(
            "favour_request_seconds", "From the request's head to its answer", buckets=steps, registry=registry
        )
        self.model_seconds = prometheus.Histogram(
            "favour_model_seconds", "One call of the model", buckets=steps, registry=registry
        )
        self.waiting = prometheus.Gauge("favour_waiting_requests", "Requests in the queue", registry=registry)
        prometheus.ProcessCollector(registry=registry)

    def observe_call(self, rows: int, requests: int) -> None:
        self.calls.inc()
        self.batch_rows.observe(rows)


# ---- requests


async def read_request(request: Any, model: Exported, limits: Limits) -> tuple[list[npt.NDArray], int]:
    """The arrays of a request and their number of rows.

    Raises:
        Refused: With the status of the module's table.
    """
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise Refused(415, f"the content type is {kind or 'missing'}; application/json is required.")
    try:
        body = await asyncio.wait_for(_read_body(request, limits.max_body), limits.timeout)
    except TimeoutError:
        raise Refused(408, f"the request did not arrive within {limits.timeout:g} s.") from None
    if len(body) < 2**16:
        return parse(body, model, limits)
    return await asyncio.to_thread(parse, body, model, limits)  # megabytes of JSON would hold up everyone else


async def _read_body(request: Any, limit: int) -> bytes:
    """The body, of which no more than the limit is ever held.

    A client that sends without asking reads the answer only when it has sent all, so what is too much is received and
    thrown away, up to `DISCARDED` bytes; one that asks first (`Expect: 100-continue`) is told at once.
    """
    declared = request.headers.get("content-length", "")
    large = declared.isdigit() and int(declared) > limit
    parts: list[bytes] = []
    size = 0
    if not (large and ("expect" in request.headers or int(declared) > DISCARDED)):
        async for part in request.stream():
            size += len(part)
            if large or size > limit:
                large = True
                parts.clear()
                if size > DISCARDED:
                    break
            else:
                parts.append(part)
    if large:
        raise Refused(413, f"the body is larger than {limit} bytes; send fewer rows at a time.")
    return b"".join(parts)


def parse(body: bytes, model: Exported, limits: Limits) -> tuple[list[npt.NDArray], int]:
    """Arrays from the JSON of a request, checked.

    Raises:
        Refused: 400 or 422.
    """
    try:
        content = json.loads(body, parse_constant=_constant)
    except Refused:
        raise
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON: {str(error)[:200] or type(error).__name__}.") from None
    names = [port.name for port in model.inputs]
    shape = '{"inputs": [[…], …]}' if len(names) == 1 else f'{{"inputs": {{"{names[0]}": [[…], …], …}}}}'
    if not isinstance(content, dict) or "inputs" not in content:
        raise Refused(422, f"an object {shape} is required.")
    strange = sorted(set(content) - {"inputs"})
    if strange:
        raise Refused(422, f"the object has {', '.join(map(repr, strange[:3]))} besides `inputs`; {shape} is required.")
    inputs = content["inputs"]
    if not isinstance(inputs, dict):
        inputs = {names[0]: inputs} if len(names) == 1 else {}
    if sorted(inputs) != sorted(names):
        raise Refused(422, f"`inputs` must have {', '.join(names)}: {shape}.")
    for name, port in zip(names, model.inputs, strict=True):
        rows = inputs[name]
        if not isinstance(rows, list):
            raise Refused(422, f"`{name}` is {_kind(rows)}; a list of rows of shape {port.written_shape} is required.")
        if port.shape and port.shape[0] is None and not 1 <= len(rows) <= limits.max_batch:
            raise Refused(422, f"`{name}` has {len(rows)} rows; between 1 and {limits.max_batch} are allowed.")
    try:
        arrays = model.check(**{name: _array(inputs[name]) for name in names})
    except FavourError as error:
        raise Refused(422, str(error)) from None
    first = next((a for a, p in zip(arrays, model.inputs, strict=True) if p.shape and p.shape[0] is None), arrays[0])
    return arrays, len(first)


def _constant(name: str) -> float:
    raise Refused(422, f"the inputs hold {name}, which is not a number JSON allows; leave such rows out.")


def _kind(value: Any) -> str:
    kinds = {
        type(None): "null",
        bool: "a truth value",
        str: "a text",
        dict: "an object",
        int: "a number",
        float: "a number",
    }
    return kinds.get(type(value), "something else")


def _array(rows: list[Any]) -> npt.NDArray:
    try:
        return np.array(rows)
    except (ValueError, OverflowError) as error:
        raise InvalidValue(f"the rows are not of one shape, or hold numbers out of range: {error}.") from None


def encode(outputs: Any, rows: int) -> bytes:
    """The answer as JSON, which has no NaN."""
    if not all(np.isfinite(array).all() for array in outputs.values()):
        raise Refused(422, "the answer is not finite for these inputs; they are probably far out of the model's range.")
    lists = {name: array.tolist() for name, array in outputs.items()}
    return json.dumps({"outputs": lists, "rows": rows}, separators=(",", ":")).encode()


def describe(model: Exported, limits: Limits) -> dict[str, Any]:
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
        "format": model.format,
        "favour": model.favour_version,
        "max_batch": limits.max_batch,
        "max_body": limits.max_body,
        **ports,
    }


def run(model: str, *, host: str = "127.0.0.1", port: int = 8000, threads: int = 1, **limits: Any) -> None:
    """Serve a model until interrupted; `limits` are those of `Limits`."""
    uvicorn = require("uvicorn", "serve")
    app = create_app(model, Limits(**limits), threads=threads)
    listening = bind(host, port)
    address, number = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    print(f"serving {model} on http://{shown}:{number} (Ctrl-C ends it)", flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run([listening])


def bind(host: str, port: int) -> socket.socket:
    """A socket for the server, bound; the port is known from here on, also where 0 was asked for.

    The protocol is named because asyncio switches off Nagle's algorithm only where it is: otherwise the body of an
    answer waits 40 ms for the client to acknowledge its head.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InvalidValue(
            f"cannot listen on {host} port {port}: {error.strerror or error}. Try another --port."
        ) from None
    return listening
