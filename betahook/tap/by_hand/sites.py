"""Call sites in the user's code, which identify the products of an attention from one forward to the next."""

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
"""Packages that are not user code: the line of a site is the innermost one outside of them."""
CHECKPOINT = "a checkpoint that begins inside the forward, at {} (begin it around the attention module)"
FUNCTION = (
    "a torch.autograd.Function, whose backward is not seen, at {} (call it without one, or put the whole attention "
    "module into it)"
)
"""Obstacles: the tap sees neither a recomputation within the backward pass, nor the backward of a custom function."""


class Place(NamedTuple):
    """A place on the call stack: a function, and the instruction that runs in it.

    Attributes:
        code: the function's code.
        instruction: the offset of the instruction in the bytecode.
        module: the name of the module that defines the function.
    """

    code: CodeType
    instruction: int
    module: str

    @property
    def line(self) -> str:
        """File and line of the instruction."""
        lines = (line for first, last, line in self.code.co_lines() if first <= self.instruction < last)
        return f"{os.path.basename(self.code.co_filename)}:{next(lines, None)}"


@dataclass(frozen=True)
class Site:
    """The call site of a torch function.

    Attributes:
        operation: the kind of use for which the site is looked up, such as "product", "softmax" or "scale".
        callers: the user's functions between the forward and the call, innermost first, each with its position in the
            bytecode; torch's functions if the forward is torch's own.
        line: file and line of the innermost caller.
        obstacle: the reason why beta would not act in the backward pass, with the line; None if it does.
    """

    operation: str
    callers: tuple[tuple[CodeType, int], ...]
    line: str = field(compare=False)
    obstacle: str | None = field(compare=False)


def run_forward(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the forward of a hooked module; the frame of this function ends the search for callers."""
    return forward(*args, **kwargs)


def find_site(operation: str) -> Site:
    """Return the site of the torch function that is being called."""
    frame: FrameType | None = sys._getframe(1)
    places, forward = [], run_forward.__code__
    while frame is not None and frame.f_code is not forward:
        places.append(Place(frame.f_code, frame.f_lasti, frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return _site(operation, tuple(places))


@functools.lru_cache(maxsize=2**12)
def _site(operation: str, places: tuple[Place, ...]) -> Site:
    """Return the site of a torch function from the places on the call stack, innermost first."""
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
    """Return True for the forward of a `torch.autograd.Function`; from torch 2.14 on, no torch frame calls it."""
    forwards = (inspect.unwrap(kind.forward) for kind in _subclasses(Function))
    return any(code is getattr(forward, "__code__", None) for forward in forwards)


def _subclasses(kind: type[Function]) -> Iterator[type[Function]]:
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def find_line() -> str:
    """Return file and line of the user's code that is running."""
    return find_site("").line
