"""A whole page: one HTML file that needs nothing else; its content security policy allows no request at all, and no
script but the one that sorts tables."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from favour.files.replacing import replaced
from favour.pages.markup import paragraph
from favour.pages.script import DIGEST, SORT
from favour.pages.style import PAGE, PALETTE

POLICY = f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src '{DIGEST}'"


def page(title: str, lead: str, sections: Sequence[tuple[str, str, str]], footer: str = "", style: str = "") -> str:
    """The HTML of a page.

    Args:
        title: In the window's bar, and on top.
        lead: A paragraph below it.
        sections: Of each an id, a title and its markup.
        footer: Markup of the last line.
        style: Rules beyond those of every page.
    """
    contents = "".join(f'<li><a href="#{name}">{escape(words)}</a></li>' for name, words, _ in sections)
    body = "".join(
        f'<section id="{name}" aria-labelledby="{name}-title"><h2 id="{name}-title">{escape(words)}</h2>{content}'
        "</section>\n"
        for name, words, content in sections
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<link rel="icon" href="data:,">
<style>
{PALETTE}{PAGE}{style}</style>
</head>
<body>
<div class="shell">
<nav aria-label="Contents"><strong>Contents</strong><ol>{contents}</ol></nav>
<main>
<header><h1>{escape(title)}</h1>{paragraph(lead, "lead")}</header>
{body}</main>
<footer>{footer}</footer>
</div>
<script>{SORT}</script>
</body>
</html>
"""


def write(path: Path, text: str) -> Path:
    """Put a text into a file, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")
    return path
