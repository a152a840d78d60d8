"""CSV and TSV files: what their first line means, which columns hold numbers, and what a number is.

A first line whose fields are all text holds names. One with a number in it may be either, names (`id,2019,2020`) or a
row (`ada,1,2`), and nothing in the file says which: it is refused until the user does, with `header`, or by naming
columns that only one of the two has. Text is UTF-8, with a byte-order mark or without, and decimals have a point.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence

from favour.errors import CorruptFile, InvalidValue

SAMPLE = 200  # records that decide which columns are numbers
LOST = re.compile("[\udc80-\udcff]")  # what bytes that are no UTF-8 become
_WHOLE = re.compile(r"\s*[+-]?\d+\s*", re.ASCII)
_MARKS = {b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16", b"\x1f\x8b": "compressed (gzip)", b"PK": "a zip archive"}


def delimiter(file: str) -> str:
    """What separates fields: a tab in .tsv files, else a comma."""
    return "\t" if file.lower().endswith(".tsv") else ","


def number(text: str) -> float | None:
    """The number that a field holds, or None.

    >>> number(" 1e3 "), number("1_000"), number(""), number("1,5")
    (1000.0, None, None, None)
    """
    try:
        return None if "_" in text else float(text)
    except ValueError:
        return None


def whole(text: str) -> int | float | None:
    """The same, to the last digit where it is written as a whole number.

    >>> whole("9007199254740993"), whole("2.5")
    (9007199254740993, 2.5)
    """
    return int(text) if _WHOLE.fullmatch(text) and len(text) < 40 else number(text)


def header(file: str, named: bool | None = None) -> tuple[list[str], bool]:
    """Names of the columns, and whether they stand in the first line; `column_0`, `column_1`, … where they do not.

    Args:
        file: To read.
        named: What is known already; None to decide.
    """
    fields = first_record(file)
    if named is None:
        odd = next((field for field in fields if number(field) is not None), None)
        if odd is not None:
            raise InvalidValue(
                f"the first line of `{file}` has the number {odd.strip()!r} in it: a row, or names of columns? Say so "
                "with `header=False` (`--no-header`) or `header=True` (`--header`)."
            )
        named = True
    if not named:
        if not any(number(field) is not None for field in fields):
            raise InvalidValue(
                f"the first line of `{file}` holds no number, {_shown(fields)}, and was said to be a row; leave out "
                "`header`, or remove the line."
            )
        return [f"column_{i}" for i in range(len(fields))], False
    names = [name.strip() for name in fields]
    repeated = sorted({name for name in names if name and names.count(name) > 1})
    if repeated:
        raise CorruptFile(
            f"`{file}` has columns of the same name in its first line: {', '.join(f'`{n}`' for n in repeated)}; one of "
            "them would be read twice. Rename them."
        )
    if not any(names):
        raise CorruptFile(f"the first line of `{file}` names no column: {_shown(fields)}.")
    return names, True


def first_record(file: str) -> list[str]:
    """The fields of the first record, checked."""
    try:
        with open(file, "rb") as raw:
            begin = raw.read(2)
        odd = next((what for mark, what in _MARKS.items() if begin == mark), None)
        if odd is not None:
            raise CorruptFile(f"`{file}` is {odd}, and text in UTF-8 is required; convert it first.")
        with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
            fields = next(csv.reader(stream, delimiter=delimiter(file)), None)
    except OSError as error:
        raise InvalidValue(f"`{file}` cannot be read: {error.strerror}.") from error
    except csv.Error as error:
        raise CorruptFile(f"the first line of `{file}` cannot be read: {error}.") from error
    if not fields:
        raise CorruptFile(f"`{file}` is empty, or begins with an empty line; a line of column names is expected there.")
    lost = next((i for i, field in enumerate(fields) if LOST.search(field)), None)
    if lost is not None:
        raise CorruptFile(
            f"the name of column {lost + 1} in the first line of `{file}` is not UTF-8; convert the file first, such "
            "as with `iconv -f latin1 -t utf-8`."
        )
    return fields


def has_header(file: str, columns: Sequence[str] | None) -> bool:
    """Whether the first line holds names, as far as the line itself and the columns that the user wants tell."""
    fields = [field.strip() for field in first_record(file)]
    if columns and any(number(field) is not None for field in fields):
        if all(name in fields for name in columns):
            return True
        if all(name in {f"column_{i}" for i in range(len(fields))} for name in columns):
            return False
    return header(file)[1]


def column_kinds(file: str, names: Sequence[str], named: bool) -> dict[str, str]:
    """What columns hold by the first `SAMPLE` records, `"numbers"`, `"text"` or `"unclear"`; empty without a record.

    A column of numbers may have the odd field that is none: such rows are reported, and the column is not dropped. One
    with numbers in half of its rows or fewer, or with nothing in any, is unclear.
    """
    counts, empty, records = [0] * len(names), [0] * len(names), 0
    with open(file, encoding="utf-8-sig", errors="surrogateescape", newline="") as stream:
        reader = csv.reader(stream, delimiter=delimiter(file))
        if named:
            next(reader)
        for fields in reader:
            records += bool(fields)
            for i, field in enumerate(fields[: len(names)]):
                counts[i] += number(field) is not None
                empty[i] += not field.strip()
            if records == SAMPLE:
                break
    if not records:
        return {}

    def kind(count: int, blank: int) -> str:
        return "numbers" if 2 * count > records else "unclear" if count or blank == records else "text"

    return {name: kind(*tallies) for name, *tallies in zip(names, counts, empty, strict=True)}


def hint(names: Sequence[str]) -> str:
    """What is likely wrong with a file whose names look as if something else separated them."""
    for separator, what in ((";", "semicolons"), ("\t", "tabs (a file of those ends in .tsv)"), ("|", "bars")):
        if len(names) == 1 and separator in names[0]:
            return f" Its fields seem to be separated by {what}; commas are required, and points in numbers."
    return ""


def _shown(fields: Sequence[str]) -> str:
    return ", ".join(map(repr, fields[:8])) + (", …" if len(fields) > 8 else "")
