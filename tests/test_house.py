"""How the library is laid out: what is private stays at home, what is public is listed, one loop walks graphs."""

import ast
import re
from functools import cache
from pathlib import Path

from test_import import ROOMS

import favour

# They say how a value came about or where it lies; a name says what the value is.
RIDDLES = {"found", "given", "own", "told", "near", "beyond", "bend"}
KEYWORDS = {("belief/pictures.py", "found")}  # of a public function: `favour.plots.belief`
SOURCE = Path(favour.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(path: Path) -> set[str]:
    """Private names that a file makes: functions, classes, variables and attributes of its own objects."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and own(node):
            found.add(node.attr)
    return {name for name in found if private(name)}


def own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def foreign(path: Path, elsewhere: set[str]) -> list[str]:
    """Private names of other files that a file reads or imports."""
    here, found = defined(path), []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and not own(node) and node.attr in elsewhere - here:
            found.append(f"{path.relative_to(SOURCE)}:{node.lineno} {ast.unparse(node)}")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("favour"):
            names = [alias.name for alias in node.names if private(alias.name)]
            found += [f"{path.relative_to(SOURCE)}:{node.lineno} {name}" for name in names]
    return found


def stored(path: Path) -> list[tuple[int, str]]:
    """Line and name of every variable, argument and attribute that a file gives a value."""
    names = []
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.arg):
            names.append((node.lineno, node.arg))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append((node.lineno, node.attr))
        elif isinstance(node, ast.MatchAs | ast.MatchStar) and node.name:
            names.append((node.lineno, node.name))
    return names


def test_no_module_uses_the_private_members_of_another():
    elsewhere = set().union(*map(defined, FILES))
    found = [line for path in FILES for line in foreign(path, elsewhere)]
    assert not found, "\n".join(found)


def test_every_module_with_public_names_lists_them():
    """`__all__` in every package's front and every module beside the packages."""
    fronts = [p for p in FILES if p.name == "__init__.py" or p.parent == SOURCE]
    without = [str(p.relative_to(SOURCE)) for p in fronts if "__all__" not in p.read_text() and len(tree(p).body) > 1]
    assert not without


def test_the_page_of_rooms_is_true():
    """docs/rooms.md lists every room in the order in which they may import, and the files it names exist."""
    page = (SOURCE.parent.parent / "docs" / "rooms.md").read_text()
    table = page.split("| room |")[1].split("\n\n")[0].splitlines()[2:]
    assert [name for line in table for name in line.split("|")[1].replace("`", "").split()] == ROOMS
    named = re.findall(r"`(src/favour/[\w/.]+)`(?:, `(\w+)`)?", page)
    assert len(named) > 15
    for path, name in named:
        file = SOURCE.parent.parent / path
        assert file.exists(), path
        assert not name or name in {n.name for n in ast.walk(tree(file)) if isinstance(n, ast.FunctionDef)}, name


def test_variables_are_named_for_what_they_hold():
    riddles = [
        f"{path.relative_to(SOURCE)}:{line} {name}"
        for path in FILES
        for line, name in stored(path)
        if name in RIDDLES and (path.relative_to(SOURCE).as_posix(), name) not in KEYWORDS
    ]
    assert not riddles, "\n".join(riddles)
