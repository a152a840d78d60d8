"""Result files of a folder: read, and refused by name if one is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from favour.errors import CorruptFile, InvalidValue
from favour_studies.experiments.record import FORMAT, read_json

# In the order of the report, with the parts a file must have.
EXPERIMENTS: dict[str, tuple[str, ...]] = {
    "classification": ("metrics", "tasks"),
    "regression": ("metrics", "tasks"),
    "ood": ("scores", "tables", "pairs"),
    "jsd": ("panels",),
    "figures": ("sine", "simplex"),
}
_HEAD = ("experiment", "format", "environment", "profile", "seeds")


@dataclass(frozen=True)
class Results:
    """The files of a folder by experiment; one that is missing was not run."""

    directory: Path
    files: dict[str, dict[str, Any]]

    def __contains__(self, name: str) -> bool:
        return name in self.files

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self.files[name]

    def command(self, name: str) -> str:
        """What would run an experiment that is missing, as the others here were run."""
        others = list(self.files.values())
        profile = others[0]["profile"].get("name", "quick") if others else "quick"
        source = (others[0].get("data") or {}).get("source") if others else None
        data = "" if source == "embedded" else " --data hub" if source == "hub" else " --data DATA"
        return f"favour reproduce {name} --profile {profile}{data} --out {self.shown}"

    @property
    def shown(self) -> str:
        """The folder as a command would have it, without what is above the working directory."""
        try:
            path = self.directory.resolve().relative_to(Path.cwd())
        except ValueError:
            return self.directory.resolve().name
        return str(path)

    @contextmanager
    def reading(self, name: str) -> Iterator[None]:
        """Turns a lookup that fails inside into an error that names the file."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
            path = self.directory / f"{name}.json"
            raise CorruptFile(
                f"{path} does not have the layout the report expects ({type(error).__name__}: {error}). It was damaged "
                f"or written by another version; delete it and run `{self.command(name)}`."
            ) from error


def load(directory: str | Path) -> Results:
    """Read a folder that `favour reproduce` wrote.

    Raises:
        InvalidValue: The folder is missing or has no result file.
        CorruptFile: A file is cut off or has another layout; the message names it.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidValue(f"no folder {directory}. Give the one that `favour reproduce --out DIR` wrote.")
    paths = {name: directory / f"{name}.json" for name in EXPERIMENTS}
    files = {name: _checked(name, path) for name, path in paths.items() if path.is_file()}
    if not files:
        raise InvalidValue(
            f"{directory} holds none of {', '.join(p.name for p in paths.values())}. "
            f"Run `favour reproduce all --out {directory}` first."
        )
    return Results(directory, files)


def _checked(name: str, path: Path) -> dict[str, Any]:
    content = read_json(path)
    if not isinstance(content, dict):
        raise CorruptFile(f"{path} should hold an object, not a {type(content).__name__}. Delete it and run again.")
    missing = [key for key in (*_HEAD, *EXPERIMENTS[name]) if key not in content]
    if missing:
        raise CorruptFile(f"{path} has no {', '.join(missing)}. Delete it and run again.")
    wrong = [key for key in ("environment", "profile", "seeds") if not isinstance(content[key], dict)]
    if wrong:
        raise CorruptFile(f"{path}: {', '.join(wrong)} should be an object. Delete it and run again.")
    if content["experiment"] != name:
        raise CorruptFile(f"{path} holds the results of {content['experiment']!r}, not of {name!r}.")
    if content["format"] != FORMAT:
        raise CorruptFile(
            f"{path} has format {content['format']}, and this version reads {FORMAT}. "
            "Use the version of favour that wrote it, or run again."
        )
    return content
