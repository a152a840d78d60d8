"""Connections: uvicorn's HTTP/1.1 protocol with limits on what a client may do with one.

uvicorn serves whoever speaks HTTP for as long as they like. Here every connection that keeps the server waiting has a
deadline, and when there are too many the one that has kept it waiting longest makes room:

    waits for                         until                                      then
    the head of a request             `header_timeout` from its first byte       408
    the body of a request             `timeout` and a margin (the application    closed
                                      has its own, shorter limits)
    the client to read its answer     `timeout`                                  closed
    a refused client to hang up       `LINGER`                                   closed

What is left of a body that was refused is received and thrown away, slowly and up to `DISCARDED` bytes: a client that
sends without asking reads the answer only when it has sent everything. Requests sent ahead (pipelining) wait in the
system's buffers until their turn comes, not in ours. Heads are limited in size (by h11) and in number of fields, and
chunks in how small they may be: h11 takes as long for a chunk of one byte as for one of a thousand.

Whatever is refused here is answered with JSON, like everywhere else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import chain
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import H11Protocol

from favour.serving.limits import GRACE, Limits
from favour.serving.refusals import error_body, request_id

MAX_HEAD, MAX_FIELDS = 2**14, 100
SMALL_CHUNKS, CHUNK = 200, 64  # so many chunks may be smaller than that on average
DISCARDED = 2**28
PAUSE = 0.003  # seconds for each piece that is thrown away, shared by all such connections
LINGER = 2.0
SWEEP = 0.25
log = logging.getLogger("favour.serving")


class Connections:
    """All connections of a server, and their deadlines.

    Args:
        limits: `max_connections`, `header_timeout`, `timeout` and `max_held_bytes` hold here.
        observe: Told the reason of every connection that the server ended: header timeout, body timeout, slow reader,
            room (for another), bad request, too much (thrown away), full.
        most: Where the system allows fewer than `max_connections`.
    """

    def __init__(self, limits: Limits, observe: Callable[[str], None], most: int | None = None) -> None:
        self.limits, self.observe = limits, observe
        self.most = limits.max_connections if most is None else most
        self.all: set[GuardedProtocol] = set()
        self.discarding = 0
        self._strangers: dict[GuardedProtocol, None] = {}  # keep us waiting, and were never answered; longest first
        self._known: dict[GuardedProtocol, None] = {}  # keep us waiting, and were answered before; longest first
        self._unread: dict[GuardedProtocol, int] = {}  # bytes of answers that are not read; longest first
        self._sweeping: asyncio.TimerHandle | None = None

    def protocol(self, **arguments: Any) -> GuardedProtocol:
        """For `uvicorn.Config(http=...)`."""
        return GuardedProtocol(connections=self, **arguments)

    def opened(self, connection: GuardedProtocol) -> bool:
        """Whether there is room for it."""
        self.all.add(connection)
        if self._sweeping is None:
            self._sweeping = connection.loop.call_later(SWEEP, self._sweep)
        if len(self.all) > self.most:
            longest = next(chain(self._strangers, self._unread, self._known), None)
            if longest is None:
                return False
            longest.end("room")
        return True

    def closed(self, connection: GuardedProtocol) -> None:
        self.all.discard(connection)
        self.busy(connection)
        self._unread.pop(connection, None)

    def waits_for(self, connection: GuardedProtocol) -> None:
        """The connection keeps us waiting from now on."""
        self.busy(connection)
        (self._known if connection.answered else self._strangers)[connection] = None

    def busy(self, connection: GuardedProtocol) -> None:
        """It is our turn."""
        self._strangers.pop(connection, None)
        self._known.pop(connection, None)

    def unread(self, connection: GuardedProtocol, size: int) -> None:
        """So many bytes of an answer wait for the client; 0 for none."""
        self._unread.pop(connection, None)
        if size:
            self._unread[connection] = size
            while sum(self._unread.values()) > self.limits.max_held_bytes and len(self._unread) > 1:
                next(iter(self._unread)).end("slow reader")

    def _sweep(self) -> None:
        now = asyncio.get_running_loop().time()
        for connection in [c for c in self.all if c.deadline <= now or c.unread_deadline <= now]:
            connection.expire(now)
        again = bool(self.all)
        self._sweeping = asyncio.get_running_loop().call_later(SWEEP, self._sweep) if again else None


class _Parser(h11.Connection):
    """Remembers what was wrong, and knows two limits more."""

    problem: h11.RemoteProtocolError | None = None

    def next_event(self) -> Any:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request):
                self._chunks = self._size = 0
                size = len(event.target) + sum(len(name) + len(value) for name, value in event.headers)
                if len(event.headers) > MAX_FIELDS or size > MAX_HEAD:  # h11 limits only heads that are not complete
                    raise h11.RemoteProtocolError("the head is too large", error_status_hint=431)
            elif isinstance(event, h11.Data):
                self._chunks += event.chunk_start
                self._size += len(event.data)
                if self._chunks > SMALL_CHUNKS and self._size < CHUNK * self._chunks:
                    raise h11.RemoteProtocolError(f"chunks of less than {CHUNK} bytes")
            return event
        except h11.RemoteProtocolError as problem:
            self.problem = problem
            raise


class _Flow(FlowControl):
    """Does not read on while a request that has arrived whole is being answered: what comes next is another one."""

    def __init__(self, transport: asyncio.Transport, parser: h11.Connection) -> None:
        super().__init__(transport)
        self._parser = parser

    def resume_reading(self) -> None:
        if self._parser.their_state is h11.DONE and self._parser.our_state is not h11.DONE:
            return
        super().resume_reading()


class GuardedProtocol(H11Protocol):
    """One connection; see the module."""

    def __init__(self, connections: Connections, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.guard = connections
        self.conn: _Parser = _Parser(h11.SERVER, MAX_HEAD)
        self.answered = 0
        self.deadline = self.unread_deadline = float("inf")
        self._reason = ""
        self._discarded = 0
        self._lingers = False

    # ---- events of the transport

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport, self.conn)
        transport.set_write_buffer_limits(high=0)  # any byte that is not read starts the clock
        if self.guard.opened(self):
            self._await_head()
        else:
            self.refuse(503, "the server has as many connections as it may; try again later.", "full")

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_discarding()
        self.guard.closed(self)
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._lingers:
            self._discard(len(data))
            return
        fresh = self.conn.their_state is h11.IDLE
        super().data_received(data)
        if self._lingers or self.transport.is_closing():
            return
        theirs = self.conn.their_state
        if theirs is h11.IDLE:  # part of a head
            if self._reason != "header timeout":
                self._await_head()
        elif theirs is h11.SEND_BODY:
            if fresh or self._reason != "body timeout":
                self._await(self.guard.limits.timeout + GRACE, "body timeout")
            if self.cycle.response_complete:
                self._discard(len(data))
        else:
            self._await(None, "")

    def pause_writing(self) -> None:
        super().pause_writing()
        self.unread_deadline = self.loop.time() + self.guard.limits.timeout
        self.guard.unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        super().resume_writing()
        self.unread_deadline = float("inf")
        self.guard.unread(self, 0)

    # ---- events of the server

    def on_response_complete(self) -> None:
        self.answered += 1
        super().on_response_complete()
        if self.transport.is_closing() or self._lingers:
            return
        if self.conn.their_state is h11.IDLE:
            self._await(None, "idle")  # uvicorn's own clock for connections between two requests runs now
            self.guard.waits_for(self)

    def shutdown(self) -> None:
        if self._lingers:
            self.transport.abort()
        else:
            super().shutdown()

    def _unsupported_upgrade_warning(self) -> None:
        """HTTP lets a server ignore the wish for another protocol; that needs no line in the log."""

    def send_400_response(self, msg: str) -> None:
        problem = self.conn.problem
        status = problem.error_status_hint if problem is not None else 400
        words = f"this is not HTTP: {problem or msg}"
        if status == 431:
            words = f"the head of the request has more than {MAX_HEAD} bytes or {MAX_FIELDS} fields"
        self.refuse(status, f"{words}.", "bad request")

    # ---- ends

    def refuse(self, status: int, words: str, reason: str) -> None:
        """Answer, if nothing was said yet, and wait a little for the client to read it."""
        self.guard.observe(reason)
        self._unset_keepalive_if_required()
        self._leave_application()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.abort()
            return
        identity = request_id(None)
        log.info("connection refused (%s), request %s: %s", reason, identity, words)
        body = error_body(words, identity)
        fields = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
            ("x-request-id", identity),
        ]
        if status == 503:
            fields.append(("retry-after", "1"))
        answer = self.conn.send(h11.Response(status_code=status, headers=fields)) or b""
        self._lingers = True
        self._await(LINGER, "linger")
        self.transport.write(answer + body)
        self.transport.write_eof()
        self.flow.resume_reading()

    def end(self, reason: str) -> None:
        """Close at once."""
        self.guard.observe(reason)
        self.guard.closed(self)
        self._leave_application()
        self.transport.abort()

    def expire(self, now: float) -> None:
        """A deadline has passed."""
        if self.unread_deadline <= now:
            self.end("slow reader")
        elif self._reason == "header timeout" and self.conn.trailing_data[0]:
            seconds = self.guard.limits.header_timeout
            self.refuse(408, f"the head of the request did not arrive within {seconds:g} s.", "header timeout")
        elif self._reason == "linger":
            self.transport.abort()
        else:
            self.end(self._reason)

    # ---- parts

    def _await_head(self) -> None:
        self._await(self.guard.limits.header_timeout, "header timeout")

    def _await(self, seconds: float | None, reason: str) -> None:
        """Wait for the client for so long; `None` where it is our turn."""
        if reason == self._reason == "":
            return
        self._reason = reason
        self._stop_discarding()
        if seconds is None:
            self.deadline = float("inf")
            self.guard.busy(self)
        else:
            self.deadline = self.loop.time() + seconds
            self.guard.waits_for(self)

    def _leave_application(self) -> None:
        """Whoever handles a request of this connection is told that the client is gone."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _discard(self, size: int) -> None:
        """Throw a piece away, and read the next one after a pause."""
        if not self._discarded:
            self.guard.discarding += 1
        self._discarded += size
        if self._discarded > DISCARDED:
            self.end("too much")
            return
        self.transport.pause_reading()
        self.loop.call_later(PAUSE * self.guard.discarding, self._read_on)

    def _read_on(self) -> None:
        if not self.transport.is_closing():
            self.transport.resume_reading()

    def _stop_discarding(self) -> None:
        if self._discarded:
            self.guard.discarding -= 1
            self._discarded = 0
