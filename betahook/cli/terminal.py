"""Rendering of a document on a terminal. Pictures, charts and wide tables are left to the HTML page."""

from __future__ import annotations

import sys
from io import TextIOWrapper

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text as RichText

from betahook.report.document import Document, Table, Text
from betahook.report.names import shorten_to

PIPED = 200
"""Width if the output is not a terminal, so that each row stays on one line."""
BETWEEN, FOLDED, NAME = 3, 24, 12
"""Widths: the gap between columns, the most that a foldable column claims, and the least for the first column."""


def show(document: Document) -> None:
    """Print a document to the standard output, with a ? for each character that its encoding lacks."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED
    console.print(RichText(document.title, style="bold"))
    for block in document.blocks:
        if isinstance(block, Text):
            console.print(RichText(block.text, style="bold" if block.strong else ""))
        elif isinstance(block, Table) and not block.is_wide:
            _show_table(console, block.compact())


def _show_table(console: Console, table: Table) -> None:
    console.print()
    if table.title:
        console.print(RichText(table.title, style="bold"))
    shown = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, header_style="dim")
    for column, name in enumerate(table.header):
        numeric = table.is_numeric(column)
        shown.add_column(
            RichText(name), justify="right" if numeric else "left", overflow="fold", no_wrap=numeric or column == 0
        )
    names = _names(table, console.width)
    for name, row in zip(names, table.rows, strict=True):
        shown.add_row(name, *map(RichText, row[1:]))
    if (least := _least_width(table, names)) > console.width:  # rich would truncate numbers and drop columns
        shown.width = least
    console.print(shown, crop=False)
    if table.note:
        console.print(RichText(table.note, style="dim"))


def _names(table: Table, width: int) -> list[str]:
    """Return the first column, shortened if the others leave it too little room."""
    first, *others = zip(*table.rows, strict=True) if table.rows else [()]
    widths = [max(map(len, (name, *cells))) for name, cells in zip(table.header[1:], others, strict=False)]
    left = width - sum(min(each, FOLDED) + BETWEEN for each in widths)
    return shorten_to(first, max(left, NAME))


def _least_width(table: Table, names: list[str]) -> int:
    """Return the least width that leaves every number whole, and most words of the columns that are folded."""
    widths = [max(map(len, (table.header[0], *names)))]
    for column, (name, *cells) in enumerate(zip(table.header[1:], *(row[1:] for row in table.rows), strict=True), 1):
        words = [word for text in (name, *cells) for word in text.split()]
        folded = min(FOLDED, max(map(len, words)))
        widths.append(max(map(len, (name, *cells))) if table.is_numeric(column) else folded)
    return sum(widths) + BETWEEN * (len(widths) - 1)
