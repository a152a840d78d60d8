"""Micro-batching: requests that arrive together share one call of the model.

One thread runs the model. While it is busy requests queue up; when it is free it takes what waits, up to `max_rows`
rows, and waits at most `max_wait` seconds for more unless it has enough. So a single client waits `max_wait` plus one
call, and many clients are served at the throughput of large batches. Requests may carry any number of rows up to
`max_rows` and are never split.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from favour.errors import FavourError
from favour.serving.limits import Overloaded

Arrays = Sequence[npt.NDArray]
Answer = Mapping[str, npt.NDArray]


class BadAnswer(FavourError, RuntimeError):
    """The model gave another number of rows than it was asked for."""


class Stopped(FavourError, RuntimeError):
    """The server is shutting down."""


@dataclass
class _Waiting:
    arrays: Arrays
    rows: int
    result: asyncio.Future[Answer]


class Batcher:
    """Queues requests and runs the model on several of them at once.

    Args:
        run: From arrays with the batch first to named arrays with the batch first. Called from one thread.
        batched: Which of the arrays have the batch as their first axis; others must be equal to be shared.
        max_rows: Of one call.
        max_wait: Seconds.
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
    ) -> None:
        self._run_model, self._batched = run, list(batched)
        self.max_rows, self.max_wait, self.max_queue = max_rows, max_wait, max_queue
        self._observe = observe
        self._queue: deque[_Waiting] = deque()
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

    async def __call__(self, arrays: Arrays, rows: int) -> Answer:
        """The answer for these arrays.

        Raises:
            Overloaded: The queue is full.
        """
        if not self.running:
            raise Stopped("the server is shutting down.")
        if len(self._queue) >= self.max_queue:
            raise Overloaded(f"{len(self._queue)} requests are waiting already; try again later.")
        item = _Waiting(arrays, rows, asyncio.get_running_loop().create_future())
        self._queue.append(item)
        self._arrived.set()
        return await item.result

    async def _serve(self) -> None:
        while self._open:
            if not self._queue:
                self._arrived.clear()
                await self._arrived.wait()
                continue
            if self.max_wait > 0 and sum(item.rows for item in self._queue) < self.max_rows:
                await self._fill()
            batch = self._take()
            if batch:
                await self._answer(batch)

    async def _fill(self) -> None:
        """Wait until there are rows for a whole call, or the time is up."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self.max_wait
        while self._open and sum(item.rows for item in self._queue) < self.max_rows:
            left = end - loop.time()
            if left <= 0:
                return
            self._arrived.clear()
            try:
                await asyncio.wait_for(self._arrived.wait(), left)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """Requests from the front of the queue that fit into one call; those whose client went away are dropped."""
        batch: list[_Waiting] = []
        rows = 0
        while self._queue:
            item = self._queue[0]
            if item.result.done():
                self._queue.popleft()
                continue
            if batch and (rows + item.rows > self.max_rows or not self._alike(batch[0], item)):
                break
            batch.append(self._queue.popleft())
            rows += item.rows
        return batch

    def _alike(self, first: _Waiting, other: _Waiting) -> bool:
        """Whether two requests can share a call: sizes that may change are the same, and so is what is not batched."""
        return all(
            a.shape[1:] == b.shape[1:] if batched else np.array_equal(a, b)
            for a, b, batched in zip(first.arrays, other.arrays, self._batched, strict=True)
        )

    async def _answer(self, batch: list[_Waiting]) -> None:
        rows = sum(item.rows for item in batch)
        loop = asyncio.get_running_loop()
        try:
            groups = zip(*(item.arrays for item in batch), strict=True)
            arrays = [
                np.concatenate(group) if batched and len(batch) > 1 else group[0]
                for group, batched in zip(groups, self._batched, strict=True)
            ]
            answer = await loop.run_in_executor(self._thread, self._run_model, arrays)
            wrong = [name for name, array in answer.items() if len(array) != rows]
            if wrong:
                raise BadAnswer(f"the model's outputs {', '.join(wrong)} have not the {rows} rows that were asked for.")
        except Exception as error:
            if len(batch) > 1:  # one of them may be at fault: the others must not pay for it
                half = len(batch) // 2
                await self._answer(batch[:half])
                await self._answer(batch[half:])
            elif not batch[0].result.done():
                batch[0].result.set_exception(error)
            return
        if self._observe is not None:
            self._observe(rows, len(batch))
        start = 0
        for item in batch:
            if not item.result.done():
                item.result.set_result({name: array[start : start + item.rows] for name, array in answer.items()})
            start += item.rows
