"""Load test of `favour serve` on loopback: throughput, latency, errors and memory.

A server process, and clients in this one that each keep a connection and ask for one row after another. In the last
setting and in the soak a hostile client, in a third process, sends malformed JSON, wrong shapes, NaN and bodies of
100 MB, each of which must be refused with a 4xx; no request of the others may fail. Memory is the server's resident
set, sampled every second after a warm-up; `drift_per_minute` is the slope of a line through it. The server's
processor time per request does not depend on what else the machine does.

    python benchmarks/serving.py [--seconds 60] [--clients 1 8 64] [--soak 600]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import RESULTS, write
from networks import mlp

import favour

FEATURES, WARM_UP = 64, 5.0


class Client:
    """One connection, one request at a time: HTTP/1.1 by hand, so that the clients take little of the machine."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.reader: asyncio.StreamReader | None = None
        self.writer: asyncio.StreamWriter | None = None

    async def ask(self, body: bytes | None = None, head: bytes = b"", path: bytes = b"/predict") -> tuple[int, bytes]:
        """The status and body of the answer; a lost connection is an error, status 0."""
        try:
            if self.writer is None:
                self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)
            assert self.reader is not None
            if body is None:
                self.writer.write(b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path)
            else:
                kind = b"Content-Type: application/json\r\n"
                length = b"Content-Length: %d\r\n" % len(body)
                self.writer.write(b"POST %s HTTP/1.1\r\nHost: localhost\r\n%s%s%s\r\n" % (path, kind, length, head))
                for start in range(0, len(body), 2**18):
                    self.writer.write(body[start : start + 2**18])
                    await self.writer.drain()
            lines = (await self.reader.readuntil(b"\r\n\r\n")).split(b"\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in lines[1:] if b": " in line)
            content = await self.reader.readexactly(int(fields.get(b"content-length", b"0")))
            if fields.get(b"connection") == b"close":
                await self.close()
            return int(lines[0].split()[1]), content
        except (OSError, asyncio.IncompleteReadError):
            await self.close()
            return 0, b""

    async def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
        self.reader = self.writer = None


def bodies(rows: int) -> list[bytes]:
    """Different requests of one row, so that nothing could be remembered."""
    x = np.random.default_rng(0).uniform(0, 1, (rows, FEATURES)).round(4)
    return [json.dumps({"inputs": [row.tolist()]}).encode() for row in x]


async def client(port: int, end: float, requests: list[bytes], offset: int, seen: list[tuple[int, float]]) -> None:
    one = Client(port)
    turn = offset
    while time.perf_counter() < end:
        start = time.perf_counter()
        status, _ = await one.ask(requests[turn % len(requests)])
        seen.append((status, time.perf_counter() - start))
        turn += 1
    await one.close()


HOSTILE: dict[str, tuple[bytes, bytes]] = {
    "malformed JSON": (b'{"inputs": [[1, 2', b""),
    "wrong shape": (b'{"inputs": [[1, 2, 3]]}', b""),
    "NaN": (b'{"inputs": [[' + b", ".join([b"NaN"] * FEATURES) + b"]]}", b""),
    "too many rows": (json.dumps({"inputs": [[0.0] * FEATURES] * 300}).encode(), b""),
    "100 MB": (b"[" * 100_000_000, b""),
}


def hostile(port: int, seconds: float, results: Any) -> None:
    """In a process of its own, since 100 MB would hold up the clients that are measured; the statuses by kind."""

    async def attack() -> dict[str, list[int]]:
        seen: dict[str, list[int]] = {}
        one, end = Client(port), time.perf_counter() + seconds
        while time.perf_counter() < end:
            for name, (body, head) in HOSTILE.items():
                status, _ = await one.ask(body, head)
                seen.setdefault(name, []).append(status)
                await asyncio.sleep(0.2)
        await one.close()
        return seen

    results.send(asyncio.run(attack()))


async def watch(pid: int, end: float, memory: list[tuple[float, int]]) -> None:
    start = time.perf_counter()
    page = os.sysconf("SC_PAGE_SIZE")
    while time.perf_counter() < end:
        await asyncio.sleep(1.0)
        memory.append((time.perf_counter() - start, int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page))


def cpu(pid: int) -> float:
    """Seconds of processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def setting(port: int, pid: int, clients: int, seconds: float, attacked: bool) -> dict[str, Any]:
    requests = bodies(256)
    await asyncio.gather(*(client(port, time.perf_counter() + WARM_UP, requests, 17 * i, []) for i in range(clients)))
    end = time.perf_counter() + seconds
    seen: list[tuple[int, float]] = []
    refused: dict[str, list[int]] = {}
    memory: list[tuple[float, int]] = []
    tasks = [client(port, end, requests, 17 * i, seen) for i in range(clients)]
    ours, theirs = multiprocessing.Pipe(duplex=False)
    attacker = multiprocessing.get_context("fork").Process(target=hostile, args=(port, seconds, theirs))
    if attacked:
        attacker.start()
    before = cpu(pid)
    await asyncio.gather(*tasks, watch(pid, end, memory))
    used = cpu(pid) - before
    if attacked:
        refused = ours.recv()
        attacker.join()
    times = np.array([t for status, t in seen if status == 200])
    sizes = np.array([m for _, m in memory]) / 1e6
    slope = np.polyfit([t for t, _ in memory], sizes, 1)[0] if len(memory) > 2 else 0.0
    result = {
        "clients": clients,
        "attacked": attacked,
        "seconds": seconds,
        "requests": len(seen),
        "errors": sum(status != 200 for status, _ in seen),
        "per_second": round(len(times) / seconds, 1),
        "p50_ms": round(1e3 * float(np.quantile(times, 0.5)), 3),
        "p99_ms": round(1e3 * float(np.quantile(times, 0.99)), 3),
        "server_cpu_ms": round(1e3 * used / max(1, len(seen)), 3),
        "longest_ms": round(1e3 * float(times.max()), 3),
        "refused": {name: dict(zip(*np.unique(s, return_counts=True), strict=True)) for name, s in refused.items()},
        "memory_mb": {
            "first": round(float(sizes[0]), 1),
            "last": round(float(sizes[-1]), 1),
            "least": round(float(sizes.min()), 1),
            "most": round(float(sizes.max()), 1),
            "drift_per_minute": round(60 * float(slope), 3),
            "samples": [round(float(v), 1) for v in sizes[:: max(1, len(sizes) // 60)]],
        },
    }
    result["refused"] = {name: {str(k): int(v) for k, v in table.items()} for name, table in result["refused"].items()}
    flat = {k: v for k, v in result.items() if k not in ("refused", "memory_mb")}
    print(flat, result["refused"], {k: v for k, v in result["memory_mb"].items() if k != "samples"}, flush=True)
    return result


def start(path: str) -> tuple[subprocess.Popen[str], int]:
    command = [sys.executable, "-m", "favour.cli", "serve", path, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, int(line.split(":")[2].split()[0])


async def run(options: argparse.Namespace, path: str) -> dict[str, Any]:
    process, port = start(path)
    try:
        while (await Client(port).ask(path=b"/health"))[0] != 200:
            await asyncio.sleep(0.1)
        content: dict[str, Any] = {}
        if options.clients:
            settings = [(n, False) for n in options.clients] + [(options.soak_clients, True)]
            content["settings"] = [await setting(port, process.pid, n, options.seconds, a) for n, a in settings]
        if options.soak:
            content["soak"] = await setting(port, process.pid, options.soak_clients, options.soak, True)
        return content
    finally:
        process.terminate()
        process.wait(30)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each setting")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 64])
    parser.add_argument("--soak", type=float, default=0.0, help="seconds of a long run after the settings")
    parser.add_argument("--soak-clients", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    predict = favour.compile(mlp(FEATURES, 100, 100, 10), torch.randn(2, FEATURES))
    known: dict[str, Any] = {}
    if (RESULTS / "serving.json").exists():
        known = json.loads((RESULTS / "serving.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        content = asyncio.run(run(options, favour.export(predict, f"{folder}/model.onnx")))
    kept = {k: known[k] for k in ("settings", "soak") if k in known and k not in content}
    write(
        "serving",
        {"network": f"MLP {FEATURES}-100-100-10, one row per request, onnxruntime, 1 thread"} | kept | content,
    )


if __name__ == "__main__":
    main()
