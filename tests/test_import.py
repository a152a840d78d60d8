"""What `import favour` brings with it, what it offers, and which way imports point."""

import ast
import importlib
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import favour
from favour import errors

HEAVY = ["torch._dynamo", "torch._inductor", "matplotlib", "sklearn", "typer", "rich", "pandas", "scipy"]
SOURCE = Path(favour.__file__).parent


def test_import_loads_neither_the_compiler_nor_an_extra():
    """The compiler alone takes a second to import; extras may be missing altogether."""
    code = (
        "import sys, torch; before = set(sys.modules); import favour; "
        f"print([m for m in {HEAVY!r} if m in sys.modules and m not in before])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# ---- names


def test_public_names_are_few_and_all_there():
    shown = [name for name in dir(favour) if not name.startswith("_")]
    assert len(shown) <= 60 and len(set(shown)) == len(shown)
    assert set(favour.__all__) <= set(shown)
    for name in shown:
        assert getattr(favour, name) is not None


@pytest.mark.parametrize("name", ["InvalidValue", "CorruptFile", "OutOfRange"])
def test_names_that_moved_are_found_with_a_warning(name):
    with pytest.warns(errors.DeprecatedName, match=rf"favour\.errors\.{name}"):
        assert getattr(favour, name) is getattr(errors, name)


def test_unknown_names_are_no_attributes():
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = favour.nonsense


# ---- which way imports point

# Who may import whom: every room those before it. Section 6 of the design, from the ground up.
ROOMS = [
    *("errors", "progress", "extras", "files", "pages", "surrogate", "posterior", "graph", "scalar", "belief"),
    *("rules", "passes", "methods", "program", "classify", "inspect", "metrics", "plots", "scores", "predictor"),
    *("saving", "nn", "learn", "losses", "adapters", "integrations", "sklearn", "botorch", "exporting", "rating"),
    *("scale", "serving", "trial", "demo", "cli"),
]


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(path: Path) -> set[str]:
    """Modules of favour that a file imports, at its head, inside functions or for types only."""
    inside = ["favour", *path.relative_to(SOURCE).with_suffix("").parts]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.startswith("favour.")}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*inside[: -node.level], *([base] if base else [])])
            if base == "favour":
                found |= {f"favour.{alias.name}" for alias in node.names if (SOURCE / alias.name).exists()}
                found |= {f"favour.{a.name}" for a in node.names if (SOURCE / f"{a.name}.py").exists()}
            elif base.startswith("favour."):
                found.add(base)
    return found


def edges() -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        own = room(".".join(["favour", *path.relative_to(SOURCE).with_suffix("").parts]))
        if path.parent == SOURCE and path.name == "__init__.py":
            continue
        for module in imported(path):
            if room(module) != own:
                found.setdefault((own, room(module)), []).append(f"{path.relative_to(SOURCE)} imports {module}")
    return found


def test_every_room_has_its_place():
    here = {p.stem for p in SOURCE.iterdir() if p.suffix == ".py" or (p / "__init__.py").exists()} - {"__init__"}
    assert here == set(ROOMS), "give a new room its place in ROOMS"
    assert len([p for p in SOURCE.glob("*.py")]) <= 16


def test_imports_point_one_way():
    place = {name: i for i, name in enumerate(ROOMS)}
    wrong = {edge: files for edge, files in edges().items() if place[edge[1]] > place[edge[0]]}
    assert not wrong, wrong


def test_no_module_waits_for_itself():
    """No cycle of imports, lazy and type-only ones too, but between a belief or a covariance and its helpers."""
    paths = {".".join(["favour", *p.relative_to(SOURCE).with_suffix("").parts]): p for p in SOURCE.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): path for name, path in paths.items() if path != SOURCE / "__init__.py"}
    reads: dict[str, set[str]] = {}
    for name, path in modules.items():
        lines = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
        found = {f"{n.module}.{a.name}" for n in lines for a in n.names} | {str(n.module) for n in lines}
        found -= {other for other in found if any(inner.startswith(f"{other}.") for inner in found & modules.keys())}
        allowed = {n for n in modules if n == name or room(n) == room(name) == "belief"}
        reads[name] = found & (modules.keys() - allowed)
    TopologicalSorter(reads).prepare()  # raises CycleError, which names one


def test_the_reader_of_imports_sees_what_is_hidden(tmp_path, monkeypatch):
    """Imports inside functions, for types, and relative ones."""
    folder = tmp_path / "rules"
    folder.mkdir()
    (folder / "norm.py").write_text(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
        "    from favour.cli import main\ndef f():\n    import favour.serving\n    from ..graph import node\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "SOURCE", tmp_path)
    assert imported(folder / "norm.py") == {"favour.cli", "favour.serving", "favour.graph"}
    assert ("rules", "cli") in edges()


def test_no_file_is_longer_than_four_hundred_lines():
    long = {str(p.relative_to(SOURCE)): n for p in SOURCE.rglob("*.py") if (n := len(p.read_text().splitlines())) > 400}
    assert not long, long


@pytest.mark.parametrize("name", ["favour.sklearn", "favour.botorch"])
def test_integrations_keep_their_names(name):
    pytest.importorskip(name.rpartition(".")[2])
    assert importlib.import_module(name).__all__
