"""No output of torch's while it captures: what it has to say is in its exception, and is said in the user's terms."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export", "torch._dynamo", "torch.fx")


class _Elsewhere:
    """A stream that takes nothing from one thread, and passes on what the others write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def quietly() -> Iterator[None]:
    """Drop what this thread writes to the error stream and what torch's tracers log."""
    stream = sys.stderr
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    before = [logger.disabled for logger in loggers]
    try:
        sys.stderr = _Elsewhere(stream)
        for logger in loggers:
            logger.disabled = True
        yield
    finally:
        sys.stderr = stream
        for logger, was in zip(loggers, before, strict=True):
            logger.disabled = was
