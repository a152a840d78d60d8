"""Micro-batching: requests that arrive together share one call of the model, and large ones are taken in pieces.

One thread runs the model. While it is busy requests queue up; when it is free it takes rows of what waits, and waits at
most `max_wait` seconds for more unless it has enough. So a single client waits `max_wait` plus one call, and many
clients are served at the throughput of large batches.

A call that has begun cannot be interrupted: whoever comes next waits for its end. So a call holds only as many rows as
take about `max_call` seconds, or `ROOMY` times as long as a call of a row or two where that is longer. A request of
more rows goes through several calls, `RELAXED` times as long where no short request has come for `ALONE` seconds.
Between them short requests have calls of their own, for `SHARE` times as long in all as the last piece of a long one
took; then it is the turn of the long ones again, one after the other. So neither keeps the other out.

Clients take turns too: each one's first request comes before anyone's second. Where the queue is full, the last request
of whoever has most of it makes room for clients that have less.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from favour.errors import FavourError
from favour.serving.limits import Overloaded

Arrays = Sequence[npt.NDArray]
Answer = Mapping[str, npt.NDArray]
FIRST = 32  # rows of a piece before any call was timed
ROOMY = 1.25  # times as long as a call of a row or two may a call be at least
SHARE = 3.0  # seconds of short requests' calls for each second of long ones', while both wait
RELAXED, ALONE = 4.0, 1.0


class BadAnswer(FavourError, RuntimeError):
    """The model gave another number of rows than it was asked for."""


class Stopped(FavourError, RuntimeError):
    """The server is shutting down."""


@dataclass(eq=False)
class _Waiting:
    arrays: Arrays
    rows: int
    result: asyncio.Future[Answer]
    client: str = ""
    begun: int = 0  # rows that were taken
    parts: list[Answer] = field(default_factory=list)

    @property
    def left(self) -> int:
        return self.rows - self.begun

    def take(self, most: int) -> _Piece:
        start, self.begun = self.begun, min(self.rows, self.begun + most)
        return _Piece(self, start, self.begun)


@dataclass(frozen=True)
class _Piece:
    """Some rows of a request."""

    item: _Waiting
    start: int
    stop: int

    @property
    def rows(self) -> int:
        return self.stop - self.start


def by_turns(items: list[_Waiting]) -> list[_Waiting]:
    """The first request of every client, then the second of every client …; in their order otherwise."""
    counts: Counter[str] = Counter()
    turns = []
    for item in items:
        turns.append(counts[item.client])
        counts[item.client] += 1
    return [item for _, item in sorted(zip(turns, items, strict=True), key=lambda pair: pair[0])]


class Room:
    """How many rows a call may hold: as many as take about so long, or somewhat longer than a call of a row or two.

    Args:
        most: Rows.
        seconds: See above.
        first: Rows before any call was timed.
    """

    FEW = 2
    UP, DOWN = 1.05, 0.8  # five steps up for one down: about the fifth part of calls is faster

    def __init__(self, most: int, seconds: float, first: int) -> None:
        self._most, self._seconds = most, seconds
        self._size = float(min(most, first))
        self._small = 0.0  # seconds of a call of a row or two, where nothing disturbs it

    @property
    def rows(self) -> int:
        return int(self._size)

    def learn(self, rows: int, seconds: float) -> None:
        """A call of so many rows took so long."""
        if rows <= self.FEW:
            before = self._small or seconds
            self._small = min(seconds, self.UP * before) if seconds > before else max(seconds, self.DOWN * before)
        factor = max(self._seconds, ROOMY * self._small) / max(seconds, 1e-9)
        if rows >= self.rows or (factor < 1 and rows > self.rows / 2):
            least = 0.8 if factor > 0.4 else 0.5  # somewhat slower may be chance
            self._size = min(float(self._most), max(1.0, self._size * min(1.5, max(least, factor))))


class Batcher:
    """Queues requests and runs the model on several of them at once.

    Args:
        run: From arrays with the batch first to named arrays with the batch first. Called from one thread.
        batched: Which of the arrays have the batch as their first axis; others must be equal to be shared.
        max_rows: Of one call.
        max_wait: Seconds.
        max_call: Seconds that a call should take at most while short requests and long ones are there.
        max_queue: Most requests that wait.
        observe: Told the number of rows and of requests of each call.
    """

    def __init__(
        self,
        run: Callable[[Arrays], Answer],
        batched: Sequence[bool],
        max_rows: int = 256,
        max_wait: float = 0.002,
        max_queue: int = 1024,
        observe: Callable[[int, int], None] | None = None,
        max_call: float = 0.003,
    ) -> None:
        self._run_model, self._batched = run, list(batched)
        self.max_rows, self.max_wait, self.max_queue = max_rows, max_wait, max_queue
        self.max_call = max_call
        self._observe = observe
        self._queue: deque[_Waiting] = deque()
        self._rooms = {False: Room(max_rows, max_call, FIRST), True: Room(max_rows, RELAXED * max_call, max_rows)}
        self._credit = 0.0  # seconds of short requests' calls before the next piece of a long one
        self._company = -math.inf  # when a short request waited last
        self._arrived = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "favour-model")
        self._open = False

    @property
    def running(self) -> bool:
        """Whether requests are taken and answered."""
        return self._open and self._task is not None and not self._task.done()

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._queue)

    def start(self) -> None:
        """From inside the event loop."""
        self._open = True
        self._task = asyncio.get_running_loop().create_task(self._serve())

    async def stop(self) -> None:
        """Answer what waits with `Stopped`, and let the call in progress finish."""
        self._open = False
        self._arrived.set()
        if self._task is not None:
            await self._task
        for item in self._queue:
            if not item.result.done():
                item.result.set_exception(Stopped("the server is shutting down."))
        self._queue.clear()
        self._thread.shutdown(wait=True)

    async def __call__(self, arrays: Arrays, rows: int, client: str = "") -> Answer:
        """The answer for these arrays.

        Args:
            arrays: As for `run`.
            rows: How many.
            client: Who asks, such as an address; clients take turns.

        Raises:
            Overloaded: The queue is full.
        """
        if not self.running:
            raise Stopped("the server is shutting down.")
        if len(self._queue) >= self.max_queue:
            self._make_room(client)
        item = _Waiting(arrays, rows, asyncio.get_running_loop().create_future(), client)
        self._queue.append(item)
        self._arrived.set()
        return await item.result

    def _make_room(self, client: str) -> None:
        """Refuse the last request of the client with the most, or else this one."""
        full = Overloaded(f"{len(self._queue)} requests are waiting already; try again later.")
        (greedy, most), *_ = (counts := Counter(item.client for item in self._queue)).most_common(1)
        if most <= counts[client] + 1:
            raise full
        last = next(item for item in reversed(self._queue) if item.client == greedy)
        self._queue.remove(last)
        if not last.result.done():
            last.result.set_exception(full)

    async def _serve(self) -> None:
        while self._open:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.max_wait > 0 and self._missing:
                await self._fill()
            batch, short = self._take()
            if batch:
                begin = time.perf_counter()
                await self._answer(batch)
                seconds = time.perf_counter() - begin
                self._credit = self._credit - seconds if short else SHARE * seconds

    @property
    def _missing(self) -> bool:
        """Whether fewer rows wait than a call has room for."""
        return sum(item.left for item in self._queue) < self._room()

    async def _fill(self) -> None:
        """Wait until there are rows for a whole call, or the time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.max_wait
        while self._open and self._missing:
            left = end - loop.time()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _room(self) -> int:
        """Rows of a call now."""
        return self._rooms[time.perf_counter() - self._company > ALONE].rows

    def _take(self) -> tuple[list[_Piece], bool]:
        """Rows for one call, of requests that can share it, and whether they are short ones.

        Those whose client went away are dropped.
        """
        self._queue = deque(item for item in self._queue if not item.result.done())
        if not self._queue:
            return [], True
        if not any(self._batched):  # nothing to cut
            item = self._queue.popleft()
            return [item.take(item.rows)], True
        most = max(1, self._rooms[False].rows // 2)
        short = [item for item in self._queue if item.rows <= most]
        long = [item for item in self._queue if item.rows > most]
        if short:
            self._company = time.perf_counter()
        turn = bool(short) and (not long or self._credit > 0)
        waiting, batch = by_turns(short if turn else long), list[_Piece]()
        room = self._rooms[True].rows if turn else self._room()
        for item in itertools.takewhile(lambda item: self._alike(waiting[0], item), waiting):
            if not room:
                break
            batch.append(item.take(room))
            room -= batch[-1].rows
        taken = {piece.item for piece in batch}
        rest = [item for item in self._queue if item not in taken]
        self._queue = deque(rest + [piece.item for piece in batch if piece.item.left])  # behind the others
        return batch, turn

    def _alike(self, first: _Waiting, other: _Waiting) -> bool:
        """Whether two requests can share a call: sizes that may change are the same, and so is what is not batched."""
        return first is other or all(
            a.shape[1:] == b.shape[1:] if batched else np.array_equal(a, b)
            for a, b, batched in zip(first.arrays, other.arrays, self._batched, strict=True)
        )

    async def _answer(self, batch: list[_Piece]) -> None:
        rows = sum(piece.rows for piece in batch)
        loop = asyncio.get_running_loop()
        try:
            arrays = [
                np.concatenate(parts) if batched and len(parts) > 1 else parts[0]
                for k, batched in enumerate(self._batched)
                for parts in [[p.item.arrays[k][p.start : p.stop] if batched else p.item.arrays[k] for p in batch]]
            ]
            begin = time.perf_counter()
            answer = await loop.run_in_executor(self._thread, self._run_model, arrays)
            seconds = time.perf_counter() - begin
            for room in self._rooms.values():
                room.learn(rows, seconds)
            wrong = [name for name, array in answer.items() if len(array) != rows]
            if wrong:
                raise BadAnswer(f"the model's outputs {', '.join(wrong)} have not the {rows} rows that were asked for.")
        except Exception as error:
            if len(batch) > 1:  # one of them may be at fault: the others must not pay for it
                half = len(batch) // 2
                await self._answer(batch[:half])
                await self._answer(batch[half:])
            elif not batch[0].item.result.done():
                batch[0].item.result.set_exception(error)
            return
        if self._observe is not None:
            self._observe(rows, len(batch))
        start = 0
        for piece in batch:
            end = start + piece.rows
            self._give(piece.item, {name: array[start:end] for name, array in answer.items()})
            start = end

    def _give(self, item: _Waiting, part: Answer) -> None:
        """Keep the answer to some rows of a request, and tell it when it has all of them."""
        if item.result.done():
            return
        item.parts.append(part)
        if sum(len(next(iter(p.values()))) for p in item.parts) == item.rows:
            whole = {name: np.concatenate([p[name] for p in item.parts]) for name in part} if item.parts[1:] else part
            item.result.set_result(whole)
