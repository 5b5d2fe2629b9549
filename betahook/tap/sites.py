"""Places in the user's code, by which the products of an attention are known from one forward to the next."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from types import CodeType, FrameType

LIBRARIES = {"torch", "einops", "betahook"}
WATCHED = "watched"
"""The function of `products` that calls the forward of a hooked module: the search for callers ends there."""
CHECKPOINT_REMEDY = "begin it around the attention module"
"""The remedy where a checkpoint of activations hides a call from its recomputation."""


@dataclass(frozen=True)
class Site:
    """The call of a torch function.

    Attributes:
        operation: the name of the function.
        callers: the user's functions on the way from the forward, and where each of them is; those of torch if it is
            torch's forward.
        line: file and line of the innermost.
        checkpointed: the call lies in a checkpoint of activations that begins inside the forward.
    """

    operation: str
    callers: tuple[tuple[CodeType, int], ...]
    line: str = field(compare=False)
    checkpointed: bool = field(compare=False)


def find_site(operation: str) -> Site:
    """The place of the torch function that is being called."""
    frame: FrameType | None = sys._getframe(1)
    callers: list[tuple[CodeType, int]] = []
    inside: list[tuple[CodeType, int]] = []
    line, checkpointed = "", False
    while frame is not None:
        package, _, rest = frame.f_globals.get("__name__", "").partition(".")
        if package == "betahook" and frame.f_code.co_name == WATCHED:
            break
        checkpointed |= package == "torch" and rest == "utils.checkpoint"
        if package == "torch":
            inside.append((frame.f_code, frame.f_lasti))
        if package not in LIBRARIES:
            line = line or f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return Site(operation, tuple(callers or inside), line or "a line of torch", checkpointed)


def find_line() -> str:
    """File and line of the user's code that runs."""
    return find_site("").line
