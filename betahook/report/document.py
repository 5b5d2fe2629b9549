"""A document of texts, tables, pictures and charts, which the commands make and a terminal or an HTML page shows.

Nothing here knows betahook's numbers. `betahook.cli` fills documents; `report.html` and `cli.terminal` render them.
Findings and audits use the tables too, and print them as text or Markdown.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

NUMBER = re.compile(r"[-+]?[\d.,]+(e[-+]?\d+)?\s?(x|%)?")
BAR = re.compile(r"(?<!\\)\|")
"""A bar between two cells of a Markdown table; a bar within a cell is escaped."""


@dataclass(frozen=True)
class Text:
    """A paragraph.

    Attributes:
        text: plain text; line breaks are kept.
        strong: True for the sentence to read first.
    """

    text: str
    strong: bool = False


@dataclass(frozen=True)
class Table:
    """A table with a header; prints as aligned columns, without title and note.

    Attributes:
        header: a name for each column.
        rows: rows of cells, one plain text for each column.
        title: title above the table.
        note: note below the table, on how to read it.
        is_wide: True for a table that only the HTML page shows, not a terminal.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    note: str = ""
    is_wide: bool = False

    def is_numeric(self, column: int) -> bool:
        """Return whether a column holds numbers, which are aligned at the right."""
        cells = [row[column] for row in self.rows if row[column]]
        return bool(cells) and all(NUMBER.fullmatch(cell) for cell in cells)

    def compact(self, *, without: Collection[str] = ()) -> Table:
        """Return the table without the columns named in `without`, and without those that are empty in every row."""
        columns = [[name, *(row[index] for row in self.rows)] for index, name in enumerate(self.header)]
        kept = [column for column in columns if column[0] not in without and (any(column[1:]) or not self.rows)]
        header, *rows = map(list, zip(*kept, strict=True))
        return replace(self, header=header, rows=rows)

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, strict=True)]
        rule = ["-" * width for width in widths]
        lines = [zip(row, widths, strict=True) for row in (self.header, rule, *self.rows)]
        return "\n".join("  ".join(cell.ljust(width) for cell, width in line).rstrip() for line in lines)

    def markdown(self) -> str:
        """Return header and rows in Markdown."""
        rows = [[on_one_line(cell).replace("|", r"\|") for cell in row] for row in (self.header, *self.rows)]
        rows.insert(1, ["---"] * len(self.header))
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    @classmethod
    def from_markdown(cls, words: str) -> Table:
        """Read the table in a text that contains one, as `markdown` wrote it."""
        lines = [line for line in words.splitlines() if line.startswith("|")]
        header, _, *rows = ([cell.strip().replace(r"\|", "|") for cell in BAR.split(line)[1:-1]] for line in lines)
        return cls(header, rows)


def on_one_line(text: str) -> str:
    """Replace line breaks, which names of modules may have, by spaces: in Markdown they would end the element."""
    return " ".join(text.splitlines())


@dataclass(frozen=True)
class Image:
    """A picture; a terminal leaves it out.

    Attributes:
        png: content of the PNG file.
        alt: what the picture shows, in words.
        title: title above the picture.
        note: note below the picture, on how to read it.
    """

    png: bytes
    alt: str
    title: str = ""
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over the steps of a run; a terminal leaves it out.

    Attributes:
        title: title above the chart.
        lines: name to points (step, value), in order of the steps.
        logarithmic: True for a logarithmic axis of positive values.
        note: note below the chart, on how to read it.
        colours: colours of lines by name, if they have a meaning.
        ends: ends of the axis of values; None fits the axis to the values.
        steps: ends of the axis of steps; None fits the axis to the steps.
    """

    title: str
    lines: Mapping[str, Sequence[tuple[float, float]]]
    logarithmic: bool = False
    note: str = ""
    colours: Mapping[str, str] = field(default_factory=dict)
    ends: tuple[float, float] | None = None
    steps: tuple[float, float] | None = None


Block = Text | Table | Image | Chart


@dataclass(frozen=True)
class Document:
    """Blocks under a title."""

    title: str
    blocks: Sequence[Block] = field(default_factory=tuple)
