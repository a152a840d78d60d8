"""One writer for each result: a lock file beside it, `.OUT.lock`, that the operating system opens when a process dies.

The file is opened without following a symbolic link and without truncating it, and only a file that this module made
(it holds `MARK`) is removed again: whatever else lies at that path stays as it is, and is refused by name.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from favour.errors import InvalidValue

MARK = b"favour: a rating is being written beside this file\n"
ATTEMPTS = 100  # to lock a file that others remove meanwhile


def lock_file(out: Path) -> Path:
    """The lock of a result."""
    return out.with_name(f".{out.name}.lock")


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep a second run from the files of `out`; folders above it are made, and removed again if they stay empty."""
    with _folders(out.parent):
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        name = lock_file(out)
        descriptor = _acquired(name, out, fcntl)
        try:
            yield
        finally:
            try:
                if os.pread(descriptor, len(MARK), 0) == MARK:  # ours; removed while nobody else can hold it
                    with suppress(OSError):
                        os.unlink(name)
            finally:
                os.close(descriptor)


def _acquired(name: Path, out: Path, fcntl: object) -> int:
    """A descriptor that holds the lock on the file that has the name now."""
    for _ in range(ATTEMPTS):
        descriptor = _opened(name)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # type: ignore[attr-defined]
        except OSError as error:
            os.close(descriptor)
            raise InvalidValue(f"another process is writing `{out}`.") from error
        with suppress(FileNotFoundError):
            if os.path.samestat(os.stat(name, follow_symlinks=False), os.fstat(descriptor)):
                return descriptor
        os.close(descriptor)  # its owner was done, and removed it between our opening and locking it
    raise InvalidValue(f"`{name}` is made and removed by other processes all the time; `{out}` cannot be locked.")


def _opened(name: Path) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        try:
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o644)
            os.write(descriptor, MARK)
            return descriptor
        except FileExistsError:
            descriptor = os.open(name, flags)
    except FileNotFoundError:  # removed by its owner meanwhile
        return _opened(name)
    except OSError as error:
        raise InvalidValue(
            f"the lock `{name}` cannot be opened ({error.strerror}); a file of its own is needed there: remove what "
            "has that name, or choose another output."
        ) from error
    # An empty file is a lock whose maker has not written its mark: it serves, and is not removed.
    content = os.pread(descriptor, len(MARK) + 1, 0) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None
    if content not in (b"", MARK):
        os.close(descriptor)
        raise InvalidValue(f"`{name}` is no lock of ours; move it, or choose another output.")
    return descriptor


@contextmanager
def _folders(folder: Path) -> Iterator[None]:
    """Make a folder and those above it; those that were made and are empty in the end are removed."""
    absent = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidValue(f"there can be no folder `{folder}`: {error.strerror}.") from error
    try:
        yield
    finally:
        for made in absent:
            with suppress(OSError):
                made.rmdir()
