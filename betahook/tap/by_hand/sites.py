"""Places in the user's code, which tell the products of an attention apart and stay the same in every forward."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

from torch.autograd import Function

PASSED_OVER = {"torch", "einops", "betahook"}
"""Packages whose lines are none of the user's: the line of a site is that which called them."""
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


def run_forward(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a hooked module: the search for callers ends at the frame of this function."""
    return forward(*args, **kwargs)


def find_site(operation: str) -> Site:
    """The site of the torch function that is being called."""
    of_user: list[FrameType] = []
    of_torch: list[FrameType] = []
    obstacle = None
    for frame, module in _frames_within_forward(sys._getframe(1)):
        package = module.partition(".")[0]
        obstacle = obstacle or _out_of_sight(module, frame.f_code)
        if package == "torch":
            of_torch.append(frame)
        if package not in PASSED_OVER:
            of_user.append(frame)
    line = "a line of torch"
    if of_user:
        line = f"{os.path.basename(of_user[0].f_code.co_filename)}:{of_user[0].f_lineno}"
    callers = tuple((frame.f_code, frame.f_lasti) for frame in of_user or of_torch)
    return Site(operation, callers, line, obstacle and obstacle.format(line))


def _frames_within_forward(frame: FrameType | None) -> Iterator[tuple[FrameType, str]]:
    """Frames from this one outwards, each with its module, up to the tap that called the user's forward."""
    while frame is not None:
        if frame.f_code is run_forward.__code__:
            return
        yield frame, frame.f_globals.get("__name__", "")
        frame = frame.f_back


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
