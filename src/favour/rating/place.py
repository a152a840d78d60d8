"""Where a result may lie: what its name says, and that nothing which is read would be written.

A result has several paths (`Place.paths`). None of them may be an input, or lie where the inputs are looked for: a
second run would read what the first one wrote. Symbolic links, hard links and relative paths are seen through.

    rated.parquet, .pq     one Parquet file
    rated.csv, .tsv        one text file
    rated, rated.v2/       a folder of Parquet files: no suffix, or a name that ends in a slash
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from favour.errors import InvalidValue
from favour.rating.lock import lock_file

FORMS = {".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "csv"}


class Place:
    """The paths of a result.

    Attributes:
        target: As the user named it; a slash at the end makes it a folder.
        form: `"parquet"`, `"csv"` or `"folder"`.
        out: The result.
        bad_out: The file (or folder) of bad rows.
        folder: Of the parts, while the run lasts.
        sidecar: What a text file was made from; None for the other forms, which hold it themselves.
    """

    def __init__(self, out: str | os.PathLike[str]) -> None:
        self.target = path = os.fspath(out)
        self.out = Path(path)
        if not self.out.name or self.out.name == "..":
            raise InvalidValue(f"`{path}` is no name for a result; give that of a file or of a new folder.")
        suffix = self.out.suffix.lower()
        self.form = FORMS.get(suffix, "folder")
        if self.form == "folder" and suffix and not path.endswith(("/", os.sep)) and not self.out.is_dir():
            raise InvalidValue(
                f"`{path}`: results are written to {', '.join(FORMS)} files, or into a folder, whose name has no "
                "suffix or ends in a slash."
            )
        self.folder = self.out.with_name(self.out.name + ".parts")
        ending = suffix if self.form == "csv" else ".parquet"
        self.bad_out = (
            self.out / "_bad" if self.form == "folder" else self.out.with_name(f"{self.out.stem}.bad{ending}")
        )
        self.sidecar = self.out.with_name(f"{self.out.name}.rating.json") if self.form == "csv" else None

    @property
    def single(self) -> bool:
        """Whether the result is one file."""
        return self.form != "folder"

    @property
    def paths(self) -> list[Path]:
        """All that is written."""
        others = [self.bad_out] if self.single else []
        return [self.out, *others, *([self.sidecar] if self.sidecar else []), self.folder, lock_file(self.out)]

    def keep_apart(self, inputs: Sequence[str], files: Sequence[str]) -> None:
        """Refuse inputs that are, hold or would find what is written.

        Args:
            inputs: Paths, folders and globs as the user named them.
            files: What they stand for.
        """
        outputs = [os.path.realpath(path) for path in self.paths]
        known = {(s.st_dev, s.st_ino): str(p) for p in self.paths if p.is_file() for s in [p.stat()]}
        for file in files:
            real, there = os.path.realpath(file), os.stat(file)
            written = known.get((there.st_dev, there.st_ino)) or next((p for p in outputs if _within(real, p)), None)
            if written is not None:
                raise InvalidValue(
                    f"the input `{file}` is `{written}`, which this rating writes; give the result another name."
                )
        for item in inputs:
            if os.path.isdir(item):
                inside = next((path for path in outputs if _within(path, os.path.realpath(item))), None)
            elif not os.path.exists(item):
                inside = next((path for path in outputs if any(_found(item, p) for p in _above(path))), None)
            else:
                continue
            if inside is not None:
                raise InvalidValue(
                    f"`{inside}` would be written where the input `{item}` is looked for, and read as data by the next "
                    "run; put the result elsewhere."
                )


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def _above(path: str) -> Iterator[str]:
    """The path and the folders it lies in: a glob that finds one of those finds all below it."""
    yield path
    yield from map(str, Path(path).parents)


def _found(pattern: str, path: str) -> bool:
    """Whether a glob finds a path, were it there.

    >>> _found("/data/**/*.csv", "/data/a/b/x.csv"), _found("/data/*.csv", "/data/a/x.csv")
    (True, False)
    """
    parts = os.path.abspath(pattern).split(os.sep)
    plain = next((i for i, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    head = os.path.realpath(os.sep.join(parts[:plain]) or os.sep)
    return _matches([*head.rstrip(os.sep).split(os.sep), *parts[plain:]], path.rstrip(os.sep).split(os.sep))


def _matches(pattern: list[str], path: list[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or (
            bool(path) and not path[0].startswith(".") and _matches(pattern, path[1:])
        )
    if not path or (path[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    same = fnmatchcase(path[0], pattern[0]) if glob.has_magic(pattern[0]) else path[0] == pattern[0]
    return same and _matches(pattern[1:], path[1:])
