"""The process: a socket, uvicorn on it, and as many open files as the connections need."""

from __future__ import annotations

import gc
import logging
import math
import socket
import sys
from collections.abc import Sequence
from typing import Any

from favour.errors import InvalidValue
from favour.extras import require
from favour.serving.app import create_app
from favour.serving.gate import LOCAL
from favour.serving.limits import GRACE, Limits

BACKLOG = 128  # connections that the event loop may accept before it looks at any of them
SPARE = 64  # files for everything else
SWITCH = 0.0005  # seconds that the model's thread and the event loop wait for each other at most, instead of 0.005
log = logging.getLogger("favour.serving")


def run(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    threads: int = 1,
    hosts: Sequence[str] = (),
    version: str | None = None,
    **limits: Any,
) -> None:
    """Serve a model until interrupted; requests in progress are finished then.

    Args:
        model: Path of an exported model.
        host: Address to listen on.
        port: 0 takes a free one.
        threads: CPU threads of onnxruntime.
        hosts: Names by which clients may address the server, besides `localhost`, its loopback addresses and `host`.
        version: Of the model; see `create_app`.
        limits: Those of `Limits`.
    """
    allowed = Limits(**limits)
    app = create_app(model, allowed, threads=threads, hosts=(*LOCAL, host, *hosts), version=version)
    server = guarded(app, allowed)
    listening = bind(host, port)
    address, number = listening.getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    print(f"serving {model} on http://{shown}:{number} (Ctrl-C ends it)", flush=True)
    # What was imported is not looked through for garbage again: that takes a tenth of a second, in which all wait.
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH)
    server.run([listening])


def guarded(app: Any, limits: Limits) -> Any:
    """A `uvicorn.Server` for an application of `create_app` whose connections are limited."""
    uvicorn = require("uvicorn", "serve")
    from favour.serving.connections import Connections

    metrics = app.state.metrics
    connections = Connections(limits, metrics.observe_end, room_for(limits.max_connections))
    metrics.connections.set_function(lambda: len(connections.all))
    config = uvicorn.Config(
        app,
        http=connections.protocol,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=math.ceil(3 * limits.timeout + GRACE),
    )
    return uvicorn.Server(config)


def room_for(connections: int) -> int:
    """How many connections the process may have open; the limit on open files is raised where the system allows it.

    Where a process has no file left, the event loop cannot accept a connection, and complains about each of the
    thousands of times that it tries. So it never comes to that.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return connections
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + BACKLOG + SPARE
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(hard, needed)
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        soft = wanted
        if soft < needed:
            room = max(8, soft - BACKLOG - SPARE)
            log.warning(
                "at most %d connections instead of %d: this process may open %d files (ulimit -n)",
                room,
                connections,
                soft,
            )
            return room
    return connections


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
