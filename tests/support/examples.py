"""The scripts under examples/ as modules, imported as they run: from their own folder."""

import importlib
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextmanager
def imported(*names, folder="."):
    """The modules of some scripts by name, for a while; they and what they import from beside them are new."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES / folder))
        forget()
        try:
            yield {name: importlib.import_module(name) for name in names}
        finally:
            forget()


def forget():
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(f"{EXAMPLES}/"):
            del sys.modules[name]
