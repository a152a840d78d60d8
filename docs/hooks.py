"""What the site needs beyond Markdown: formulas, tables of measured numbers, the examples.

$…$, $$…$$              MathML, made when the site is built: pages need neither a script nor the network
<!-- table: NAME -->    the table NAME of `docs/tables.py`, made from the files under results/
<!-- examples -->       every file of examples/: what it says about itself, and its source
"""

from __future__ import annotations

import ast
import html
import importlib.util
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
TABLE = re.compile(r"<!-- table: (\w+) -->")
FORMULA = re.compile(r'<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', re.DOTALL)


def on_config(config: Any) -> Any:
    version = re.search(r'^__version__ = "(.*)"', (ROOT / "src" / "favour" / "__init__.py").read_text(), re.MULTILINE)
    assert version is not None
    config["copyright"] = f"Favour {version[1]}"  # at the foot of every page
    config["watch"].extend(str(ROOT / name) for name in ("results", "examples"))
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = TABLE.sub(_table, markdown)
    return markdown.replace("<!-- examples -->", examples())


def _table(match: re.Match[str]) -> str:
    try:
        return str(getattr(_tables(), match[1])())
    except FileNotFoundError as error:
        name = Path(error.filename).name
        return f"*Not measured yet: `python benchmarks/{Path(name).stem}.py` writes `results/{name}`.*"


def on_page_content(content: str, **_: Any) -> str:
    return FORMULA.sub(_mathml, content)


# What the converter writes, and what MathML Core renders well: relations are operators, names of functions keep a thin
# space from letters and none from brackets, and bold digits are characters of their own.
NAME = r"<mo>([A-Za-z]{2,})</mo>"
BRACKET = r"(?=(?:<mrow>)*<mo[^>]*>(?:&#x00028;|&#x0005B;|&#x0007B;|\(|\[|\{))"
POLISH = (
    (re.compile(r"<mi>&#x0007E;</mi>"), "<mo>&#x0223C;</mo>"),
    (re.compile(r"<mi>(&#x(?:02AB0|027F9|02190);)</mi>"), r"<mo>\1</mo>"),
    (re.compile(r'<mn mathvariant="bold">1</mn>'), "<mn>&#x1D7CF;</mn>"),
    (re.compile(NAME + BRACKET), r'<mo lspace="0.1em" rspace="0">\1</mo>'),
    (re.compile(NAME), r'<mo lspace="0.1em" rspace="0.17em">\1</mo>'),
    (re.compile(r"<mi>(log|exp|tanh)</mi>(?=<m(?:i|sub)>)"), r'<mi>\1</mi><mspace width="0.17em"/>'),
)


def _mathml(match: re.Match[str]) -> str:
    latex = html.unescape(match[2]).strip()
    block = match[1] == "div"
    # The converter knows `align*` but not `aligned`.
    latex = latex.replace("{aligned}", "{align*}")
    math = convert(latex, display="block" if block else "inline")
    if "\\" in re.sub(r"<[^>]*>", "", math):
        raise ValueError(f"the converter left LaTeX behind in {latex!r}: {math}")
    for pattern, better in POLISH:
        math = pattern.sub(better, math)
    return f'<div class="formula">{math}</div>' if block else math


def examples() -> str:
    """A section for each file of examples/: its docstring, the command that runs it, its source."""
    parts = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        source = path.read_text()
        title, _, text = (ast.get_docstring(ast.parse(source)) or path.stem).partition("\n")
        text = re.sub(r"^python examples/\S+\s*(\(needs (.*)\))?$", _needs, text.strip(), flags=re.MULTILINE)
        code = "\n".join(f"    {line}".rstrip() for line in source.splitlines())
        parts.append(
            f"## {title.rstrip('.')} {{ #{path.stem.replace('_', '-')} }}\n\n{text.strip()}\n\n"
            f"```console\n$ python examples/{path.name}\n```\n\n"
            f'??? example "examples/{path.name}"\n\n    ```python\n{code}\n    ```\n'
        )
    return "\n".join(parts)


def _needs(match: re.Match[str]) -> str:
    return f"Needs `{match[2]}`." if match[2] else ""


def _tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("favour_docs_tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
