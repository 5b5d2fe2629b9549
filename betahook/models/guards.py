"""Guards in user code: calls of `has_torch_function`, with which copies of torch's own functions begin.

Torch's `multi_head_attention_forward` hands itself over to a function mode that its guard finds. So does a copy, but it
may leave out an argument that its author added, or use a name that is not defined, and torch's function would run in
its place. So the tap and `trial` blind these guards.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import nn
from torch.overrides import has_torch_function, has_torch_function_unary, has_torch_function_variadic

from betahook.models import stand_ins
from betahook.models.code import functions_of, is_user_function
from betahook.models.torch_calls import in_place_of_torch

GUARDS = (has_torch_function, has_torch_function_unary, has_torch_function_variadic)


@contextmanager
def blinded(module: nn.Module) -> Iterator[None]:
    """Blind the guards that the code of a module and its parts calls by name, for as long as the context lasts."""
    with ExitStack() as stack:
        for function in functions_of(module):
            for name in _guards(function):
                stack.enter_context(stand_ins.put(function.__globals__, name, _blind))
        yield


def is_handed_over(function: object) -> bool:
    """True for a user function that handed itself over to a mode, rather than wrapping a kernel or one of torch's."""
    is_theirs = is_user_function(function) and not hasattr(function, "__wrapped__")
    return is_theirs and in_place_of_torch(function) is None


def _guards(function: FunctionType) -> Iterator[str]:
    """Yield the global names by which a function calls guards."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, FunctionType | BuiltinFunctionType) and inspect.unwrap(value) in GUARDS:
            yield name


def _blind(guard: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap a guard so that it sees no function mode."""

    @functools.wraps(guard)
    def blind(*tensors: Any) -> bool:
        has_mode = has_torch_function((None,))
        return not has_mode and guard(*tensors)

    return blind
