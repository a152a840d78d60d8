"""Clients that a server should be rid of: a process of its own, so that it does not slow down those that are measured.

    python benchmarks/campaigns/hostile.py PORT SECONDS [--features 64] [--kinds ...]

Every kind is a loop of its own, bounded in time and rate, against 127.0.0.1 only. Prints JSON: for every kind how often
it got which status; 0 stands for a connection that was closed without an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import struct
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
MEGABYTE = 2**20


class Attack:
    """What all kinds share: the address, the end, and what was seen."""

    def __init__(self, port: int, seconds: float, features: int, heads: int = 200) -> None:
        self.port, self.features, self.heads = port, features, heads
        self.end = asyncio.get_running_loop().time() + seconds
        self.seen: dict[str, Counter[int]] = {}

    @property
    def left(self) -> float:
        return self.end - asyncio.get_running_loop().time()

    @asynccontextmanager
    async def connection(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield reader, writer
        finally:
            writer.transport.abort()

    async def answer(self, reader: asyncio.StreamReader, patience: float = 40.0) -> int:
        """The status of the next answer; an error must be JSON with a sentence and no traceback."""
        try:
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), max(0.1, min(patience, self.left)))
            lines = head.lower().split(b"\r\n")
            status = int(lines[0].split()[1])
            length = next((int(v.split(b":")[1]) for v in lines if v.startswith(b"content-length:")), 0)
            body = await asyncio.wait_for(reader.readexactly(length), 5)
            if status >= 400:
                content = json.loads(body)
                if not content["error"] or "Traceback" in content["error"]:
                    return -1
            return status
        except TimeoutError:
            return -2 if self.left > 0 else -3  # it was left without an answer; this run ended first
        except (OSError, asyncio.IncompleteReadError):
            return 0
        except (ValueError, KeyError, TypeError):
            return -1

    async def send(self, *parts: bytes) -> int:
        async with self.connection() as (reader, writer):
            with suppress(OSError):
                for part in parts:
                    for start in range(0, len(part), 2**18):
                        writer.write(part[start : start + 2**18])
                        await writer.drain()
            return await self.answer(reader)


def post(body: bytes, head: bytes = HEAD, more: bytes = b"") -> bytes:
    return head + more + b"Content-Length: %d\r\n\r\n" % len(body) + body


def row(features: int, value: bytes = b"0.5") -> bytes:
    return b"[" + b",".join([value] * features) + b"]"


# ---- kinds: each is one turn of its loop, how many loops, and the pause after a turn


async def half_head(a: Attack) -> int:
    """Sends the beginning of a head, and then a byte now and then."""
    async with a.connection() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        waiting = asyncio.ensure_future(a.answer(reader))
        while not waiting.done():
            with suppress(OSError):
                writer.write(b"a")
            await asyncio.wait([waiting], timeout=1.0)
        return waiting.result()


async def slow_body(a: Attack) -> int:
    async with a.connection() as (reader, writer):
        writer.write(HEAD + b"Content-Length: 100000\r\n\r\n")
        waiting = asyncio.ensure_future(a.answer(reader))
        while not waiting.done():
            with suppress(OSError):
                writer.write(b"[")
            await asyncio.wait([waiting], timeout=0.5)
        return waiting.result()


async def large_body(a: Attack) -> int:
    return await a.send(post(b'{"inputs": [' + b"1.5,1," * (15 * MEGABYTE // 6) + b"1]}"))


async def endless_chunks(a: Attack) -> int:
    """A chunked body that never ends, as fast as the server takes it, up to 64 MB."""
    piece = b"10000\r\n" + b"[" * 65536 + b"\r\n"
    return await a.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", *[piece] * 1024)


async def tiny_chunks(a: Attack) -> int:
    return await a.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\n[\r\n" * 200_000)


async def leaves_in_body(a: Attack) -> int:
    async with a.connection() as (_, writer):
        writer.write(HEAD + b'Content-Length: 5000\r\n\r\n{"inputs": [[')
        await writer.drain()
        await asyncio.sleep(0.01)
        reset(writer)
    return 0


async def leaves_before_answer(a: Attack) -> int:
    async with a.connection() as (_, writer):
        writer.write(post(b'{"inputs": [' + row(a.features) + b"]}"))
        await writer.drain()
        reset(writer)
    return 0


def reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


async def never_reads(a: Attack) -> int:
    """Asks for large answers ahead, and reads none."""
    body = post(b'{"inputs": [' + b",".join([row(a.features)] * 200) + b"]}")
    async with a.connection() as (_, writer):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(20):
            writer.write(body)
        await asyncio.sleep(max(0.0, min(5.0, a.left)))
    return 0


async def pipeline(a: Attack) -> int:
    """A thousand requests at once; every one has its answer."""
    async with a.connection() as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 1000)
        statuses = {await a.answer(reader) for _ in range(1000)}
        return statuses.pop() if len(statuses) == 1 else min(statuses)


def fixed(make: Callable[[int], bytes]) -> Callable[[Attack], Awaitable[int]]:
    return lambda a: a.send(make(a.features))


BAD_JSON: dict[str, Callable[[int], bytes]] = {
    "malformed": lambda f: b'{"inputs": [[1, 2',
    "deep": lambda f: b'{"inputs": ' + b"[" * 100_000,
    "NaN": lambda f: b'{"inputs": [' + row(f, b"NaN") + b"]}",
    "huge number": lambda f: b'{"inputs": [' + row(f, b"1e999") + b"]}",
    "long integer": lambda f: b'{"inputs": [' + row(f, b"9" * 5000) + b"]}",
    "texts": lambda f: b'{"inputs": [' + row(f, b'"1"') + b"]}",
    "truths": lambda f: b'{"inputs": [' + row(f, b"true") + b"]}",
    "surrogates": lambda f: b'{"inputs": [], "\\ud800": 1}',
    "not UTF-8": lambda f: b'{"inputs": "\xff\xfe"}',
    "two of a name": lambda f: b'{"inputs": [' + row(f) + b'], "inputs": [' + row(f) + b"]}",
    "wrong shape": lambda f: b'{"inputs": [[1, 2, 3]]}',
    "ragged": lambda f: b'{"inputs": [' + row(f) + b", [1]]}",
    "many rows": lambda f: b'{"inputs": [' + b",".join([row(f)] * 300) + b"]}",
    "tiny rows": lambda f: b'{"inputs": [' + b",".join([b"[]"] * 20_000) + b"]}",
    "an object each": lambda f: b'{"inputs": [' + b",".join([b'{"a":1}'] * 10_000) + b"]}",
    "beyond the model": lambda f: b'{"inputs": [' + row(f, b"1e38") + b"]}",
}
BAD_HTTP: dict[str, bytes] = {
    "not HTTP": b"\x16\x03\x01 nonsense\r\n\r\n",
    "giant header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "many headers": b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 2000 + b"\r\n",
    "giant path": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "foreign host": b"GET /model HTTP/1.1\r\nHost: evil.example\r\n\r\n",
    "wrong method": b"DELETE /predict HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "wrong path": b"GET /%ff%00/../../etc/passwd HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\n{}}}",
    "negative length": HEAD + b"Content-Length: -5\r\n\r\n",
    "giant length": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "bad chunk": HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "unknown coding": HEAD + b"Transfer-Encoding: gzip\r\n\r\n",
    "compressed": HEAD + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
    "plain text": HEAD.replace(b"application/json", b"text/plain") + b"Content-Length: 2\r\n\r\n{}",
    "websocket": b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
}
KINDS: dict[str, tuple[Callable[[Attack], Awaitable[int]], int, float]] = {
    "half-sent heads": (half_head, 200, 0.1),
    "slow bodies": (slow_body, 30, 0.1),
    "15 MB": (large_body, 1, 1.0),
    "endless chunks": (endless_chunks, 1, 2.0),
    "tiny chunks": (tiny_chunks, 1, 1.0),
    "leaves in the body": (leaves_in_body, 2, 0.1),
    "leaves before the answer": (leaves_before_answer, 2, 0.1),
    "never reads": (never_reads, 2, 0.5),
    "pipelines 1,000": (pipeline, 1, 5.0),
    **{name: (fixed(lambda f, make=make: post(make(f))), 1, 1.0) for name, make in BAD_JSON.items()},
    **{name: (fixed(lambda f, raw=raw: raw), 1, 1.0) for name, raw in BAD_HTTP.items()},
}
# What a server may do; 0 where hanging up is an answer, −3 where the run ends before there is one.
EXPECTED: dict[str, set[int]] = {
    "half-sent heads": {408, 0, -3},
    "slow bodies": {408, 0, -3},
    "15 MB": {413, -3},
    "endless chunks": {413, 0, -3},
    "tiny chunks": {400, -3},
    "leaves in the body": {0},
    "leaves before the answer": {0},
    "never reads": {0},
    "pipelines 1,000": {200, -3},
    **{name: {400, 422, -3} for name in BAD_JSON},
    **{name: {400, -3} for name in BAD_HTTP},
    "giant header": {431, -3},
    "many headers": {431, -3},
    "giant path": {431, -3},
    "foreign host": {421, -3},
    "wrong method": {405, -3},
    "wrong path": {404, -3},
    "giant length": {400, 413, -3},
    "unknown coding": {501, -3},
    "compressed": {415, -3},
    "plain text": {415, -3},
    "websocket": {200, 400, -3},
}


async def attack(port: int, seconds: float, features: int, kinds: list[str], heads: int) -> dict[str, Any]:
    a = Attack(port, seconds, features, heads)

    async def loop(name: str, turn: Callable[[Attack], Awaitable[int]], pause: float) -> None:
        while a.left > 0:
            try:
                status = await asyncio.wait_for(turn(a), a.left + 1)
            except TimeoutError:
                status = -3
            except OSError:
                status = 0
            a.seen.setdefault(name, Counter())[status] += 1
            await asyncio.sleep(max(0.0, min(pause, a.left)))

    loops = []
    for name in kinds:
        turn, count, pause = KINDS[name]
        loops += [loop(name, turn, pause) for _ in range(heads if turn is half_head else count)]
    await asyncio.gather(*loops)
    return {
        name: {
            "statuses": {str(status): n for status, n in sorted(a.seen[name].items())},
            "unexpected": sum(n for status, n in a.seen[name].items() if status not in EXPECTED[name]),
        }
        for name in kinds
        if name in a.seen
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--features", type=int, default=64)
    parser.add_argument("--heads", type=int, default=200, help="connections with half-sent heads")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), choices=list(KINDS), metavar="KIND")
    o = parser.parse_args()
    json.dump(asyncio.run(attack(o.port, min(o.seconds, 3600), o.features, o.kinds, o.heads)), sys.stdout)


if __name__ == "__main__":
    main()
