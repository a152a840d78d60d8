"""Writing a file in one step: readers meet the old one or the new one, never a part of either.

The new file is written under a name of its own in the same folder, flushed to the disk, and renamed over the old one.
Any number of processes and threads may write to one path: the last to finish wins.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator


@contextlib.contextmanager
def replaced(path: str | os.PathLike[str]) -> Iterator[str]:
    """A path to write to, with the ending of `path`; what was written there takes the place of `path` at the end.

    Nothing is left behind, and `path` stays as it was, where the block raises.

    Example:
        >>> import pathlib, tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     target = pathlib.Path(folder, "note.txt")
        ...     with replaced(target) as temporary:
        ...         _ = pathlib.Path(temporary).write_text("whole")
        ...     target.read_text(), len(list(target.parent.iterdir()))
        ('whole', 1)
    """
    target = os.fspath(path)
    stem, ending = os.path.splitext(os.path.basename(target))
    folder = os.path.dirname(target)
    temporary = os.path.join(folder, f"{stem}.{os.getpid()}-{secrets.token_hex(8)}.part{ending}")
    try:
        yield temporary
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)
    _flush_folder(folder or ".")


def _flush_folder(folder: str) -> None:
    """Let the new name survive a power cut, where the system can be told so."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
