"""The blocks of Python on a page of the documentation, by the heading above them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page, heading=None):
    """The code of each block of a page, or only below a heading of the second level."""
    text = (ROOT / page).read_text()
    if heading is not None:
        _, text = f"\n{text}".split(f"\n## {heading}\n")
        text = text.split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def tables(page):
    """The cells of each row of the tables on a page."""
    lines = (ROOT / page).read_text().splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]


def run(code, **names):
    """Run a block with what it takes as given; return all its names."""
    exec(compile(code, "page", "exec"), names)
    return names
