"""Where results go: parts first, one file or a folder of parts in the end.

    OUT.parquet            the result, with what it was made from in its metadata
    OUT.bad.parquet        rows that could not be rated, with the reason; only if there are any
    OUT.parquet.parts/     while the run lasts: _manifest.json, part-000000.parquet …, _bad/part-000000.parquet …;
                           on a cluster also _model

An OUT without the suffix .parquet is a folder, the one of the parts: they stay there as a data set (readers of data
sets skip names that begin with an underscore).

A part holds the results of one unit. It is written under another name, flushed to the disk and renamed, after the file
of its bad rows: a part that exists is whole. A run that is killed loses the parts it was at work on and no others; a
run that is repeated skips parts that exist. Writing a part twice replaces it by an equal one, so a unit that two
workers rate because one was thought dead is in the result once.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating.columns import bad_schema
from favour.rating.models import Packed

KEY = b"favour.rating"
GROUP = 2**16  # rows of a row group


class Store:
    """The files of one rating."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.out = Path(out)
        self.single = self.out.suffix.lower() in (".parquet", ".pq")
        self.folder = self.out.with_name(self.out.name + ".parts") if self.single else self.out
        self.bad_out = self.out.with_name(f"{self.out.stem}.bad.parquet") if self.single else self.out / "_bad"
        self.manifest_file = self.folder / "_manifest.json"

    # ---- what is there

    def identity(self) -> tuple[dict[str, Any] | None, bool]:
        """What the files here were made from, and whether they are complete; (None, False) if there are none.

        Raises `InvalidValue` for files that are not a rating.
        """
        final = self._final()
        if self.manifest_file.exists():
            manifest = self.manifest()
            if final is None or final["identity"] != manifest["identity"]:
                return manifest["identity"], bool(manifest.get("complete"))
        if final is not None:
            return final["identity"], True
        foreign = self.out.exists() if self.single else self._occupied()
        if foreign:
            raise InvalidValue(f"`{self.out}` exists and is no rating of ours; choose another name, or overwrite it.")
        return None, False

    def _final(self) -> dict[str, Any] | None:
        """The manifest inside the single file, or None."""
        pa, pq = require("pyarrow", "rate"), require("pyarrow.parquet", "rate")
        if not (self.single and self.out.is_file()):
            return None
        try:
            found = (pq.read_schema(self.out).metadata or {}).get(KEY)
        except (pa.ArrowInvalid, OSError):
            return None
        return None if found is None else json.loads(found)

    def _occupied(self) -> bool:
        return self.out.exists() and (not self.out.is_dir() or any(self.out.iterdir()))

    def manifest(self) -> dict[str, Any]:
        """What was decided when the run began."""
        return json.loads(self.manifest_file.read_text())

    def summary(self) -> dict[str, Any]:
        """The manifest of a complete rating."""
        return self._final() or self.manifest()

    # ---- beginning

    def clear(self) -> None:
        """Remove a rating, or the file that has its name; a folder of other things is left alone."""
        if self.out.is_dir() and not self.manifest_file.exists() and any(self.out.iterdir()):
            raise InvalidValue(f"`{self.out}` is a folder of other things; choose another name.")
        for path in (self.out, self.bad_out, self.folder):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest."""
        (self.folder / "_bad").mkdir(parents=True, exist_ok=True)
        _replace(self.manifest_file, json.dumps(manifest, indent=1).encode())

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run from the same files; the operating system opens the lock when the process dies."""
        try:
            import fcntl
        except ImportError:  # Windows
            yield
            return
        self.out.parent.mkdir(parents=True, exist_ok=True)
        name = self.out.with_name(f".{self.out.name}.lock")
        with open(name, "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise InvalidValue(f"another process is writing `{self.out}`.") from error
            try:
                yield
            finally:
                name.unlink(missing_ok=True)

    def unfinished(self) -> bool:
        """Whether a rating was begun here and not completed."""
        return self.manifest_file.exists() and self._final() is None and not self.manifest().get("complete")

    # ---- the model, for workers

    def keep_model(self, packed: Packed) -> None:
        """Put the model beside the parts, where every worker finds it."""
        head = json.dumps({"form": packed.form, "kind": packed.kind}).encode()
        _replace(self.folder / "_model", head + b"\n" + packed.content)

    def model(self) -> Packed:
        """What `keep_model` put there."""
        head, _, content = (self.folder / "_model").read_bytes().partition(b"\n")
        return Packed(**json.loads(head), content=content)

    # ---- parts

    def part(self, number: int) -> Path:
        """The file of a unit's results."""
        return self.folder / f"part-{number:06d}.parquet"

    def bad_part(self, number: int) -> Path:
        """The file of a unit's bad rows."""
        return self.folder / "_bad" / f"part-{number:06d}.parquet"

    def done(self) -> set[int]:
        """Numbers of the parts that exist."""
        return {int(file.stem.removeprefix("part-")) for file in self.folder.glob("part-*.parquet")}

    def counts(self, numbers: Iterable[int]) -> tuple[int, int]:
        """Rated and bad rows in these parts, from their footers."""
        pq = require("pyarrow.parquet", "rate")
        rows = bad = 0
        for number in numbers:
            rows += pq.read_metadata(self.part(number)).num_rows
            if self.bad_part(number).exists():
                bad += pq.read_metadata(self.bad_part(number)).num_rows
        return rows, bad

    # ---- the end

    def finish(self, manifest: Mapping[str, Any], schema: Any, numbers: Sequence[int]) -> None:
        """Join the parts of these numbers, or declare the folder of them complete."""
        absent = sorted(set(numbers) - self.done())
        if absent:
            raise InvalidValue(
                f"{len(absent)} of {len(numbers)} parts are missing in `{self.folder}`, the first is {absent[0]}."
            )
        (self.folder / "_model").unlink(missing_ok=True)
        if not self.single:
            _replace(self.manifest_file, json.dumps({**manifest, "complete": True}, indent=1).encode())
            return
        bad = [self.bad_part(i) for i in numbers if self.bad_part(i).exists()]
        if bad:
            join(self.bad_out, bad, bad_schema())
        else:
            self.bad_out.unlink(missing_ok=True)
        described = schema.with_metadata({KEY: json.dumps({**manifest, "complete": True})})
        join(self.out, [self.part(i) for i in numbers], described)
        shutil.rmtree(self.folder, ignore_errors=True)


class Writer:
    """A Parquet file that appears whole, or not at all.

    Rows are gathered into row groups of `GROUP`, so that a file of small batches reads well.
    """

    def __init__(self, path: Path, schema: Any) -> None:
        self.path, self.schema = path, schema
        self.temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        self._held: list[Any] = []
        self._rows = 0
        pq = require("pyarrow.parquet", "rate")
        self._file = open(self.temporary, "wb")  # noqa: SIM115  (closed by close and abandon)
        self._writer = pq.ParquetWriter(self._file, schema, compression="zstd")

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


def join(out: Path, parts: Iterable[Path], schema: Any) -> None:
    """Append files to one another, a row group at a time."""
    pq = require("pyarrow.parquet", "rate")
    with Writer(out, schema) as writer:
        for part in parts:
            with pq.ParquetFile(part) as file:
                for i in range(file.num_row_groups):
                    writer.write(file.read_row_group(i).replace_schema_metadata(schema.metadata))


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
