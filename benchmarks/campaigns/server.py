"""Good clients of `favour serve` beside hostile ones, a soak, and the attacks that once worked.

    python benchmarks/campaigns/server.py [--rounds 5] [--seconds 15] [--soak 600] [--only beside floods bodies soak]

Good clients each keep a connection and ask for one row at a time at a steady pace; every answer is compared with the
predictor's own. `hostile.py` has the others, in a process of their own which the system runs only where nobody else
wants the processor (`SCHED_IDLE`): clients on other machines take the server's time, not its processors. How many
requests they made is told, by kind and answer.

    beside   three stretches take turns: calm; hostile clients of another server on the same machine, which shows what
             they take from the machine; hostile clients of the same server. The ratios of the good ones' p99 within
             each round, and their medians over all; also of p99 in processor time that the server used between a
             question and its answer, which does not depend on who else wants the processor
    floods   a server that may open 256 files: time of /health beside 200 half-sent heads, and bytes of its log while as
             many connections as it has files for are held open
    bodies   20 bodies of 15 MB at once: time until all are answered, and the server's peak of memory
    soak     both for ten minutes: growth of memory, errors, wrong answers

All traffic goes to 127.0.0.1, and every loop is bounded in time and count. Figures depend on what else the machine
does; the ratios of a round less, since its stretches follow each other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import RESULTS, environment
from networks import mlp

import favour

FEATURES, CLASSES, ROWS = 64, 10, 256
CLIENTS, PACE = 8, 0.04  # seconds between two requests of a client
HOSTILE = Path(__file__).resolve().parent / "hostile.py"
TOLERANCE = 1e-4


class Good:
    """Clients that ask, wait and compare."""

    def __init__(self, port: int, pid: int, requests: list[bytes], answers: list[dict[str, np.ndarray]]) -> None:
        self.port, self.requests, self.answers = port, requests, answers
        self._clock = ~pid << 3 | 2  # Linux: the processor time of another process
        self.times: list[float] = []
        self.worked: list[float] = []  # the server's processor time between a question and its answer
        self.errors: Counter[str] = Counter()
        self.wrong = 0
        self.reopened = 0

    async def run(self, seconds: float, clients: int = CLIENTS) -> None:
        end = time.perf_counter() + seconds
        await asyncio.gather(*(self._client(i, end) for i in range(clients)))

    async def _client(self, number: int, end: float) -> None:
        stream: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        turn = 31 * number
        await asyncio.sleep(PACE * number / CLIENTS)
        while time.perf_counter() < end:
            turn = (turn + 1) % len(self.requests)
            start, before = time.perf_counter(), time.clock_gettime(self._clock)
            try:
                fresh = stream is None
                if stream is None:
                    stream = await asyncio.open_connection("127.0.0.1", self.port)
                status, content = await asyncio.wait_for(ask(*stream, self.requests[turn]), 60)
                self.times.append(time.perf_counter() - start)
                self.worked.append(time.clock_gettime(self._clock) - before)
                if status != 200:
                    self.errors[str(status)] += 1
                elif not same(json.loads(content)["outputs"], self.answers[turn]):
                    self.wrong += 1
            except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
                if fresh:
                    self.errors[type(error).__name__] += 1
                self.reopened += 1  # a kept connection may be closed between two requests: HTTP asks to try again
                if stream is not None:
                    stream[1].close()
                stream = None
            await asyncio.sleep(max(0.0, PACE - (time.perf_counter() - start)))
        if stream is not None:
            stream[1].close()

    def figures(self) -> dict[str, float]:
        figures: dict[str, float] = {"requests": len(self.times)}
        for name, values in (("ms", self.times), ("server_cpu_ms", self.worked)):
            for q in (50, 99):
                figures[f"p{q}_{name}"] = round(1e3 * float(np.percentile(values, q)), 2)
        return figures


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, raw: bytes) -> tuple[int, bytes]:
    writer.write(raw)
    lines = (await reader.readuntil(b"\r\n\r\n")).lower().split(b"\r\n")
    length = next(int(line.split(b":")[1]) for line in lines if line.startswith(b"content-length:"))
    return int(lines[0].split()[1]), await reader.readexactly(length)


def same(given: dict[str, Any], right: dict[str, np.ndarray]) -> bool:
    return all(np.allclose(given[name], value, rtol=TOLERANCE, atol=TOLERANCE) for name, value in right.items())


def prepare(folder: str, small: bool) -> tuple[str, list[bytes], list[dict[str, np.ndarray]]]:
    """A model's file, requests, and the predictor's own answers."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    if small:  # exported in a few seconds
        network: nn.Module = nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
    else:
        network = mlp(FEATURES, 100, 100, CLASSES)
    predict = favour.compile(network, torch.randn(2, FEATURES), check=False)
    path = str(favour.export(predict, f"{folder}/model.onnx"))
    x = np.random.default_rng(0).uniform(0, 1, (ROWS, FEATURES)).round(4).astype(np.float32)
    with torch.no_grad():
        belief = predict(torch.from_numpy(x))
    own = {"mean": belief.mean.numpy(), "variance": belief.variance.numpy()}
    if not small:
        own |= {
            "covariance": belief.covariance_matrix.numpy(),
            "probabilities": favour.probabilities(belief).numpy(),
        }
    head = "POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    bodies = [json.dumps({"inputs": [row.tolist()]}) for row in x]
    requests = [f"{head}{len(body)}\r\n\r\n{body}".encode() for body in bodies]
    return path, requests, [{name: value[i : i + 1] for name, value in own.items()} for i in range(ROWS)]


@contextlib.asynccontextmanager
async def server(
    path: str, folder: str, files: int | None = None, log: str = "server"
) -> AsyncIterator[tuple[subprocess.Popen[str], int]]:
    """A process of `favour serve` and its port; its log goes to a file."""

    def limit() -> None:
        if files is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, files))

    command = [sys.executable, "-m", "favour.cli", "serve", path, "--port", "0"]
    with open(f"{folder}/{log}.log", "w") as file:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, preexec_fn=limit)
    try:
        assert process.stdout is not None
        port = int(process.stdout.readline().split(":")[2].split()[0])
        for _ in range(200):
            if await health(port, 5.0) is not None:
                break
            await asyncio.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait(60)


async def health(port: int, patience: float) -> float | None:
    """Seconds until /health answers on a new connection."""
    start = time.perf_counter()
    with contextlib.suppress(OSError, asyncio.IncompleteReadError, TimeoutError):
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                status, _ = await ask(reader, writer, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            finally:
                writer.close()
            return time.perf_counter() - start if status == 200 else None
    return None


def memory(pid: int) -> float:
    """Resident megabytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


async def hostile(port: int, seconds: float, *more: str) -> dict[str, Any]:
    command = [sys.executable, str(HOSTILE), str(port), str(seconds), *more]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, preexec_fn=step_back)
    output, _ = await process.communicate()
    return json.loads(output)


def step_back() -> None:
    """Run only where nobody else wants to; where there is no such class, at the lowest priority."""
    if hasattr(os, "SCHED_IDLE"):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    else:
        os.nice(19)


def merged(reports: list[dict[str, Any]]) -> dict[str, Any]:
    total: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, found in report.items():
            into = total.setdefault(name, {"statuses": {}, "unexpected": 0})
            into["unexpected"] += found["unexpected"]
            for status, n in found["statuses"].items():
                into["statuses"][status] = into["statuses"].get(status, 0) + n
    return total


# ---- parts


async def stretch(
    given: tuple[Any, ...], port: int, pid: int, seconds: float, target: int | None, heads: int
) -> tuple[Good, Any]:
    """Good clients of a server for a while, hostile ones of the server at `target` beside them."""
    good = Good(port, pid, *given[1:])
    attack = None
    if target is not None:
        attack = asyncio.create_task(hostile(target, seconds + 1.0, "--heads", str(heads)))
        await asyncio.sleep(1.0)
    await good.run(seconds)
    return good, {} if attack is None else await attack


async def beside(given: tuple[Any, ...], folder: str, rounds: int, seconds: float, heads: int) -> dict[str, Any]:
    results, reports = [], []
    async with server(given[0], folder) as (process, port), server(given[0], folder, log="other") as (_, other):
        await Good(port, process.pid, *given[1:]).run(min(3.0, seconds))
        for _ in range(rounds):
            calm, _ = await stretch(given, port, process.pid, seconds, None, heads)
            elsewhere, _ = await stretch(given, port, process.pid, seconds, other, heads)
            attacked, report = await stretch(given, port, process.pid, seconds, port, heads)
            reports.append(report)
            all_three = {"calm": calm, "elsewhere": elsewhere, "hostile": attacked}
            row: dict[str, Any] = {name: g.figures() for name, g in all_three.items()}
            row |= {
                "load": round(os.getloadavg()[0], 1),
                "p99_to_calm": ratio(row, "calm", "p99_ms"),
                "p99_to_elsewhere": ratio(row, "elsewhere", "p99_ms"),
                "p50_to_calm": ratio(row, "calm", "p50_ms"),
                "p99_server_cpu_to_calm": ratio(row, "calm", "p99_server_cpu_ms"),
                "errors": dict(sum((g.errors for g in all_three.values()), Counter())),
                "wrong_answers": sum(g.wrong for g in all_three.values()),
                "reopened": sum(g.reopened for g in all_three.values()),
                "memory_mb": round(memory(process.pid), 1),
            }
            print(row, flush=True)
            results.append(row)
    return {
        "seconds_per_stretch": seconds,
        **{
            name: statistics.median(r[name] for r in results)
            for name in ("p50_to_calm", "p99_to_calm", "p99_to_elsewhere", "p99_server_cpu_to_calm")
        },
        "errors": sum(sum(r["errors"].values()) for r in results),
        "wrong_answers": sum(r["wrong_answers"] for r in results),
        "rounds": results,
        "log_bytes": Path(f"{folder}/server.log").stat().st_size,
        "refused": merged(reports),
    }


def ratio(row: dict[str, Any], to: str, name: str) -> float:
    return round(row["hostile"][name] / row[to][name], 2)


async def floods(path: str, folder: str, seconds: float) -> dict[str, Any]:
    """Connections with half-sent heads, held open against a server that may open 256 files."""
    found: dict[str, Any] = {"files": 256}
    for name, count in (("half_sent_200", 200), ("as_many_as_files", 400)):
        async with server(path, folder, files=256) as (process, port):
            streams: list[asyncio.StreamWriter] = []

            async def hold(streams: list[asyncio.StreamWriter] = streams, port: int = port) -> None:
                with contextlib.suppress(OSError, TimeoutError):
                    async with asyncio.timeout(5):
                        _, writer = await asyncio.open_connection("127.0.0.1", port)
                        writer.write(b"GET /health HTTP/1.1\r\nHost: loc")
                        streams.append(writer)

            times: list[float | None] = []
            end = time.perf_counter() + seconds
            while time.perf_counter() < end:
                streams[:] = [s for s in streams if not s.is_closing()]
                await asyncio.gather(*(hold() for _ in range(count - len(streams))))
                times.append(await health(port, 10.0))
                await asyncio.sleep(0.5)
            for stream in streams:
                stream.transport.abort()
            answered = [t for t in times if t is not None]
            found[name] = {
                "connections": count,
                "seconds": seconds,
                "health_asked": len(times),
                "health_answered": len(answered),
                "health_median_ms": round(1e3 * statistics.median(answered), 1) if answered else None,
                "log_bytes": Path(f"{folder}/server.log").stat().st_size,
                "memory_mb": round(memory(process.pid), 1),
            }
            print(name, found[name], flush=True)
    return found


async def bodies(path: str, folder: str, count: int = 20) -> dict[str, Any]:
    body = b'{"inputs": [' + b"[" + b"1.5," * (15 * 2**18) + b"1]]}"
    raw = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    raw += b"Content-Length: %d\r\n\r\n" % len(body) + body
    async with server(path, folder) as (process, port):
        before, peak, done = memory(process.pid), 0.0, asyncio.Event()

        async def watch() -> None:
            nonlocal peak
            while not done.is_set():
                peak = max(peak, memory(process.pid))
                await asyncio.sleep(0.02)

        async def one() -> int:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    return (await asyncio.wait_for(ask(reader, writer, raw), 120))[0]
                finally:
                    writer.close()
            return 0

        watching = asyncio.create_task(watch())
        start = time.perf_counter()
        statuses = await asyncio.gather(*(one() for _ in range(count)))
        seconds = time.perf_counter() - start
        done.set()
        await watching
    found = {
        "bodies": count,
        "megabytes_each": round(len(body) / 1e6, 1),
        "seconds": round(seconds, 2),
        "memory_before_mb": round(before, 1),
        "memory_peak_mb": round(peak, 1),
        "statuses": {str(s): n for s, n in Counter(statuses).items()},
    }
    print(found, flush=True)
    return found


async def soak(given: tuple[Any, ...], folder: str, seconds: float, heads: int) -> dict[str, Any]:
    path, requests, answers = given
    async with server(path, folder) as (process, port):
        good = Good(port, process.pid, requests, answers)
        attack = asyncio.create_task(hostile(port, seconds, "--heads", str(heads)))
        samples: list[tuple[float, float]] = []
        start = time.perf_counter()

        async def watch() -> None:
            while time.perf_counter() - start < seconds - 1:
                samples.append((time.perf_counter() - start, memory(process.pid)))
                await asyncio.sleep(1.0)

        await asyncio.gather(good.run(seconds), watch())
        refused = await attack
        alive = await health(port, 30.0) is not None
    late = [(t, m) for t, m in samples if t > seconds / 5] or samples
    slope = float(np.polyfit([t for t, _ in late], [m for _, m in late], 1)[0]) if len(late) > 2 else 0.0
    found = {
        "seconds": seconds,
        **good.figures(),
        "errors": dict(good.errors),
        "wrong_answers": good.wrong,
        "reopened": good.reopened,
        "healthy_after": alive,
        "log_bytes": Path(f"{folder}/server.log").stat().st_size,
        "memory_mb": {
            "first": round(samples[0][1], 1),
            "after_a_fifth": round(late[0][1], 1),
            "last": round(samples[-1][1], 1),
            "most": round(max(m for _, m in samples), 1),
            "growth_per_minute_after_a_fifth": round(60 * slope, 3),
        },
        "refused": refused,
    }
    print({k: v for k, v in found.items() if k != "refused"}, flush=True)
    return found


PARTS = ("beside", "floods", "bodies", "soak")


async def campaign(o: argparse.Namespace) -> dict[str, Any]:
    content: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        given = prepare(folder, o.small)
        if "beside" in o.only:
            content["beside"] = await beside(given, folder, o.rounds, o.seconds, o.heads)
        if "floods" in o.only:
            content["floods"] = await floods(given[0], folder, o.seconds)
        if "bodies" in o.only:
            content["bodies"] = await bodies(given[0], folder)
        if "soak" in o.only:
            content["soak"] = await soak(given, folder, o.soak, o.heads)
    return content


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each stretch")
    parser.add_argument("--soak", type=float, default=600.0, help="seconds")
    parser.add_argument("--heads", type=int, default=200, help="connections with half-sent heads")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--small", action="store_true", help="a small network, for tests of behaviour")
    parser.add_argument("--out", type=Path, default=RESULTS / "campaigns" / "server.json")
    o = parser.parse_args()
    known = json.loads(o.out.read_text()) if o.out.exists() else {}
    content = asyncio.run(campaign(o))
    here = environment()  # of each part, since parts may be measured on different days
    content = {part: {"environment": here, **found} for part, found in content.items()}
    content = {part: content.get(part, known.get(part)) for part in PARTS if part in content or part in known}
    network = f"MLP {FEATURES}-100-100-{CLASSES}, {CLIENTS} clients, one row per request, one each {PACE} s"
    o.out.parent.mkdir(parents=True, exist_ok=True)
    o.out.write_text(json.dumps({"network": network, **content}, indent=1) + "\n")
    print(f"wrote {o.out}")


if __name__ == "__main__":
    main()
