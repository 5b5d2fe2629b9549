"""Prefix betahook's warnings with its name in programs that configure no logging."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGER = logging.getLogger("betahook")


class _LastResort(logging.StreamHandler[TextIO]):
    """A handler of last resort, as in `logging`, which puts the name before the message."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.setFormatter(logging.Formatter("[betahook] %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # looked up each time, since notebooks replace it

    def emit(self, record: logging.LogRecord) -> None:
        if LOGGER.handlers == [self] and not logging.root.handlers:
            super().emit(record)


def name_warnings() -> None:
    """Show warnings as `[betahook] ...` in programs that configure no logging; change nothing in others."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_LastResort())
