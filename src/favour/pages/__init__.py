"""Pages of one file: no script, nothing fetched, light and dark, and readable on paper.

page        the whole, from sections of markup
table, figure, reading …    the markup of a section
number, count, seconds …    values as a reader wants them
"""

from favour.pages.document import POLICY, page, write
from favour.pages.markup import (
    DASH,
    bullets,
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
from favour.pages.style import PALETTE
