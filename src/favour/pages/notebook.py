"""What notebooks show of an object: a card with a table, in its own colours, without script or style sheet."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_BOX = "display:inline-block;max-width:100%;overflow-x:auto;font-variant-numeric:tabular-nums"
_CELL = "text-align:{};padding:.15em .8em .15em 0;white-space:nowrap"


def card(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], note: str = "") -> str:
    """A title, a table whose first column holds words, and markup below.

    >>> card("t", ["a", "b"], [["x", "1"]]).count("<td")
    2
    """
    lines = [header, *rows] if header else list(rows)
    body = []
    for number, line in enumerate(lines):
        tag = "th" if header and number == 0 else "td"
        cells = (
            f'<{tag} style="{_CELL.format("left" if i == 0 else "right")}">{escape(text)}</{tag}>'
            for i, text in enumerate(line)
        )
        body.append(f"<tr>{''.join(cells)}</tr>")
    table = f"<table>{''.join(body)}</table>" if body else ""
    below = f'<div style="opacity:.75">{note}</div>' if note else ""
    return f'<div style="{_BOX}"><strong>{escape(title)}</strong>{table}{below}</div>'
