"""What a file holds, in a few bytes.

Files of up to `WHOLE` bytes together are read whole. Of more, each is read in blocks of `BLOCK` bytes at even
distances, its first and last among them; size and time of modification, which `Data.fingerprint` adds, are what then
tells of a change between the blocks.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Any

from favour.errors import InvalidValue

WHOLE = 2**28
BLOCK = 2**12


def content_digest(file: str | os.PathLike[str], budget: int = WHOLE) -> str:
    """Of a file's content, of which about `budget` bytes are read."""
    sha = hashlib.sha256()
    try:
        size = os.stat(file).st_size
        with open(file, "rb") as stream:
            if size <= budget:
                while block := stream.read(2**22):
                    sha.update(block)
            else:
                count = max(2, budget // BLOCK)
                for i in range(count):
                    stream.seek((size - BLOCK) * i // (count - 1))
                    sha.update(stream.read(BLOCK))
    except OSError as error:
        raise InvalidValue(f"`{os.fspath(file)}` cannot be read: {error.strerror}.") from error
    sha.update(str(size).encode())
    return sha.hexdigest()


def files_digest(files: Sequence[str]) -> str:
    """Of names, sizes, times of modification and contents, in order."""
    sha = hashlib.sha256()
    try:
        stats = [os.stat(file) for file in files]
    except OSError as error:
        raise InvalidValue(f"`{error.filename}` cannot be read: {error.strerror}.") from error
    total = sum(s.st_size for s in stats)
    budget = WHOLE if total <= WHOLE else WHOLE // max(1, len(files))
    for file, stat in zip(files, stats, strict=True):
        described: tuple[Any, ...] = (file, stat.st_size, stat.st_mtime_ns, content_digest(file, budget))
        sha.update("\0".join(map(str, described)).encode("utf-8", "surrogateescape") + b"\n")
    return sha.hexdigest()
