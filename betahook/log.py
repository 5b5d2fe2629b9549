"""Prefix betahook's warnings with its name in programs that configure no logging."""

from __future__ import annotations

import logging
import sys
from typing import TextIO

LOGGER = logging.getLogger("betahook")


class _LastResort(logging.StreamHandler[TextIO]):
    """The last resort of `logging` for a program that configured none, with the name before the message."""

    def __init__(self) -> None:
        logging.Handler.__init__(self, logging.WARNING)
        self.setFormatter(logging.Formatter("[betahook] %(message)s"))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr  # as it is now: notebooks replace it

    def emit(self, record: logging.LogRecord) -> None:
        if LOGGER.handlers == [self] and not logging.root.handlers:
            super().emit(record)


def name_warnings() -> None:
    """Show warnings as `[betahook] ...` in programs that configure no logging; in the others nothing changes."""
    if not LOGGER.handlers:
        LOGGER.addHandler(_LastResort())
