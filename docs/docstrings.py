"""A Griffe extension: docstrings as they are written here, made into what the API page's parser expects.

Example:            becomes Examples:, a section whose doctests are shown as code
>>> outside one     gets such a section
(batch, *event)     keeps its asterisk: two of them in a paragraph are no emphasis
"""

from __future__ import annotations

import re
from typing import Any

import griffe

DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*(?:\n.+)*)")
ASTERISK = re.compile(r"(?<=[(\s])\*(?=\w)(?=[^`]*(?:`[^`]*`[^`]*)*$)")  # outside of `code`


class Docstrings(griffe.Extension):
    """Rewrites every docstring before it is parsed."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is None:
            return
        text = re.sub(r"^Example:$", "Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = DOCTEST.sub(lambda match: "Examples:\n" + re.sub("^", "    ", match[1], flags=re.MULTILINE), text)
        lines = text.split("\n")
        plain = [
            not re.match(r"\s*(>>>|\.\.\.|\S.*  \S)", line) for line in lines
        ]  # neither code nor a table of formulas
        lines = [ASTERISK.sub(r"\\*", line) if is_plain else line for line, is_plain in zip(lines, plain, strict=True)]
        obj.docstring.value = "\n".join(lines)
