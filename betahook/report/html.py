"""A document as one HTML file, for `betahook.cli`: no script, nothing from the network, light and dark, all escaped."""

from __future__ import annotations

import base64
import html
import os
from collections.abc import Iterator
from importlib import resources
from itertools import groupby
from pathlib import Path

from betahook.report.charts import draw
from betahook.report.document import Block, Chart, Document, Image, Table, Text

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def write(document: Document, path: str | os.PathLike[str]) -> None:
    """Write a document to a file, which appears complete or not at all, or into a device or pipe, which is kept.

    Raises:
        OSError: the document cannot be written there.
    """
    page, file = render(document), Path(path)
    try:
        if file.exists() and not file.is_file():
            file.write_text(page, encoding="utf-8")
            return
        file = file.resolve()  # a link is kept, too
        unfinished = file.with_name(f"{file.name}.unfinished")
        unfinished.write_text(page, encoding="utf-8")
        os.replace(unfinished, file)
    except OSError as error:  # it names the unfinished file
        raise OSError(f"{path} cannot be written: {error.strerror}") from error


def render(document: Document) -> str:
    """Return a document as an HTML page."""
    style = resources.files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    body = "\n".join(_sections(document))
    return PAGE.format(title=html.escape(document.title), style=style, body=body)


def _sections(document: Document) -> Iterator[str]:
    """Render the blocks; charts that follow one another stand side by side."""
    for kind, blocks in groupby(document.blocks, type):
        rendered = [_render(block) for block in blocks]
        yield f'<div class="charts">{"".join(rendered)}</div>' if kind is Chart else "\n".join(rendered)


def _render(block: Block) -> str:
    if isinstance(block, Text):
        return f"<p{' class=strong' if block.strong else ''}>{html.escape(block.text)}</p>"
    title = f"<h2>{html.escape(block.title)}</h2>" if block.title else ""
    note = f'<p class="note">{html.escape(block.note)}</p>' if block.note else ""
    content = {Table: _table, Image: _image, Chart: draw}[type(block)](block)  # type: ignore[operator]
    return f"<section>{title}{content}{note}</section>"


def _table(table: Table) -> str:
    table = table.compact()
    kinds = [' class="number"' if table.is_numeric(column) else "" for column in range(len(table.header))]

    def row(cells: list[str], tag: str) -> str:
        return (
            "<tr>" + "".join(f"<{tag}{kind}>{cell}</{tag}>" for kind, cell in zip(kinds, cells, strict=True)) + "</tr>"
        )

    head = row([html.escape(name) for name in table.header], "th")
    body = "".join(row([html.escape(cell) for cell in cells], "td") for cells in table.rows)
    return f'<div class="scroll"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _image(image: Image) -> str:
    data = base64.b64encode(image.png).decode()
    return f'<img alt="{html.escape(image.alt)}" src="data:image/png;base64,{data}">'
