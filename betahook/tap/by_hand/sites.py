"""Places in the user's code, which tell the products of an attention apart and stay the same in every forward."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch.autograd import Function

PASSED_OVER = {"torch", "einops", "betahook"}
"""Packages whose lines are none of the user's: the line of a site is that which called them."""
CHECKPOINT = "a checkpoint that begins inside the forward, at {} (begin it around the attention module)"
FUNCTION = (
    "a torch.autograd.Function, whose backward is not seen, at {} (call it without one, or put the whole attention "
    "module into it)"
)
"""Obstacles: the tap sees neither code that the backward runs again, nor a backward that a function brings along."""


class Place(NamedTuple):
    """The place in a function that a call stack leads through.

    Attributes:
        code: of the function.
        instruction: the offset of the bytecode that runs.
        module: the name of the module that the function is from.
    """

    code: CodeType
    instruction: int
    module: str

    @property
    def line(self) -> str:
        """File and line."""
        lines = (line for first, last, line in self.code.co_lines() if first <= self.instruction < last)
        return f"{os.path.basename(self.code.co_filename)}:{next(lines, None)}"


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
    frame: FrameType | None = sys._getframe(1)
    places, forward = [], run_forward.__code__
    while frame is not None and frame.f_code is not forward:
        places.append(Place(frame.f_code, frame.f_lasti, frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return _site(operation, tuple(places))


@functools.lru_cache(maxsize=2**12)
def _site(operation: str, places: tuple[Place, ...]) -> Site:
    """The site of a function that is called at some places, the innermost first."""
    of_user: list[Place] = []
    of_torch: list[Place] = []
    obstacle = None
    for place in places:
        package = place.module.partition(".")[0]
        obstacle = obstacle or _out_of_sight(place.module, place.code)
        if package == "torch":
            of_torch.append(place)
        if package not in PASSED_OVER:
            of_user.append(place)
    line = of_user[0].line if of_user else "a line of torch"
    callers = tuple((place.code, place.instruction) for place in of_user or of_torch)
    return Site(operation, callers, line, obstacle and obstacle.format(line))


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
