"""HTML from values: numbers as text, tables, figures. Everything that is not markup already is escaped."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from html import escape, unescape

DASH = "–"


def number(value: float | None, digits: int = 3) -> str:
    """A number with that many significant digits, thousands separated; a dash for none.

    >>> number(0.012345), number(1234.5), number(None)
    ('0.0123', '1,234', '–')
    """
    if value is None:
        return DASH
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(decimals, 9)}f}".replace("-", "−")


def count(value: float | None) -> str:
    """A number of samples or forward passes: two digits below ten, whole above.

    >>> count(4.26), count(640.2), count(0.83)
    ('4.3', '640', '0.83')
    """
    if value is None:
        return DASH
    if value == int(value):
        return f"{int(value):,}"
    return f"{value:,.0f}" if value >= 9.95 else number(value, 2)


def signed(value: float | None, digits: int = 2) -> str:
    """With its sign."""
    shown = number(value, digits)
    return f"+{shown}" if value is not None and value > 0 else shown


def seconds(value: float | None) -> str:
    """A duration in the unit that suits it.

    >>> seconds(0.0123), seconds(75.0), seconds(3e-5)
    ('12.3 ms', '75.0 s', '30.0 µs')
    """
    if value is None:
        return DASH
    for limit, unit in ((1.0, 1.0), (1e-3, 1e-3)):
        if value >= limit:
            return f"{number(value / unit)} {'s' if unit == 1.0 else 'ms'}"
    return f"{number(value / 1e-6)} µs"


def listed(words: Sequence[str]) -> str:
    """Words as a sentence has them.

    >>> listed(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def paragraph(text: str, kind: str = "") -> str:
    """What stands between backticks is code, here and in lists."""
    return f"<p{_class(kind)}>{_words(text)}</p>"


def _words(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def heading(text: str) -> str:
    return f"<h3>{escape(text)}</h3>"


def bullets(sentences: Sequence[str]) -> str:
    items = (_words(s) for s in sentences)
    return "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>" if sentences else ""


def reading(sentences: Sequence[str], warning: bool = False) -> str:
    """The plain-language reading: one sentence a paragraph, several a list."""
    if not sentences:
        return ""
    body = bullets(sentences) if len(sentences) > 2 else "".join(paragraph(s) for s in sentences)
    return f'<div class="reading{" warning" if warning else ""}">{body}</div>'


def cell(text: str, kind: str = "", markup: bool = False) -> str:
    """A cell of a table body."""
    return f"<td{_class(kind)}>{text if markup else escape(text)}</td>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


def row_head(text: str, rows: int = 1, kind: str = "") -> str:
    span = f' rowspan="{rows}" scope="rowgroup"' if rows > 1 else ' scope="row"'
    return f'<th class="{("left " + kind).strip()}"{span}>{escape(text)}</th>'


def group_row(text: str, columns: int) -> str:
    return f'<tr class="group"><th colspan="{columns}" scope="colgroup"><span>{escape(text)}</span></th></tr>'


def row(cells: Sequence[str], kind: str = "") -> str:
    return f"<tr{_class(kind)}>{''.join(cells)}</tr>"


def head(titles: Sequence[str | tuple[str, int]], left: Sequence[str] = ()) -> str:
    """A header row; (title, n) spans n columns; the titles in `left` stand above words."""
    cells = []
    for title in titles:
        text, span = (title, 1) if isinstance(title, str) else title
        scope = f'scope="colgroup" colspan="{span}"' if span > 1 else 'scope="col"'
        cells.append(f"<th {scope}{_class('left' if text in left else '')}>{escape(text)}</th>")
    return f"<tr>{''.join(cells)}</tr>"


def table(name: str, caption: str, header: str, body: Sequence[str]) -> str:
    """A table in a box of its own, with a header that stays and sorts; `header` and `body` are rows of markup.

    Cells carry their column's title, so that a narrow screen can show every row as a list of titles and values.
    """
    label = escape(caption, quote=True)
    header, body, columns = _labelled(header, body)
    kind = ' class="many"' if columns > 5 else ""
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table id="{name}"{kind}>'
        f"<caption><span>{escape(caption)}</span></caption><thead>{header}</thead><tbody>{''.join(body)}</tbody></table></div>"
    )


_CELL = re.compile(r"<(t[hd])((?: [^<>]*)?)>([^<]*)")


def _labelled(header: str, body: Sequence[str]) -> tuple[str, list[str], int]:
    """Header and rows with the title of each cell's column, and the number of columns."""
    titles: dict[int, list[str]] = {}
    tops = [line for line in header.split("</tr>") if line]
    for _, column, across, match in _placed(tops):
        for c in range(column, column + across):
            titles.setdefault(c, []).extend([unescape(match[3])] if match[3] else [])
    labels = {column: escape(": ".join(words), quote=True) for column, words in titles.items() if words}

    def titled(lines: Sequence[str]) -> list[str]:
        marked = list(lines)
        for i, column, across, match in reversed(list(_placed(lines))):
            if across == 1 and column in labels:
                at = match.end(2)
                marked[i] = marked[i][:at] + f' data-label="{labels[column]}"' + marked[i][at:]
        return marked

    return "".join(f"{line}</tr>" for line in titled(tops)), titled(body), max(titles, default=0) + 1


def _placed(rows: Sequence[str]) -> Iterator[tuple[int, int, int, re.Match[str]]]:
    """Row, column, width and markup of every cell, beside the cells above it that span rows."""
    free: dict[int, int] = {}  # by column, the first row below what stands there
    for i, line in enumerate(rows):
        column = 0
        for match in _CELL.finditer(line):
            while free.get(column, 0) > i:
                column += 1
            spans = {kind: int(n) for kind, n in re.findall(r'(colspan|rowspan)="(\d+)"', match[2])}
            across = spans.get("colspan", 1)
            free |= dict.fromkeys(range(column, column + across), i + spans.get("rowspan", 1))
            yield i, column, across, match
            column += across


def figure(name: str, panels: Sequence[str], caption: str, legend: str = "", wide: bool = False, says: str = "") -> str:
    """A figure of one or several panels (SVG), which flow into as many columns as there is room for; `says` is its
    reading in one line."""
    return (
        f'<figure id="{name}">{paragraph(says, "says") if says else ""}{legend}'
        f'<div class="panels{" wide" if wide else ""}">{"".join(panels)}</div>'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def card(title: str, big: str, text: str = "", kind: str = "") -> str:
    """An answer in large letters, with its name above and a sentence below."""
    return f'<div class="card"><h3>{escape(title)}</h3><p class="big {kind}">{escape(big)}</p>{paragraph(text)}</div>'


def details(summary: str, content: str) -> str:
    return f"<details><summary>{escape(summary)}</summary>{content}</details>"
