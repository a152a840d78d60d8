"""A record as a table: one line per row, costs in forward passes, errors, and what a sampler would take instead.

With rich where it is installed, else plain text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

COLUMNS = (
    "network",
    "method",
    "batch",
    "mode",
    "ms",
    "forwards",
    "compiled",
    "naive",
    "cached",
    "memory",
    "error",
    "worth",
    "× naive",
    "× batched",
    "× cached",
)
CAPTION = (
    "forwards, compiled: time in plain forward passes, eager and compiled; naive, cached: in draws of these samplers; "
    "memory: peak over the plain forward's; error: relative Frobenius error of the covariance; worth: draws with the "
    "same error (≥: the reference cannot tell); ×: speed-up at equal error over the naive, the batched, and the "
    "trunk-cached compiled sampler"
)


def short(value: float | None) -> str:
    """Three digits, thousands with a comma.

    >>> short(0.01234), short(3.14159), short(12345.6), short(None)
    ('0.0123', '3.14', '12,346', '–')
    """
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def lines(record: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The cells of every row."""
    result = []
    for row in record["rows"]:
        spread = f" ±{row['forwards spread']:.2g}"
        result.append(
            (
                record["networks"][row["network"]]["title"],
                row["method"],
                str(row["batch"]),
                row["mode"],
                short(row["time"]["seconds"] * 1e3),
                short(row["forwards"]) + spread,
                short(row["compiled forwards"]),
                short(row["samples"]["naive"]),
                short(row["samples"]["cached"]),
                short(row["memory over forward"]),
                short(row["error"]),
                ("≥ " if row["capped"] else "") + short(row["worth"]),
                *(short(row["speed-up"][name]) for name in ("naive", "batched", "cached")),
            )
        )
    return result


def skipped(record: Mapping[str, Any]) -> list[str]:
    """What was not measured, and why; one line per reason and network."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in record["skipped"]:
        mode = f" {row['mode']}" if row["mode"] else ""
        places.setdefault((row["network"], row["why"]), []).append(f"{row['method']}{mode} at batch {row['batch']}")
    return [f"not measured: {network}, {', '.join(rows)}: {why}" for (network, why), rows in places.items()]


def plain(record: Mapping[str, Any]) -> str:
    """The table without rich."""
    cells = [COLUMNS, *lines(record)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    text = [
        "  ".join(c.ljust(w) if i < 4 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return "\n".join([*text, CAPTION, *skipped(record)])


def show(record: Mapping[str, Any]) -> None:
    """Print the table."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        print(plain(record))
        return
    table = Table(caption=CAPTION, caption_justify="left")
    for i, name in enumerate(COLUMNS):
        table.add_column(name, justify="left" if i in (0, 1, 3) else "right", no_wrap=True)
    previous = None
    for row in lines(record):
        if previous is not None and row[0] != previous:
            table.add_section()
        table.add_row(*row)
        previous = row[0]
    console = Console()
    if not console.is_terminal:
        console = Console(width=180)
    console.print(table)
    for line in skipped(record):
        console.print(line, highlight=False)
