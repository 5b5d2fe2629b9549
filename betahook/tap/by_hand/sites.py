"""Places in the user's code, which tell the products of an attention apart and stay the same in every forward."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType

from torch.autograd import Function

PASSED_OVER = {"torch", "einops", "betahook"}
"""Packages whose lines are none of the user's: the line of a site is that which called them."""
WATCHED = "watched"
"""The function of `watching` that calls the forward of a hooked module: the search for callers ends there."""
CHECKPOINT = "a checkpoint that begins inside the forward, at {} (begin it around the attention module)"
FUNCTION = (
    "a torch.autograd.Function, whose backward is not seen, at {} (call it without one, or put the whole attention "
    "module into it)"
)
"""Obstacles: the tap sees neither code that the backward runs again, nor a backward that a function brings along."""


@dataclass(frozen=True)
class Site:
    """The call of a torch function.

    Attributes:
        operation: the name of the function.
        callers: the user's functions on the way from the forward, and where each of them is; those of torch if it is
            torch's forward.
        line: file and line of the innermost.
        obstacle: the reason why beta would not act in the backward, with the line; None where it does.
    """

    operation: str
    callers: tuple[tuple[CodeType, int], ...]
    line: str = field(compare=False)
    obstacle: str | None = field(compare=False)


def find_site(operation: str) -> Site:
    """The site of the torch function that is being called."""
    frame: FrameType | None = sys._getframe(1)
    callers: list[tuple[CodeType, int]] = []
    inside: list[tuple[CodeType, int]] = []
    line, obstacle = "", None
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        package = module.partition(".")[0]
        if package == "betahook" and frame.f_code.co_name == WATCHED:
            break
        obstacle = obstacle or _out_of_sight(module, frame.f_code)
        if package == "torch":
            inside.append((frame.f_code, frame.f_lasti))
        if package not in PASSED_OVER:
            line = line or f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            callers.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    line = line or "a line of torch"
    return Site(operation, tuple(callers or inside), line, obstacle and obstacle.format(line))


def _out_of_sight(module: str, code: CodeType) -> str | None:
    if module == "torch.utils.checkpoint":
        return CHECKPOINT
    return FUNCTION if _is_of_function(code) else None


@functools.cache
def _is_of_function(code: CodeType) -> bool:
    """True of the forward of a `torch.autograd.Function`; from torch 2.14 on, no frame of torch stands above it."""
    forwards = (inspect.unwrap(kind.forward) for kind in _subclasses(Function))
    return any(code is getattr(forward, "__code__", None) for forward in forwards)


def _subclasses(kind: type[Function]) -> Iterator[type[Function]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def find_line() -> str:
    """File and line of the user's code that runs."""
    return find_site("").line
