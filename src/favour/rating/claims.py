"""Whose a file is: everything a rating writes says so inside, and what does not is somebody else's.

| file | is ours if |
|---|---|
| a result, Parquet | its metadata hold a manifest |
| bad rows, Parquet | their metadata hold the run |
| a part | its metadata hold run and number |
| text, results and bad rows | the manifest beside it, `OUT.csv.rating.json`, has the fingerprint of its content |
| a folder of parts | it has a manifest, and nothing in it has a name that is not one of ours |
| a manifest | it is JSON whose `favour` is `rating` |

A symbolic link is never ours.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from favour.extras import require
from favour.rating.fingerprint import content_digest
from favour.rating.place import Place
from favour.rating.writing import abandoned

MARK, KIND = "favour", "rating"
MANIFEST = "_manifest.json"
RESULT, BAD, PART = b"favour.rating", b"favour.rating.bad", b"favour.rating.part"
_PART_NAME = re.compile(r"part-\d{6,}\.parquet")
_FILES = {MANIFEST, "_model", "_result", "_bad_result", "_sidecar"}
Manifest = dict[str, Any]


# ---- what files say of themselves


def described(schema: Any, manifest: Mapping[str, Any]) -> Any:
    """The schema of a result."""
    return schema.with_metadata({RESULT: json.dumps(manifest)})


def bad_rows(schema: Any, run: str) -> Any:
    """The schema of a file of bad rows."""
    return schema.with_metadata({BAD: run})


def signed(schema: Any, run: str, number: int) -> Any:
    """The schema of a part."""
    return schema.with_metadata({PART: f"{run} {number}"})


def signature(file: Path) -> tuple[str, int] | None:
    """Run and number of a part; None for any other file."""
    stamp = _metadata(file).get(PART)
    if stamp is None:
        return None
    run, _, number = stamp.decode().partition(" ")
    return run, int(number)


def _metadata(file: Path) -> dict[bytes, bytes]:
    pa, pq = require("pyarrow", "rate"), require("pyarrow.parquet", "rate")
    if file.is_symlink() or not file.is_file():
        return {}
    try:
        return pq.read_schema(file).metadata or {}
    except (pa.ArrowInvalid, OSError):
        return {}


def _manifest(content: bytes | str | None) -> Manifest | None:
    try:
        manifest = None if content is None else json.loads(content)
    except ValueError:
        return None
    return manifest if isinstance(manifest, dict) and manifest.get(MARK) == KIND and "identity" in manifest else None


def _read(file: Path) -> Manifest | None:
    if file.is_symlink() or not file.is_file():
        return None
    with suppress(OSError):
        return _manifest(file.read_bytes())
    return None


# ---- what is at the paths of a rating


def begun(folder: Path) -> tuple[Manifest | None, list[str]]:
    """The manifest of an unfinished run, and what is there of others."""
    if not os.path.lexists(folder):
        return None, []
    manifest = None if folder.is_symlink() else _read(folder / MANIFEST)
    if manifest is not None:
        return manifest, [f"`{path}` is none of the files of a rating" for path in _strangers(folder)]
    # A run that is killed before it has a manifest leaves the folder empty, or with a temporary file.
    if folder.is_dir() and not folder.is_symlink() and all(abandoned(p.name) == MANIFEST for p in folder.iterdir()):
        return None, []
    return None, [f"`{folder}` is no folder of ours"]


def final(place: Place, whole: Mapping[str, Any] | None = None) -> tuple[Manifest | None, list[str]]:
    """The manifest of a result, and what is there of others.

    `whole` is the manifest of an unfinished run. If it was killed while it put its results in their places, some of
    them are there already.
    """
    if place.form == "folder":
        return _final_folder(place.out)
    known = None if place.sidecar is None else _read(place.sidecar)
    foreign = []
    if place.sidecar is not None and known is None and os.path.lexists(place.sidecar):
        foreign.append(f"`{place.sidecar}` is there, and is not what a rating is described in")
    manifest: Manifest | None = None
    for path, name in ((place.out, "_result"), (place.bad_out, "_bad_result")):
        if not os.path.lexists(path):
            continue
        if place.form == "parquet":
            metadata = _metadata(path)
            ours = (_manifest(metadata.get(RESULT)) is not None) if name == "_result" else BAD in metadata
            manifest = _manifest(metadata.get(RESULT)) if name == "_result" else manifest
        else:
            prints = [m.get("content", {}).get(name) for m in (known, whole) if m is not None]
            ours = path.is_file() and not path.is_symlink() and content_digest(path) in prints
            manifest = known if name == "_result" and ours else manifest
        if not ours:
            foreign.append(f"`{path}` {_whose(path, known is not None)}")
    return manifest, foreign


def _whose(path: Path, described: bool) -> str:
    if path.is_symlink():
        return f"is a symbolic link to `{os.readlink(path)}`"
    if described:
        return "was changed since a rating wrote it"
    return "is there already and is no rating of ours"


def _final_folder(out: Path) -> tuple[Manifest | None, list[str]]:
    if not os.path.lexists(out):
        return None, []
    if out.is_symlink() or not out.is_dir():
        return None, [f"`{out}` {_whose(out, False)}"]
    if out.is_mount():
        return None, [f"`{out}` is where a file system is mounted: name a new folder in it"]
    names = {p.name for p in out.iterdir()}
    if not names:
        return None, []
    manifest = _read(out / MANIFEST)
    if manifest is None:
        return None, [f"`{out}` is a folder of other things"]
    wanted = {f"part-{number:06d}.parquet" for number in manifest.get("numbers", ())}
    lost, more = wanted - names, {n for n in names - wanted if _PART_NAME.fullmatch(n)}
    foreign = [f"`{path}` is none of the files of a rating" for path in _strangers(out)]
    foreign += [f"`{out / name}` is no part of the rating there" for name in sorted(more)]
    return {**manifest, "lost": sorted(lost)} if lost else manifest, foreign


def _strangers(folder: Path) -> Iterable[Path]:
    """What has a name that is none of ours, or is not what our file of that name is."""
    for path in sorted(folder.iterdir()):
        name = abandoned(path.name) or path.name
        if path.is_symlink():
            yield path
        elif name == "_bad" and path.is_dir():
            yield from (p for p in sorted(path.iterdir()) if not _PART_NAME.fullmatch(abandoned(p.name) or p.name))
        elif name == "_earlier" and path.is_dir():
            yield from _strangers(path)
        elif not (path.is_file() and (name in _FILES or _PART_NAME.fullmatch(name))):
            yield path


# ---- removing


def remove(folder: Path) -> None:
    """Remove a folder of parts. What is in it and not ours stays, and the folder with it."""
    if not folder.is_dir() or folder.is_symlink() or _read(folder / MANIFEST) is None:
        return
    remove_temporary(folder)
    for inner in (folder, folder / "_bad"):
        for path in inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ():
            if _PART_NAME.fullmatch(path.name) and signature(path) is not None:
                path.unlink()
    remove(folder / "_earlier")
    with suppress(OSError):
        (folder / "_bad").rmdir()
    others = {p.name for p in folder.iterdir()} - _FILES
    for name in sorted(_FILES - {MANIFEST}) + ([] if others else [MANIFEST]):  # last, as it says whose the folder is
        (folder / name).unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


def remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but a manifest half written, or nothing at all."""
    if folder.is_dir() and not folder.is_symlink() and all(abandoned(p.name) == MANIFEST for p in folder.iterdir()):
        remove_temporary(folder)
        with suppress(OSError):
            folder.rmdir()


def remove_temporary(folder: Path) -> None:
    """Remove what killed processes were writing."""
    for inner in (folder, folder / "_bad"):
        for path in inner.iterdir() if inner.is_dir() and not inner.is_symlink() else ():
            name = abandoned(path.name)
            if name is not None and (name in _FILES or _PART_NAME.fullmatch(name)) and not path.is_symlink():
                path.unlink()
