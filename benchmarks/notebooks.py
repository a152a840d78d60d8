"""Run the notebooks of examples/notebooks and keep what their cells print, show and draw, as a reader will see them.

A plain executor: cells in order in one namespace; a last line that is an expression is shown, as notebooks do.

python benchmarks/notebooks.py
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import tempfile
import types
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "examples" / "notebooks"


def executed(notebook: dict[str, Any], name: str) -> dict[str, Any]:
    """The notebook with the outputs of its cells."""
    import matplotlib

    matplotlib.use("Agg")
    module = types.ModuleType("__main__")  # classes defined in a cell need a module that holds them
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            code = "".join(cell["source"])
            outputs = run(code, module, f"{name}, cell {count}", count)
            cell = cell | {"execution_count": count, "outputs": outputs}
        cells.append(cell)
    return notebook | {"cells": cells}


def run(code: str, module: types.ModuleType, where: str, count: int) -> list[dict[str, Any]]:
    """The outputs of one cell: what it prints, the value of its last line, and its figures."""
    from matplotlib import pyplot as plt

    tree = ast.parse(code, where)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value = None
    plt.close("all")
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, where, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), where, "eval"), module.__dict__)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(printed.getvalue())})
    if value is not None and not code.rstrip().endswith(";"):
        shown = {"text/plain": lines(repr(value))}
        if hasattr(value, "_repr_html_"):
            shown = {"text/html": lines(value._repr_html_())} | shown
        kind = {"output_type": "execute_result", "execution_count": count}
        outputs.append(kind | {"data": shown, "metadata": {}})
    for number in plt.get_fignums():
        picture = io.BytesIO()
        plt.figure(number).savefig(picture, format="png", dpi=80, bbox_inches="tight", metadata={"Software": None})
        data = {"image/png": base64.b64encode(picture.getvalue()).decode(), "text/plain": ["a figure"]}
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    for path in sorted(FOLDER.glob("*.ipynb")):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            notebook = executed(json.loads(path.read_text()), path.name)
        path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
