"""Files that appear whole or not at all: written under another name, flushed to the disk, renamed.

A process that is killed leaves at most a file of the form `.NAME.RANDOM.tmp`, which `abandoned` knows again.
"""

from __future__ import annotations

import ctypes
import os
import re
import secrets
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from favour.extras import require

GROUP = 2**16  # rows of a row group
_AT_FDCWD, _EXCHANGE = -100, 2  # of Linux


def temporary(path: Path) -> Path:
    """A name beside a file, of this process alone."""
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}.tmp")


def abandoned(name: str) -> str | None:
    """The file that a temporary name stands for, or None for any other name.

    >>> abandoned(temporary(Path("part-000001.parquet")).name), abandoned(".notes.tmp")
    ('part-000001.parquet', None)
    """
    match = re.fullmatch(r"\.(.+)\.[0-9a-f]{12}\.tmp", name)
    return None if match is None else match[1]


class Writer:
    """A Parquet file of batches of rows, gathered into row groups of `GROUP` so that it reads well."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.temporary = temporary(path)
        self._held: list[Any] = []
        self._rows = 0
        self._file = open(self.temporary, "xb")  # noqa: SIM115  (closed by __exit__)
        self._writer = self._begin()

    def _begin(self) -> Any:
        return require("pyarrow.parquet", "rate").ParquetWriter(self._file, self.schema, compression="zstd")

    def write(self, table: Any) -> None:
        """Append rows."""
        self._held.append(table)
        self._rows += table.num_rows
        if self._rows >= GROUP:
            self._flush()

    def _flush(self) -> None:
        if self._rows:
            self._writer.write_table(require("pyarrow", "rate").concat_tables(self._held))
        self._held, self._rows = [], 0

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                self._flush()
            self._writer.close()
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            if kind is None:
                os.replace(self.temporary, self.path)
        finally:
            self._file.close()
            self.temporary.unlink(missing_ok=True)


class TextWriter(Writer):
    """The same as comma- or tab-separated text, with a line of names; what is missing is an empty field."""

    def __init__(self, path: Path, schema: Any, delimiter: str = ",") -> None:
        self.delimiter = delimiter
        super().__init__(path, schema)

    def _begin(self) -> Any:
        pacsv = require("pyarrow.csv", "rate")
        return pacsv.CSVWriter(self._file, self.schema, write_options=pacsv.WriteOptions(delimiter=self.delimiter))


def join(out: Path, parts: Iterable[Path], schema: Any, delimiter: str | None = None) -> None:
    """Append files to one another, a row group at a time; as text where there is a delimiter."""
    pq = require("pyarrow.parquet", "rate")
    with Writer(out, schema) if delimiter is None else TextWriter(out, schema, delimiter) as writer:
        for part in parts:
            with pq.ParquetFile(part) as file:
                for i in range(file.num_row_groups):
                    writer.write(file.read_row_group(i).replace_schema_metadata(schema.metadata))


def replace(path: Path, content: bytes) -> None:
    """Give a file this content."""
    beside = temporary(path)
    with open(beside, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def exchange(first: Path, second: Path) -> bool:
    """Let two paths change places in one step; False where the system has no such step."""
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call is not None and call(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _EXCHANGE) == 0


def flush_folder(folder: Path) -> None:
    """Renames in a folder reach the disk."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
