"""The blocks of Python on a page of the documentation, by the heading above them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def blocks(page, heading):
    """The code of each block below a heading of the second level."""
    _, text = f"\n{(ROOT / page).read_text()}".split(f"\n## {heading}\n")
    return re.findall(r"```python\n(.*?)```", text.split("\n## ")[0], re.DOTALL)


def run(code, **names):
    """Run a block with what it takes as given; return all its names."""
    exec(compile(code, "page", "exec"), names)
    return names
