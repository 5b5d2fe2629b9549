"""The commands that pages and docstrings give: `python examples/...`, indented or between backticks."""

import re
import shlex
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(path for folder in ("docs", "examples") for path in sorted((ROOT / folder).rglob("*.md"))),
    *(path for folder in ("betahook", "examples") for path in sorted((ROOT / folder).rglob("*.py"))),
]


def documented() -> list[tuple[str, list[str]]]:
    """Return the page and the words, without `python`, of every command."""
    found = []
    for page in PAGES:
        text = page.read_text()
        inline = re.findall(r"`(python examples/[^`]+)`", text)
        lines = re.findall(r"^ {4}(python examples/.*)$", text.replace("\\\n", " "), re.MULTILINE)
        found += [(str(page.relative_to(ROOT)), shlex.split(line, comments=True)[1:]) for line in (*inline, *lines)]
    return found


def of(script: str) -> list[list[str]]:
    """Return the arguments of all commands that run this script, each once."""
    return [list(words) for words in dict.fromkeys(tuple(words[1:]) for _, words in documented() if words[0] == script)]
