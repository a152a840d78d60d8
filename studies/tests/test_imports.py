"""This package stands on what Favour promises: `favour` itself and its public modules."""

import ast
from pathlib import Path

import favour

ROOT = Path(__file__).parents[2]
PUBLIC = {
    "favour.errors",
    "favour.losses",
    "favour.metrics",
    "favour.nn",
    "favour.pages",
    "favour.plots",
    "favour.scores",
}


def imported(path: Path) -> set[str]:
    """Modules of Favour that a file imports from; a name imported from `favour` counts if it is a module."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "favour":
            found |= {f"favour.{alias.name}" for alias in node.names if module(alias.name)}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return {name for name in found if name.split(".")[0] == "favour"} - {"favour"}


HOME = Path(favour.__file__).parent


def module(name: str) -> bool:
    return (HOME / f"{name}.py").exists() or (HOME / name).is_dir()


def test_only_public_modules_are_imported():
    files = sorted((ROOT / "studies" / "src").rglob("*.py"))
    assert len(files) > 40
    private = {str(p.relative_to(ROOT)): sorted(imported(p) - PUBLIC) for p in files if imported(p) - PUBLIC}
    assert private == {}


def test_nothing_private_is_read():
    """No attribute with an underscore in front, but one's own."""
    found = []
    for path in sorted((ROOT / "studies" / "src").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                owner = ast.unparse(node.value)
                if owner.split(".")[0] not in ("self", "cls", "torch", "nn", "storage"):
                    found.append(f"{path.name}:{node.lineno} {owner}.{node.attr}")
    assert found == []


def test_the_library_does_not_know_the_studies():
    assert [str(p) for p in HOME.rglob("*.py") if "favour_studies" in p.read_text()] == []
