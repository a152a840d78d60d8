"""Where results go: parts first, one file or a folder of parts in the end.

    OUT.parquet            the result, with what it was made from in its metadata
    OUT.bad.parquet        rows that could not be rated, with the reason; only if there are any
    OUT.parquet.parts/     while the run lasts: _manifest.json, part-000000.parquet …, _bad/part-000000.parquet …;
                           on a cluster also _model

    OUT.csv                text (.tsv with tabs); OUT.bad.csv, OUT.csv.parts/ as above, and what it was made from, with
                           fingerprints of both files, in OUT.csv.rating.json
    OUT/                   a folder of parts, a data set (readers skip names that begin with an underscore): what
                           OUT.parts/ becomes in the end

A part holds the results of one unit. It is written under another name, flushed to the disk and renamed, after the file
of its bad rows: a part that exists is whole. A run that is killed loses the parts it was at work on and no others; a
run that is repeated skips parts that exist. Writing a part twice replaces it by an equal one, so a unit that two
workers rate because one was thought dead is in the result once.

An earlier result stays where it is until the new one is whole beside it. `finish` then says so in the manifest and
swaps; a process that is killed in between leaves a decision that the next run carries out (`settle`).

Whose a file is, `favour.rating.claims` tells. Files of others are refused by name and never written, moved or removed.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from favour.errors import InvalidValue
from favour.extras import require
from favour.rating import claims
from favour.rating.columns import bad_schema
from favour.rating.fingerprint import content_digest
from favour.rating.lock import locked
from favour.rating.models import Packed
from favour.rating.place import Place
from favour.rating.sources import delimiter
from favour.rating.writing import Writer, exchange, flush_folder, join, replace


@dataclass(frozen=True)
class Standing:
    """What there is of a rating: manifests of its result and of an unfinished run, None where there is none."""

    final: dict[str, Any] | None
    begun: dict[str, Any] | None


class Store(Place):
    """The files of one rating."""

    def __init__(self, out: str | os.PathLike[str]) -> None:
        super().__init__(out)
        self.manifest_file = self.folder / claims.MANIFEST
        self._job: str | None = None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps a second run from the same files."""
        with locked(self.out):
            yield

    # ---- what is there

    def standing(self) -> Standing:
        """What is there; files of others at the paths of this rating are an `InvalidValue`."""
        begun, foreign = claims.begun(self.folder)
        final, others = claims.final(self, begun)
        foreign += others
        if foreign:
            raise InvalidValue(
                f"{'; '.join(foreign)}. Nothing was touched: move what is yours, or give the result another name."
            )
        return Standing(final, begun)

    def manifest(self) -> dict[str, Any]:
        """What was decided when the run began."""
        return json.loads(self.manifest_file.read_text())

    # ---- beginning

    def begin(self, manifest: Mapping[str, Any]) -> None:
        """Write the manifest, in place of an unfinished run; the result of an earlier one stays."""
        standing = self.standing()
        if standing.begun is not None:
            claims.remove(self.folder)
        replaces = None if standing.final is None else standing.final.get("run")
        made = {claims.MARK: claims.KIND, **manifest, "run": secrets.token_hex(8), "replaces": replaces}
        self.folder.mkdir(exist_ok=True)
        replace(self.manifest_file, json.dumps(made, indent=1).encode())
        (self.folder / "_bad").mkdir(exist_ok=True)
        self._job = None

    # ---- the model, for workers

    def keep_model(self, packed: Packed) -> None:
        """Put the model beside the parts, where every worker finds it."""
        head = json.dumps({"form": packed.form, "kind": packed.kind}).encode()
        replace(self.folder / "_model", head + b"\n" + packed.content)

    def model(self) -> Packed:
        """What `keep_model` put there."""
        head, _, content = (self.folder / "_model").read_bytes().partition(b"\n")
        return Packed(**json.loads(head), content=content)

    # ---- parts

    @property
    def job(self) -> str:
        """Of the run whose parts these are: they carry it, so that no other part is taken for one of them."""
        if self._job is None:
            self._job = self.manifest()["run"]
        return self._job

    def part(self, number: int) -> Path:
        """The file of a unit's results."""
        return self.folder / f"part-{number:06d}.parquet"

    def bad_part(self, number: int) -> Path:
        """The file of a unit's bad rows."""
        return self.folder / "_bad" / f"part-{number:06d}.parquet"

    def writer(self, number: int, schema: Any) -> Writer:
        """Of a unit's results."""
        return Writer(self.part(number), claims.signed(schema, self.job, number))

    def bad_writer(self, number: int) -> Writer:
        """Of a unit's bad rows."""
        (self.folder / "_bad").mkdir(exist_ok=True)
        return Writer(self.bad_part(number), claims.signed(bad_schema(), self.job, number))

    def done(self) -> set[int]:
        """Numbers of the parts that exist. One of another run, or that is damaged, is an `InvalidValue`."""
        numbers = {int(file.stem.removeprefix("part-")) for file in self.folder.glob("part-*.parquet")}
        for number in numbers:
            for file in (self.part(number), self.bad_part(number)):
                if file.exists() and claims.signature(file) != (self.job, number):
                    raise InvalidValue(
                        f"`{file}` is no part of this rating, or is damaged; move it, and the same command rates its "
                        "rows."
                    )
        return numbers

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
        """Join the parts of these numbers, or declare the folder of them complete, and put the result in its place."""
        done = self.done()
        absent, more = sorted(set(numbers) - done), sorted(done - set(numbers))
        if absent or more:
            what = f"{len(absent)} of {len(numbers)} parts are missing" if absent else f"{len(more)} parts are too many"
            raise InvalidValue(f"{what} in `{self.folder}`, the first is number {(absent or more)[0]}.")
        self.standing()  # somebody may have put a file of theirs in the way meanwhile
        whole = {**self.manifest(), **manifest, "complete": True}
        (self.folder / "_model").unlink(missing_ok=True)
        if self.single:
            separator = delimiter(str(self.out)) if self.form == "csv" else None
            result, bad_result = self.folder / "_result", self.folder / "_bad_result"
            bad = [self.bad_part(i) for i in numbers if self.bad_part(i).exists()]
            bad_result.unlink(missing_ok=True)  # of a run that was killed here
            if bad:
                join(bad_result, bad, claims.bad_rows(bad_schema(), whole["run"]), separator)
            join(result, [self.part(i) for i in numbers], claims.described(schema, whole), separator)
            if self.form == "csv":
                whole["content"] = {f.name: content_digest(f) for f in (result, bad_result) if f.exists()}
                replace(self.folder / "_sidecar", json.dumps(whole, indent=1).encode())
        else:
            whole["numbers"] = sorted(numbers)
            claims.remove_temporary(self.folder)
        replace(self.manifest_file, json.dumps(whole, indent=1).encode())
        flush_folder(self.folder)
        self.settle()

    def settle(self) -> bool:
        """Carry out what a run decided: put the result that is whole among the parts in its place. False if none is."""
        standing = self.standing()
        whole = standing.begun
        if whole is None:  # what a run leaves that is killed in its last steps
            claims.remove_empty(self.folder)
            if not self.single:
                claims.remove(self.out / "_earlier")
        if whole is None or not whole.get("complete"):
            return False
        if self.single:
            self._swap_files(whole)
        else:
            self._swap_folders(whole, standing.final)
        flush_folder(self.out.parent)
        return True

    def _swap_files(self, whole: Mapping[str, Any]) -> None:
        # Each step is done again, or found done, when the one after it is interrupted.
        result, bad_result = self.folder / "_result", self.folder / "_bad_result"
        if result.exists():
            os.replace(result, self.out)
        if bad_result.exists():
            os.replace(bad_result, self.bad_out)
        elif not whole["bad"]:
            self.bad_out.unlink(missing_ok=True)  # of the result before
        if self.sidecar is not None and (self.folder / "_sidecar").exists():
            os.replace(self.folder / "_sidecar", self.sidecar)
        claims.remove(self.folder)

    def _swap_folders(self, whole: Mapping[str, Any], final: Mapping[str, Any] | None) -> None:
        if final is not None and final.get("replaces") == whole["run"]:
            claims.remove(self.folder)  # the result before, which has changed places with the new one
        elif final is None:
            if self.out.exists():  # and is empty
                self.out.rmdir()
            os.rename(self.folder, self.out)
            claims.remove(self.out / "_earlier")
        elif exchange(self.out, self.folder):
            flush_folder(self.out.parent)
            claims.remove(self.folder)
        else:
            os.rename(self.out, self.folder / "_earlier")
            os.rename(self.folder, self.out)
            claims.remove(self.out / "_earlier")
