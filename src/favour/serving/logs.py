"""A log that clients cannot fill: messages that repeat are counted instead of written."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NAMES = ("favour.serving", "uvicorn.error", "asyncio")


class Repeats(logging.Filter):
    """Lets a message through `most` times in `period` seconds; the next one later says how many were left out.

    Messages are the same if they come from the same logger and their templates, whatever these were filled in with,
    begin with the same line.
    Of different templates there are at most `kinds`; what is more counts as one.
    """

    def __init__(
        self, most: int = 10, period: float = 60.0, kinds: int = 100, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self.most, self.period, self.kinds = most, period, kinds
        self._clock = clock
        self._seen: dict[tuple[str, str], list[float]] = {}  # start of the period, how many since

    def filter(self, record: logging.LogRecord) -> bool:
        key = (record.name, str(record.msg).split("\n", 1)[0][:200])
        if key not in self._seen and len(self._seen) >= self.kinds:
            key = ("", "")
        now = self._clock()
        start, count = self._seen.get(key, (now, 0))
        missing = 0
        if now - start >= self.period:
            missing, start, count = max(0, int(count) - self.most), now, 0
        self._seen[key] = [start, count + 1]
        if count >= self.most:
            return False
        if missing:
            record.msg = f"{record.getMessage()} [{missing} more of this kind were not written since]"
            record.args = ()
        return True


@contextmanager
def bounded() -> Iterator[None]:
    """Applies a `Repeats` to our logger and those of the server and the event loop."""
    filters = [(logging.getLogger(name), Repeats()) for name in NAMES]
    for logger, repeats in filters:
        logger.addFilter(repeats)
    try:
        yield
    finally:
        for logger, repeats in filters:
            logger.removeFilter(repeats)
