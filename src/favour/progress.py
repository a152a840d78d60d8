"""A line on the terminal while something takes long.

Nothing is shown in the first seconds, nor where the error stream is no terminal: there the log (`favour`, level
INFO) gets the line once the work is done.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self

__all__ = ["INTERVAL", "PATIENCE", "Bar", "Progress"]

PATIENCE = 2.0  # seconds
INTERVAL = 0.25

_log = logging.getLogger("favour")


class Progress:
    """Shows what goes on, and for how long it has, once that takes over `PATIENCE` seconds.

    Example:
        >>> with Progress("compiling Net") as progress:
        ...     progress.stage("capturing")
    """

    def __init__(self, title: str, patience: float = PATIENCE) -> None:
        self.title, self.patience = title, patience
        self._stage = ""
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._begin = 0.0
        self._times: dict[str, float] = {}
        self._since = 0.0

    def stage(self, name: str) -> None:
        """What is being done from here on."""
        now = time.perf_counter()
        if self._stage:
            self._times[self._stage] = self._times.get(self._stage, 0.0) + now - self._since
        self._stage, self._since = name, now

    def __enter__(self) -> Self:
        self._begin = self._since = time.perf_counter()
        if sys.stderr is not None and sys.stderr.isatty():
            self._thread = threading.Thread(target=self._watch, daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stage("")
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        seconds = time.perf_counter() - self._begin
        if kind is None and seconds >= self.patience:
            parts = ", ".join(f"{name} {part:.1f} s" for name, part in self._times.items())
            _log.info("%s took %.1f s (%s)", self.title, seconds, parts)

    def _watch(self) -> None:
        if self._done.wait(self.patience):
            return
        line = _line()
        while True:
            line.show(f"favour: {self.title}: {self._stage}, {time.perf_counter() - self._begin:.0f} s")
            if self._done.wait(INTERVAL):
                break
        line.clear()


class _Plain:
    """Rewrites one line of the error stream."""

    def __init__(self) -> None:
        self.stream = sys.stderr
        self.width = 0

    def show(self, text: str) -> None:
        self.stream.write("\r" + text.ljust(self.width))
        self.stream.flush()
        self.width = max(self.width, len(text))

    def clear(self) -> None:
        self.stream.write("\r" + " " * self.width + "\r")
        self.stream.flush()


class _Rich:
    """The same with a spinner."""

    def __init__(self, console: Any) -> None:
        self.console = console
        self.status: Any = None

    def show(self, text: str) -> None:
        if self.status is None:
            self.status = self.console.status(text)
            self.status.start()
        self.status.update(text)

    def clear(self) -> None:
        self.status.stop()


def _line() -> _Plain | _Rich:
    try:
        from rich.console import Console
    except ImportError:
        return _Plain()
    return _Rich(Console(stderr=True))


class Bar(Progress):
    """A bar for work in equal parts, with the rate at which inputs go through.

    Example:
        >>> with Bar("predicting", total=2) as bar:
        ...     bar.advance(inputs=32)
        ...     bar.text()
        '[##########----------] 1 of 2 batches, 32 inputs...'
    """

    WIDTH = 20

    def __init__(self, title: str, total: int | None, patience: float = PATIENCE) -> None:
        super().__init__(title, patience)
        self.total, self.done, self.inputs = total, 0, 0

    def advance(self, inputs: int) -> None:
        """One more batch, of so many inputs, is done."""
        self.done += 1
        self.inputs += inputs
        self._stage = self.text()  # not `stage`, which would keep a time for each of them

    def text(self) -> str:
        """The line as it stands."""
        rate = self.inputs / max(time.perf_counter() - self._begin, 1e-9)
        counts = f"{self.inputs:,} inputs, {rate:,.0f} a second"
        if not self.total:
            return f"{self.done} batches, {counts}"
        filled = min(self.WIDTH, self.WIDTH * self.done // self.total)
        bar = "#" * filled + "-" * (self.WIDTH - filled)
        return f"[{bar}] {self.done} of {self.total} batches, {counts}"
