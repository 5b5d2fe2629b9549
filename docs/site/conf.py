"""The documentation site of `make docs`: the pages as they lie here, and a reference from the docstrings."""

import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

import betahook

project = "betahook"
author = "the betahook developers"
version = release = betahook.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
# The source directory is the repository, so that links between pages are the same here and on a code host.
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "examples/**.md"]
html_extra_path = ["index.html"]

html_theme = "furo"
html_title = f"betahook {version}"
html_copy_source = False
myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # pages of a code host may skip a level of heading

autodoc_mock_imports = ["lightning"]  # large; one page of the reference needs it
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # napoleon writes them beside each argument
autodoc_default_options = {"members": True, "show-inheritance": True, "exclude-members": "__init__,__new__"}
napoleon_use_ivar = True
napoleon_attr_annotations = True

CONTENTS = """
```{toctree}
:hidden:
:caption: Use
docs/FINDINGS
docs/GALLERY
docs/METRICS
docs/SHORT_RUNS
docs/YOUR_ATTENTION
docs/STACKS
docs/CHECKPOINTS
docs/DISTRIBUTED
docs/SUPPORT
docs/LIMITATIONS
```

```{toctree}
:hidden:
:glob:
:caption: Controllers
docs/controllers/search
docs/controllers/*
```

```{toctree}
:hidden:
:caption: Reference
docs/API
docs/site/reference
```

```{toctree}
:hidden:
:glob:
:caption: Evidence
docs/BENCHMARK
docs/ABLATIONS
examples/*/README
```

```{toctree}
:hidden:
:caption: Project
CONTRIBUTING
SECURITY
CHANGELOG
```
"""


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Give the first page the table of contents, which would only be noise on a code host."""
    if page == root_doc:
        source[0] += CONTENTS


def read_as_markdown(app: Sphinx, what: str, name: str, it: Any, options: Any, lines: list[str]) -> None:
    """Show `x` in a docstring as code, and an indented paragraph after a colon as a block of code, as readers do."""
    text = "\n".join(lines).replace("`", "``").replace("````", "``")
    lines[:] = re.sub(r":\n\n(?=    )", "::\n\n", text).split("\n")


def check_every_page_is_listed(app: Sphinx) -> None:
    """Fail where a page of docs/ is not in the contents."""
    pages = {str(page.relative_to(app.srcdir).with_suffix("")) for page in Path(app.srcdir, "docs").glob("*.md")}
    if missing := sorted(page for page in pages if page not in CONTENTS):
        raise ValueError(f"docs/site/conf.py lists no {', '.join(missing)}: add them to CONTENTS")


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)
    app.connect("autodoc-process-docstring", read_as_markdown, priority=400)
    app.connect("builder-inited", check_every_page_is_listed)
