"""Guards in users' code: calls of `has_torch_function`, with which copies of torch's own functions begin.

Torch's `multi_head_attention_forward` hands itself over to the function mode that it finds so. A copy hands over less:
not the arguments that its author added, or a name that is none, and torch's function would run in its place.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

from torch import nn
from torch.overrides import has_torch_function, has_torch_function_unary, has_torch_function_variadic

from betahook.models.code import functions_of

GUARDS = (has_torch_function, has_torch_function_unary, has_torch_function_variadic)


class _Blinded:
    """Stands in for a guard, and sees no function mode.

    Attributes:
        guard: the guard.
        users: how many need that it is replaced.
    """

    def __init__(self, guard: Any) -> None:
        self.guard, self.users = guard, 0

    def __call__(self, *tensors: Any) -> bool:
        has_mode = has_torch_function((None,))
        return not has_mode and bool(self.guard(*tensors))


@contextmanager
def blinded(module: nn.Module) -> Iterator[None]:
    """Replace the guards that the code of a module and its parts calls by name, for as long as the context lasts."""
    found = {(id(each.__globals__), name): each.__globals__ for each in functions_of(module) for name in _guards(each)}
    for (_, name), namespace in found.items():
        if not isinstance(namespace[name], _Blinded):
            namespace[name] = _Blinded(namespace[name])
        namespace[name].users += 1
    try:
        yield
    finally:
        for (_, name), namespace in found.items():
            stand_in = namespace.get(name)
            if isinstance(stand_in, _Blinded):
                stand_in.users -= 1
                if stand_in.users == 0:
                    namespace[name] = stand_in.guard


def _guards(function: FunctionType) -> Iterator[str]:
    """The global names by which a function calls guards."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, _Blinded) or any(value is guard for guard in GUARDS):
            yield name
