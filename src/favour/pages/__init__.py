"""Pages of one file: nothing fetched, no script but the sorting of tables, light and dark, and readable on paper.

page        the whole, from sections of markup
table, figure, reading …    the markup of a section
number, count, seconds …    values as a reader wants them
Chart, Axis, sheet          figures as SVG, in the page's own colours
"""

from favour.pages.chart import Axis, Chart, around, fences, shape, sheet
from favour.pages.document import POLICY, page, write
from favour.pages.markup import (
    DASH,
    bullets,
    card,
    cell,
    count,
    details,
    figure,
    group_row,
    head,
    heading,
    listed,
    number,
    paragraph,
    reading,
    row,
    row_head,
    seconds,
    signed,
    table,
)
from favour.pages.style import CHART, PALETTE

__all__ = [
    "CHART",
    "DASH",
    "PALETTE",
    "POLICY",
    "Axis",
    "Chart",
    "around",
    "bullets",
    "card",
    "cell",
    "count",
    "details",
    "fences",
    "figure",
    "group_row",
    "head",
    "heading",
    "listed",
    "number",
    "page",
    "paragraph",
    "reading",
    "row",
    "row_head",
    "seconds",
    "shape",
    "sheet",
    "signed",
    "table",
    "write",
]
